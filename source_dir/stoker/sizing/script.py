"""Laptop: the verdict on an observed training script, and what would help. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.costs import prices
from stoker.errors import UsageError
from stoker.integrations.check.fetching import draws
from stoker.integrations.check.timeline import (
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
from stoker.sizing.advice import DEAR_STAGE, INPUT_BOUND
from stoker.sizing.candidates import Measured
from stoker.sizing.measure import (
    ASSUMED_SPREAD,
    FEED_S,
    RECEIVE_BYTES,
    RECEIVE_S,
    RUN_SPREAD,
    efficiency_note,
    table_name,
)

AROUND = ("__getitem__", "collate")
"""Stages of every loader."""
SLACK = 1.05
"""Spare workers, because batches vary."""
FAIR = 0.5
"""CPUs that another process gets on a busy machine."""
BLOCKED = 0.2
"""From this share of a fetch on, time neither computing nor queueing for a CPU is mentioned."""
QUEUED = 0.1
"""From this share of a fetch on, queueing means that there are too few CPUs here."""
CACHEABLE = 0.2
SLOW_START = 0.05
"""From this share of an epoch on, its start is mentioned."""


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
    def waits(self) -> bool:
        """Whether waiting for data is worth fixing."""
        return self.share.value >= INPUT_BOUND


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
    if loaders[main].in_thread:
        raise UsageError(
            f"{script}: another thread than the one that trains takes batches from its DataLoader"
            f" ({loaders[main].place}), so the time in next() is not the time that training waits; run check"
            " without that thread"
        )
    if found[0].steps < LEAST_STEPS:
        raise UsageError(
            f"{script}: too short to judge: {loaders[main].batches} steps; at least"
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
        found, spread = {known or "": own}, min(one.share.spread / (1 - one.share.value), 1.0)
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
    if not one.waits:
        return [f"well fed: {percent} of each step waits for data ({of}); training itself is the bottleneck"]
    now, then = one.samples_per_step / one.step_s, one.samples_per_step / max(one.compute_s, 1e-9)
    return [
        f"input-bound: {percent} of each step waits for data ({of})",
        f"without waiting a step takes {duration(one.compute_s)}: {then:,.0f} samples/s instead of"
        f" {now:,.0f}, {then / now:.1f} times as fast",
    ]


def help_here(one: Checked, cpus: float, idle: float | None) -> list[str]:
    """Laptop: what would help without further hosts.

    Args:
        one: the loader for training.
        cpus: available to the script here.
        idle: share of this machine's CPU time that was unused.
    """
    lines = []
    fetched = one.fetched
    if one.waits and fetched is not None and one.compute_s > 0:
        lines += [_workers(one, fetched, cpus, idle)]
    start = one.start_s or 0.0
    length = one.loader.length
    restarts = len(one.loader.starts) > 1 or one.loader.batches <= (length or 0)
    if one.loader.num_workers and length and restarts and not (one.whole_epochs or one.loader.persistent):
        share = start / (start + length * one.step_s)
        if share >= SLOW_START:
            lines.append(
                f"each epoch of {length} batches spends {duration(start)} on starting workers,"
                f" {100 * share:.0f} % of its time: persistent_workers=True saves it after the first epoch"
            )
    return [*lines, *_cheaper(fetched)] if fetched is not None and one.waits else lines


def _workers(one: Checked, fetched: Fetched, cpus: float, idle: float | None) -> str:
    """Whether more workers here would remove the wait."""
    batch = one.samples_per_step
    needed = math.ceil(SLACK * fetched.slot_s * batch / one.compute_s)
    cpus_needed = fetched.cpu_s * batch / one.compute_s
    used = fetched.cpu_s * batch / one.step_s
    # One CPU is for the script itself; CPUs used by other work are not available, except for a fair share.
    most = max(cpus - 1, 1)
    free = most if idle is None else min(most, max(idle * cpus + used, FAIR))
    now = one.loader.num_workers
    whole = fetched.slot_s + fetched.queued_s
    if cpus_needed > free:
        late = 100 * (1 - free / cpus_needed)
        return (
            f"more workers here cannot fix this: fetching needs {cpus_needed:.1f} CPUs to keep up, and"
            f" {free:.1f} of {cpus:g} are free; with those, {late:.0f} % of a step would still wait"
        )
    if needed > now:
        own = 100 * fetched.blocked_s / whole
        why = f"; a worker itself waits {own:.0f} % of a fetch (storage, network), so they need few CPUs"
        return (
            f"num_workers={needed} instead of {now} would fix this on this machine:"
            f" {cpus_needed:.1f} of its {cpus:g} CPUs would fetch{why if own > 100 * BLOCKED else ''}"
        )
    if fetched.queued_s > QUEUED * whole:
        return (
            f"{now} workers would be enough if CPUs were free: a fetch waits"
            f" {100 * fetched.queued_s / whole:.0f} % of its time for one of the {cpus:g} here"
        )
    return (
        f"{now} workers should be enough for this cost of fetching: some batches take much longer than"
        " others, or their transfer to the script is slow; try a larger prefetch_factor"
    )


def _cheaper(fetched: Fetched) -> list[str]:
    """What would make fetching itself cheaper."""
    total = sum(fetched.stages.values())
    if total <= 0:
        return []
    lines = []
    decode = fetched.stages.get("decode", 0.0) / total
    if decode >= DEAR_STAGE:
        lines.append(
            f"decoding takes {100 * decode:.0f} % of the CPU time: a faster decoder (simplejpeg,"
            " torchvision.io), or files no larger than the script needs"
        )
    fixed = ["decode"] if decode else []
    for name in fetched.stages:
        if name in (*AROUND, "decode"):
            continue
        if draws(name):
            break
        fixed.append(name)
    share = sum(fetched.stages.get(name, 0.0) for name in fixed) / total
    if share >= CACHEABLE:
        names = "its name, it draws" if len(fixed) == 1 else "their names, they draw"
        takes = "takes" if len(fixed) == 1 else "take"
        lines.append(
            f"a cache: {', '.join(fixed)} {takes} {100 * share:.0f} % of the CPU time; judging by {names}"
            " nothing random, so the result is the same in every epoch"
        )
    dear = {n: s for n, s in fetched.stages.items() if n not in (*AROUND, "decode")}
    name = max(dear, key=lambda n: dear[n], default="")
    if name and dear[name] >= DEAR_STAGE * total:
        lines.append(f"{name} takes {100 * dear[name] / total:.0f} % of the CPU time: make it cheaper first")
    return lines


def duration(seconds: float) -> str:
    """Laptop: `2.5 s`, `120 ms`."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
