"""Script: `stoker.DataLoader`, a drop-in for torch's: the same batches, made on every CPU of a cluster."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import secrets
import sys
import warnings
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, IterDataPipe
from torch.utils.data import DataLoader as TorchDataLoader

from stoker.errors import UsageError
from stoker.loader import connection
from stoker.loader.divisions import Order, length, of_accelerate, order_of, ranks_of
from stoker.loader.iterator import (
    ClusterIterator,
    Kept,
    drawn_states,
    set_states,
    world_and_rank,
)
from stoker.loader.makers import ClusterMaker, ProcessMaker, end_passes_before_ray
from stoker.loader.script_state import state_of_script
from stoker.loader.skipped import Quarantine
from stoker.loader.work import LoaderWork
from stoker.loader.worker_output import reloaded
from stoker.read.sources import restore_generators, states
from stoker.serve.blocks.packing import content_of, pack, pack_named

HERE_VARIABLE = "STOKER_LOADER"
"""Set it to `process` to make batches in the script's own process, for debugging."""
VERSION = 2
ORDER = "length of the order"
SHAPE = ("batch_size", "records", "batches", "num_workers")
"""What must be equal for a state within a pass, unless what is left can be divided among other ranks."""
Item = TypeVar("Item", covariant=True)
OF_PASS = {"_state", "quarantine", "generator", "_IterableDataset_len_called"}
"""Attributes that change between passes. Workers get None, or each pass would send another content."""


