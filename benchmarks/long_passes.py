"""Laptop: memory of the head over passes of 10 million batches, a recipe's and a loader's, without Ray.

Planner, account, cursor and splitter are real; one chain worker is a call in this process. A loader's block
is a batch of one record. The recipe's source is numbered and shuffled, with four batches to a shard.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator

import psutil

from benchmarks.harness import Measure
from stoker.config.schema import Config
from stoker.data import Shard, read_range
from stoker.loader.loader_service import LoaderAttempt
from stoker.loader.work import LoadRequest
from stoker.protocol import BlockReport, DataCursor, Made, Process
from stoker.serve.accounting import ChainCosts
from stoker.serve.passes import Passes, ServiceState
from stoker.serve.planner import Planner
from stoker.serve.pool import ChainHost
from stoker.serve.recipe_pass import RecipeAttempt

MILLIONS = (1, 5, 10)
BATCH, SHARD, AHEAD, CHECKPOINT_EVERY = 64, 256, 64, 10_000
WORKER = Process("w", "h", "t")


def on_one_host() -> ServiceState:
    """For attempts on one host with one chain worker."""
    shared = ServiceState(lambda *_, **__: None, 2**30, {"train": ChainCosts()})
    shared.pool.update([ChainHost("h", 1)], False, 0.0)
    return shared


def made(planner: Planner) -> Iterator[BlockReport]:
    """Claim work and make its shards, each in one block; yields after each."""
    while (claim := planner.claim(WORKER)) is not None:
        for work in claim.work:
            rows = len(work.shard.items) or 1
            report = BlockReport(work.number, 0, True, rows, 0.01, rows, work.number, bytes_out=100)
            go_on = planner.reported(WORKER, claim.number, Made(report, str(work.number)))
            yield report
            if not go_on:
                break


def recipe(batches: int) -> Iterator[int]:
    """A recipe's pass from its listing to its closed account; yields after each batch.

    Raises:
        DataError: the account does not close.
    """
    config = Config.model_validate(
        {
            "recipe": "none:None",
            "data": {"block_records": SHARD},
            "train": {"epochs": 1, "batch_size": BATCH},
        }
    )
    records = batches * BATCH
    passes = Passes(config, {"train": read_range(records)}, {"train": b""})
    start = DataCursor(epoch=0, plan=passes.identity("f"))
    shared = on_one_host()
    attempt = RecipeAttempt(0, 1, passes, {"train": records}, start, shared)
    with attempt.shared.changed:
        planner = attempt.planner = Planner(attempt)
    pass_ = attempt.open["train", 0]
    while not planner.passes or not planner.passes[0].listed():
        planner.advance()
    ids, step = 0, 0
    for report in made(planner):
        ids += report.id_sum
        while pass_.splitter.ready(step):
            assert pass_.portion(step, 0) is not None
            pass_.fetched[0] = step + 1
            pass_.release()
            if step % CHECKPOINT_EVERY == 0:
                shared.holdings.unused("h")
                pass_.position(step, ids)
            yield step
            step += 1
    planner.advance()
    assert pass_.portion(batches, 0) is None
    pass_.finished[0] = records, ids, 0
    attempt.reconcile(pass_, [])
    assert not attempt.failure, attempt.failure


def request(number: int) -> LoadRequest:
    return LoadRequest(0, batches=((number, None),), digests=(str(number).encode(),))


def loader(batches: int) -> Iterator[int]:
    """A loader's pass to its end; yields after each batch."""
    shared = on_one_host()
    attempt = LoaderAttempt(0, shared, {})
    with attempt.shared.changed:
        attempt.open("k", "s", 0, 60.0)
        pass_ = attempt.passes["k"]
        for first in range(0, batches, AHEAD):
            shards = [
                (n, Shard(f"batch {n}", items=(request(n),)), 0)
                for n in range(first, min(first + AHEAD, batches))
            ]
            attempt.submit("k", shards, batches)
            attempt.planner.advance()
            for at, _ in enumerate(made(attempt.planner)):
                place = first + at, 0
                pass_.given = {place: pass_.ready.pop(place)}
                attempt.sharing.taken(pass_, place, pass_.given[place])
                pass_.next = (first + at + 1, 0)
                yield first + at
            shared.holdings.unused("h")
        attempt.planner.advance()
    assert pass_ not in attempt.planner.passes


def resident(drive: Callable[[int], Iterator[int]]) -> list[float]:
    """Memory of this process in MB after so many million batches."""
    found, process = [], psutil.Process()
    for number in drive(MILLIONS[-1] * 1_000_000):
        if number + 1 in [millions * 1_000_000 for millions in MILLIONS]:
            found.append(process.memory_info().rss / 1e6)
            print(f"{drive.__name__}: {number + 1:,} batches, {found[-1]:.1f} MB", flush=True)
    return found


def run() -> list[Measure]:
    """Run the benchmark, each pass in a process, and return its rows."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        whole = pool.map(resident, (recipe, loader))
    return [
        Measure(
            f"head at {millions} M batches, {drive.__name__}", mb, None, "–", None, None, None, "MB"
        )
        for drive, found in zip((recipe, loader), whole, strict=True)
        for millions, mb in zip(MILLIONS, found, strict=True)
    ]
