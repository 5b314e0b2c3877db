"""Laptop: the verdict on an observed training script, and what would help. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.advise.check.timeline import (
    LEAST_STEPS,
    STARTING,
    Loader,
    Share,
    Take,
    epoch_start,
    judged,
    steady,
    steps_of,
    training,
    waiting,
)
from launcher.advise.size.candidates import Measured
from launcher.advise.size.measure import (
    ASSUMED_SPREAD,
    FEED_S,
    RECEIVE_BYTES,
    RECEIVE_S,
    RUN_SPREAD,
    efficiency_note,
    table_name,
)
from stoker.errors import UsageError
from stoker.events import prices
from stoker.events.advice import INPUT_BOUND
from stoker.figures import count_of

UNSURE, UNCERTAIN = 0.05, 0.15
"""A wider ± share of a step recommends more steps; from the second on there is no verdict. At 50 % it would
promise anything between 1.5 and 2.9 times the speed."""
ADVISED_STEPS = 1000


@dataclass(frozen=True)
class Fetched:
    """Laptop: the cost of fetching a sample, in the processes that do it."""

    cpu_s: float
    blocked_s: float
    """Neither computing nor queueing for a CPU: storage, network, locks, sleeping."""
    queued_s: float
    """Ready to compute while all CPUs were busy."""
    stages: dict[str, float]
    """CPU-seconds per sample by stage, in the order of their first run."""
    samples_per_batch: float
    batches: int

    @property
    def slot_s(self) -> float:
        """Seconds per sample for which a worker is occupied if CPUs are free."""
        return self.cpu_s + self.blocked_s


@dataclass(frozen=True)
class Checked:
    """Laptop: the assessment of one loader of the script."""

    number: int
    """In the order in which the script first used its loaders."""
    loader: Loader
    steps: int
    share: Share
    step_s: float
    samples_per_step: float
    bytes_per_step: float
    start_s: float | None
    """From the start of an epoch to its first batch."""
    fetched: Fetched | None
    whole_epochs: bool
    """The epochs are so short that their starts are included in the share."""

    @property
    def compute_s(self) -> float:
        """Duration of a step if data were never late."""
        return self.step_s * (1 - self.share.value)

    @property
    def certain(self) -> bool:
        """Whether the share was measured well enough for a verdict."""
        return self.share.spread < UNCERTAIN

    @property
    def waits(self) -> bool:
        """Whether waiting for data is worth fixing."""
        return self.certain and self.share.value >= INPUT_BOUND


def fetched_of(sums: Sequence[Mapping[str, Any]]) -> Fetched | None:
    """Laptop: totals of all processes that fetched for one loader; None if there were none."""
    # The first fetch of a process imports and opens things; it counts only if there is nothing else.
    sums = [one for one in sums if not one.get("first")] or sums
    samples = sum(one["samples"] for one in sums)
    fetches = sum(one["fetches"] for one in sums)
    if not samples:
        return None
    cpu, wall, queued = (sum(one[name] for one in sums) for name in ("cpu_s", "wall_s", "delay_s"))
    stages: dict[str, float] = {}
    for one in sums:
        for name, spent in one["stages"].items():
            stages[name] = stages.get(name, 0.0) + spent
    return Fetched(
        cpu_s=cpu / samples,
        blocked_s=max(wall - cpu - queued, 0.0) / samples,
        queued_s=queued / samples,
        stages={name: spent / samples for name, spent in stages.items()},
        samples_per_batch=samples / fetches,
        batches=int(fetches),
    )


def checked(
    seen: Mapping[str, Any], sums: Sequence[Mapping[str, Any]], script: str, wanted: int | None = None
) -> list[Checked]:
    """Laptop: all loaders of a script, starting with the one for training.

    Args:
        seen: records of the script's process about its loaders.
        sums: records of each process that fetched.
        script: its name, for messages.
        wanted: the requested number of steps.

    Raises:
        UsageError: there is no loader, or too few steps were observed.
    """
    loaders = [Loader(**one) for one in seen["loaders"]]
    takes = [Take(**one) for one in seen["takes"]]
    main = training(loaders)
    if main is None:
        raise UsageError(
            f"{script}: no torch DataLoader was iterated in its process; `check` needs a script that reads"
            " its batches from one (torch.utils.data.DataLoader or a subclass)"
        )
    found = [
        judge(loaders, takes, number, fetched_of([one for one in sums if one["loader"] == number]), wanted)
        for number in sorted(range(len(loaders)), key=lambda n: n != main)
        if loaders[number].batches
    ]
    if loaders[main].ours:
        raise UsageError(
            f"{script}: its DataLoader ({loaders[main].place}) is already stoker's: read its waiting in"
            " the report of its job, or check the script with torch's DataLoader"
        )
    if loaders[main].in_thread:
        raise UsageError(
            f"{script}: another thread than the one that trains takes batches from its DataLoader"
            f" ({loaders[main].place}), so the time in next() is not the time that training waits; run check"
            " without that thread"
        )
    if found[0].steps < LEAST_STEPS:
        raise UsageError(
            f"{script}: too short to judge: {count_of(loaders[main].batches, 'step')}; at least"
            f" {LEAST_STEPS + STARTING + 1} are needed: use more data or epochs"
        )
    return found


def judge(
    loaders: Sequence[Loader], takes: Sequence[Take], number: int, fetched: Fetched | None, wanted: int | None
) -> Checked:
    """Laptop: assess one loader, from at most the requested number of steps."""
    loader = loaders[number]
    steps = steps_of(takes, loaders, number)
    kept = judged(steps, loader)[:wanted]
    sized = max(loader.sized_batches, 1)
    return Checked(
        number=number,
        loader=loader,
        steps=len(kept),
        share=waiting(kept),
        step_s=sum(step.whole for step in kept) / max(len(kept), 1),
        samples_per_step=fetched.samples_per_batch if fetched else loader.samples / sized,
        bytes_per_step=loader.batch_bytes / sized,
        start_s=epoch_start(takes, loader, number),
        fetched=fetched,
        whole_epochs=len(steady(steps, loader)) < LEAST_STEPS,
    )


def measured(one: Checked, rates: Mapping[str, float], gpu: str | None) -> Measured | None:
    """Laptop: the limits model's input; None if the cost of fetching was not observed.

    Args:
        one: the loader for training.
        rates: samples/s by GPU name as given by the user, "" for all.
        gpu: of the machine that ran the script, as its driver reports it.
    """
    if one.fetched is None or one.compute_s <= 0:
        return None
    own = one.samples_per_step / one.compute_s
    spread = 0.0
    note = "samples/s of the GPU: from --gpu-samples-per-s"
    found = dict(rates)
    if not found:
        known = table_name(gpu) if gpu else None
        found, spread = {known or "": own}, one.share.spread / (1 - one.share.value)
        what = f"its {gpu}" if gpu else "its CPUs"
        note = f"assumes a GPU there trains as fast as this machine ({what}), {own:,.0f} samples/s"
        note = note if known is None else f"samples/s of the GPU: {own:,.0f} as here, on {what}"
        note += "" if known else "; correct it with --gpu-samples-per-s"
    size = one.bytes_per_step / one.samples_per_step
    scale = size / RECEIVE_BYTES
    return Measured(
        cpu_s=max(one.fetched.slot_s, 1e-9),
        cpu_spread=RUN_SPREAD,
        bytes_per_sample=size,
        receive_s=RECEIVE_S * scale,
        other_s=FEED_S * scale,
        serial_s=FEED_S * scale / 3,
        receive_spread=ASSUMED_SPREAD,
        gpu_samples_per_s=found,
        gpu_spread=spread,
        notes=[
            "one vCPU counts as one core of this machine; correct it with --cpu-speed",
            note,
            f"receiving: assumed {1000 * (RECEIVE_S + FEED_S) * scale:.2f} ms of CPU per sample ± 50 %",
            efficiency_note(),
        ],
    )


def usual_gpu_host(gpu: str | None, default: str) -> str:
    """Laptop: the smallest instance with this machine's GPU, else the default."""
    name = table_name(gpu) if gpu else None
    return next((m.type for m in prices.MACHINES.values() if name and m.gpu_name == name), default)


