"""`stoker.DataLoader` on a real Ray cluster: the batches are torch's whatever happens to the processes."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from alike import equal
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from stoker import DataLoader
from stoker.errors import UsageError
from stoker.loader import connection
from stoker.serve.chain_worker import MOST_LOADED
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Records(Dataset[Any]):
    def __init__(self, count: int = 61) -> None:
        self.count, self.factor = count, 1.0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), index * self.factor), {"index": index, "name": f"r{index}"}


class Draws(Records):
    def __init__(self) -> None:
        super().__init__()
        self.own = {"train": [random.Random(1), np.random.default_rng(2)]}

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)  # so that all processes take part
        own = [generator.random() for generator in self.own["train"]]
        return index, random.random(), np.random.rand(), float(torch.rand(())), *own


class Masks:
    """As a collator with a seed that creates its generator in the first call."""

    generator: Any = None

    def __call__(self, records: list[Any]) -> Any:
        self.generator = self.generator or torch.Generator().manual_seed(42)
        return [*torch.tensor(records).T, torch.rand(len(records), generator=self.generator)]


@pytest.mark.parametrize(
    ("shuffle", "workers", "after"), [(False, 0, 3), (True, 0, 0), (True, 2, 3), (True, 2, "end")]
)
def test_batches_are_torchs_and_a_pass_goes_on_where_it_stood(
    shuffle: bool, workers: int, after: int | str
) -> None:
    torch.manual_seed(3)
    expected = list(TorchLoader(Records(), batch_size=6, shuffle=shuffle))
    torch.manual_seed(3)
    loader = DataLoader(Records(), batch_size=6, shuffle=shuffle, num_workers=workers)
    iterator = iter(loader)
    given = list(iterator) if after == "end" else [next(iterator) for _ in range(int(after))]
    state = loader.state_dict()
    again = DataLoader(Records(), batch_size=6, shuffle=shuffle, num_workers=workers)
    again.load_state_dict(state)
    assert equal(given + ([] if after == "end" else list(again)), expected)


def test_what_records_draw_is_the_same_on_a_cluster_and_in_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for where in ("", "process"):
        monkeypatch.setenv("STOKER_LOADER", where)
        torch.manual_seed(0)
        loader = DataLoader(Draws(), batch_size=5, shuffle=True, collate_fn=Masks())
        found.append([batch for _ in range(2) for batch in loader])
    assert equal(*found)
    for column in range(1, 7):
        draws = [float(value) for batch in found[0] for value in batch[column]]
        assert len({*draws}) == len(draws) == 2 * len(Draws())


class Shuffled(IterableDataset[Any]):
    """An order that nobody can repeat, as of a pipeline that shuffles without a seed; notes each opening."""

    def __init__(self, opened: Path, lives: Path | None = None, seed: int | None = None) -> None:
        self.opened, self.lives, self.seed = opened, lives, seed
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        (self.opened / f"{self.epoch} {worker} {os.getpid()} {time.monotonic_ns()}").touch()
        numbers = list(range(worker, 240, workers))
        random.Random(self.seed).shuffle(numbers)
        self.epoch += 1
        for at, number in enumerate(numbers):
            time.sleep(0.002)
            if at == 40 and self.lives is not None and worker == 1 and any(self.lives.iterdir()):
                next(self.lives.iterdir()).unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            yield torch.tensor([self.epoch, number])


def test_each_stream_is_read_once_by_one_process_whatever_else_there_is_to_do(
    tmp_path: Path,
) -> None:
    """Five of them on two processes, and passes within the pass; their order cannot be repeated."""
    found, inner = [], 0
    for n, batch in enumerate(DataLoader(Shuffled(tmp_path), batch_size=4, num_workers=5)):
        found += batch[:, 1].tolist()
        if n % 20 == 7:
            inner += len(list(DataLoader(Records(), batch_size=6, timeout=300)))
    assert sorted(found) == list(range(240)) and inner == 3 * 11
    assert sorted(int(each.name.split()[1]) for each in tmp_path.iterdir()) == [0, 1, 2, 3, 4]


def test_passes_in_step_share_processes_that_are_too_few_for_their_streams(tmp_path: Path) -> None:
    one, other = (DataLoader(Shuffled(tmp_path), batch_size=8, num_workers=3) for _ in range(2))
    found = [(a[:, 1].tolist(), b[:, 1].tolist()) for a, b in zip(one, other, strict=True)]
    for each in zip(*found, strict=True):
        assert sorted(n for batch in each for n in batch) == list(range(240))
    assert len(list(tmp_path.iterdir())) == 6


@pytest.mark.parametrize("seed", [1, None], ids=["repeats", "does not repeat"])
def test_a_stream_whose_process_dies_is_opened_again_if_it_repeats(
    tmp_path: Path, seed: int | None
) -> None:
    opened, lives = tmp_path / "opened", tmp_path / "lives"
    for folder in (opened, lives):
        folder.mkdir()
    (lives / "1").touch()
    loader = DataLoader(Shuffled(opened, lives, seed), batch_size=4, num_workers=2)
    if seed is None:
        with pytest.raises(
            RuntimeError, match=r"stream of worker 1 was opened again.*first \d+ batches"
        ):
            list(loader)
        return
    assert sorted(n for batch in loader for n in batch[:, 1].tolist()) == list(range(240))
    assert len(list(opened.iterdir())) > 2 and not list(lives.iterdir())


def test_copies_that_persistent_workers_keep_count_their_epochs_and_are_not_replaced_silently(
    tmp_path: Path,
) -> None:
    opened, lives = tmp_path / "opened", tmp_path / "lives"
    for folder in (opened, lives):
        folder.mkdir()
    loader = DataLoader(
        Shuffled(opened, lives), batch_size=4, num_workers=3, persistent_workers=True
    )
    epochs = []
    for epoch in range(3):
        found = [each for batch in loader for each in batch.tolist()]
        assert sorted(n for _, n in found) == list(range(240))
        epochs.append({of for of, _ in found})
        if epoch == 0:
            time.sleep(17)  # longer than chain workers without a pass live
            next(iter(loader))  # given up: its epoch has begun
    assert epochs == [{1}, {3}, {4}]
    (lives / "1").touch()
    with pytest.raises(
        RuntimeError, match=r"the copy of the dataset that served worker \d .* was lost"
    ):
        list(loader)


class Dies(Records):
    def __init__(self, lives: Path) -> None:
        super().__init__()
        self.lives = lives

    def __getitem__(self, index: int) -> Any:
        if index == 20:
            for life in self.lives.iterdir():
                life.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)


def test_a_process_that_dies_costs_no_batch_and_one_that_always_does_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "once").touch()
    assert [i for b in DataLoader(Dies(tmp_path), batch_size=6) for i in b.tolist()] == list(
        range(61)
    )
    for n in range(50):
        (tmp_path / str(n)).touch()
    with pytest.raises(
        RuntimeError, match=r"DataLoader batch.* its process died .*loading index 20"
    ):
        list(DataLoader(Dies(tmp_path), batch_size=6))
    # In the same process, on the same cluster: a new pass is a new beginning.
    assert len(list(DataLoader(Records(), batch_size=6))) == 11


def test_loaders_may_run_at_once_within_each_other_and_be_given_up() -> None:
    train, val = DataLoader(Records(), batch_size=6), DataLoader(Records(30), batch_size=10)
    seen = []
    for n, _ in enumerate(train):
        seen.append(len(list(val)))
        if n == 3:
            break
    pairs = list(zip(train, val, strict=False))
    assert seen == [3] * 4 and len(pairs) == 3
    assert equal(list(train), list(TorchLoader(Records(), batch_size=6)))


class Environment:
    """As one of LMDB: open once in a process."""

    def __init__(self, path: str) -> None:
        self.path = path
        if path in self.paths():
            raise OSError(f"{path} is already open in this process")
        self.paths().add(path)

    def __del__(self) -> None:
        self.paths().discard(self.path)

    def paths(self) -> set[str]:
        paths: set[str] = vars(sys).setdefault("opened_in_this_process", set())
        return paths


class Opens(Records):
    environment: Any = None

    def __getitem__(self, index: int) -> Any:
        self.environment = self.environment or Environment("rows.lmdb")
        return index


@pytest.mark.parametrize("on_error", ["raise", "quarantine"])
def test_loaders_in_turn_may_each_open_what_a_process_can_open_once(on_error: str) -> None:
    train, val = (DataLoader(Opens(n), 4, num_workers=2, on_error=on_error) for n in (61, 30))
    seen = [
        (int(batch[0]), sum(map(len, val)) if n % 5 == 0 else 30) for n, batch in enumerate(train)
    ]
    assert seen == [(first, 30) for first in range(0, 61, 4)]
    assert not train.quarantine.records and not val.quarantine.records


def test_a_loader_for_another_cluster_than_the_scripts_is_refused() -> None:
    list(DataLoader(Records(), batch_size=61))
    own = ray.get_runtime_context().gcs_address
    for same in (own, "auto"):
        assert len(list(DataLoader(Records(), batch_size=61, address=same))) == 1
    with pytest.raises(UsageError, match="is connected to the Ray cluster at"):
        iter(DataLoader(Records(), address="192.0.2.1:6379"))


def service_name() -> str:
    return f"stoker-loader-{connection.service_name()}"


def wait_until_closed(loader: DataLoader) -> Any:
    """A pass is closed soon after its last batch; the service, which then drops what it had for it."""
    service = ray.get_actor(service_name(), namespace="stoker")

    def used(service: Any) -> set[str]:
        with service.shared.changed:
            found: set[str] = service._used()
            return found

    until(lambda: loader.kept.name not in ray.get(service.__ray_call__.remote(used), timeout=60))
    return service


class Copies(Records):
    """A record says how many copies of the dataset its process has."""

    def __init__(self) -> None:
        super().__init__(4)
        self.memory = np.zeros(1 << 20, np.uint8)

    def __getitem__(self, index: int) -> Any:
        return self.factor, sum(isinstance(each, Copies) for each in gc.get_objects())


def test_a_dataset_that_changes_in_each_epoch_is_kept_twice_at_most() -> None:
    """By the service, and by each process."""
    records = Copies()
    loader = DataLoader(records, batch_size=1)
    kept: list[set[str]] = []
    for epoch in range(6):
        records.factor = float(epoch)
        for factor, copies in loader:
            assert float(factor) == epoch and int(copies) <= 2
        service = wait_until_closed(loader)
        kept.append(ray.get(service.__ray_call__.remote(lambda self: set(self.setups)), timeout=60))
    own = set.union(*kept[1:]) - kept[0]
    assert len(own) == 5 and len(own & kept[-1]) <= 2


class OwnDraws(Records):
    """Two generators per copy: seeded by `worker_init_fn`, and when the first record is loaded."""

    first: Any = None
    second: Any = None

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        time.sleep(0.005)
        self.second = self.second or random.Random(info.seed)
        return self.first.random(), self.second.random()


def seeds_its_copy(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.first = np.random.default_rng(torch.initial_seed())


@pytest.mark.parametrize("workers", [1, 4])
def test_generators_of_copies_in_several_processes_do_not_draw_alike(workers: int) -> None:
    loader = DataLoader(
        OwnDraws(96), batch_size=4, num_workers=workers, worker_init_fn=seeds_its_copy
    )
    found = [torch.stack(batch).tolist() for batch in loader]
    for nth in range(2):
        assert len({number for batch in found for number in batch[nth]}) == 96


class Speaks(Records):
    def __getitem__(self, index: int) -> Any:
        if index == 7:
            faulthandler.enable()  # needs the stream's file
            print("seven is here", "in", sys.stdout.encoding)
            warnings.warn("seven is odd", stacklevel=2)
        if index % 6 == 1:
            logging.basicConfig()  # keeps the stream of the first batch
            logging.getLogger(__name__).warning("record %s", index)
        return index


def test_what_a_dataset_prints_and_warns_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert len(list(DataLoader(Speaks(), batch_size=6))) == 11
    shown = capfd.readouterr()
    assert "seven is here in utf-8\n" in shown.out and "UserWarning: seven is odd" in shown.err
    assert [f"record {index}\n" in shown.err for index in range(1, 61, 6)] == [True] * 10


EDITS = """
import importlib, pathlib, sys
sys.path.insert(0, sys.argv[1])
file = pathlib.Path(sys.argv[1]) / "edited_records.py"
text = "class Edited:\\n    def __len__(self): return 2\\n    def __getitem__(self, index): return 'NAME'\\n"
file.write_text(text.replace("NAME", "before"))
import edited_records
from stoker import DataLoader

