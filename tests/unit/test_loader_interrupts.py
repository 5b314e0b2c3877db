"""An interrupt (Ctrl-C, a signal handler) at any line of `next()` neither skips nor repeats a batch.

Batches are made in this process (STOKER_LOADER=process): by the same code as on a cluster, without Ray.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from loading import Stream

from stoker import DataLoader

FILE = str(Path(inspect.getfile(DataLoader)).with_name("iterator.py"))


class Interrupt:
    """Raises at the first line that runs in `FILE` and that none has struck before."""

    def __init__(self, struck: set[tuple[str, int]]) -> None:
        self.struck, self.line = struck, ""

    def __enter__(self) -> Interrupt:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._runs if frame.f_code.co_filename == FILE else None

    def _runs(self, frame: FrameType, event: str, argument: object) -> Any:
        here = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and here not in self.struck:
            self.struck.add(here)
            self.line = linecache.getline(*here).strip()
            raise KeyboardInterrupt
        return self._runs


def loader(kind: str) -> DataLoader[Any]:
    torch.manual_seed(1)
    if kind == "map":
        return DataLoader(range(8), batch_size=3, shuffle=True, prefetch_factor=1, num_workers=1)
    return DataLoader(Stream(lambda *_: range(4)), batch_size=3, num_workers=2)


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_an_interrupt_at_any_line_loses_and_repeats_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_LOADER", "process")
    whole = [batch.tolist() for batch in loader(kind)]
    struck: set[tuple[str, int]] = set()
    went_on = ended = 0
    while True:
        made = loader(kind)
        interrupt, batches = Interrupt(struck), iter(made)
        found = [next(batches).tolist()]
        try:
            while len(found) <= len(whole):
                before = made.state_dict()
                with interrupt:
                    batch = next(batches)
                found.append(batch.tolist())
        except (KeyboardInterrupt, StopIteration):
            pass
        if not interrupt.line:
            break
        if interrupt.line == "return batch":
            continue  # Python handles no signal between the line before and this one
        place = made.state_dict()["place"]
        assert place == before["place"] or (place is None and found == whole), interrupt.line
        again = loader(kind)
        again.load_state_dict(before)
        assert found + [batch.tolist() for batch in again] == whole, interrupt.line
        try:
            for batch in batches:
                found.append(batch.tolist())
            assert found == whole, interrupt.line
            went_on += 1
        except RuntimeError as error:
            assert "an interrupt or an error broke off the last next()" in str(error), (
                interrupt.line
            )
            assert found == whole[: len(found)], interrupt.line
            ended += 1
    assert went_on and ended > 9
