"""What goes wrong around a `stoker.DataLoader` is told, and costs others nothing."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from alike import equal
from PIL import Image, ImageFile
from test_loader_order import Records
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler, IterableDataset, default_collate

from stoker import DataLoader
from stoker.errors import UsageError
from stoker.loader import connection
from stoker.loader.loader_service import LoaderAttempt, LoaderPass
from stoker.loader.work import PAGES, LoaderChain, LoaderSource, LoaderWork, LoadRequest, MadeBatch
from stoker.protocol import (
    BlockReport,
    Care,
    Claim,
    Failure,
    Made,
    PassPlan,
    Process,
    Reply,
    Shard,
    SplitSetup,
    Work,
)
from stoker.serve.blocks.folder import BlockFolder
from stoker.serve.blocks.packing import pack, unpack
from stoker.serve.chain_worker import MOST_LOADED, ChainWorker
from stoker.serve.passes import Shared
from stoker.serve.pool import ChainHost
from stoker.serve.shards import Setup

pytestmark = pytest.mark.usefixtures("loader_in_this_process")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(20))


class Leaves(Records):
    def __getitem__(self, index: int) -> Any:
        return sys.exit(0) if index == 9 else torch.tensor(index)


def test_a_record_that_leaves_python_is_an_error_of_its_batch_alone() -> None:
    iterator = iter(DataLoader(Leaves(), batch_size=4))
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(RuntimeError, match=r"SystemExit at index 9 \(batch 2\)"):
        next(iterator)
    assert next(iterator).tolist() == [12, 13, 14, 15]
    with pytest.raises(RuntimeError, match="SystemExit"):
        list(DataLoader(Leaves(), batch_size=4, on_error="quarantine", bad_record_budget=1.0))


def fails(worker: int) -> None:
    raise LookupError(f"not for {worker}")


def test_what_worker_init_fn_raises_comes_as_from_torch() -> None:
    with pytest.raises(LookupError, match=r"(?s)worker_init_fn\(0\).*not for 0"):
        next(iter(DataLoader(Records(), worker_init_fn=fails, num_workers=1)))


class FailsOnTheWay(IterableDataset[Any]):
    def __iter__(self) -> Any:
        self.at = iter(range(5))
        return self

    def __next__(self) -> int:
        if (number := next(self.at)) == 2:
            raise ValueError("the third")
        return number


@pytest.mark.parametrize("kind", [TorchLoader, DataLoader])
def test_an_iterable_dataset_that_goes_on_after_an_error_loses_nothing(kind: type[Any]) -> None:
    iterator = iter(kind(FailsOnTheWay(), batch_size=None))
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(ValueError, match="the third"):
        next(iterator)
    assert list(iterator) == [3, 4]


def breaks_off() -> Iterator[int]:
    yield from range(5)
    raise OSError("no more indices")


def test_what_a_sampler_raises_comes_behind_the_batches_before_it() -> None:
    found: list[int] = []
    with pytest.raises(OSError, match="no more indices"):
        found.extend(batch[1] for batch in DataLoader(Records(), batch_size=None, sampler=breaks_off()))
    assert found == [0, 1, 2, 3, 4]


class Countless(list[int]):
    def __len__(self) -> int:
        raise NotImplementedError


def test_a_state_of_more_batches_than_there_are_is_refused() -> None:
    loader = DataLoader(Records(), batch_size=4, sampler=Countless(range(43)))
    iterator = iter(loader)
    for _ in range(9):
        next(iterator)
    again = DataLoader(Records(), batch_size=4, sampler=Countless(range(20)))
    again.load_state_dict(loader.state_dict())
    for _ in range(2):  # the state is not used up by the pass that could not be opened
        with pytest.raises(ValueError, match="after 9 batches, but the sampler now has 5"):
            iter(again)


class Permuted(Countless):
    """Draws from a generator that no state includes."""

    drawn = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.drawn.permutation(43).tolist())


@pytest.mark.parametrize("kind", ["permuted", "distributed"])
def test_a_state_of_batches_that_the_sampler_no_longer_gives_is_refused(kind: str) -> None:
    """Records would be lost and repeated. States of versions that knew no digest are taken."""

    def sampler() -> Any:
        return Permuted() if kind == "permuted" else DistributedSampler(Records(), 1, 0)

    loader = DataLoader(Records(), batch_size=4, sampler=sampler())
    if kind == "distributed":
        loader.sampler.set_epoch(3)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    again = DataLoader(Records(), batch_size=4, sampler=sampler())
    again.load_state_dict(state)
    with pytest.raises(ValueError, match=r"after 2 batches, and the sampler now gives other .*set_epoch"):
        iter(again)
    del state["place"]["indices"]
    again.load_state_dict(state)
    assert sum(1 for _ in again) == 9


@pytest.mark.parametrize(
    ("dataset", "arguments", "named"),
    [
        (Records(), {"batch_size": 8}, "batch_size 4 (here 8), batches 11 (here 6)"),
        (Records(20), {"batch_size": 4}, "records 43 (here 20)"),
        (
            Records(),
            {"batch_size": 4, "sampler": DistributedSampler(Records(86), 2, 0)},
            "world_size 1 (here 2)",
        ),
    ],
)
def test_a_state_within_a_pass_of_another_shape_is_refused(
    dataset: Any, arguments: dict[str, Any], named: str
) -> None:
    loader = DataLoader(Records(), batch_size=4)
    next(iter(loader))
    again = DataLoader(dataset, **arguments)
    with pytest.raises(ValueError, match=re.escape(named)):
        again.load_state_dict(loader.state_dict())
        iter(again)
    list(loader)
    again.load_state_dict(loader.state_dict())  # between two passes there is no position to lose
    assert len(list(again)) == len(again)


def test_a_loader_may_be_copied_in_the_midst_of_a_pass() -> None:
    loader = DataLoader(Records(), batch_size=4)
    next(iter(loader))
    copy = pickle.loads(pickle.dumps(loader))  # noqa: S301
    assert [batch[1].tolist() for batch in copy] == [batch[1].tolist() for batch in loader]


@pytest.mark.long
def test_accelerate_may_be_imported_after_a_loader_was_made() -> None:
    pytest.importorskip("accelerate")
    script = (
        "import sys; from stoker import DataLoader; loader = DataLoader(range(8), batch_size=4);"
        "assert 'accelerate' not in sys.modules; from accelerate import Accelerator;"
        "print(type(Accelerator(cpu=True).prepare(loader).base_dataloader).__module__)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "stoker.loader.dataloader"


class NoLength(Records):
    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.long
def test_a_dataset_needs_no_length_where_a_sampler_is_given() -> None:
    loader = DataLoader(NoLength(), sampler=range(6), batch_size=3, on_error="quarantine")
    assert [batch[1].tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "option", [{"stall_timeout_s": 0}, {"stall_timeout_s": float("nan")}, {"bad_record_budget": 5}]
)
def test_an_option_out_of_its_range_is_refused(option: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(option))} is a .*, not {next(iter(option.values()))}"):
        DataLoader(Records(), **option)


FORKS = """
import gc, os
from stoker import DataLoader

