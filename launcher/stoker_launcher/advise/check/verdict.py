"""The verdict on an observed training script, and what would help on this machine. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stoker.errors import UsageError
from stoker.events import prices
from stoker.events.bottleneck import INPUT_BOUND
from stoker.figures import count_of, duration
from stoker_launcher.advise.advice import Advice, Measured, table_name
from stoker_launcher.advise.check.timeline import (
    LEAST_STEPS,
    Loader,
    Take,
    TimeShare,
    epoch_start,
    steady,
    steps_of,
    training,
    wait_share,
)

UNCERTAIN = 0.15
"""From this ± share of a step on there is no verdict: at 50 %, it would promise anything between 1.5 and 2.9
times the speed."""
ADVISED_STEPS = 1000
SLACK = 1.05
"""Spare workers, because batches vary."""
BLOCKED = 0.2
"""From this share of a fetch on, waiting in it is mentioned."""
SLOW_START = 0.05
"""From this share of an epoch on, its start is mentioned."""


@dataclass(frozen=True)
class FetchCost:
    """Seconds per sample for which a worker is occupied."""

    cpu_s: float
    blocked_s: float
    """Not computing: storage, network, locks, sleeping, or no free CPU."""
    samples_per_batch: float
    batches: int

    @property
    def whole_s(self) -> float:
        return self.cpu_s + self.blocked_s


@dataclass(frozen=True)
class Checked:
    number: int
    """In the order in which the script first used its loaders."""
    loader: Loader
    steps: int
    share: TimeShare
    step_s: float
    samples_per_step: float
    bytes_per_step: float
    start_s: float | None
    """From the start of an epoch to its first batch."""
    fetched: FetchCost | None

    @property
    def compute_s(self) -> float:
        """Duration of a step if data were never late."""
        return self.step_s * (1 - self.share.value)

    @property
    def certain(self) -> bool:
        return self.share.spread < UNCERTAIN

    @property
    def caveat(self) -> str:
        """Why the loader's waiting may not be training's; empty if it is."""
        if self.loader.in_thread:
            return "another thread than the one that trains takes the batches"
        return "" if self.loader.trains else "few or no optimizer steps of torch follow the batches"

    @property
    def waits(self) -> bool:
        return self.certain and not self.caveat and self.share.value >= INPUT_BOUND


def fetched_of(sums: Sequence[Mapping[str, Any]]) -> FetchCost | None:
    samples, fetches, cpu, wall = (
        sum(one[name] for one in sums) for name in ("samples", "fetches", "cpu_s", "wall_s")
    )
    if not samples:
        return None
    return FetchCost(cpu / samples, max(wall - cpu, 0.0) / samples, samples / fetches, int(fetches))


def checked(
    seen: Mapping[str, Any],
    sums: Sequence[Mapping[str, Any]],
    script: str,
    wanted: int | None = None,
) -> list[Checked]:
    """All loaders of a script, starting with the one for training."""
    loaders = [Loader(**one) for one in seen["loaders"]]
    takes = [Take(**one) for one in seen["takes"]]
    main = training(loaders)
    if main is None:
        raise UsageError(
            f"{script}: no torch DataLoader was iterated in its process; `check` needs a script that reads"
            " its batches from one (torch.utils.data.DataLoader or a subclass)"
        )
    if loaders[main].ours:
        raise UsageError(
            f"{script}: its DataLoader ({loaders[main].place}) is already stoker's: read its waiting in"
            " the report of its job, or check the script with torch's DataLoader"
        )
    found = []
    for number, loader in sorted(enumerate(loaders), key=lambda item: item[0] != main):
        if not loader.batches:
            continue
        steps = steps_of(takes, loaders, number)
        kept = steady(steps, loader)[:wanted]
        fetched = fetched_of([one for one in sums if one["loader"] == number])
        sized = max(loader.sized_batches, 1)
        found.append(
            Checked(
                number=number,
                loader=loader,
                steps=len(kept),
                share=wait_share(kept),
                step_s=sum(step.whole for step in kept) / max(len(kept), 1),
                samples_per_step=fetched.samples_per_batch if fetched else loader.samples / sized,
                bytes_per_step=loader.batch_bytes / sized,
                start_s=epoch_start(takes, loader, number),
                fetched=fetched,
            )
        )
    if found[0].steps < LEAST_STEPS:
        least = LEAST_STEPS + loaders[main].warmup + 1
        raise UsageError(
            f"{script}: too short to judge: {count_of(loaders[main].batches, 'step')}; at least {least} are"
            " needed, in epochs of more than twice num_workers: use more data or epochs"
        )
    return found


def measured(one: Checked, rates: Mapping[str, float], gpu: str | None) -> Measured | None:
    """The limits model's input; None if the cost of fetching was not observed.

    `rates`: samples/s by GPU name as given by the user, "" for all. `gpu`: as its driver reports it.
    """
    if one.fetched is None or one.compute_s <= 0:
        return None
    found, spread, notes = dict(rates), 0.0, ["samples/s of the GPU: from --gpu-samples-per-s"]
    if not rates:
        known, notes = table_name(gpu or ""), []
        if known is not None:
            own = one.samples_per_step / one.compute_s
            spread = one.share.spread / (1 - one.share.value)
            found, notes = {known: own}, [f"samples/s of the GPU: {own:,.0f} as here, on its {gpu}"]
    core = "one vCPU counts as one core of this machine; correct it with --cpu-speed"
    return Measured(
        cpu_s=max(one.fetched.whole_s, 1e-9),
        bytes_per_sample=one.bytes_per_step / one.samples_per_step,
        gpu_samples_per_s=found,
        gpu_spread=spread,
        notes=[core, *notes],
    )


def usual_gpu_host(gpu: str | None, default: str) -> str:
    name = table_name(gpu or "")
    return next((m.type for m in prices.MACHINES.values() if name and m.gpu_name == name), default)


def headline(one: Checked) -> list[str]:
    share, spread = one.share.value, one.share.spread
    percent = f"{100 * share:.0f} % (± {100 * spread:.0f})"
    of = f"{one.steps} steps of {duration(one.step_s)}"
    if not one.certain:
        low, high = (100 * min(max(end, 0), 1) for end in (share - spread, share + spread))
        return [
            f"too uncertain to judge: {low:.0f} to {high:.0f} % of each step waits for data ({of}); measure"
            f" more: --steps {max(ADVISED_STEPS, 2 * one.steps)}, with enough data or epochs for it"
        ]
    if one.caveat:
        return [
            f"{percent} of the time is spent in the loader's next() ({of}); {one.caveat}, so whether training"
            " waits for them is not known"
        ]
    waits = f"{percent} of each step waits for data ({of})"
    if not one.waits:
        return [f"well fed: {waits}; training itself is the bottleneck"]
    now, then = one.samples_per_step / one.step_s, one.samples_per_step / max(one.compute_s, 1e-9)
    ends = [1 / max(1 - part, 1e-9) for part in (share - spread, share + spread)]
    least, most = (f"{max(end, 1):.{0 if end >= 10 else 1}f}" for end in ends)
    times = f"at least {least}" if share + spread >= 1 else f"{least} to {most}"
    return [
        f"input-bound: {waits}",
        f"without waiting a step takes {duration(one.compute_s)}: {then:,.0f} samples/s instead of"
        f" {now:,.0f}, {least if least == most else times} times as fast",
    ]


def help_here(one: Checked, cpus: float) -> Iterator[str]:
    """What would help on this machine."""
    batch, now = one.samples_per_step, one.loader.num_workers
    if (fetched := one.fetched) is not None and one.waits and one.compute_s > 0:
        needed = math.ceil(SLACK * fetched.whole_s * batch / one.compute_s)
        cpus_needed = fetched.cpu_s * batch / one.compute_s
        free = max(cpus - 1, 1)  # one is for the script itself
        if cpus_needed > free:
            late = 100 * (1 - free / cpus_needed)
            yield (
                f"more workers here cannot fix this: fetching needs {cpus_needed:.1f} CPUs to keep up, beside"
                f" one for the script, and there are {cpus:g}; {late:.0f} % of a step would still wait"
            )
        elif needed > now:
            yield (
                f"num_workers={needed} instead of {now} would fix this on this machine:"
                f" {cpus_needed:.1f} of its {cpus:g} CPUs would fetch, if nothing else takes them"
            )
        else:
            yield (
                f"{now} workers should be enough for this cost of fetching: some batches take much longer than"
                " others, or their transfer to the script is slow; try a larger prefetch_factor"
            )
    start, length = one.start_s or 0.0, one.loader.length
    # With one epoch of several lengths, the script ends its epochs itself, in one iterator.
    endless = len(one.loader.starts) <= 1 and one.loader.batches > (length or 0)
    if not now or one.loader.persistent or not length or endless:
        return
    if (share := start / (start + length * one.step_s)) >= SLOW_START:
        yield (
            f"each epoch of {length} batches spends {duration(start)} on starting workers,"
            f" {100 * share:.0f} % of its time: persistent_workers=True saves it after the first epoch"
        )


def lines_of(
    loaders: Sequence[Checked], seen: Mapping[str, Any], advice: Advice | None
) -> list[str]:
    """What the screen shows."""
    first, *others = loaders
    lines = [*headline(first), f"  {_loader_line(first)}"]
    for other in others:
        waits = f", {100 * other.share.value:.0f} % waiting" if other.certain else ""
        lines.append(f"  also {_loader_line(other)}{waits}")
    cost = "not measured; this loader does not fetch in torch's own workers"
    if fetched := first.fetched:
        cost = f"{1000 * fetched.cpu_s:.2f} ms"
        if fetched.blocked_s > BLOCKED * fetched.whole_s:
            blocked = f"{1000 * fetched.blocked_s:.2f} ms"
            cost += f", and {blocked} waiting (storage, network, a busy CPU)"
    lines.append(f"CPU per sample: {cost}")
    sections = {
        "what would help on this machine": [*help_here(first, seen["cpus"])],
        "CPU hosts": advice.lines if advice else [],
    }
    for title, texts in sections.items():
        lines += [title, *(f"  {text}" for text in texts)] if texts else []
    return [*lines, *(f"  {note}" for note in notes(first, seen, advice))]


def _loader_line(one: Checked) -> str:
    size = f", {one.bytes_per_step / 1000:,.0f} kB" if one.bytes_per_step else ""
    batches = f"batches of {one.samples_per_step:.0f} samples{size}"
    loader = one.loader
    return f"{loader.place}: {loader.dataset}, {batches}, num_workers={loader.num_workers}"


def notes(first: Checked, seen: Mapping[str, Any], advice: Advice | None) -> list[str]:
    gpu = seen["gpu"]
    by = f"with CUDA events ({gpu})" if gpu else "by the time in next() and between calls"
    said = {
        "the loader is the one iterated most": not first.loader.trains,
        "the script was stopped at --timeout": seen["ended"] == "interrupted",
        "batch_size=None: samples per batch are the rows of its first tensor": (
            not first.loader.batch_size
        ),
        f"waiting: measured {by}": True,
    }
    return [*(text for text, holds in said.items() if holds), *(advice.notes if advice else [])]


def as_json(
    loaders: Sequence[Checked], seen: Mapping[str, Any], advice: Advice | None
) -> dict[str, Any]:
    shown = {name: seen[name] for name in ("cpus", "gpu", "ended")}
    return shown | {
        "loaders": [
            {**asdict(one), "compute_s": one.compute_s, "trains": one.loader.trains}
            for one in loaders
        ],
        "verdict": headline(loaders[0]),
        "help": [*help_here(loaders[0], seen["cpus"])],
        "candidates": [asdict(one) for one in advice.table] if advice else [],
        "recommended": asdict(advice.best) if advice and advice.best else None,
        "reasons": advice.lines if advice else [],
        "notes": notes(loaders[0], seen, advice),
        "prices_as_of": advice.prices.as_of if advice else None,
    }
