"""Script: `stoker.DataLoader`, in the place of torch's: the same batches, made on all CPUs of a cluster."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from stoker.data.sources.seeding import put_back, states
from stoker.errors import UsageError
from stoker.loader import cluster
from stoker.loader.adoption import adopt, follow_accelerate
from stoker.loader.iterator import ClusterIterator, Quarantine
from stoker.loader.makers import ClusterMaker, ProcessMaker, register
from stoker.loader.packing import pack
from stoker.loader.work import LoaderWork

HERE_VARIABLE = "STOKER_LOADER"
"""`process`: batches are made in the script's process, for debugging."""
VERSION = 1


class DataLoader(TorchDataLoader[Any]):
    """Script: torch's DataLoader with the records loaded and collated on all CPUs of a Ray cluster.

        from stoker import DataLoader        # was: from torch.utils.data import DataLoader

    Takes the arguments of `torch.utils.data.DataLoader`, with their meaning. The sampler and its generator
    decide on the indices in the script's process, so the batches are torch's, in order and content, where the
    dataset's records depend on nothing but their index. What a dataset or `collate_fn` draws from the
    generators of `random`, NumPy and torch is seeded per record from `generator` (or torch's own) and the
    epoch, so a run repeats on any number of hosts.

    `num_workers` tells what `get_worker_info()` says and how an IterableDataset is divided; every CPU of the
    cluster is used whatever it is. Batches are drawn from the sampler some seconds ahead.

    Args:
        *args: as torch's.
        address: of a Ray cluster; None: RAY_ADDRESS, the cluster this process is connected to, or a new one
            of this machine alone.
        on_error: "raise", or "quarantine": leave out records of a map-style dataset that raise.
        bad_record_budget: share of the records that may be left out of a pass.
        stall_timeout_s: fail when no batch has come for so long.
        **kwargs: as torch's.
    """

    def __init__(
        self,
        *args: Any,
        address: str | None = None,
        on_error: str = "raise",
        bad_record_budget: float = 0.01,
        stall_timeout_s: float = 600.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.set_options(address, on_error, bad_record_budget, stall_timeout_s)

    def set_options(
        self,
        address: str | None = None,
        on_error: str = "raise",
        bad_record_budget: float = 0.01,
        stall_timeout_s: float = 600.0,
    ) -> None:
        """Script: what is Stoker's own; see the class.

        Raises:
            ValueError: an unknown `on_error`.
        """
        if on_error not in ("raise", "quarantine"):
            raise ValueError(f'on_error is "raise" or "quarantine", not {on_error!r}')
        follow_accelerate(DataLoader)
        self.address, self.on_error = address, on_error
        self.bad_record_budget, self.stall_timeout_s = bad_record_budget, stall_timeout_s
        self.quarantine = Quarantine(bad_record_budget, self._total())
        """Records left out of the present pass: `loader.quarantine.records`."""
        self._live: Any = None
        self._state: dict[str, Any] | None = None
        """Where the next pass begins, from `load_state_dict`."""

    def options(self) -> dict[str, Any]:
        """Script: what `set_options` takes."""
        names = ("address", "on_error", "bad_record_budget", "stall_timeout_s")
        return {name: getattr(self, name) for name in names}

    def check_worker_number_rationality(self) -> None:
        """Nothing to warn of: the workers are the cluster's."""

    def _total(self) -> int | None:
        if self.on_error == "raise" or isinstance(self.dataset, IterableDataset):
            return None
        try:
            return len(self.dataset)  # type: ignore[arg-type]
        except Exception:  # torch asks for no length either, where a sampler is given
            return None

    def __getstate__(self) -> dict[str, Any]:
        """Without the present pass, which belongs to this process."""
        return self.__dict__ | {"_live": None}

    def __iter__(self) -> Any:
        """A pass; the one before, if it has not come to its end, is given up."""
        self.quarantine = Quarantine(self.bad_record_budget, self._total())
        state, self._state = self._state, None
        if state is None:
            before = self._generators()
            iterator = ClusterIterator(self, self._maker())
        else:
            before, now = state["generators"], states()
            self._set_generators(before)
            try:
                iterator = ClusterIterator(self, self._maker(), state["place"])
            finally:
                # The script's own place in these is its own affair: it has put it back, or will.
                put_back(now)
        self._live = (iterator, before)
        return iterator

    def _maker(self) -> Any:
        pages = self._packed()
        if os.environ.get(HERE_VARIABLE) == "process":
            return ProcessMaker(pages)
        from stoker.loader.service import service_of

        cluster.connect(self.address)
        service = service_of(cluster.group(), self.stall_timeout_s)
        name = hashlib.sha256(b"".join(part.tobytes() for part in pages)).hexdigest()[:32]
        register(service, pages, name)
        streams = max(1, self.num_workers) if isinstance(self.dataset, IterableDataset) else 0
        pinned = bool(self.pin_memory and torch.cuda.is_available())
        return ClusterMaker(service, name, streams, not self.persistent_workers, pinned, self.stall_timeout_s)

    def _packed(self) -> tuple[Any, Any]:
        folder, path = str(Path.cwd()), [str(Path(each).resolve()) for each in sys.path]
        work = LoaderWork(
            dataset=self.dataset,
            collate=self.collate_fn,
            iterable=isinstance(self.dataset, IterableDataset),
            auto_collation=self._auto_collation,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            workers=max(1, self.num_workers),
            worker_init_fn=self.worker_init_fn,
            quarantines=self.on_error == "quarantine",
        )
        try:
            return pack([(folder, path)]), pack([work])
        except Exception as error:
            raise UsageError(
                f"stoker.DataLoader: the dataset cannot be sent to other processes: {type(error).__name__}:"
                f" {error}; open files, connections and locks in __getitem__, not in __init__"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Where the present pass stands, as `load_state_dict` takes it: after the batches that were taken.

        Holds numbers, strings and bytes only, so `torch.load(weights_only=True)` reads it.
        """
        iterator, before = self._live or (None, None)
        place = iterator.place() if iterator is not None else None
        return {"version": VERSION, "place": place, "generators": before if place else self._generators()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass begin where another one stood, whatever the number of hosts.

        Raises:
            ValueError: another version of Stoker wrote the state.
        """
        if state.get("version") != VERSION:
            raise ValueError(f"a state of version {state.get('version')}, not {VERSION}")
        self._live = None
        if state["place"] is None:
            self._set_generators(state["generators"] | {"global": states()})
        else:
            self._state = state

    def _samplers(self) -> list[Any]:
        """Those that tell and take their state."""
        return [s for s in (self.sampler, self.batch_sampler) if hasattr(s, "load_state_dict")]

    def _own(self) -> list[torch.Generator]:
        """Generators of the loader and its samplers, each once."""
        owners = (self, self.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None))
        found = {id(g): g for o in owners if isinstance(g := getattr(o, "generator", None), torch.Generator)}
        return list(found.values())

    def _generators(self) -> dict[str, Any]:
        """Where all generators stand that may decide on a pass, and samplers that tell their state."""
        samplers = [sampler.state_dict() for sampler in self._samplers()]
        own = [bytes(g.get_state().numpy()) for g in self._own()]
        return {"global": states(), "own": own, "samplers": samplers}

    def _set_generators(self, found: dict[str, Any]) -> None:
        put_back(found["global"])
        for generator, state in zip(self._own(), found["own"], strict=True):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        for sampler, state in zip(self._samplers(), found["samplers"], strict=True):
            sampler.load_state_dict(state)


_stock_iter = TorchDataLoader.__iter__


def replace_torch_loader(**options: Any) -> None:
    """Script: every torch DataLoader that is iterated over from now on is a `stoker.DataLoader`.

    For Trainers that make their loaders themselves (Hugging Face's, say). Subclasses of torch's with an
    iterator of their own stay as they are.

    Args:
        **options: `address`, `on_error`, `bad_record_budget`, `stall_timeout_s`.
    """

    def iterate(loader: TorchDataLoader[Any]) -> Any:
        if type(loader) is TorchDataLoader:
            adopt(loader, DataLoader, options)
            return iter(loader)
        return _stock_iter(loader)

    TorchDataLoader.__iter__ = iterate  # type: ignore[method-assign]