batches = iter(DataLoader([1, 2, 3, 4]))
next(batches), next(batches)
child = os.fork()
if child:
    os.wait()
del batches
gc.collect()
print("parent" if child else "child", os.path.exists(os.environ["STOKER_EVENTS"]), flush=True)
os._exit(0)
"""


def test_a_fork_that_lets_go_of_a_pass_does_not_end_it_for_its_parent(tmp_path: Path) -> None:
    """The report of a pass that has ended shows whose finalizers ran."""
    events = {"STOKER_EVENTS": str(tmp_path / "events.jsonl")}
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    done = subprocess.run(command, env=os.environ | events, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["child", "False", "parent", "True"]


def test_an_address_where_nobody_answers_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match=r"no Ray cluster answers at 127\.0\.0\.1:1: .*refused"):
        connection.connect("127.0.0.1:1")


def test_a_file_of_ranks_that_were_killed_is_not_taken_for_that_of_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(connection, "RANKS_WAIT_S", 0.1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    folder = tmp_path / f"stoker-ranks-{os.getuid()}"
    folder.mkdir(mode=0o700)
    file = folder / f"{os.getppid()}-.json"
    file.write_text("of a process that had this number")
    os.utime(file, (1e9, 1e9))
    with pytest.raises(UsageError, match="local rank 0 started no Ray cluster"):
        connection._with_other_ranks()


def test_what_killed_ranks_have_left_the_next_ones_remove(tmp_path: Path) -> None:
    own, other = f"{os.getppid()}-mine", f"{os.getpid()}-of-a-running-job"
    for name in (f"{own}.json", f"{own}.123", f"{other}.json", "4194305-killed.json", "4194305-killed.7"):
        (tmp_path / name).touch()
    connection._forget_killed(tmp_path / f"{own}.json")
    assert [path.name for path in tmp_path.iterdir()] == [f"{other}.json"]


@pytest.mark.parametrize("failed", [False, True])
def test_the_rank_that_started_the_cluster_leaves_after_the_others_or_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    file = tmp_path / "1-none-localhost.json"
    file.touch()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        mark = file.with_suffix(f".{other.pid}")
        mark.touch()
        if failed:
            monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
        leaves = threading.Thread(target=connection._leave, args=(file, os.getpid()))
        leaves.start()
        leaves.join(10.0 if failed else 0.3)
        assert leaves.is_alive() != failed
    leaves.join(10.0)
    assert not leaves.is_alive() and not list(tmp_path.iterdir())


class TwoHosts:
    """The service's planner and chain workers `a` on a CPU host and `b` on one that trains; no Ray."""

    def __init__(self, budget: int, trains: bool) -> None:
        shared = Shared(print, budget, {})
        self.pool = shared.pool
        self.hosts = [ChainHost("a", 1), ChainHost("b", 1, trains)]
        for at in (0.0, 3.0):
            self.pool.update(self.hosts, trains, at)
        self.pool.workers_are({"a": "a", "b": "b"}, 3.0)
        self.attempt = LoaderAttempt(0, shared, {"s": {}})
        self.planner = self.attempt.planner

    def open(self, key: str, streams: int, stall_s: float = 60.0, of: str = "s") -> LoaderPass:
        """A pass of the loader `of` over so many streams, or over 99 batches."""
        self.attempt.open(key, of, streams, stall_s)
        shards = [(n, Shard(f"worker {n}" if streams else f"batch {n}"), 0) for n in range(streams or 99)]
        self.attempt.submit(key, shards, len(shards))
        self.planner.advance()
        return self.attempt.passes[key]

    def claim(self, worker: str) -> Claim | None:
        return self.planner.claim(Process(worker, worker, "1"))

    def made(self, worker: str, claim: Claim, nth: int, last: bool = False) -> bool:
        shard = claim.work[0].number
        report = BlockReport(shard, nth, last, rows=1, records=1, bytes_out=150, seconds=2.0)
        return self.planner.reported(
            Process(worker, worker, "1"), claim.number, Made(report, f"{shard}.{nth}")
        )

    def given(self, worker: str) -> Claim:
        claim = self.claim(worker)
        assert claim is not None
        return claim