for name in ("before", "after the edit"):
    file.write_text(text.replace("NAME", name))
    importlib.reload(edited_records)
    print(list(DataLoader(edited_records.Edited(), batch_size=2)))
"""


class Hangs(Records):
    def __getitem__(self, index: int) -> Any:
        if index == 30:
            time.sleep(1000)
        return index


def test_a_timeout_is_an_error_as_torch_words_it() -> None:
    iterator = iter(DataLoader(Hangs(), batch_size=31, timeout=5, num_workers=1))
    with pytest.raises(RuntimeError, match=r"timed out after \d+ seconds"):
        next(iterator)


def test_an_interrupt_leaves_loader_and_cluster_of_use() -> None:
    """As Ctrl-C does in a notebook's cell: the process that hangs at the batch is ended and replaced."""
    for _ in range(3):  # more than there are processes
        iterator = iter(DataLoader(Hangs(), batch_size=30))
        next(iterator)
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(1.0, signal.raise_signal, [signal.SIGINT]).start()
            next(iterator)
        del iterator
    assert equal(
        list(DataLoader(Records(), batch_size=6)), list(TorchLoader(Records(), batch_size=6))
    )


def test_batches_that_fill_the_store_many_times_all_come() -> None:
    """A gigabyte through the store, each batch written into by the script, which keeps some."""
    records, kept = Large(), []
    for n, batch in enumerate(
        DataLoader(records, batch_size=1, collate_fn=lambda records: records[0])
    ):
        assert (batch == n).all()
        batch += 1
        kept += [batch[7:9]] if n % 9 == 0 else []
    assert n == len(records) - 1
    assert all(
        (each == number + 1).all() for each, number in zip(kept, range(0, n + 1, 9), strict=True)
    )


