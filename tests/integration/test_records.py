"""No record is lost: read = trained + quarantined + remainder in every epoch, by record ids."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rebuilding import rebuilt_as_recorded
from running import Outcome, run_job
from streaming import Train

from stoker.schema import Config


def ids(outcome: Outcome, split: str, epoch: int) -> Counter[str]:
    """Every record id that any rank used, with how often."""
    found: Counter[str] = Counter()
    for path in (outcome.run_dir / "records").glob(f"{split}-epoch-{epoch:03d}-rank-*.txt"):
        found.update(path.read_text().split())
    return found


def test_every_record_is_accounted_for(ray_cluster: None, tmp_path: Path) -> None:
    workers = 2
    # 1,003 records, 2 of them bad: not divisible by workers × batch, by blocks, nor by workers.
    outcome = run_job(
        tmp_path,
        recipe="rows:Counting",
        params={"train_records": 1003, "val_records": 37, "bad": [5, 400]},
        data={"block_records": 64, "bad_record_budget": 0.01},
        train={"epochs": 2, "workers": workers, "strategy": "fsdp", "batch_size": 32, "lr": 0.001},
        tracking={"record_ids": True, "tensorboard": False},
    )
    assert outcome.code == 0, outcome.summary.error
    everyone = {str(i) for i in range(1003)} - {"5", "400"}
    for epoch in range(2):
        books = next(
            e for e in outcome.summary.records.epochs if e["split"] == "train" and e["epoch"] == epoch
        )
        trained = ids(outcome, "train", epoch)
        assert books["read"] == 1003
        assert books["quarantined"] == 2
        assert books["remainder"] == 1001 % workers < workers
        assert books["trained"] == 1003 - 2 - books["remainder"] == sum(trained.values())
        assert set(trained.values()) == {1}, "no record twice"
        assert len(everyone - set(trained)) == books["remainder"]
        assert set(trained) <= everyone
        assert ids(outcome, "val", epoch) == Counter(str(i) for i in range(37)), "validation is exact"
    assert outcome.summary.records.trained == 2 * (1001 - 1001 % workers)
    quarantined = (outcome.run_dir / "quarantine.jsonl").read_text().splitlines()
    assert len(quarantined) == 4
    rebuilt_as_recorded(outcome.run_dir, 32, 16, range(1, 33))
    assert '"key": "5"' in quarantined[0] or '"key": "400"' in quarantined[0]


def test_the_order_is_permuted_anew_in_every_epoch_and_the_same_in_every_run(ray_cluster: None) -> None:
    job = {
        "recipe": "rows:Counting",
        "params": {"train_records": 200, "val_records": 3},
        "data": {"order": "exact", "block_records": 32},
        "train": {"epochs": 2, "batch_size": 16},
    }
    orders = []
    for _ in range(2):
        train = Train(Config.model_validate(job))
        epochs = []
        for epoch in range(2):
            epochs.append([i for step in train.steps("train", epoch) for i in step])
            train.reconcile("train", epoch, epochs[-1])
            train.reconcile("val", epoch, [i for step in train.steps("val", epoch) for i in step])
        orders.append(epochs)
        train.close()
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]
    assert sorted(orders[0][0]) == sorted(orders[0][1])
    assert len(set(orders[0][0])) == 200


def test_a_ray_dataset_of_the_recipes_own_is_accounted_for_and_padding_repeats_instead_of_dropping(
    ray_cluster: None, tmp_path: Path
) -> None:
    outcome = run_job(
        tmp_path,
        recipe="rows:FromRay",
        data={"remainder": "pad"},
        train={"epochs": 2, "workers": 2, "batch_size": 16, "lr": 0.001},
        tracking={"record_ids": True, "tensorboard": False},
    )
    assert outcome.code == 0, outcome.summary.error
    assert outcome.summary.records.read == outcome.summary.records.trained == 206
    for epoch in range(2):
        trained = ids(outcome, "train", epoch)
        assert len(trained) == 103
        assert sorted(trained.values())[-2:] == [1, 2], "one of 103 is given to both workers"
    assert [books["padded"] for books in outcome.summary.records.epochs] == [1, 1]


def test_a_source_can_be_handed_to_a_pipeline_of_ray_data(ray_cluster: None, digits: Path) -> None:
    from stoker.data import read_parquet

    source = read_parquet(str(digits / "parquet"), "val")
    assert source is not None
    keys = [row["key"] for row in source.to_ray(100).map(lambda row: {"key": row["key"]}).take_all()]
    assert len(keys) == len(set(keys)) == source.count()