def at(claim: Claim | None) -> tuple[int, int]:
    """The shard of a claim, and how many of its blocks are skipped."""
    assert claim is not None
    return claim.work[0].number, claim.work[0].skip


def test_a_pass_that_nobody_takes_from_does_not_keep_another_from_being_made() -> None:
    """A training pass that was left fills the room for batches; validation goes on."""
    head, found = TwoHosts(budget=300, trains=False), list[str]()
    with head.attempt.changed:
        head.open("train", 0, of="train")
        val = head.open("val", 0, of="val")
        for _ in range(9):
            claim = head.given("a")
            found.append(claim.plan.split)
            head.made("a", claim, 0, last=True)
            if claim.plan.split == "val":  # its script takes what is there
                val.next = (claim.work[0].number + 1, 0)
                val.ready.clear()
    assert found.count("val") >= 6


def test_a_process_reads_its_streams_side_by_side_and_does_other_work_while_they_are_ahead() -> None:
    head = TwoHosts(budget=10**9, trains=False)
    with head.attempt.changed:
        train, val = head.open("train", 2, of="train"), head.open("val", 0, of="val")
        waiting, val.work = val.work, type(val.work)()
        first = head.given("a")
        assert (first.plan.split, *at(first)) == ("train", 0, 0)
        assert head.made("a", first, 0)
        train.next = (1, 0)  # the script has taken the first batch and waits for one of the other stream
        train.ready.clear()
        assert not head.made("a", first, 1)
        second = head.given("a")
        assert at(second) == (1, 0)
        assert [head.made("a", second, nth) for nth in range(4)] == [True, True, True, False]
        third = head.given("a")
        assert at(third) == (0, 2), "the one that is less ahead"
        assert [head.made("a", third, nth) for nth in range(2, 5)] == [True, True, False]
        assert head.claim("a") is None, "both are far enough"
        assert head.claim("b") is None, "and nobody else reads them"
        val.work = waiting
        other = head.given("a")
        assert other.plan.split == "val"
        head.made("a", other, 0, last=True)
        train.next = (0, 1)
        del train.ready[0, 1]
        val.work.clear()
        assert at(head.claim("a")) == (0, 5)
        assert head.attempt.bound() == {"a"}
        head.pool.workers_are({"b": "b"}, 4.0)
        del train.ready[1, 0]
        assert at(head.claim("b")) == (1, 4), "its process is gone"


