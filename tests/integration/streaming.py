"""Drives a coordinator as train workers do, without training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from stoker.config.schema import Config
from stoker.protocol import ID_COLUMN, StepAssignment
from stoker.read.sources import ID_MODULUS
from stoker.serve.blocks.client import block_transport
from stoker.serve.opening import open_data, start_coordinator


def flat(steps: Iterable[list[int]]) -> list[int]:
    return [number for step in steps for number in step]


@dataclass
class Train:
    config: Config
    workers: int = 1
    first_epoch: int = 0
    place: dict[str, Any] | None = None
    attempt: int = 0
    portions: list[StepAssignment] = field(default_factory=list)
    keeps: bool = False
    """Whether it keeps what it fetched, in `batches`; blocks go once all workers have them."""
    batches: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        data = open_data(self.config)
        self.coordinator = start_coordinator(
            self.config, data, self.workers, self.first_epoch, self.place
        )
        begin = self.coordinator.begin.remote(
            self.coordinator, 0, self.workers, self.first_epoch, self.place
        )
        self.ray.get(begin, timeout=180)
        self.transport = block_transport(self.coordinator, pinned=False, timeout_s=120.0)

    @property
    def ray(self) -> Any:
        """Imported late: Ray reads its authentication mode as it is imported."""
        import ray

        return ray

    def again(self, workers: int, first_epoch: int, place: dict[str, Any] | None) -> None:
        self.attempt, self.workers = self.attempt + 1, workers
        begin = self.coordinator.begin.remote(
            self.coordinator, self.attempt, workers, first_epoch, place
        )
        self.ray.get(begin, timeout=120)

    def steps(self, split: str, epoch: int, first: int = 0) -> Iterator[list[int]]:
        step = first
        while True:
            ids: list[int] = []
            asked = [
                self.coordinator.ahead.remote(self.attempt, split, epoch, rank, step, 1, step)
                for rank in range(self.workers)
            ]
            answers = self.ray.get(asked, timeout=180)
            if answers[0] == []:
                assert answers == [[]] * self.workers
                return
            for answer in answers:
                assert isinstance(answer, list), answer
                self.portions += answer
                for part in answer[0].blocks:
                    columns, start, stop, _ = self.transport.rows(part)
                    ids += columns[ID_COLUMN][start:stop].tolist()
                if self.keeps and answer[0].schema is not None:
                    fetched = self.transport.fetch(answer[0].blocks, answer[0].schema)
                    self.batches.append(deepcopy(fetched.columns))
            self.transport.finish_pass()
            yield ids
            step += 1

    def kept(self) -> list[dict[str, Any]]:
        batches, self.batches = self.batches, []
        return batches

    def position(self, epoch: int, steps: int, ids: list[int]) -> dict[str, Any]:
        id_sum = sum(ids) % ID_MODULUS
        place: dict[str, Any] = self.ray.get(
            self.coordinator.position.remote(self.attempt, epoch, steps, id_sum), timeout=120
        )
        return place

    def reconcile(self, split: str, epoch: int, ids: list[int]) -> dict[str, Any]:
        shares = [(len(ids), sum(ids) % ID_MODULUS, 0)] + [(0, 0, 0)] * (self.workers - 1)
        calls = [
            self.coordinator.epoch_done.remote(self.attempt, split, epoch, rank, share)
            for rank, share in enumerate(shares)
        ]
        answers = self.ray.get(calls, timeout=180)
        assert isinstance(answers[0], dict), answers[0]
        counts: dict[str, Any] = answers[0]
        return counts

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [
            e
            for e in self.ray.get(self.coordinator.drain.remote(), timeout=120)
            if e["event"] == kind
        ]

    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = self.ray.get(self.coordinator.figures.remote(), timeout=120)
        return figures

    def close(self) -> None:
        self.ray.kill(self.coordinator)
