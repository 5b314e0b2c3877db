"""The coordinator gives a missing validation first, and tells all ranks of a stop in the same step of one."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from stoker.config.schema import Config
from stoker.events import kinds
from stoker.protocol import BlockReport, DataCursor, PassPlan, Plan
from stoker.serve.accounting import ChainCosts
from stoker.serve.actor import Coordinator
from stoker.serve.items import ReadyBlock
from stoker.serve.passes import Shared
from stoker.serve.recipe_pass import RecipeAttempt

PLAN = Plan(seed=0, shuffle=True, order="exact", block_records=8, fingerprint="f")
ROWS = 8


def head(start: DataCursor, workers: int = 2, epochs: int = 3) -> tuple[Coordinator, RecipeAttempt]:
    """A coordinator whose passes are all there, 8 rows each, without a host that makes them."""
    passes: Any = SimpleNamespace(
        config=Config.model_validate({"train": {"epochs": epochs, "batch_size": 1}}),
        identity=lambda fingerprint: PLAN,
        has_shards=lambda split: True,
        plan=lambda split, epoch, start: PassPlan(0, epoch, split, True, 8),
        cache=None,
    )
    totals = {"train": ROWS, "val": ROWS}
    chain = {"train": ChainCosts(), "val": ChainCosts()}
    shared = Shared(lambda *args, **values: None, 0, chain)
    attempt = RecipeAttempt(0, workers, passes, totals, start, shared)
    found: Any = object.__new__(Coordinator)
    found.passes, found.attempt = passes, attempt
    found.changed, found.has_work, found.ready = shared.changed, shared.has_work, shared.ready
    found.stop_reason, found.events = "", []
    for stream in attempt.open.values():
        stream.arrived(ReadyBlock(BlockReport(rows=ROWS), ""))
        stream.splitter.ended = True
    return found, attempt


def test_rows_count_as_recovered_only_in_the_attempt_after_the_loss() -> None:
    coordinator, attempt = head(DataCursor(epoch=2, plan=PLAN), workers=1)
    attempt.event = coordinator.event  # as `begin` sets it
    coordinator.log(kinds.TrainWorkerLost(cause="train worker 1: died", restarts_left=0))
    # Another rank of the same attempt may still request rows ahead.
    assert coordinator.next(0, "train", 2, 0, 0)
    attempt.lost_at = time.monotonic()  # as in the attempt after it
    assert coordinator.next(0, "train", 2, 0, 1)
    assert coordinator.next(0, "train", 2, 0, 2)
    lost, recovered = coordinator.drain()
    assert (lost["event"], recovered["event"]) == ("train_worker_lost", "recovered")
    assert 0 <= recovered["data_s"] <= recovered["seconds"]


def test_events_of_train_workers_have_the_time_of_the_head_which_takes_what_they_say() -> None:
    coordinator, attempt = head(DataCursor(epoch=2, plan=PLAN))
    attempt.event = coordinator.event
    coordinator.training = {}
    began = round(time.time(), 3)
    coordinator.log(kinds.TrainWorkerStarted(rank=1, node="n", time=1.0))
    coordinator.log(kinds.CheckpointWritten(path="c", epoch=2, step=4, time=1.0))
    for epoch, shard in ((2, 0), (2, 1), (3, 0)):
        coordinator.event(kinds.BlocksArrived(epoch=epoch, blocks=[[shard, 0, 8, 5]]))
    assert coordinator.training == {1: "n"} and coordinator.published() == "c"
    events = coordinator.drain()
    assert all(event["time"] >= began for event in events)
    assert [{name: event[name] for name in event if name != "time"} for event in events] == [
        {"event": "train_worker", "rank": 1, "node": "n"},
        {"event": "checkpoint", "path": "c", "epoch": 2, "step": 4},
        {"event": "blocks", "epoch": 2, "blocks": [[0, 0, 8, 5], [1, 0, 8, 5]]},
        {"event": "blocks", "epoch": 3, "blocks": [[0, 0, 8, 5]]},
    ]
    assert coordinator.drain() == []