class DataLoader(TorchDataLoader[Item]):
    """Torch's DataLoader with the records loaded and collated on all CPUs of a Ray cluster.

        from stoker import DataLoader        # was: from torch.utils.data import DataLoader

    Accepts the arguments of `torch.utils.data.DataLoader` with the same meaning. The sampler and its
    generator run in the script's process, so if a record depends only on its index, batches equal torch's in
    order and content. Random draws of the dataset and `collate_fn` (`random`, NumPy, torch) are seeded per
    record from `generator` (or torch's default one) and the epoch, so a run is reproducible on any number of
    hosts.

    `num_workers` sets what `get_worker_info()` reports and how an IterableDataset is divided. It does not
    limit parallelism: every CPU of the cluster works. The sampler is read a few seconds ahead.

    Args:
        dataset: same as torch's, as are all arguments that are not listed here.
        *args: same as torch's.
        address: address of a Ray cluster. None means RAY_ADDRESS, the cluster that this process is connected
            to, or a new cluster on this machine.
        on_error: "raise", or "quarantine" to skip records of a map-style dataset that raise.
        bad_record_budget: largest share of its records that one pass of a rank may skip.
        stall_timeout_s: fail if no batch arrives for this long.
        **kwargs: same as torch's.
    """

    _sends = False
    """Whether the loader is being packed for workers, as the object of a bound `collate_fn`."""
    endless = False
    """Whether each worker's stream has no end, and one that is lost begins anew: see `stoker.offload`."""

    def __init__(
        self,
        dataset: Dataset[Item],
        *args: Any,
        address: str | None = None,
        on_error: str = "raise",
        bad_record_budget: float = 0.01,
        stall_timeout_s: float = 600.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, *args, **kwargs)
        self.set_options(address, on_error, bad_record_budget, stall_timeout_s)

    def set_options(
        self,
        address: str | None = None,
        on_error: str = "raise",
        bad_record_budget: float = 0.01,
        stall_timeout_s: float = 600.0,
    ) -> None:
        if on_error not in ("raise", "quarantine"):
            raise ValueError(f'on_error is "raise" or "quarantine", not {on_error!r}')
        if not stall_timeout_s > 0:
            raise ValueError(
                f"stall_timeout_s is a number of seconds above 0, not {stall_timeout_s!r}"
            )
        if not 0 <= bad_record_budget <= 1:
            raise ValueError(f"bad_record_budget is a share from 0 to 1, not {bad_record_budget!r}")
        if on_error == "quarantine" and isinstance(self.dataset, IterableDataset):
            warnings.warn(
                'stoker.DataLoader: on_error="quarantine" has no effect on an IterableDataset: skip'
                " records that cannot be loaded in its __iter__",
                stacklevel=3,
            )
        counting = [each for each in self._samplers() if hasattr(each, "state_dict")]
        if counting and not self.num_workers:
            warnings.warn(
                f"stoker.DataLoader: batches are drawn ahead of the loop, so {type(counting[0]).__name__}"
                ".state_dict() counts some that the loop does not have; save the loader's state instead",
                stacklevel=3,
            )
        follow_accelerate()
        self.address, self.on_error = address, on_error
        self.bad_record_budget, self.stall_timeout_s = bad_record_budget, stall_timeout_s
        self.quarantine = Quarantine(bad_record_budget, self._total())
        """Records skipped in the current pass: `loader.quarantine.records`."""
        self._live: Any = None
        self._state: dict[str, Any] | None = None
        """Loaded, and not used by a pass yet."""
        self.kept = Kept()
        self._id = secrets.token_hex(8)
        self.dispatched = 0
        """Batches of a step, if Accelerate reads them for all ranks on rank 0; a state counts whole steps."""

    def options(self) -> dict[str, Any]:
        names = ("address", "on_error", "bad_record_budget", "stall_timeout_s")
        return {name: getattr(self, name) for name in names}

    def check_worker_number_rationality(self) -> None:
        """No warning: the workers run on the cluster."""

    def _total(self) -> int | None:
        """The records of a pass of this rank; None: its end will tell."""
        own = self.batch_size is None and self.batch_sampler is not None
        if own or self.on_error == "raise" or isinstance(self.dataset, IterableDataset):
            return None
        try:
            return len(self.sampler)  # type: ignore[arg-type]
        except Exception:  # torch does not need a length either
            return None

    def __getstate__(self) -> dict[str, Any]:
        """Without the current pass: it belongs to this process."""
        state = self.__dict__ | {"_live": None, "kept": Kept(), "_id": secrets.token_hex(8)}
        return state | dict.fromkeys([*OF_PASS, "kept", "_id"]) if self._sends else state

    @functools.cached_property
    def _is_accelerate_prepared(self) -> bool:
        """Accelerate reads it before it takes a loader apart, and may be imported after one was made."""
        follow_accelerate()
        return False

    def __iter__(self) -> Any:
        """Start a pass; an unfinished earlier pass is abandoned."""
        self.quarantine = Quarantine(self.bad_record_budget, self._total())
        keeps = self.persistent_workers or self._keeps
        state = self._state if self._state and self._state["place"] else None
        if state is not None:
            self._refuse_other(state, *SHAPE, "world_size", "rank")
        if keeps and self._live:
            # The copies serve one pass at a time, as torch's persistent workers do.
            self._live[0].close(superseded=True)
        now = states()
        before = state["generators"] if state else self._generators()
        try:
            if state:
                self._set_generators(before)
            iterator = ClusterIterator(self, self._maker(), state and state["place"])
        finally:
            late = state and state["place"].get("late")
            if state and not (late and late["global"] == now):
                # Restoring the global generators is up to the script; where it did before the sampler was
                # first asked, they are now as the sampler left them.
                restore_generators(now)
        if keeps:
            self.kept.opened(iterator.request, self.persistent_workers)
        self._state = None
        self._live = iterator, before, self._shape()
        return iterator

    def _get_iterator(self) -> Any:
        """Subclasses of torch's loader call it in place of `__iter__`."""
        return DataLoader.__iter__(self)

    @property
    def _keeps(self) -> bool:
        """Whether copies of an iterable dataset serve all passes, as one object does without workers."""
        return isinstance(self.dataset, IterableDataset) and (
            self.persistent_workers or not self.num_workers
        )

    def _maker(self) -> ClusterMaker | ProcessMaker:
        served = self._keeps and self.kept.served
        pages = self.kept.content(*self._packed(), stays=self.persistent_workers)
        expected = isinstance(self.dataset, IterDataPipe) or hasattr(self.dataset, "set_epoch")
        if served and not self.kept.served and not expected:
            warnings.warn(
                "stoker.DataLoader: the dataset, collate_fn or a reloaded module has changed since the pass"
                " before, so this pass begins with new copies of the dataset: what the earlier ones counted,"
                " such as epochs, starts again",
                stacklevel=3,
            )
        if os.environ.get(HERE_VARIABLE) == "process":
            return ProcessMaker(self, pages)
        drawn = states()  # connecting to Ray draws from the script's generators
        connection.connect(self.address)
        restore_generators(drawn)
        end_passes_before_ray()
        return ClusterMaker(self, pages)

    def _packed(self) -> tuple[Any, Any, Any]:
        """Packed: where and how the script runs, the modules it has loaded again, and its workers' work."""
        folder = str(Path.cwd())
        path, dataset = _resolved(folder, *sys.path), cast(Any, self.dataset)
        if self.parts()[0] > 1:
            dataset = copy.copy(dataset)
            dataset.process_index = 0
        work = LoaderWork(
            dataset=dataset,
            collate=self.collate_fn,
            iterable=isinstance(self.dataset, IterableDataset),
            auto_collation=self._auto_collation,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            workers=self.num_workers,
            worker_init_fn=self.worker_init_fn,
            quarantines=self.on_error == "quarantine",
            keeps=self._keeps,
        )
        self._sends = True
        try:
            modules = reloaded()
            where = pack([(folder, path, modules, state_of_script())])
            work_pages = pack_named(work) if self.ranks()[0] > 1 else pack([work])
            return where, pack([modules]), work_pages
        except Exception as error:
            parts = {n: getattr(self, n) for n in ("dataset", "collate_fn", "worker_init_fn")}
            raise UsageError(
                f"stoker.DataLoader: {unsendable(parts)} cannot be sent to other processes:"
                f" {type(error).__name__}: {error}; open files, connections and locks in __getitem__, not in"
                " __init__"
            ) from error
        finally:
            del self._sends

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the current pass, after the last batch that the script received.

        Contains only numbers, strings and bytes, so `torch.load(weights_only=True)` can read it.
        """
        if hasattr(self.dataset, "load_state_dict"):
            warnings.warn(
                f"stoker.DataLoader: the state of a loader does not include that of its dataset"
                f" ({type(self.dataset).__name__}.state_dict): a pass continues by reading it again, later"
                " passes begin as in a new process; set its epoch in your script",
                stacklevel=2,
            )
        if self._state is not None:
            return self._state
        iterator, before, shape = self._live or (None, None, None)
        place = iterator.place() if iterator is not None else None
        kept = {"passes": self.kept.passes, "seed": self.kept.seed}
        return {
            "version": VERSION,
            "place": place,
            "generators": before if place else self._generators(),
            "kept": kept,
            "shape": shape or self._shape(),
        }

    @property
    def dl_state_dict(self) -> dict[str, Any]:
        """The state that Accelerate's loaders ask for before their first batch."""
        return self.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next pass at the saved position; the number of hosts may differ, and often that of ranks.

        Raises:
            ValueError: the state has another format version or number of records, or was saved with a batch
                size or number of ranks that this loader's sampler cannot follow.
        """
        if state.get("version") != VERSION:
            raise ValueError(
                f"the state has version {state.get('version')}; this is version {VERSION}"
            )
        if state["place"] is not None:
            self._refuse_other(state, *SHAPE)
        self.kept = Kept(**state["kept"]) if self.persistent_workers else Kept()
        self._live, self._state = None, state
        if state["place"] is None:
            self._set_generators(state["generators"] | {"global": states()})

    def _shape(self) -> dict[str, Any]:
        world_size, rank = self.ranks()
        shape = {
            "batch_size": self.batch_size or getattr(self.batch_sampler, "batch_size", None),
            "world_size": world_size,
            "rank": rank,
        }
        if isinstance(self.dataset, IterableDataset):
            return shape | {"num_workers": self.num_workers}
        order = self.shared_order()
        return shape | {
            "records": length(self.dataset),
            "batches": length(self._index_sampler),
            ORDER: order and order.length,
        }

    def shared_order(self) -> Order | None:
        """The order that ranks share; None: what is left of a pass cannot be divided among others."""
        if isinstance(self.dataset, IterableDataset):
            return None
        return order_of(self._index_sampler, 1 if self.dispatched else world_and_rank()[0])

    def ranks(self) -> tuple[int, int]:
        """How many ranks share the pass, by `torch.distributed` and by the sampler, and which one this is."""
        if self.dispatched:
            return 1, 0
        world, rank = world_and_rank()
        divided = next((d for each in self._samplers() if (d := ranks_of(each))), (1, rank))
        return max(world, divided[0]), divided[1]

    def _refuse_other(self, state: dict[str, Any], *names: str) -> None:
        """Refuse a state within a pass if what must be equal is not.

        Args:
            state: the state.
            *names: what must be equal, unless what is left can be divided among other ranks.
        """
        saved, here, place = state["shape"], self._shape(), state["place"]
        differ = [name for name in here if name in saved and saved[name] != here[name]]
        divides = self.shared_order() is not None and place.get("division")
        if isinstance(self.dataset, IterableDataset):
            differ = [name for name in differ if name != "rank"]  # its batches are compared
            was, now = place.get("read_as"), self.read_as()
            # Single records do not make batches of the stretch after.
            divides = was and now and (was["size"] is None) == (now["size"] is None)
        if divides:
            differ = [name for name in differ if name in ("records", "num_workers", ORDER)]
            names = tuple(differ)
        found = [f"{n} {saved[n]} (here {here[n]})" for n in differ if divides or n != ORDER]
        again = bool(place.get("segments") or place.get("before")) and not divides
        if again or not {*names}.isdisjoint(differ):
            found += ["ranks whose number has changed"] * again
            why = f", because {self._decides()} alone decides what each rank reads"
            raise ValueError(
                f"the state was saved within a pass with {', '.join(found)}; it can continue only with the"
                f" same{'' if divides else why}: restore them (each rank has a state of its own), or load a"
                " state that was saved between two passes"
            )

    def parts(self) -> tuple[int, int]:
        """How many ranks divide a stream that each of them reads whole, and which part is this one's.

        They share it: see `shared_streams`. What workers get must say nothing of the rank.
        """
        shard: Any = self.dataset
        if type(shard) is not of_accelerate("IterableDatasetShard") or self.worker_init_fn:
            return 1, 0
        own = shard.batch_size // (shard.num_processes if shard.split_batches else 1)
        if own != self.batch_size:
            return 1, 0
        return shard.num_processes, shard.process_index

    def read_as(self) -> dict[str, Any] | None:
        """How this rank reads a stream; None: what is left of it cannot be divided among others."""
        (parts, part), ranks = self.parts(), self.ranks()[0]
        known = isinstance(self.dataset, IterableDataset) and (parts > 1 or ranks == 1)
        return {"parts": parts, "part": part, "size": self.batch_size} if known else None

    def _decides(self) -> str:
        """What prevents a state from being used by other ranks, by its argument."""
        if isinstance(self.dataset, IterableDataset):
            return f"dataset={type(self.dataset).__name__}"
        key, found = "batch_sampler" if self._auto_collation else "sampler", self._index_sampler
        while type(found) in (BatchSampler, of_accelerate("BatchSamplerShard")):
            key = "batch_sampler" if hasattr(found, "batch_sampler") else "sampler"
            found = getattr(found, key)
        return f"{key}={type(found).__name__}"

    def _samplers(self) -> list[Any]:
        found: list[Any] = []
        left = [self.batch_sampler, self.sampler]
        while left:
            each = left.pop(0)
            if each is not None and not any(each is other for other in found):
                found.append(each)
                left += [getattr(each, "batch_sampler", None), getattr(each, "sampler", None)]
        return found

    def _stateful(self) -> list[Any]:
        return [each for each in self._samplers() if hasattr(each, "load_state_dict")]

    @property
    def restored(self) -> bool:
        """Whether samplers have a loaded state that no pass has begun with."""
        return self._state is not None and bool(self._stateful())

    def _own(self) -> list[torch.Generator]:
        seeds = of_accelerate("SeedableRandomSampler")  # seeds its generator as each pass begins
        owners = (
            self,
            *(each for each in self._samplers() if not seeds or type(each) is not seeds),
        )
        found = {
            id(g): g
            for o in owners
            if isinstance(g := getattr(o, "generator", None), torch.Generator)
        }
        return list(found.values())

    def _generators(self) -> dict[str, Any]:
        """State of every generator and stateful sampler that a pass depends on."""
        samplers = [sampler.state_dict() for sampler in self._stateful()]
        return {"global": states(), "own": drawn_states(self._own()), "samplers": samplers}

    def _set_generators(self, found: dict[str, Any]) -> None:
        for name, here in (("own", self._own()), ("samplers", self._stateful())):
            if len(found[name]) != len(here):
                raise ValueError(
                    f"the state has {len(found[name])} {'generators' if name == 'own' else 'samplers'} and this"
                    f" loader {len(here)}; make it with the same generator and sampler as the saved one"
                )
        restore_generators(found["global"])
        set_states(self._own(), found["own"])
        for sampler, state in zip(self._stateful(), found["samplers"], strict=True):
            sampler.load_state_dict(state)


def unsendable(parts: dict[str, Any]) -> str:
    """The path and type of the innermost attribute that cannot be pickled."""
    path, seen = "the dataset", set[int]()
    while bad := next(
        (n for n, v in parts.items() if id(v) not in seen and not _is_sendable(v)), ""
    ):
        part = parts[bad]
        seen.add(id(part))
        path = f"{bad} ({type(part).__name__})"
        parts = {f"{bad}.{name}": value for name, value in content_of(part).items()}
    return path


def _is_sendable(part: Any) -> bool:
    with contextlib.suppress(Exception):
        pack([part])
        return True
    return False


@functools.lru_cache(1)
def _resolved(folder: str, *path: str) -> list[str]:
    return [str(Path(folder, each).resolve()) for each in path]


_replaced: dict[str, Any] | None = None
"""Options of the loaders that take the place of torch's."""
_stock_iter, _stock_iterator = TorchDataLoader.__iter__, TorchDataLoader._get_iterator


