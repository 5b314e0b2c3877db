"""`check`: from the moments at which a script asked for batches to the verdict, and to what would help."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import stoker
from stoker.errors import UsageError
from stoker.events.prices import price_list
from stoker_launcher.advise.advice import Advice, Wanted, advise
from stoker_launcher.advise.check.fetching import Fetching, observe_next_fetcher
from stoker_launcher.advise.check.timeline import (
    Loader,
    Take,
    enough,
    steady,
    steps_of,
    wait_share,
)
from stoker_launcher.advise.check.verdict import Checked, checked, headline, lines_of, measured
from stoker_launcher.advise.check.watch import GpuClock, Watch, describe_loader

TRAINS = Loader("train.py:9", "Images", 8, 0, 0, batches=60, trained=60)
IDLE = replace(TRAINS, batches=0, trained=0)
WORKERS = replace(TRAINS, num_workers=2, prefetch=2)
VALIDATES = Loader("train.py:30", "Images", 8, 0, 0, batches=5)


def epoch(
    count: int, wait: float, compute: float, *, number: int = 0, since: float = 0.0
) -> list[Take]:
    starts = [since + i * (wait + compute) for i in range(count + 1)]
    takes = [Take(0, number, i, start, start + wait) for i, start in enumerate(starts)]
    return [*takes[:-1], replace(takes[-1], got=starts[-1] + 0.001, ended=True)]


def share_of(takes: Sequence[Take], *loaders: Loader) -> float:
    loaders = loaders or (TRAINS,)
    return wait_share(steady(steps_of(takes, loaders, 0), loaders[0]))[0]


def zipped() -> list[Take]:
    """20 ms for one loader and 30 ms for the other in each step of 100 ms."""
    pairs = [
        (Take(0, 0, i, at, at + 0.02), Take(1, 0, i, at + 0.02, at + 0.05)) for i, at in TENTHS
    ]
    return [take for pair in pairs for take in pair]


TENTHS = [(i, i / 10) for i in range(40)]
PREFETCHED = [
    Take(0, 0, 0, 0.0, 0.09),
    *(Take(0, 0, i, 30 + i / 100, 30 + i / 100) for i in range(1, 5)),
    *(Take(0, 0, i, 30 + (i - 4) / 10, 30.09 + (i - 4) / 10) for i in range(5, 60)),
]
"""Four batches were prefetched while the first step compiled for 30 s; then each is waited for."""


def validated() -> list[Take]:
    """A validation after 20 steps, and 50 s between two epochs: neither is part of a step."""
    first = epoch(40, 0.05, 0.05)
    asked = first[20].asked
    inside = [Take(1, 0, i, asked - 0.01 + i / 1000, asked - 0.009 + i / 1000) for i in range(5)]
    second = epoch(30, 0.05, 0.05, number=1, since=first[-1].got + 50)
    return sorted([*first, *second, *inside], key=lambda take: take.asked)


@pytest.mark.parametrize(
    ("takes", "loaders", "share"),
    [
        *((epoch(50, 0.1 * share, 0.1 * (1 - share)), [TRAINS], share) for share in (0, 0.2, 0.9)),
        (zipped(), [TRAINS, replace(TRAINS)], 0.5),
        (validated(), [TRAINS, VALIDATES], 0.5),
        (PREFETCHED, [WORKERS], 0.9),
    ],
)
def test_the_share_is_the_time_in_next_against_the_whole_step(
    takes: list[Take], loaders: list[Loader], share: float
) -> None:
    assert share_of(takes, *loaders) == pytest.approx(share, abs=0.001)


def test_only_steady_steps_and_whole_rounds_of_workers_count() -> None:
    steps = steps_of(PREFETCHED, [WORKERS], 0)
    assert steady(steps, WORKERS)[0].number == 7 and wait_share(steps)[0] < 0.2
    later = steps_of([*PREFETCHED, *epoch(20, 0.09, 0.01, number=1, since=100)], [WORKERS], 0)
    assert next(s.number for s in steady(later, WORKERS) if s.epoch == 1) == 2
    # Eight workers deliver together: every eighth step waits 0.8 s, the rest not at all.
    eight, takes, now = replace(TRAINS, num_workers=8, prefetch=2), list[Take](), 0.0
    for number in range(60):
        got = now + (0.0 if number % 8 else 0.8)
        takes.append(Take(0, 0, number, now, got))
        now = got + 0.1
    found = steady(steps_of(takes, [eight], 0), eight)
    assert len(found) == 40 and wait_share(found)[0] == pytest.approx(0.5)


EVEN = steps_of(epoch(60, 0.05, 0.05), [TRAINS], 0)
VARIED = [
    s._replace(whole=0.1, wait=0.05) if i % 7 else s._replace(whole=1.5, wait=1.4)
    for i, s in enumerate(EVEN)
]
SLOW = steps_of(epoch(20, 3.0, 4.0), [TRAINS], 0)


@pytest.mark.parametrize(
    ("steps", "wanted", "few", "ends"),
    [(EVEN, None, 22, 23), (VARIED, None, 23, None), (EVEN, 50, 52, 53), (SLOW, None, 11, 13)],
    ids=["a share that is sure", "one that varies", "the number asked for", "a minute"],
)
def test_when_it_has_seen_enough_behind_the_warm_up(
    steps: list[Any], wanted: int | None, few: int, ends: int | None
) -> None:
    assert not enough(steps[:few], TRAINS, wanted)
    assert ends is None or enough(steps[:ends], TRAINS, wanted)


class Rows:
    """A dataset whose records cost 32 s, with a loader of its own inside; CPU seconds are by decree."""

    spent = 0.0

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> int:
        Rows.spent += 32 + sum(len(batch) for batch in DataLoader(torch.arange(3), 1)) - 3  # type: ignore[arg-type]
        return index


def test_a_fetch_is_booked_with_the_loaders_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rows, "spent", 0.0)
    counted = Fetching(tmp_path / "fetch.json", 0, lambda: Rows.spent)
    rows: Any = Rows()
    for _ in range(2):
        observe_next_fetcher(counted)
        assert [len(batch) for batch in DataLoader(Subset(rows, range(40)), 4)] == [4] * 10
    counted.write()
    found = json.loads((tmp_path / "fetch.json").read_text())
    # The first is not counted, nor are those of the loader within.
    assert found["batches"] == 19 and found["cpu_s"] == pytest.approx(19 * 4 * 32)


def one(
    cpu: float | None,
    blocked: float = 0.0,
    *,
    share: float = 0.5,
    spread: float = 0.01,
    step_s: float = 0.08,
) -> Checked:
    """A loader of 2 workers: 8 samples a step, each with this cost of fetching."""
    cpu = None if cpu is None else 8 * cpu
    return Checked(0, WORKERS, 50, share, spread, step_s, 8, 8 * 150_528, cpu, 8 * blocked)


CANNOT = "more workers here cannot fix this: fetching needs 4.0 CPUs to keep up, beside one for the script"
FASTER = "without waiting a step takes 25 ms: 320 samples/s instead of 80, 3.8 to 4.2 times as fast"
UNSURE = "too uncertain to judge: 40 to 98 % of each step waits for data (50 steps of 100 ms); measure more: "
MORE = "num_workers=5 instead of 2 would fix this on this machine"


@pytest.mark.parametrize(
    ("script", "cpus", "said"),
    [
        (one(0.001, share=0.02), 8, "well fed: 2 % (± 1) of each step waits for data"),
        (one(0.02, share=0.69, spread=0.29, step_s=0.1), 8, f"{UNSURE}--steps 1000"),
        (one(0.02, share=0.75, step_s=0.1), 8, FASTER),
        (one(0.02, share=0.82, spread=0.13), 8, ", 3.2 to 20.0 times as fast"),
        (one(0.02, share=0.95, spread=0.06), 8, ", at least 9.1 times as fast"),
        (one(0.02, share=0.1, spread=0.12), 8, ", 1.0 to 1.3 times as fast"),
        # 8 samples of 20 ms on two workers take 80 ms; a step alone 40 ms.
        (one(0.02), 16, f"{MORE}: 4.0 of its 16 CPUs"),
        (one(0.02), 3, f"{CANNOT}, and there are 3; 50 % of a step would still wait"),
        (one(0.001, 0.019), 2, f"{MORE}: 0.2 of its 2"),
        (one(0.004), 2, "2 workers should be enough for this cost of fetching"),
    ],
)
def test_the_verdict_and_what_would_help_here(script: Checked, cpus: float, said: str) -> None:
    lines = lines_of([script], {"cpus": cpus, "gpu": None, "ended": "enough"}, None)
    assert said in "\n".join(lines)
    verdict = lines[0].partition(":")[0]
    assert (verdict == "input-bound") == ("what would help on this machine" in lines)


def advised(script: Checked, rates: dict[str, float], gpu: str | None) -> Advice | None:
    found = measured(script, rates, gpu)
    hosts = Wanted(("ml.g5.xlarge",), ("ml.c5.xlarge", "ml.c5.2xlarge"))
    return advise(found, hosts, price_list()) if found else None


def test_the_cpu_hosts_that_lift_the_wait() -> None:
    """Fetching a sample takes 20 ms of CPU, training it 1 ms."""
    advice = advised(one(0.02, share=0.9), {}, "NVIDIA A10G")
    assert advice is not None and advice.best is not None
    best = advice.best
    assert advice.measured.gpu_samples_per_s == {"A10G": pytest.approx(1000)}
    assert best.cpu_hosts > 0
    cpus = 4 * best.cpu_hosts * (2 if best.cpu_type == "ml.c5.2xlarge" else 1)
    # All of them at 95 % and the three that the GPU host has left.
    assert best.samples_per_s == pytest.approx(min(1000, (cpus + 3) * 0.95 / 0.02), rel=0.05)
    waits = advised(one(0.001, 0.019, share=0.9), {"A10G": 400.0}, "NVIDIA A10G")
    assert waits is not None and waits.best is not None
    assert waits.measured.gpu_samples_per_s == {"A10G": 400.0}
    assert waits.measured.cpu_s == pytest.approx(0.02), "a worker that waits is occupied, too"
    unknown = advised(one(0.02, share=0.9), {}, None)
    assert unknown is not None and unknown.best is None
    assert "--gpu-samples-per-s" in unknown.lines[0]
    assert advised(one(None), {}, None) is None, "nothing is made up"


def seen(takes: list[Take], *loaders: Loader) -> dict[str, object]:
    return {"loaders": [asdict(one) for one in loaders], "takes": [asdict(take) for take in takes]}


@pytest.mark.parametrize(
    ("loop", "place", "judged"),
    [
        ("t" * 100 + "s" * 2000, "t", False),
        (("t" * 8 + "s" * 8) * 12, "t", True),
        (("t" * 60 + "s") * 3, "t", True),
        ("v" * 50 + "ts" * 40, "t", True),
        ("v" * 80 + "t" * 60, "v", False),
        ("tx" * 40, "t", False),
    ],
    ids=[
        *("from memory", "eight batches ahead", "accumulation", "a validation first"),
        *("no optimizer", "another thread"),
    ],
)
def test_only_steps_behind_batches_give_a_verdict(
    tmp_path: Path, loop: str, place: str, judged: bool
) -> None:
    """`loop`: batches of the training and validation, optimizer steps here and in another thread."""
    watch = Watch(tmp_path, None)
    watch.loaders += [replace(IDLE, place=name) for name in "tv"]
    for happens in loop:
        if happens in "tv":
            at = float(len(watch.takes))
            watch.note("tv".index(happens), at, at + 0.5, ended=False)
        elif happens == "s":
            watch.stepped()
        else:
            other = threading.Thread(target=watch.stepped)
            other.start()
            other.join()
    watch.finish("finished")
    first = checked(json.loads((tmp_path / "result.json").read_text()), [], "train.py")[0]
    assert first.loader.place == place
    assert headline(first)[0].startswith("input-bound") is first.waits is judged


@pytest.mark.parametrize(
    ("takes", "loaders", "said"),
    [
        (0, [], "train.py: no torch DataLoader was iterated"),
        (5, [replace(TRAINS, batches=5)], "train.py: too short to judge: 5 steps; at least 14"),
        (1, [replace(TRAINS, ours=True)], r"its DataLoader \(train.py:9\) is already stoker's"),
    ],
)
def test_scripts_without_a_measurement_are_told_apart(
    takes: int, loaders: list[Loader], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        checked(seen(epoch(takes, 0.1, 0.1) if takes else [], *loaders), [], "train.py")


def test_stokers_own_loader_ends_it_as_soon_as_it_is_seen(tmp_path: Path) -> None:
    """Its batches come from a cluster that is only starting."""
    rows = TensorDataset(torch.zeros(8))
    kinds = [
        describe_loader(loader, ["train.py:9"])
        for loader in (stoker.DataLoader(rows), DataLoader(rows))
    ]
    assert [loader.ours for loader in kinds] == [True, False]
    watch = Watch(tmp_path, None)
    watch.loaders.append(replace(TRAINS, ours=True, batches=1))
    assert watch.seen_enough()


class Gpu:
    """What PyTorch asks of CUDA's driver: work is queued and runs in order; an event happens behind it."""

    def __init__(self) -> None:
        self.clock = self.busy_until = 100.0
        self.cuda = self

    def work(self, seconds: float, *, launching: float = 0.001) -> None:
        self.clock += launching
        self.busy_until = max(self.busy_until, self.clock) + seconds

    def synchronize(self) -> None:
        self.clock = max(self.clock, self.busy_until)

    def get_device_name(self) -> str:
        return "NVIDIA A10G"

    def Event(self, enable_timing: bool) -> GpuEvent:  # noqa: N802 - as torch.cuda spells it
        assert enable_timing
        return GpuEvent(self)


