"""Laptop: find the attempt that trained a step, and its position in the data, in events.jsonl."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from stoker.errors import UsageError
from stoker.events import kinds
from stoker.messages import DataCursor


@dataclass
class Attempt:
    """Laptop: one start of training in a run."""

    about: dict[str, Any]
    """What the coordinator logged at the start; see `stoker.serve.cursor.about`."""
    first_step: int = 0
    """Optimiser steps before it."""
    last_step: int = 0
    """Last step known to be trained."""
    passes: list[tuple[int, int]] = field(default_factory=list)
    """(epoch, optimiser steps in it) of its completed training passes."""
    bad: dict[int, dict[str, str]] = field(default_factory=dict)
    """Quarantined training records by epoch: key → reason."""
    blocks: dict[int, list[list[int]]] = field(default_factory=dict)
    """By epoch, [shard, index in it, rows, their ids] of each block in order of arrival."""
    produced: set[int] = field(default_factory=set)
    """Epochs of which all blocks have arrived."""
    trains: bool = True
    """Whether its train workers have started; until then, steps are those of the attempt before."""

    @property
    def start(self) -> DataCursor:
        return DataCursor.model_validate(self.about["start"])


class Found(NamedTuple):
    """Laptop: position of a step in the history of a run."""

    attempt: Attempt
    epoch: int
    window: int
    """Optimiser steps of this attempt before it in its epoch."""
    sure: bool
    """Whether the step is known to be trained."""
    bad_before: dict[str, str] = {}  # noqa: RUF012 - a NamedTuple field
    """Records quarantined in the epoch by other attempts: key → reason."""


def history(run_dir: Path) -> list[Attempt]:
    """Laptop: the attempts of a run, in order.

    Raises:
        UsageError: events.jsonl has no attempt, or an event that cannot be read.
    """
    found = list[Attempt]()
    for record in kinds.json_lines(run_dir / "events.jsonl"):
        try:
            _take(kinds.event_of(record), found)
        except ValidationError as error:  # without it, another batch might be shown
            kind, first = record.get("event"), error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UsageError(
                f"{run_dir}: events.jsonl: an event `{kind}` cannot be read: {where}: {first['msg']}"
            ) from None
    if not found:
        raise UsageError(
            f"{run_dir}: no event `attempt` in events.jsonl: the run has not started training, is a"
            " script, or comes from an earlier version"
        )
    return found


def _take(event: kinds.Event, found: list[Attempt]) -> None:
    if isinstance(event, kinds.AttemptStarted):
        found.append(Attempt(event.record(), trains=not event.ahead))
    if not found:
        return
    attempt = found[-1]
    if isinstance(event, kinds.StepLogged | kinds.PassEnded):
        attempt = next(each for each in reversed(found) if each.trains)
    match event:
        case kinds.TrainWorkerStarted():
            attempt.trains = True
        case kinds.Resumed():
            attempt.first_step = attempt.last_step = event.step
        case kinds.StepLogged():
            attempt.last_step = max(attempt.last_step, event.step)
        case kinds.PassEnded(split="train"):
            attempt.passes.append((event.epoch, event.steps))
            ended = attempt.first_step + sum(steps for _, steps in attempt.passes)
            attempt.last_step = max(attempt.last_step, ended)
        case kinds.RecordQuarantined(split="train"):
            attempt.bad.setdefault(event.epoch, {})[event.key] = event.reason
        case kinds.BlocksArrived():
            attempt.blocks.setdefault(event.epoch, []).extend(event.blocks)
        case kinds.PassProduced(split="train"):
            attempt.produced.add(event.epoch)


def find(attempts: list[Attempt], step: int, unlogged: int) -> Found:
    """Laptop: find the last attempt that trained a step.

    Args:
        attempts: of the run.
        step: counted from 1, as in the metrics.
        unlogged: steps that an ended attempt may have trained after its last logged one.

    Raises:
        UsageError: the run has not trained this step.
    """
    within = [a for a in attempts if a.first_step < step <= a.last_step]
    beyond = [a for a in attempts if a.trains and a.first_step < step <= a.last_step + unlogged]
    if step < 1 or not (within or beyond):
        last = max(attempt.last_step for attempt in attempts)
        raise UsageError(f"--step {step}: the run has trained steps 1 to {last}")
    attempt = (within or beyond)[-1]
    before, epoch = attempt.first_step, attempt.start.epoch
    for passed, steps in attempt.passes:
        epoch = passed
        if step <= before + steps:
            break
        before, epoch = before + steps, passed + 1
    bad = {key: reason for each in attempts for key, reason in each.bad.get(epoch, {}).items()}
    return Found(attempt, epoch, step - before - 1, bool(within), bad)
