"""`stoker.DataLoader` on a real Ray cluster: streams that take their time, and that wait for the loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from stoker import DataLoader
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Slows(IterableDataset[Any]):
    """Read at once the first time, and slowly each time after."""

    def __init__(self, opened: Path) -> None:
        self.opened = opened

    def __iter__(self) -> Iterator[int]:
        again = self.opened.exists()
        self.opened.touch()
        for number in range(40):
            time.sleep(0.7 if again and number < 36 else 0)
            yield number


@pytest.mark.long
def test_a_stream_that_is_read_again_for_longer_than_its_deadline_comes_to_its_place(
    tmp_path: Path,
) -> None:
    loader = DataLoader(Slows(tmp_path / "opened"), batch_size=2)
    iterator = iter(loader)
    part = [next(iterator).tolist() for _ in range(18)]
    again = DataLoader(Slows(tmp_path / "opened"), batch_size=2, stall_timeout_s=20)
    again.load_state_dict(loader.state_dict())
    del iterator
    assert part + [batch.tolist() for batch in again] == [[n, n + 1] for n in range(0, 40, 2)]


class Answers(IterableDataset[Any]):
    """Each number needs what the loop made of the one before, as in self-play or from a live queue."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __iter__(self) -> Iterator[int]:
        for number in range(4):
            if number:
                until(lambda number=number: (self.folder / str(number)).exists())
            yield number


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_may_wait_for_what_the_loop_does_with_its_last_batch(
    tmp_path: Path, workers: int
) -> None:
    found = []
    for batch in DataLoader(Answers(tmp_path), batch_size=None, num_workers=workers):
        found.append(batch)
        (tmp_path / str(batch + 1)).touch()
    assert found == [0, 1, 2, 3]