class GpuEvent:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at = gpu, 0.0

    def record(self) -> None:
        self.at = max(self.gpu.busy_until, self.gpu.clock)

    def query(self) -> bool:
        return self.gpu.clock >= self.at

    def synchronize(self) -> None:
        self.gpu.clock = max(self.gpu.clock, self.at)

    def elapsed_time(self, other: GpuEvent) -> float:
        return 1000 * (other.at - self.at)


@pytest.mark.parametrize(
    ("fetch", "step", "synchronous", "share"),
    [(0.05, 0.1, False, 0.0), (0.05, 0.1, True, 1 / 3), (0.2, 0.1, False, 0.5)],
    ids=[
        "fetched while the GPU computes",
        "fetched after it",
        "fetched for longer than it computes",
    ],
)
def test_on_a_gpu_only_what_it_waits_for_is_waiting(
    fetch: float, step: float, synchronous: bool, share: float
) -> None:
    """By the time in next() the first would wait for a third of its time, or all of it."""
    gpu = Gpu()
    clock, moments = GpuClock(gpu), []
    for _ in range(60):
        asked = clock.mark()
        gpu.clock += fetch
        moments += [asked, clock.mark()]
        gpu.work(step)
        if synchronous:
            gpu.synchronize()
    assert None not in [clock.seconds(moment, wait=False) for moment in moments[:40]], (
        "what the GPU has done can be told without waiting for it"
    )
    seconds: Any = [clock.seconds(moment, wait=True) for moment in moments]
    takes = [Take(0, 0, i, *seconds[2 * i : 2 * i + 2]) for i in range(60)]
    assert share_of(takes) == pytest.approx(share, abs=0.02)