def headline(one: Checked) -> list[str]:
    """Laptop: the verdict."""
    percent = f"{100 * one.share.value:.0f} % (± {100 * one.share.spread:.0f})"
    of = f"{one.steps} steps of {duration(one.step_s)}"
    if not one.certain:
        low, high = (100 * min(max(one.share.value + side * one.share.spread, 0), 1) for side in (-1, 1))
        # The spread falls with the square root of the number of steps.
        steps = min(math.ceil(one.steps * (one.share.spread / UNSURE) ** 2 / 100) * 100, ADVISED_STEPS)
        return [
            f"too uncertain to judge: {low:.0f} to {high:.0f} % of each step waits for data ({of}); measure"
            f" more: --steps {max(steps, 2 * one.steps)}, with enough data or epochs for it"
        ]
    if not one.waits:
        return [f"well fed: {percent} of each step waits for data ({of}); training itself is the bottleneck"]
    now, then = one.samples_per_step / one.step_s, one.samples_per_step / max(one.compute_s, 1e-9)
    return [
        f"input-bound: {percent} of each step waits for data ({of})",
        f"without waiting a step takes {duration(one.compute_s)}: {then:,.0f} samples/s instead of"
        f" {now:,.0f}, {speed_up(one.share)} as fast",
    ]


def speed_up(share: Share) -> str:
    """Laptop: how much faster training would be if data were never late, at both ends of the uncertainty."""
    low, high = (1 / max(1 - share.value - side * share.spread, 1e-9) for side in (-1, 1))
    least, most = (f"{times:.{0 if times >= 10 else 1}f}" for times in (max(low, 1), high))
    if share.value + share.spread >= 1:
        return f"at least {least} times"
    return f"{least} times" if least == most else f"{least} to {most} times"


def duration(seconds: float) -> str:
    """Laptop: `2.5 s`, `120 ms`."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