@pytest.mark.parametrize("streams", [(0, 0), (1, 1), (1, 0), (0, 1)])
def test_scripts_that_share_a_chain_worker_get_batches_alike(streams: tuple[int, int]) -> None:
    head, taken = TwoHosts(budget=10**9, trains=False), [0, 0]
    with head.attempt.changed:
        passes = [head.open(f"{number}", count) for number, count in enumerate(streams)]
        while sum(taken) < 40:
            claim, go_on = head.given("a"), True
            nth, streamed = claim.work[0].skip, not claim.work[0].shard.path.startswith("batch")
            while go_on and sum(taken) < 40:
                go_on = head.made("a", claim, nth, last=not streamed) and streamed
                nth += 1
                for number, each in enumerate(passes):
                    if each.ready.pop(each.next, None):
                        taken[number] += 1
                        shard, block = each.next
                        each.next = (shard, block + 1) if each.streams else (shard + 1, 0)
    assert min(taken) >= 15, taken


def test_each_pass_has_the_deadline_of_its_loader() -> None:
    head, began = TwoHosts(budget=10**9, trains=False), time.monotonic()
    with head.attempt.changed:
        patient, hasty = head.open("patient", 0, 600.0), head.open("hasty", 0, 40.0)
        assert head.given("a") and head.given("b")
        head.planner.look(began + 50)
        ((place, reason),) = hasty.failed.items()
        assert place == hasty.next and "no result for 50 s (stall_timeout_s: 40)" in reason
        assert "DataLoader" in reason and "data." not in reason
        assert not patient.failed and not head.attempt.over
        head.planner.look(began + 560)
        assert "(stall_timeout_s: 600)" in patient.failed[patient.next]


def test_a_stream_may_pause_for_half_as_long_as_its_loader_waits() -> None:
    """One that hangs is then read elsewhere, before its pass is given up."""
    head, began = TwoHosts(budget=10**9, trains=False), time.monotonic()
    with head.attempt.changed:
        stream = head.open("stream", 1, 600.0)
        claim = head.given("a")
        assert [head.made("a", claim, nth) for nth in range(3)] == [True] * 3
        batches = head.open("batches", 0, 600.0, of="t")
        assert head.given("b").plan.split == "t"
        head.planner.recovery.patience.took("t", "b", 0.1)
        assert head.planner.look(began + 100) == ["b"], "the other pass's"
        assert head.planner.look(began + 290) == []
        assert head.planner.look(began + 310) == ["a"] and not (stream.failed or batches.failed)