class Large(Dataset[Any]):
    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> Any:
        return torch.full((1024, 2048), float(index))


class Owner:
    """Of a loader with its own `collate_fn`, as trainers are."""

    def __init__(self) -> None:
        self.loader = DataLoader(
            Records(), 6, num_workers=2, persistent_workers=True, collate_fn=self.collate
        )

    def collate(self, records: list[Any]) -> int:
        return len(records)


def test_a_pass_whose_loader_is_let_go_of_ends_and_keeps_nothing_of_its_loop_alive() -> None:
    def loop() -> Iterator[Any]:
        has = Records()
        for _ in DataLoader(Records(), 32):
            yield weakref.ref(has)

    owner, running = Owner(), loop()
    batches, kept = iter(owner.loader), next(running)  # all batches are drawn by now
    assert next(batches) == 6
    gone = weakref.ref(batches)
    del owner, batches
    gc.collect()
    assert gone() is None
    gc.disable()
    try:
        del running
        assert kept() is None
    finally:
        gc.enable()


class Endless(IterableDataset[Any]):
    at = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(4):
            self.at += 1
            yield self.at - 1


def test_copies_of_any_number_of_datasets_stay_until_their_service_ends_which_the_next_pass_says() -> (
    None
):
    loaders = [
        DataLoader(Endless(), batch_size=2) for _ in range(2 * MOST_LOADED + 1)
    ]  # on two processes
    for first in (0, 4):
        for loader in loaders:
            batches = [batch.tolist() for batch in loader]
            assert batches == [[first, first + 1], [first + 2, first + 3]]
    records = DataLoader(Records(), batch_size=6)
    assert len(list(records)) == 11
    name = service_name()
    ray.kill(ray.get_actor(name, namespace="stoker"))
    until(
        lambda: (
            name not in {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
        )
    )
    with pytest.raises(RuntimeError, match="lost with the service"):
        list(loaders[0])
    assert equal(list(records), list(TorchLoader(Records(), batch_size=6))), "a new one is started"


FORKS = """
import os
loader = DataLoader(list(range(8)), batch_size=4)
assert len(list(loader)) == 2
if os.fork() == 0:
    try:
        list(loader)
    except Exception as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
assert len(list(loader)) == 2
"""


def test_a_script_may_load_a_module_again_and_a_fork_of_it_is_refused_at_once(
    tmp_path: Path,
) -> None:
    done = run_script(EDITS + FORKS, str(tmp_path))
    assert done.returncode == 0, done.stderr
    *edited, refused = done.stdout.splitlines()
    assert edited == ["[['before', 'before']]", "[['after the edit', 'after the edit']]"]
    assert "this process was forked" in refused and "spawn" in refused


SAVES = """
import os, signal, sys
from stoker import DataLoader

def save(number, frame):
    print("saved", flush=True)
    sys.exit(7)

signal.signal(signal.SIGTERM, save)
for batch in DataLoader(list(range(8)), batch_size=2):
    print(batch.tolist(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
"""


def run_script(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, "-c", text, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)


def test_a_script_keeps_its_handler_of_sigterm() -> None:
    """Which it may have set before the first batch, when the loader connects to Ray."""
    done = run_script(SAVES)
    assert (done.returncode, done.stdout.split("\n")[:2]) == (7, ["[0, 1]", "saved"]), done.stderr
    assert "SIGTERM received" not in done.stderr, "no stacks of Ray's threads"


LEAVES = """
import atexit, ray, threading
from stoker import DataLoader

def tell():
    print([thread.name for thread in threading.enumerate() if "stoker-batches" in thread.name])

atexit.register(tell)  # between the loader's and Ray's own: functions run in reverse order
loader = DataLoader(list(range(10_000)), batch_size=2)
first = iter(loader)
print(next(first).tolist())
list(DataLoader(list(range(8))))
del first
ray.shutdown()
kept = iter(loader)
print(next(kept).tolist())
"""


def test_a_script_that_leaves_within_a_pass_ends_its_thread_before_ray_is_gone() -> None:
    """It drops references to blocks, and Ray ends a process that does so while it disconnects."""
    done = run_script(LEAVES)
    said = [
        line for line in done.stdout.splitlines() if "(raylet)" not in line
    ]  # it warns of a busy machine
    assert (done.returncode, said) == (0, ["[0, 1]", "[0, 1]", "[]"]), done.stderr
