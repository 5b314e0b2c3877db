"""`stoker.DataLoader` with a dataset that holds much: the processes of a host have its memory once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from stoker import DataLoader
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Holds(Dataset[Any]):
    def __init__(self) -> None:
        self.table = torch.arange(1 << 20)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        self.table[0] += 1
        address = self.table.data_ptr()
        for line in Path("/proc/self/maps").read_text().splitlines():
            first, last = (int(each, 16) for each in line.split()[0].split("-"))
            if first <= address < last:
                return (
                    os.getpid(),
                    line.split()[4],
                    line.split()[-1],
                    int(self.table[0]),
                    int(self.table[-1]),
                )
        raise AssertionError("memory without a mapping")


class HoldsForTwo(Holds):
    """Its records wait until two processes read: else one alone may read all before the other has begun."""

    def __init__(self, readers: Path) -> None:
        super().__init__()
        self.readers = readers

    def __getitem__(self, index: int) -> Any:
        (self.readers / str(os.getpid())).touch()
        until(lambda: len([*self.readers.iterdir()]) == 2)
        return super().__getitem__(index)


def test_processes_map_one_file_and_what_one_writes_no_other_sees(tmp_path: Path) -> None:
    reads: dict[int, list[int]] = {}
    files, last = set(), set()
    loader = DataLoader(
        HoldsForTwo(tmp_path),
        batch_size=1,
        collate_fn=lambda records: records[0],
        persistent_workers=True,
        num_workers=2,
    )
    for _ in range(2):
        for pid, inode, file, nth, end in loader:
            reads.setdefault(pid, []).append(nth)
            files.add((inode, file))
            last.add(end)
    assert [sorted(each) for each in reads.values()] == [
        [*range(1, len(each) + 1)] for each in reads.values()
    ]
    assert len(reads) == 2 and last == {(1 << 20) - 1}
    assert len(files) == 1, "one copy for all processes of the host"


def test_what_a_changed_dataset_held_before_is_removed() -> None:
    dataset, names = Holds(), []
    loader = DataLoader(dataset, batch_size=16, collate_fn=lambda records: records[0])
    for epoch in range(4):
        dataset.table += epoch
        names.append({Path(file) for _, _, file, _, _ in loader}.pop())
    assert len({*names}) == 4 and all(name.parent == names[0].parent for name in names)
    until(
        lambda: sum(name.exists() for name in names) <= 2
    )  # hosts remove theirs when they are asked next