def test_reading_a_stream_again_up_to_its_place_takes_as_long_as_it_moves() -> None:
    head = TwoHosts(budget=10**9, trains=False)
    with head.attempt.changed:
        train = head.open("train", 2)
        claim = head.given("a")
        head.given("b")
        head.planner.begins(Process("b", "b", "2"))  # waits for a process, which may be busy with the other
        for _ in range(3):
            for item in (*head.planner.active.values(), *head.planner.again):
                item.quiet_since -= 50
                item.stuck_since -= 50
            made = Made(BlockReport(nth=7), "")
            assert head.planner.reported(Process("a", "a", "1"), claim.number, made)
            assert head.planner.look(time.monotonic()) == [] and not train.failed
        head.planner.look(time.monotonic() + 60)
        assert "no result for 60 s" in train.failed[train.next], "it hangs"


def test_a_stream_goes_on_where_it_is_read_although_its_host_gets_no_other_work() -> None:
    """Enough is ready, so the training host has stopped helping; its stream is the one waited for."""
    head = TwoHosts(budget=1000, trains=True)
    with head.attempt.changed:
        train = head.open("train", 2)
        for worker in "ab":
            claim = head.given(worker)
            for nth in range(4):
                head.made(worker, claim, nth)
        head.pool.update(head.hosts, head.planner.hungry, 4.0)
        train.ready = {place: block for place, block in train.ready.items() if place[0] != 1}
        train.next = (1, 4)
        assert not head.pool.may_work("b")
        going_on = head.given("b")
        assert (going_on.work[0].number, going_on.work[0].skip) == (1, 4)
        assert head.claim("a") is None, "nobody else reads it"


def test_a_stream_that_another_worker_has_taken_over_stays_with_that_one_in_the_next_pass() -> None:
    head = TwoHosts(budget=10**9, trains=False)
    with head.attempt.changed:
        head.open("first", 1)
        claim = head.given("a")
        head.made("a", claim, 0)
        head.planner.failed(Process("a", "a", "1"), claim.number, Failure("OSError: no space", True, 3))
        for item in head.planner.again:
            item.not_before = 0.0
        claim = head.given("b")
        head.made("b", claim, 1, last=True)
        head.planner.ended(Process("b", "b", "1"))
        head.planner.advance()
        head.attempt.close("first")
        head.open("second", 1)
        assert head.claim("a") is None, "its copy of the dataset is not the one that served the first pass"
        assert head.given("b").work[0].shard.home == "b"


class Draws(IterableDataset[Any]):
    def __init__(self) -> None:
        self.state = 0

    def __iter__(self) -> Iterator[Any]:
        for _ in range(6):
            self.state = self.state * 5 + 1
            yield self.state


def test_a_block_that_is_made_again_leaves_the_copy_of_the_stream_alone() -> None:
    """A host's agent died and took a batch along; the chain worker that reads the stream makes it again."""

    def read(source: LoaderSource, served: int) -> Iterator[Any]:
        shard = Shard(
            "worker 0", items=(LoadRequest(7, worker=0, served=served),), home="w" if served else ""
        )
        return (unpack(record[PAGES])[1].batch for record in source.read(shard, None))

    def two_passes(again: bool) -> list[Any]:
        work = LoaderWork(Draws(), default_collate, True, True, 1, False, 1, None, False, keeps=True)
        source = LoaderSource((pack([(str(Path.cwd()), [], {}, {})]), pack([work])), True)
        first = read(source, 0)
        taken = [next(first) for _ in range(4)]
        if again:
            made_again = [*itertools.islice(read(source.apart(), 0), 2)]
            assert [each.tolist() for each in made_again] == [each.tolist() for each in taken[:2]]
        return [each if each is None else each.tolist() for each in (*taken, *first, *read(source, 1))]

    assert two_passes(again=True) == two_passes(again=False)


