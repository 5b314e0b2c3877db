"""Training goes on in the middle of an epoch: each record once, with order exact in the same order."""

from __future__ import annotations

import json
import random
import time
from itertools import islice
from typing import Any

import pytest
from streaming import Train, flat

from stoker.config.schema import Config
from stoker.errors import DataError, UsageError
from stoker.events.kinds import TrainWorkerLost
from stoker.train.stop_gate import StopGate

RECORDS, BAD = 523, (5, 77, 300)


def job(recipe: str = "rows:Counting", order: str = "exact", **params: object) -> Config:
    return Config.model_validate(
        {
            "recipe": recipe,
            "params": params,
            "data": {"order": order, "block_records": 32, "bad_record_budget": 0.05},
            "train": {"epochs": 2, "batch_size": 10},
            "seed": 3,
        }
    )


@pytest.mark.parametrize("order", ["exact", "any"])
def test_interrupted_is_uninterrupted(ray_cluster: None, order: str) -> None:
    # Shards of 100 records are preprocessed in four groups of up to 32, some with bad records.
    train = Train(
        job(order=order, train_records=RECORDS, val_records=7, bad=BAD, shard=100), workers=2
    )
    whole = flat(list(train.steps("train", 0)))
    train.reconcile("train", 0, whole)
    list(train.steps("val", 0))
    assert len(whole) == len(set(whole)) == RECORDS - len(BAD)
    chance = random.Random(order)
    for _ in range(3):
        # Twice interrupted, at random steps; then with another number of train workers.
        train.again(2, 0, None)
        seen: list[int] = []
        place = None
        for workers in (2, 1):
            steps = list(islice(train.steps("train", 0), chance.randint(1, 12)))
            ids = flat(steps)
            seen += ids
            place = json.loads(json.dumps(train.position(0, len(steps), ids)))
            assert place["rows"] == len(seen)
            train.again(workers, 0, place)
        rest = flat(list(train.steps("train", 0)))
        if order == "exact":
            assert seen + rest == whole, "the same records in the same order"
        assert sorted(seen + rest) == sorted(whole), "each record once"
        counts = train.reconcile("train", 0, rest)
        assert (counts["read"], counts["trained"], counts["quarantined"]) == (
            RECORDS,
            RECORDS - 3,
            3,
        )
    train.close()


def test_the_next_epoch_and_a_new_process_follow_as_if_nothing_had_happened(
    ray_cluster: None,
) -> None:
    config = job(train_records=RECORDS, val_records=7, bad=BAD, shard=100)
    first = Train(config)
    steps = list(islice(first.steps("train", 0), 20))
    place = first.position(0, 20, flat(steps))
    steps += list(first.steps("train", 0, 20))
    first.reconcile("train", 0, flat(steps))
    second_epoch = flat(list(first.steps("train", 1)))
    # After an epoch's last step its place is the beginning of the next epoch.
    beginning = first.position(0, len(steps), flat(steps))
    assert (beginning["epoch"], beginning["rows"]) == (1, 0)
    first.close()

    resumed = Train(config, place=place)
    rest = list(resumed.steps("train", 0))
    assert rest == steps[20:]
    open_books = [b for b in resumed.figures()["open"] if b["split"] == "train"]
    assert open_books[0]["trained"] == 200, "books that are still open know what was carried"
    resumed.reconcile("train", 0, flat(rest))
    assert flat(list(resumed.steps("train", 1))) == second_epoch
    resumed.close()

    with pytest.raises(UsageError, match="the training data has changed"):
        Train(
            config.model_copy(update={"params": {**config.params, "train_records": 522}}),
            place=place,
        )


def test_after_a_loss_data_is_made_ahead_and_used_only_where_training_begins(
    ray_cluster: None,
) -> None:
    train = Train(job(train_records=RECORDS, shard=100))

    def call(name: str, *given: Any) -> Any:
        return train.ray.get(getattr(train.coordinator, name).remote(*given), timeout=120)

    assert call("new_attempt") == 0
    whole, places = list[list[int]](), []
    for _ in range(2):
        whole += islice(train.steps("train", 0, len(whole)), 2)
        places.append(json.loads(json.dumps(train.position(0, len(whole), flat(whole)))))
    whole += train.steps("train", 0, len(whole))
    early, late = places
    lost = TrainWorkerLost(cause="train worker 1: died", restarts_left=1)

    # The next train workers find a later checkpoint, and one of them is lost before they begin.
    call("saved", 0, early)
    call("log", lost)
    assert call("new_attempt") == 1
    call("log", lost)
    train.again(1, 0, late)
    with pytest.raises(DataError, match="this attempt is over"):
        call("next", 1, "train", 0, 0, 0)
    assert call("new_attempt") == 2
    train.again(1, 0, late)
    assert list(train.steps("train", 0)) == whole[4:]

    # These begin where data is made for them.
    call("saved", 0, early)
    call("log", lost)
    assert call("new_attempt") == 3
    train.again(1, 0, early)
    assert list(train.steps("train", 0)) == whole[2:]
    logged = call("drain")
    assert [e["ahead"] for e in logged if e["event"] == "attempt"] == [
        False,
        True,
        True,
        False,
        True,
    ]
    assert sum(e["event"] == "recovered" for e in logged) == 2
    train.close()


def test_ranks_stop_after_the_furthest_step_that_any_has_begun(ray_cluster: None) -> None:
    import ray

    train = Train(job(train_records=200), workers=3)
    gates = [StopGate(train.coordinator, 0, rank) for rank in range(3)]
    begun = [(0, False, 4), (0, False, 5), (0, False, 4)]  # rank 1 is one step ahead
    assert all(gate.enter(step) for gate, step in zip(gates, begun, strict=True))
    ray.get(train.coordinator.request_stop.remote("enough"))
    while not all(gate.reason for gate in gates):
        time.sleep(0.01)
    further = [[gate.enter((0, False, step)) for step in (5, 6)] for gate in gates]
    assert further == [[True, False]] * 3
    assert not gates[0].enter((0, True, 0)), "nor does a validation begin"
    for gate in gates:
        gate.close()
    train.close()


def test_ranks_that_have_begun_nothing_do_one_step(ray_cluster: None) -> None:
    import ray

    train = Train(job(train_records=200), workers=2)
    ray.get(train.coordinator.request_stop.remote("enough"))
    gates = [StopGate(train.coordinator, 0, rank) for rank in range(2)]
    while not all(gate.reason for gate in gates):
        time.sleep(0.01)
    assert [[gate.enter((0, False, step)) for step in (0, 1)] for gate in gates] == [
        [True, False]
    ] * 2
    for gate in gates:
        gate.close()
    train.close()
