"""Laptop: what an observed training script needs: the verdict, and what would help. Pure."""

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
"""Stages that every loader has."""
SLACK = 1.05
"""More workers than just enough, for batches differ."""
FAIR = 0.5
"""CPUs that another process gets on a busy machine."""
BLOCKED = 0.2
"""Share of a fetch that neither computes nor queues for a CPU from which on it is worth a word."""
QUEUED = 0.1
"""Share of a fetch that queues for a CPU from which on the CPUs here are said to be too few."""
CACHEABLE = 0.2
SLOW_START = 0.05
"""Share of an epoch from which on its start is worth a word."""


@dataclass(frozen=True)
class Fetched:
    """Laptop: what fetching costs, per sample, in the processes that do it."""

    cpu_s: float
    blocked_s: float
    """Neither computing nor queueing for a CPU: storage, network, locks, sleeping."""
    queued_s: float
    """Ready to compute while all CPUs were taken."""
    stages: dict[str, float]
    """CPU-seconds per sample by stage, in the order in which they first ran."""
    samples_per_batch: float
    batches: int

    @property
    def slot_s(self) -> float:
        """Seconds per sample for which one worker is occupied where CPUs are free."""
        return self.cpu_s + self.blocked_s


@dataclass(frozen=True)
class Checked:
    """Laptop: one loader of the script, judged."""

    number: int
    """In the order in which the script began with its loaders."""
    loader: Loader
    steps: int
    share: Share
    step_s: float
    samples_per_step: float
    bytes_per_step: float
    start_s: float | None
    """From the begin of an epoch to its first batch."""
    fetched: Fetched | None
    whole_epochs: bool
    """The epochs are so short that their starts are counted in the share."""

    @property
    def compute_s(self) -> float:
        """What a step would take if data were never late."""
        return self.step_s * (1 - self.share.value)

    @property
    def waits(self) -> bool:
        """Whether waiting for data is worth doing something about."""
        return self.share.value >= INPUT_BOUND


def fetched_of(sums: Sequence[Mapping[str, Any]]) -> Fetched | None:
    """Laptop: the sums of all processes that fetched for one loader; None where none was seen."""
    # The first fetch of a process imports and opens things: it counts where there is nothing else.
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
    """Laptop: all loaders of a script, the one that trains first.

    Args:
        seen: what the script's process wrote of its loaders.
        sums: what each process wrote that fetched.
        script: its name, for the messages.
        wanted: the number of steps asked for.

    Raises:
        UsageError: there is no loader, or too little was seen of it.
    """
    loaders = [Loader(**one) for one in seen["loaders"]]
    takes = [Take(**one) for one in seen["takes"]]
    main = training(loaders)
    if main is None:
        raise UsageError(
            f"{script}: no torch DataLoader was iterated in its process; `check` judges scripts that read"
            " their batches from one (torch.utils.data.DataLoader or a subclass)"
        )
    found = [
        judge(loaders, takes, number, fetched_of([one for one in sums if one["loader"] == number]), wanted)
        for number in sorted(range(len(loaders)), key=lambda n: n != main)
        if loaders[number].batches
    ]
    if loaders[main].in_thread:
        raise UsageError(
            f"{script}: another thread than the one that trains takes the batches from its DataLoader"
            f" ({loaders[main].place}), so the time in next() is not the time that training waits; check it"
            " without that thread"
        )
    if found[0].steps < LEAST_STEPS:
        raise UsageError(
            f"{script}: too short to judge: {loaders[main].batches} steps;"
            f" {LEAST_STEPS + STARTING + 1} are the least: give it more data or epochs"
        )
    return found


def judge(
    loaders: Sequence[Loader], takes: Sequence[Take], number: int, fetched: Fetched | None, wanted: int | None
) -> Checked:
    """Laptop: one loader, by as many steps as were asked for."""
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
    """Laptop: the limits model's input; None where nothing was seen of what fetching costs.

    Args:
        one: the loader that trains.
        rates: samples/s by GPU name as given by the user, "" for all.
        gpu: of the machine that ran the script, as its driver calls it.
    """
    if one.fetched is None or one.compute_s <= 0:
        return None
    own = one.samples_per_step / one.compute_s
    spread = 0.0
    note = "samples/s of the GPU: as given by --gpu-samples-per-s"
    found = dict(rates)
    if not found:
        known = table_name(gpu) if gpu else None
        found, spread = {known or "": own}, min(one.share.spread / (1 - one.share.value), 1.0)
        what = f"its {gpu}" if gpu else "its CPUs"
        note = f"a GPU there is taken to train as fast as this machine ({what}), {own:,.0f} samples/s"
        note = note if known is None else f"samples/s of the GPU: {own:,.0f} as here, on {what}"
        note += "" if known else "; --gpu-samples-per-s corrects that"
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
            "one vCPU counts as one core of this machine; --cpu-speed corrects that",
            note,
            f"receiving: taken as {1000 * (RECEIVE_S + FEED_S) * scale:.2f} ms of CPU per sample ± 50 %",
            efficiency_note(),
        ],
    )