def replace_torch_loader(**options: Any) -> None:
    """Turn every torch DataLoader into a `stoker.DataLoader` when it is iterated over.

    For trainers that create their own loaders, such as Hugging Face's. A subclass keeps its methods; one with
    iterators of its own (`_get_iterator`) is left alone.

    Args:
        **options: `address`, `on_error`, `bad_record_budget`, `stall_timeout_s`.
    """

    global _replaced
    _replaced = options
    follow_accelerate()

    def replaced(stock: Any) -> Any:
        def iterate(loader: Any) -> Any:
            if not isinstance(loader, DataLoader):
                if type(loader)._get_iterator is not TorchDataLoader._get_iterator:
                    return stock(loader)
                adopt(loader, options)
            return DataLoader.__iter__(loader)

        return iterate

    TorchDataLoader.__iter__ = replaced(_stock_iter)  # type: ignore[method-assign]
    TorchDataLoader._get_iterator = replaced(_stock_iterator)  # type: ignore[method-assign]


USERS = ("accelerate.data_loader", "accelerate.accelerator", "accelerate", "transformers.trainer")
"""Modules with the functions that `follow_accelerate` replaces."""


def adopt(loader: Any, options: dict[str, Any]) -> None:
    loader.__class__ = _adopted(loader.__class__)
    loader.set_options(**options)


