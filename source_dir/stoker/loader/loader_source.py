"""Chain worker: reads the shards of a `stoker.DataLoader`.

A shard holds the indices of some batches; its only record is these batches, packed. That of an iterable dataset
is a stream, with a record for each batch.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stoker.chain.chain import use_one_thread
from stoker.loader.ranks import Rank, asked, seen_as
from stoker.loader.script_state import ScriptState, follow_imports
from stoker.loader.work import LoaderWork, LoadRequest, failed, opened, parts_of_batch
from stoker.loader.worker_output import UNSENT, Said, heard, reload
from stoker.protocol import BadRecord, BlockReport, Record, Shard
from stoker.serve.blocks.folder import BlockFolder
from stoker.serve.blocks.packing import PAGES, Parts, Room, pages_of, parts_of, unpack

BATCHES, ENDED, OWN = "__batches", "__ended", "__own"


KeptCopies = dict[int, tuple[int, LoaderWork]]
"""Of an iterable dataset, by worker: the passes that a copy has served, and the copy."""
SHARED_FROM_BYTES = 2**20
NOT_SENT = (
    "your script has set {}, which cannot be sent to other processes: they have what importing the module"
    " gives; pass it through the dataset, or create it in __getitem__"
)


class SharedPages(NamedTuple):
    folder: BlockFolder
    name: str
    pages: Any

    def copy(self) -> Any:
        try:
            content = self.folder.shared(self.name, self.pages)
        except OSError:  # there is no room
            return self.pages.copy()
        return np.frombuffer(content, np.uint8).reshape(self.pages.shape)


_open: weakref.WeakSet[LoaderSource] = weakref.WeakSet()
"""Those with a copy of a map-style dataset in this process."""


def _close_others(own: weakref.ref[LoaderSource]) -> bool:
    others = [other for other in _open if other is not own() and other._works]
    for other in others:
        other._works.clear()
    gc.collect()
    return bool(others)


class LoaderSource:
    """Reads groups of batches. A shard of an iterable dataset (`stays`) is continued, not read again."""

    random = False

    def __init__(
        self, pages: Any, stays: bool = False, name: str = "", copies: KeptCopies | None = None
    ) -> None:
        self.pages, self.stays, self.name = pages, stays, name
        self._folder = ""
        self._script = ScriptState()
        self._works: dict[Rank | None, LoaderWork] = {}
        """The copy of a map-style dataset; one for each rank once the code has asked for it."""
        self._copies: KeptCopies = {} if copies is None else copies
        self._room: Room | None = None
        self._own = False
        """Whether anything so far may depend on the rank."""
        self.tell: Callable[[str], Any] | None = None

    def apart(self) -> LoaderSource:
        """For blocks that are made again: it opens copies of its own, and leaves these to their streams."""
        return LoaderSource(self.pages, self.stays, self.name)

    def begin(self, folder: BlockFolder, where: Any) -> None:
        """Open a pass; let the processes of this host have the dataset's arrays and tensors once."""
        self.pages = self.pages[0] if where is None else where, self.pages[1]
        work = self.pages[1]
        if self.name and work.nbytes >= SHARED_FROM_BYTES:
            self.pages = where, SharedPages(folder, self.name, work)

    def begun_at(self, shard: Shard, block: int) -> tuple[Shard, int]:
        """A stream of which some blocks are made, as it is read now; its first block that `read` yields."""
        request = shard.items[0]
        if not request.endless:
            return shard, 0
        return replace(shard, items=(request._replace(first=block),)), block

    def read(self, shard: Shard, order: Any) -> Iterator[Record]:
        """Yield each group of batches as a record; a batch that cannot be packed becomes a Failed."""
        if not self._folder:
            self._folder, self._script = import_script(self.pages[0])
        self._enter()
        if self._room is None:
            use_one_thread()
            self._room = Room()
        said: Said = []
        if (where := shard.items[0].where) is not None:
            self._folder, self._script = import_script(where)
        request = shard.items[0]
        with self._script_works(request.rank, said):
            groups = self.groups(request, bool(shard.home), self._room)
        for number in itertools.count():
            self._enter()
            started = time.perf_counter()
            with self._room.group():
                with self._script_works(request.rank, said):
                    group, ended = next(groups, (None, True))
                said += [(UNSENT, NOT_SENT.format(what)) for what in self._script.unsent]
                self._script.unsent.clear()
                if group is None:
                    return
                pages = packed(group, time.perf_counter() - started, self._room, said)
                said.clear()
            yield {
                "key": f"{shard.called}/{number}",
                PAGES: pages,
                BATCHES: len(group),
                ENDED: ended,
                OWN: self._own,
            }

    @contextlib.contextmanager
    def _script_works(self, rank: Rank, said: Said) -> Iterator[None]:
        with heard(said), self._script.active(), seen_as(rank, self._own):
            yield
        self._own |= asked()

    def _enter(self) -> None:
        if Path(self._folder).is_dir():
            os.chdir(self._folder)  # every time: loaders of other scripts share this process

    def groups(
        self, order: LoadRequest, began: bool, room: Room
    ) -> Iterator[tuple[list[Parts], bool]]:
        if not self.stays:
            rank = order.rank if self._own else None
            if rank not in self._works:
                self._works.pop(None, None)
                self._works[rank] = work = opened(self.pages[1])
                work.close_others = partial(_close_others, weakref.ref(self))
                _open.add(self)
            work = self._works[rank]
            work.tell, self.tell = self.tell, None
            return work.run(order, room)
        try:
            return copy_for(order, self.pages[1], self._copies, began).run(order, room)
        except BaseException as error:
            return itertools.repeat(
                ([parts_of_batch(failed(error, f"worker {order.worker}"))], False)
            )


