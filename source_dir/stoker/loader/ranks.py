"""The rank of a script, as its dataset and `collate_fn` see it on a chain worker.

torch's workers inherit their rank's environment and, if forked, its process group. Several ranks share a
chain worker, so each block is made under the rank that wants it. Other ranks may have that block too, unless
the rank was asked for.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from stoker.loader.script_state import ENVIRONMENT, OF_JOB, OF_RANK, set_as
from stoker.read.generators import is_own


class Rank(NamedTuple):
    """Script → chain worker."""

    environment: tuple[tuple[str, str], ...] = ()
    group: tuple[int, int] | None = None
    """Rank and world size by torch.distributed; None: workers have no process group."""


def rank_of_script(workers: int, context: Any) -> Rank:
    """What workers of a torch loader would see.

    Args:
        workers: how many there are.
        context: the loader's `multiprocessing_context`.
    """
    import torch.distributed as dist

    forked = not workers or (context or multiprocessing).get_start_method() == "fork"
    known = forked and dist.is_available() and dist.is_initialized()
    found = ((name, os.environ[name]) for name in (*OF_RANK, *OF_JOB) if name in os.environ)
    return Rank(tuple(found), (dist.get_rank(), dist.get_world_size()) if known else None)


_OF_HOST = {*OF_RANK, *OF_JOB} & os.environ.keys()
"""Variables that this process was started with: its host's rank, not the script's."""
_asked = False
"""Whether the rank was asked for."""
_told: Rank | None = None
"""The rank that was last given as an answer."""


def ask() -> None:
    """Note that what is being made depends on the rank."""
    global _asked
    _asked = True


class _Environment(type(os.environ)):  # type: ignore[misc]
    def __getitem__(self, name: str) -> str:
        if name in OF_RANK:
            ask()
        return str(super().__getitem__(name))


@contextlib.contextmanager
def seen_as(rank: Rank, known: bool) -> Iterator[None]:
    """Chain worker: a context in which the script's code has this rank.

    Args:
        rank: the script's.
        known: whether this loader's code has asked for it before; otherwise, it has to ask itself.
    """
    global _asked, _told
    if _told is not None and (_told != rank or not known):
        _forget()
        _told = None
    os.environ.__class__ = _Environment
    told = dict(rank.environment)
    with set_as({(ENVIRONMENT, name): told.get(name) for name in {*told, *_OF_HOST}}):
        _asked = False
        with _group(*rank.group) if rank.group else contextlib.nullcontext():
            yield
        asked = _asked
    _asked, _told = asked, rank if asked else _told


def _forget() -> None:
    """Clear the caches of the script's functions: they may hold an answer."""
    for name, module in list(sys.modules.items()):
        for value in list(vars(module).values()) if is_own(name) else ():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()


def asked() -> bool:
    """Whether the latest `seen_as` was asked for the rank."""
    return _asked


@functools.cache
def _group_kind() -> Any:
    import torch.distributed as dist

    class AskedGroup(dist.ProcessGroup):
        def rank(self) -> int:
            ask()
            return super().rank()

    return AskedGroup


@contextlib.contextmanager
def _group(rank: int, world: int) -> Iterator[None]:
    import torch.distributed as dist

    dist.GroupMember.WORLD = _group_kind()(rank, world)
    try:
        yield
    finally:
        dist.GroupMember.WORLD = None
