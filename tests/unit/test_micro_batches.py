"""`data.max_tokens`: batches in parts that fit into memory, and the same training as of whole ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from steps import run
from test_ragged import of_lengths
from texts import Classified, NextWord, feed, make

from stoker.chain.chain import Chain
from stoker.config.schema import Config
from stoker.data import Pad
from stoker.errors import DataError, UsageError
from stoker.protocol import Pad as Padding
from stoker.recipe import Recipe
from stoker.serve.opening import open_data
from stoker.train import loop
from stoker.train.step import MicroBatches, grouped


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """So small a model is slower with more, and much slower beside other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def trained(recipe: Recipe, limit: int | None, **train: Any) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """What two epochs of two batches gave, and the shapes that the model was called with."""
    worker, step = make(recipe, max_tokens=limit, clip_grad_norm=1e9, **train)
    return run(worker, step, feed(2)), worker.model.shapes


@pytest.mark.long
@pytest.mark.parametrize("recipe", [Classified(), NextWord()], ids=["per record", "per word"])
@pytest.mark.parametrize("limit", [40, 200])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_divided_batch_trains_as_the_whole_one(recipe: Recipe, limit: int, accumulated: int) -> None:
    whole, shapes = trained(recipe, None, accumulate_steps=accumulated)
    divided, parts = trained(recipe, limit, accumulate_steps=accumulated)
    assert len(parts) > len(shapes) == 4
    assert max(rows * width for rows, width in parts) <= limit
    assert divided["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert divided["norms"] == pytest.approx(whole["norms"], rel=1e-4), "of the gradient"
    for name, value in whole["weights"].items():
        torch.testing.assert_close(divided["weights"][name], value, rtol=1e-4, atol=1e-6)
    assert (divided["steps"], divided["rates"]) == (whole["steps"], whole["rates"])


def test_a_batch_within_the_limit_is_computed_as_it_came() -> None:
    whole, shapes = trained(Classified(), None)
    same, parts = trained(Classified(), 12 * 40)
    assert parts == shapes and same["losses"] == whole["losses"]


def test_every_row_is_in_one_part_with_all_its_columns_and_rows_alike_in_length_are_together() -> None:
    worker, _ = make(Classified(), max_tokens=64)
    (batch,) = feed(1)
    batch["row"] = torch.arange(12)
    parts = [part for part, _ in MicroBatches(worker).of(batch)]
    assert sorted(int(row) for part in parts for row in part["row"]) == list(range(12))
    for part in parts:
        rows = part["row"]
        assert all(torch.equal(part[name], batch[name][rows]) for name in ("label", "ids_length"))
        assert part["name"] == [batch["name"][row] for row in rows]
        width = -(-int(part["ids_length"].max()) // 4) * 4
        assert torch.equal(part["ids"], batch["ids"][rows, :width])
        assert not batch["ids"][rows, width:].any(), "nothing but padding is cut"
    for longer, shorter in pairwise(parts):
        assert longer["ids_length"].min() >= shorter["ids_length"].max()


def test_groups_are_as_few_as_the_limit_lets_them_be() -> None:
    assert grouped([3, 8, 0, 2, 8, 4, 1], 16) == [[1, 4], [0, 3, 5, 6], [2]]
    assert grouped([0, 0, 0], 4) == [[0, 1, 2]]
    assert grouped([5] * 7, 10) == [[0, 1], [2, 3], [4, 5], [6]]


def test_a_loss_weight_that_is_no_sum_over_records_is_refused() -> None:
    class Longest(NextWord):
        def loss_weight(self, batch: Any) -> Any:
            return batch["ids"].shape[1]

    with pytest.raises(UsageError, match=r"^Longest\.loss_weight is 36 for a batch and \d+ for its parts"):
        trained(Longest(), 64)


def test_the_parts_of_a_batch_without_weight_are_one_batch() -> None:
    class Unweighted(NextWord):
        def loss_weight(self, batch: Any) -> Any:
            return 0

    worker, _ = make(Unweighted(), max_tokens=64)
    (batch,) = feed(1)
    shares = [share for _, share in MicroBatches(worker).of(batch)]
    assert len(shares) > 1 and sum(shares) == pytest.approx(1)


def test_a_record_beyond_the_limit_is_quarantined_by_its_key() -> None:
    chain = Chain([], seed=5, pads={"ids": Padding(0, 4)}, bucket_by="ids", max_tokens=10)
    columns, report = chain.run(of_lengths([8, 9, 3, 0, 40]), 0)
    assert sorted(np.diff(columns["ids"].offsets).tolist()) == [0, 3, 8]
    assert [bad.reason for bad in report.bad] == [
        "ids has 12 tokens, more than data.max_tokens=10; cut it in the chain",
        "ids has 40 tokens, more than data.max_tokens=10; cut it in the chain",
    ]
    assert (report.records, report.rows) == (5, 3)


def test_one_that_comes_all_the_same_is_refused_and_not_computed() -> None:
    with pytest.raises(DataError, match=r"a row of 36 tokens came, more than data\.max_tokens=20"):
        trained(Classified(), 20)


class Unpadded(Recipe):
    """Every recipe pads what it says, this one nothing."""


class Padded(Classified):
    pad = {"ids": Pad(0)}  # noqa: RUF012


@pytest.mark.parametrize(
    ("recipe", "train", "said"),
    [
        ("Unpadded", {}, "the recipe pads no column"),
        ("Padded", {"strategy": "fsdp"}, "fsdp must make the same calls; use train.strategy=ddp"),
        ("Padded", {"mixup": 0.2}, "train.mixup and train.cutmix mix records"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_training(
    recipe: str, train: dict[str, Any], said: str
) -> None:
    changes = {"recipe": f"test_micro_batches:{recipe}", "data": {"max_tokens": 64}, "train": train}
    with pytest.raises(UsageError, match=said):
        open_data(Config.model_validate(changes))


class OneLongText:
    """A pass over a batch of one long text and many of one word, which no word follows."""

    times = SimpleNamespace(step_ms=[], figures=dict)
    split, epoch, rows, stop = "val", 0, 9, ""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        ids = torch.zeros(9, 8, dtype=torch.int64)
        ids[:, 0], ids[4] = torch.arange(1, 10), torch.arange(5, 13)
        lengths = torch.ones(9, dtype=torch.int64)
        lengths[4] = 8
        yield {"ids": ids, "ids_length": lengths, "name": [str(i) for i in range(1, 10)]}


def test_a_part_of_which_the_loss_sees_nothing_does_not_spoil_it() -> None:
    losses = []
    for limit in (None, 8):
        worker, step = make(NextWord(), max_tokens=limit)
        losses += run(worker, step, list(OneLongText()), epochs=1)["losses"]
        assert all(p.isfinite().all() for p in worker.model.parameters())
    assert losses[1] == pytest.approx(losses[0])


@pytest.mark.long
def test_validation_is_divided_too_and_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pass of our own in place of the coordinator's."""

    class Counted(NextWord):
        def validation_step(self, model: Any, batch: Any) -> Any:
            preds = model(batch["ids"]).argmax(-1)[:, 0]
            target = batch["ids"][:, 0]
            return {"loss": self.training_step(model, batch), "preds": preds, "target": target}

        def metrics(self) -> Any:
            from torchmetrics.classification import MulticlassAccuracy

            return {"acc1": MulticlassAccuracy(num_classes=None, average="micro")}

    monkeypatch.setattr(loop, "open_pass", lambda *args: OneLongText())
    monkeypatch.setattr(loop, "reconcile", lambda *args: {})
    found = []
    for limit in (None, 8):
        worker, _ = make(Counted(), max_tokens=limit)
        worker.coordinator = SimpleNamespace(log=SimpleNamespace(remote=lambda *event: None))
        found.append(loop.validate(worker, 0)[0])
        assert (len(worker.model.shapes) > 2) == (limit is not None)
    assert found[1] == pytest.approx(found[0]) and found[0]["val/loss"] > 0


def test_layers_that_wait_for_other_ranks_are_refused() -> None:
    class Synced(Classified):
        def model(self) -> Any:
            return torch.nn.SyncBatchNorm(4)

    worker, _ = make(Synced(), max_tokens=64)
    worker.world_size = 2
    with pytest.raises(UsageError, match=r"data\.max_tokens: the model has SyncBatchNorm"):
        MicroBatches(worker)