def copy_for(order: LoadRequest, pages: Any, copies: KeptCopies, began: bool) -> LoaderWork:
    """The copy of an iterable dataset for a stream.

    Args:
        order: the stream.
        pages: the packed LoaderWork.
        copies: those that persistent workers keep.
        began: whether an earlier pass has begun with this stream; it may have been given up before.
    """
    served, work = copies.pop(order.worker, (0, None))
    if not order.served or (work is None and not began):
        served, work = 0, opened(pages)
    if work is None or served > order.served:
        raise RuntimeError(
            f"the copy of the dataset that served worker {order.worker} in earlier passes was lost with its"
            " process; start the script again from its last state, or use persistent_workers=False, which"
            " makes new copies in each pass"
        )
    for _ in range(
        order.served - served
    ):  # passes that were given up before this stream was opened
        next(iter(work.dataset), None)
    if work.keeps:
        copies[order.worker] = (order.served + 1, work)
    return work


def import_script(where: Any) -> tuple[str, ScriptState]:
    folder, path, again, script = unpack(where.copy())[0]
    sys.path += [each for each in path if each not in sys.path and Path(each).is_dir()]
    reload(again)
    follow_imports()
    return str(folder), script


def packed(
    group: Sequence[Parts], seconds: float, room: Room | None = None, said: Said | None = None
) -> Any:
    """With the seconds they took, and what was printed."""
    return pages_of([parts_of((seconds, said)), *group], room)


class LoaderChain:
    """Stands in for a recipe's chain: packed batches already form a block."""

    def run(
        self, block: Iterable[Record | BadRecord], epoch: int, keep: Any
    ) -> tuple[dict[str, Any], BlockReport]:
        report, columns = BlockReport(), dict[str, Any]()
        for each in block:
            if isinstance(each, BadRecord):
                report.bad.append(each)
            else:
                columns = {PAGES: each[PAGES]}
                report.records, report.last, report.own = each[BATCHES], each[ENDED], each[OWN]
                report.rows, report.bytes_out = len(each[PAGES]), each[PAGES].nbytes
        return columns, report