class Passes:
    """The service of so many loaders over iterable datasets, read in turn twice; `remote` answers at once."""

    def __init__(self, loaders: int, folder: BlockFolder) -> None:
        self.claims = [
            Claim(number, PassPlan(number, 0, f"{number % loaders}", False, 1), [self.work(served)], Care())
            for number, served in enumerate(served for served in range(2) for _ in range(loaders))
        ]
        self.folder, self.found, self.told = folder, list[Any](), list[tuple[bool, bool]]()

    def work(self, served: int) -> Work:
        home = "w" if served else ""
        return Work(0, Shard("worker 0", items=(LoadRequest(7, served=served),), home=home))

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *asked: pickle.dumps(getattr(self, f"on_{method}")(*asked)))

    def on_begin_lease(self, *by: Any) -> None:
        """It is the only one."""

    def on_claim(self, by: Process, loaded: list[str], last: Any) -> Reply:
        if last is not None:
            self.on_block_made(by, *last)
        if not self.claims:
            return Reply(go_on=False)
        claim = self.claims.pop(0)
        new = claim.plan.split not in loaded
        return Reply(
            claim,
            setup=SplitSetup(self.setup(), frozenset(each.plan.split for each in self.claims))
            if new
            else None,
        )

    def setup(self) -> bytes:
        work = LoaderWork(Draws(), default_collate, True, True, 6, False, 1, None, False, keeps=True)
        source: Any = LoaderSource((pack([(str(Path.cwd()), [], {}, {})]), pack([work])), True)
        return pickle.dumps(Setup(source, pickle.dumps(LoaderChain())))

    def on_block_made(self, by: Process, number: int, made: Made) -> Reply:
        batch = unpack(self.folder.columns(made.file)[PAGES].copy())[1]
        self.found.append(batch)
        self.told.append((made.report.last, isinstance(batch, MadeBatch) and batch.ended))
        return Reply(go_on=isinstance(batch, MadeBatch))


@pytest.mark.parametrize("loaders", [1, MOST_LOADED + 1])
def test_a_process_keeps_the_copies_of_any_number_of_datasets_for_their_next_pass(
    loaders: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = SimpleNamespace(get_actor_id=lambda: "w", get_node_id=lambda: "a", current_actor=None)
    folder = BlockFolder("test", "a")
    folder.roots = [tmp_path]
    monkeypatch.setattr("ray.get", lambda answer, timeout=None: pickle.loads(answer))  # noqa: S301
    monkeypatch.setattr("ray.get_runtime_context", lambda: me)
    monkeypatch.setattr("stoker.serve.chain_worker.here", lambda run: folder)
    passes = Passes(loaders, folder)
    ChainWorker(passes, "run")(None)
    batches = [made.batch.tolist() for made in passes.found if isinstance(made, MadeBatch) and not made.ended]
    first, second = [1, 6, 31, 156, 781, 3906], [19531, 97656, 488281, 2441406, 12207031, 61035156]
    assert batches == [first] * loaders + [second] * loaders
    assert len(passes.told) == 4 * loaders and all(last == ended for last, ended in passes.told)


class Halves(Records):
    def __getitem__(self, index: int) -> Any:
        return torch.ones(1) / 2, torch.tensor(0.1), ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS


def test_what_a_script_has_set_for_its_process_holds_for_its_batches_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS
    with monkeypatch.context() as script:
        script.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        script.setattr(Image, "MAX_IMAGE_PIXELS", 7)
        torch.set_default_dtype(torch.float64)
        try:
            expected = next(iter(TorchLoader(Halves(), batch_size=4)))
            where, _, work = DataLoader(Halves(), batch_size=4)._packed()
        finally:
            torch.set_default_dtype(torch.float32)
    shard = Shard("batch 0", items=(LoadRequest(7, batches=((0, [0, 1, 2, 3]),)),))
    (record,) = LoaderSource((where, work)).read(shard, None)
    batch = unpack(record[PAGES].copy())[1].batch
    assert equal(batch, expected) and batch[1].dtype == torch.float64
    assert usual == (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS)
    assert torch.get_default_dtype() == torch.float32
