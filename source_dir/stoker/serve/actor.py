"""Head: the actor between chain workers and train workers.

It produces the passes in order (train 0, val 0, train 1, …), gives each train worker its rows as references
to blocks, accounts for records, and collects the run's events. Production of the next epoch starts as soon as
the previous one is produced, so no epoch starts cold.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from stoker.errors import DataError, Failure, UsageError
from stoker.events import kinds
from stoker.events.kinds import Event
from stoker.protocol import BlockSlice, DataCursor, Plan, StepAssignment, StepKey
from stoker.serve.accounting import ChainCosts
from stoker.serve.cursor import about, fresh, start_at
from stoker.serve.passes import Passes
from stoker.serve.planner import Planner
from stoker.serve.recipe_pass import Beginning, RecipeAttempt, RecipePass, Used, ids_of
from stoker.serve.service import DataService
from stoker.serve.shards import Setup

AWAIT_S = 20.0


class Coordinator(DataService):
    attempt: RecipeAttempt | None
    restart: Beginning | None = None
    """Where training would begin again now."""

    def __init__(
        self, passes: Passes, totals: dict[str, int | None], plan: Plan, **service: Any
    ) -> None:
        self.events: list[Event] = []
        chain = {split: ChainCosts() for split in ("train", "val")}
        super().__init__(chain=chain, cache=passes.cache, **service)
        self.passes, self.totals, self.plan = passes, totals, plan
        self.by_row = not passes.has_shards("train")
        self.executes_datasets = not all(map(passes.has_shards, totals))
        self.trainings = -1
        self.stop_reason = ""
        self.last_checkpoint = ""

    def first_setups(self) -> dict[str, Setup]:
        return {split: self.passes.setup(split) for split in self.totals}

    def new_attempt(self) -> int:
        """Train worker's call (rank 0), once per start: the number of this attempt, from 0."""
        with self.shared.changed:
            self.trainings += 1
            return self.trainings

    def published(self) -> str:
        with self.shared.changed:
            return self.last_checkpoint

    def saved(self, epoch: int, position: dict[str, Any]) -> None:
        """Train worker's call (rank 0): a restart would begin in this epoch, at this position."""
        with self.shared.changed:
            if self.attempt is not None:
                self.restart = Beginning(
                    self.attempt.workers, epoch, DataCursor.model_validate(position)
                )

    def begin(
        self,
        me: Any,
        attempt: int,
        workers: int,
        first_epoch: int,
        position: dict[str, Any] | None = None,
    ) -> None:
        """Start production at `first_epoch`; restart it after train workers were restarted.

        The driver begins the first attempt, so that data flows while train workers still start. Without
        effect if `attempt` is not newer than the current one.
        """
        with self.shared.changed:
            at = None if position is None else DataCursor.model_validate(position)
            self._begin(attempt, Beginning(workers, first_epoch, at))
        self.start_engine(me)

    def _begin(self, attempt: int, beginning: Beginning, lost_at: float | None = None) -> None:
        """Replace the current attempt, unless it is this one.

        `lost_at`: when (`time.monotonic()`) a train worker was lost, while no others run yet; None: they run.
        """
        before, ahead = self.attempt, lost_at is not None
        if before is not None:
            if attempt < before.number:
                return
            same = not before.ahead or (before.beginning == beginning and not before.over)
            if attempt == before.number and same:
                before.ahead = before.ahead and ahead
                return
            lost_at = before.lost_at or lost_at
            before.replace()
        self.restart = beginning
        problem, start = None, fresh(beginning.epoch, self.plan, self.by_row)
        try:
            start, note = start_at(beginning.position, start)
            if note:
                self.event(kinds.Note(text=note))
            self.shared.suspects.of("train").update(start.deadly)
        except UsageError as error:
            problem = error
        self.attempt = RecipeAttempt(
            attempt, beginning.workers, self.passes, self.totals, start, self.shared
        )
        self.attempt.beginning, self.attempt.ahead, self.attempt.lost_at = beginning, ahead, lost_at
        known = about(start, beginning.workers, self.passes.config)
        self.event(kinds.AttemptStarted(**known, ahead=ahead))
        if problem is not None:
            self.attempt.fail(problem.failure)
            raise problem
        self.attempt.planner = Planner(self.attempt)
        self.shared.has_work.notify_all()
        self.shared.ready.notify_all()

    def _current(self, number: int) -> RecipeAttempt:
        """The attempt of a train worker; raises why it is over."""
        attempt = self.attempt
        if attempt is None or attempt.number != number or attempt.over:
            failure = attempt.failure if attempt and attempt.number == number else None
            raise (failure or Failure("Over", text="this attempt is over")).error()
        return attempt

    def next(
        self, attempt: int, split: str, epoch: int, rank: int, step: int, before: int = 0
    ) -> StepAssignment | None:
        """Train worker's call: its rows of a step, once ready; None after the last.

        `before`: the optimiser steps of the run before this pass.
        """
        asked = time.monotonic()
        with self.shared.changed:
            while True:
                current = self._current(attempt)
                pass_ = current.open.get((split, epoch))
                if pass_ is not None and pass_.splitter.ready(step):
                    break
                self.shared.ready.wait(1.0)
            portion = pass_.portion(step, rank)
            if portion is not None and split == "train" and not self.by_row:
                slices = [step, rank, *pass_.slices(step, rank)]
                self.event(kinds.RowsGiven(epoch=epoch, before=before, given=[slices]))
            pass_.release()
            current.recovered(asked)
            self.shared.has_work.notify(2)
            return portion

    def ahead(
        self,
        attempt: int,
        split: str,
        epoch: int,
        rank: int,
        step: int,
        most: int,
        fetched: int,
        before: int = 0,
    ) -> list[StepAssignment]:
        """Train worker's call: `next` for up to `most` ready steps; it has fetched all before `fetched`."""
        given: list[StepAssignment] = []
        with self.shared.changed:
            if (pass_ := self._current(attempt).open.get((split, epoch))) is not None:
                pass_.fetched[rank] = fetched
            for at in range(step, step + most):
                pass_ = self._current(attempt).open.get((split, epoch))
                if given and (pass_ is None or not pass_.splitter.ready(at)):
                    break
                portion = self.next(attempt, split, epoch, rank, at, before)
                if portion is None:
                    break
                given.append(portion)
        return given

    def position(self, attempt: int, epoch: int, steps: int, id_sum: int) -> dict[str, Any]:
        """Train worker's call: with this, `begin` continues after these steps of this attempt's pass.

        All ranks have used them; `id_sum` is that of their rows' ids, modulo 2**63. If the account of the
        epoch is closed: the start of the next one.
        """
        with self.shared.changed:
            pass_ = self._current(attempt).open.get(("train", epoch))
            new = fresh(epoch + 1, self.plan, self.by_row)
            place = new if pass_ is None else pass_.position(steps, id_sum)
            deadly = dict(self.shared.suspects.of("train"))
            return place.model_copy(update={"deadly": deadly}).model_dump(mode="json")

    def epoch_done(
        self, attempt: int, split: str, epoch: int, rank: int, used: Used, steps: int | None = None
    ) -> dict[str, Any]:
        """Train worker's call at the end of a pass: waits for all ranks, then reconciles the account.

        `steps`: if a limit ends training here, the steps of this attempt's pass that were used. Returns the
        counts; raises if records were lost.
        """
        with self.shared.changed:
            current = self._current(attempt)
            pass_ = current.open[split, epoch]
            while steps is not None and not pass_.splitter.ready(steps):
                self._current(attempt)
                self.shared.ready.wait(1.0)
            cut_at = steps if steps is not None and pass_.splitter.has(steps) else None
            pass_.finished[rank] = used
            last = len(pass_.finished) == current.workers
            unused = pass_.unused() if last and cut_at is None else []
        if last:
            self._reconcile(current, pass_, unused, cut_at)
        with self.shared.changed:
            while not pass_.reconciled:
                self._current(attempt)
                self.shared.ready.wait(1.0)
            return pass_.account.counts(pass_.total)

    def _reconcile(
        self, attempt: RecipeAttempt, pass_: RecipePass, unused: list[BlockSlice], cut_at: Any
    ) -> None:
        """Close the account; fetch unused rows first, while no lock is held."""
        try:
            remaining = ids_of(unused, self.transport)
        except DataError as error:
            attempt.fail(Failure.of(error))
            return
        with self.shared.changed:
            if not attempt.over:
                attempt.reconcile(pass_, remaining, cut_at)
                self.shared.has_work.notify_all()
                self.shared.ready.notify_all()

    def await_stop(self, attempt: int) -> str:
        """Train worker's call: the reason once a stop is requested; "" after AWAIT_S without a request."""
        deadline = time.monotonic() + AWAIT_S
        with self.shared.changed:
            while not self.stop_reason and time.monotonic() < deadline:
                self._current(attempt)
                self.shared.stopping.wait(deadline - time.monotonic())
            return self.stop_reason

    def agree_stop(self, attempt: int, rank: int, begun: StepKey | None) -> StepKey | None:
        """Train worker's call, which begins no further step until it returns: the last step of the run.

        `begun`: the last step that the rank has begun; None: none yet. Returns None if none has.
        """
        with self.shared.changed:
            self._current(attempt).begun_steps[rank] = begun
            self.shared.stopping.notify_all()
            while len(steps := self._current(attempt).begun_steps) < self._current(attempt).workers:
                self.shared.stopping.wait(1.0)
            return max((step for step in steps.values() if step is not None), default=None)

    def request_stop(self, reason: str) -> None:
        with self.shared.changed:
            self.stop_reason = self.stop_reason or reason
            self.shared.stopping.notify_all()
            self.event(kinds.StopRequested(reason=reason))

    def log(self, event: Event, after: None = None) -> None:
        """Train worker's call. `after`: the result of its previous call, which so runs before this one."""
        del after
        with self.shared.changed:
            super().log(event)
            match event:
                case kinds.CheckpointWritten():
                    self.last_checkpoint = event.path
                case kinds.StepLogged():
                    self.hosts.elastic.stepped(event)
                case kinds.TrainWorkerLost() if self.restart is not None and self.trainings >= 0:
                    with contextlib.suppress(UsageError):  # it is the attempt's failure
                        # Data is ready when the train workers are.
                        self._begin(self.trainings + 1, self.restart, time.monotonic())
                case kinds.TrainWorkerStarted():
                    self.hosts.training[event.rank] = event.node

    def collated(self, split: str, cpu_s: float, rows: int = 0, nbytes: int = 0) -> None:
        with self.shared.changed:
            self.chain[split].collate(cpu_s, rows, nbytes)

    def event(self, event: Event) -> None:
        match (self.events[-1] if self.events else None), event:
            case kinds.RowsGiven() as last, kinds.RowsGiven() if (last.epoch, last.before) == (
                event.epoch,
                event.before,
            ):
                last.given.extend(event.given)
            case _:
                self.events.append(event)

    def drain(self) -> list[dict[str, Any]]:
        with self.shared.changed:
            events, self.events = self.events, []
        return [event.record() for event in events]

    def figures(self) -> dict[str, Any]:
        with self.shared.changed:
            return {
                "chain": self.chain["train"].stages(),
                "bytes_per_sample": self.chain["train"].bytes_per_sample,
                "tasks_by_node": dict(
                    self.chain["train"].tasks_by_node + self.chain["val"].tasks_by_node
                ),
                "open": [
                    s.account.counts(s.total) | {"split": s.account.split}
                    for s in (self.attempt.open.values() if self.attempt else ())
                    if (s.steps or s.account.carried.trained) and not s.reconciled
                ],
            }
