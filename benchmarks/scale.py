"""Laptop: the head's CPU time per block at 100 hosts of 96 cores and 390,000 shards, without Ray.

Planner, accounting and splitter are real; chain workers are calls in this process, in the order of a busy
cluster. 64 train workers consume the rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Measure
from stoker.config.schema import Config
from stoker.data import Shard, Source
from stoker.protocol import BlockReport, Claim, DataCursor, Made, Process
from stoker.serve.accounting import ChainCosts
from stoker.serve.passes import Passes, ServiceState
from stoker.serve.planner import Planner
from stoker.serve.pool import ChainHost
from stoker.serve.pool import Pool as Hosts
from stoker.serve.recipe_pass import RecipeAttempt

HOSTS, CORES, WORKERS, BATCH = 100, 96, 64, 256
SHARDS, ROWS, HELD = 390_000, 1024, 50_000
RECORD_S = 0.005
"""CPU time of an ImageNet JPEG."""
FRAGMENTED = 98_000
GOAL_CORES, GOAL_RESUME_S = 1.0, 5.0


class Shards(Source):
    """A source of single-block shards."""

    random = False

    def shards(self, records: int, order: Any) -> list[Shard]:
        return [Shard(f"s{n}", rows=ROWS) for n in range(SHARDS)]

    def read(self, shard: Shard, order: Any) -> Any:
        raise NotImplementedError

    def count(self) -> int:
        return SHARDS * ROWS


def attempt_of(start: Callable[[Passes], DataCursor], hosts: Hosts) -> RecipeAttempt:
    """An attempt of a training run on that cluster."""
    data = {"block_records": ROWS, "shuffle": False}
    config = Config.model_validate(
        {"recipe": "none:None", "data": data, "train": {"epochs": 1, "batch_size": BATCH}}
    )
    source = Shards()
    passes = Passes(config, {"train": source}, {"train": b""})
    shared = ServiceState(lambda *_, **__: None, 2**60, {"train": ChainCosts()})
    shared.pool = hosts
    attempt = RecipeAttempt(0, WORKERS, passes, {"train": source.count()}, start(passes), shared)
    with attempt.shared.changed:
        attempt.planner = Planner(attempt)
    return attempt


def listed(attempt: RecipeAttempt) -> float:
    """Seconds until the first shard may be claimed."""
    began = time.perf_counter()
    planner = attempt.planner
    assert planner is not None
    while not (planner.passes and planner.passes[0].listed()):
        planner.advance()
        time.sleep(0.01)
    return time.perf_counter() - began


def run() -> list[Measure]:
    """Run the benchmark and return its rows."""
    hosts = Hosts()
    hosts.update([ChainHost(f"h{n}", CORES) for n in range(HOSTS)], False, 0.0)
    attempt = attempt_of(lambda passes: DataCursor(epoch=0, plan=passes.identity("f")), hosts)
    whole_s = listed(attempt)
    planner = attempt.planner
    assert planner is not None
    stream = attempt.open["train", 0]
    workers = deque(Process(f"p{n}", f"h{n % HOSTS}", "") for n in range(HOSTS * CORES))
    working: deque[tuple[Process, Claim]] = deque()
    made, began = 0, time.process_time()
    while made < HELD:
        while workers and (claim := planner.claim(workers[0])):
            working.append((workers.popleft(), claim))
        for _ in range(min(len(working), 1000)):
            by, claim = working.popleft()
            for one in claim.work:
                first = one.number * ROWS
                ids = sum(range(first, first + ROWS))
                report = BlockReport(one.number, 0, True, ROWS, 5.0, ROWS, ids, bytes_out=10**7)
                planner.reported(by, claim.number, Made(report, str(made)))
                made += 1
            workers.append(by)
    per_block_s = (time.process_time() - began) / made
    ids_s = seconds(
        lambda: sum(range(10**9, 10**9 + ROWS))
    )  # the chain worker's share, measured above
    steps = 200
    began = time.process_time()
    for step in range(steps):
        for rank in range(WORKERS):
            stream.portion(step, rank)
            stream.fetched[rank] = step
            stream.release()
    per_step_s = (time.process_time() - began) / steps
    rate = HOSTS * CORES / (ROWS * RECORD_S)
    per_block_s = per_block_s - ids_s
    cores = rate * (per_block_s + per_step_s * ROWS / (WORKERS * BATCH))
    resume_s = resumed(hosts)
    return [
        Measure(
            "scale: head, cores at 100 × 96 CPUs",
            cores,
            None,
            "–",
            None,
            GOAL_CORES,
            cores < GOAL_CORES,
            "",
        ),
        plain("  planner and accounting, of a block", per_block_s * 1000, "ms"),
        plain(f"  64 ranks ask for a step, {HELD:,} blocks held", per_step_s * 1000, "ms"),
        plain("  blocks a second", rate, ""),
        plain("  from the start to the first shard", whole_s, "s"),
        Measure(
            f"scale: resume, {FRAGMENTED:,} ranges",
            resume_s,
            None,
            "–",
            None,
            GOAL_RESUME_S,
            resume_s < GOAL_RESUME_S,
            "s",
        ),
    ]


def resumed(hosts: Hosts) -> float:
    """Seconds to the first shard from a data cursor with every other shard done."""

    def start(passes: Passes) -> DataCursor:
        done = [(2 * n, 2 * n + 1) for n in range(FRAGMENTED)]
        return DataCursor(epoch=0, plan=passes.identity("f"), rows=FRAGMENTED * ROWS, done=done)

    return listed(attempt_of(start, hosts))


def seconds(call: Callable[[], Any], times: int = 1000) -> float:
    """CPU seconds of one call."""
    began = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - began) / times


def plain(name: str, value: float, unit: str) -> Measure:
    """A row without a goal."""
    return Measure(name, value, None, "–", None, None, None, unit)