@functools.cache
def _adopted(kind: type[TorchDataLoader[Any]]) -> type[DataLoader[Any]]:
    """`stoker.DataLoader`, behind the methods of a subclass of torch's."""
    if kind is TorchDataLoader:
        return DataLoader
    return type(kind.__name__, (kind, DataLoader), {"__module__": kind.__module__})


def follow_accelerate() -> None:
    """Make Accelerate return a `stoker.DataLoader` when it gets one.

    Accelerate takes a loader apart and builds one of torch's from the parts.
    """
    module: Any = sys.modules.get("accelerate.data_loader")
    for name in ("prepare_data_loader", "skip_first_batches"):
        original = getattr(module, name, None)
        if original is None or hasattr(original, "__wrapped__"):
            continue

        @functools.wraps(original)
        def made(dataloader: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            found = _original(dataloader, *args, **kwargs)
            given = getattr(dataloader, "base_dataloader", dataloader)
            inner = getattr(found, "base_dataloader", found)
            options = given.options() if isinstance(given, DataLoader) else _replaced
            if options is not None and type(inner) is TorchDataLoader:
                adopt(inner, options)
            if isinstance(inner, DataLoader) and type(found) is of_accelerate(
                "DataLoaderDispatcher"
            ):
                whole = found.split_batches or found.submesh_tp
                inner.dispatched = 1 if whole else found.state.num_processes
            return found

        for user in USERS:
            if getattr(sys.modules.get(user), name, None) is original:
                setattr(sys.modules[user], name, made)