def usual_gpu_host(gpu: str | None, default: str) -> str:
    """Laptop: the smallest instance with the GPU of this machine, else the usual one."""
    name = table_name(gpu) if gpu else None
    return next((m.type for m in prices.MACHINES.values() if name and m.gpu_name == name), default)


def headline(one: Checked) -> list[str]:
    """Laptop: the verdict."""
    percent = f"{100 * one.share.value:.0f} % (± {100 * one.share.spread:.0f})"
    of = f"{one.steps} steps of {duration(one.step_s)}"
    if not one.waits:
        return [f"well fed: {percent} of each step waits for data ({of}); training itself binds"]
    now, then = one.samples_per_step / one.step_s, one.samples_per_step / max(one.compute_s, 1e-9)
    return [
        f"input-bound: {percent} of each step waits for data ({of})",
        f"without waiting a step takes {duration(one.compute_s)}: {then:,.0f} samples/s instead of"
        f" {now:,.0f}, {then / now:.1f} times as fast",
    ]


def help_here(one: Checked, cpus: float, idle: float | None) -> list[str]:
    """Laptop: what would help without any other host.

    Args:
        one: the loader that trains.
        cpus: that the script may use here.
        idle: share of this machine's CPU time that nothing used.
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
                f"each epoch of {length} batches begins with {duration(start)} of starting workers,"
                f" {100 * share:.0f} % of it: persistent_workers=True spares that after the first"
            )
    return [*lines, *_cheaper(fetched)] if fetched is not None and one.waits else lines


def _workers(one: Checked, fetched: Fetched, cpus: float, idle: float | None) -> str:
    """Whether more workers here would lift the wait."""
    batch = one.samples_per_step
    needed = math.ceil(SLACK * fetched.slot_s * batch / one.compute_s)
    cpus_needed = fetched.cpu_s * batch / one.compute_s
    used = fetched.cpu_s * batch / one.step_s
    # One stays with the script itself; what other work here takes is not to be had, but for a fair part.
    most = max(cpus - 1, 1)
    free = most if idle is None else min(most, max(idle * cpus + used, FAIR))
    now = one.loader.num_workers
    whole = fetched.slot_s + fetched.queued_s
    if cpus_needed > free:
        late = 100 * (1 - free / cpus_needed)
        return (
            f"more workers here cannot lift it: fetching takes {cpus_needed:.1f} CPUs to keep up, and"
            f" {free:.1f} of {cpus:g} are free; with those, {late:.0f} % would still wait"
        )
    if needed > now:
        own = 100 * fetched.blocked_s / whole
        why = f"; a worker itself waits for {own:.0f} % of a fetch (storage, network), so they need few CPUs"
        return (
            f"num_workers={needed} instead of {now} would lift it on this machine:"
            f" {cpus_needed:.1f} of its {cpus:g} CPUs would fetch{why if own > 100 * BLOCKED else ''}"
        )
    if fetched.queued_s > QUEUED * whole:
        return (
            f"{now} workers would do if CPUs were free: a fetch queues {100 * fetched.queued_s / whole:.0f} %"
            f" of its time for one of the {cpus:g} here"
        )
    return (
        f"{now} workers would do by what fetching costs: some batches take much longer than others, or their"
        " way to the script is slow; try a larger prefetch_factor"
    )


def _cheaper(fetched: Fetched) -> list[str]:
    """What makes fetching itself cheaper."""
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
        names = "its name, draws" if len(fixed) == 1 else "their names, draw"
        takes = "takes" if len(fixed) == 1 else "take"
        lines.append(
            f"a cache: {', '.join(fixed)} {takes} {100 * share:.0f} % of the CPU time and, by {names} nothing"
            " random: the result is the same in every epoch"
        )
    dear = {n: s for n, s in fetched.stages.items() if n not in (*AROUND, "decode")}
    name = max(dear, key=lambda n: dear[n], default="")
    if name and dear[name] >= DEAR_STAGE * total:
        lines.append(f"{name} takes {100 * dear[name] / total:.0f} % of the CPU time: make it cheaper first")
    return lines


def duration(seconds: float) -> str:
    """Laptop: `2.5 s`, `120 ms`."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
