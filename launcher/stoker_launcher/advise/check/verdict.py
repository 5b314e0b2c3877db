"""The verdict on an observed training script, and what would help on this machine. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True)
class Checked:
    """A measured loader; sizes and seconds are per batch, which is per step."""

    number: int
    """In the order in which the script first used its loaders."""
    loader: Loader
    steps: int
    share: float
    """Of a step that waits for data."""
    spread: float
    """± of `share`, 95 %."""
    step_s: float
    samples: float
    bytes: float
    cpu_s: float | None
    """CPU time of fetching; None: not observed."""
    blocked_s: float
    """Rest of the time of fetching: storage, network, locks, sleeping, or no free CPU."""

    @property
    def compute_s(self) -> float:
        """Duration of a step if data were never late."""
        return self.step_s * (1 - self.share)

    @property
    def certain(self) -> bool:
        return self.spread < UNCERTAIN

    @property
    def waits(self) -> bool:
        return self.certain and self.loader.trains and self.share >= INPUT_BOUND


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
        kept = steady(steps_of(takes, loaders, number), loader)[:wanted]
        share, spread = wait_share(kept)
        own = [one for one in sums if one["loader"] == number]
        fetches, cpu_s, wall_s = (
            sum(one[name] for one in own) for name in ("batches", "cpu_s", "wall_s")
        )
        found.append(
            Checked(
                number=number,
                loader=loader,
                steps=len(kept),
                share=share,
                spread=spread,
                step_s=sum(step.whole for step in kept) / max(len(kept), 1),
                samples=loader.samples,
                bytes=loader.batch_bytes,
                cpu_s=cpu_s / fetches if fetches else None,
                blocked_s=max(wall_s - cpu_s, 0.0) / max(fetches, 1),
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
    if one.cpu_s is None or one.compute_s <= 0:
        return None
    found, notes = dict(rates), ["samples/s of the GPU: from --gpu-samples-per-s"]
    if not rates:
        known, notes = table_name(gpu or ""), []
        if known is not None:
            own = one.samples / one.compute_s
            found, notes = {known: own}, [f"samples/s of the GPU: {own:,.0f} as here, on its {gpu}"]
    core = "one vCPU counts as one core of this machine; correct it with --cpu-speed"
    return Measured(
        cpu_s=max((one.cpu_s + one.blocked_s) / one.samples, 1e-9),
        bytes_per_sample=one.bytes / one.samples,
        gpu_samples_per_s=found,
        notes=[core, *notes],
    )


def usual_gpu_host(gpu: str | None, default: str) -> str:
    name = table_name(gpu or "")
    return next((m.type for m in prices.MACHINES.values() if name and m.gpu_name == name), default)


def headline(one: Checked) -> list[str]:
    share, spread = one.share, one.spread
    percent = f"{100 * share:.0f} % (± {100 * spread:.0f})"
    of = f"{one.steps} steps of {duration(one.step_s)}"
    if not one.certain:
        low, high = (100 * min(max(end, 0), 1) for end in (share - spread, share + spread))
        return [
            f"too uncertain to judge: {low:.0f} to {high:.0f} % of each step waits for data ({of}); measure"
            f" more: --steps {max(ADVISED_STEPS, 2 * one.steps)}, with enough data or epochs for it"
        ]
    if not one.loader.trains:
        return [
            f"{percent} of the time is spent in the loader's next() ({of}); few or no optimizer steps of torch"
            " follow in its thread, so whether training waits is not known"
        ]
    waits = f"{percent} of each step waits for data ({of})"
    if not one.waits:
        return [f"well fed: {waits}; training itself is the bottleneck"]
    now, then = one.samples / one.step_s, one.samples / max(one.compute_s, 1e-9)
    least, most = (1 / max(1 - end, 1e-9) for end in (max(share - spread, 0), share + spread))
    times = f"at least {least:.1f}" if share + spread >= 1 else f"{least:.1f} to {most:.1f}"
    return [
        f"input-bound: {waits}",
        f"without waiting a step takes {duration(one.compute_s)}: {then:,.0f} samples/s instead of"
        f" {now:,.0f}, {times} times as fast",
    ]


def help_here(one: Checked, cpus: float) -> list[str]:
    """What would help on this machine."""
    if one.cpu_s is None or not one.waits or one.compute_s <= 0:
        return []
    now = one.loader.num_workers
    needed = math.ceil(SLACK * (one.cpu_s + one.blocked_s) / one.compute_s)
    cpus_needed = one.cpu_s / one.compute_s
    free = max(cpus - 1, 1)  # one is for the script itself
    if cpus_needed > free:
        late = 100 * (1 - free / cpus_needed)
        return [
            f"more workers here cannot fix this: fetching needs {cpus_needed:.1f} CPUs to keep up, beside"
            f" one for the script, and there are {cpus:g}; {late:.0f} % of a step would still wait"
        ]
    if needed > now:
        return [
            f"num_workers={needed} instead of {now} would fix this on this machine:"
            f" {cpus_needed:.1f} of its {cpus:g} CPUs would fetch, if nothing else takes them"
        ]
    return [
        f"{now} workers should be enough for this cost of fetching: some batches take much longer than"
        " others, or their transfer to the script is slow; try a larger prefetch_factor"
    ]


def lines_of(
    loaders: Sequence[Checked], seen: Mapping[str, Any], advice: Advice | None
) -> list[str]:
    """What the screen shows."""
    first, *others = loaders
    lines = [*headline(first), f"  {_loader_line(first)}"]
    lines += [f"  also {_loader_line(other)}" for other in others]
    cost = "not measured; this loader does not fetch in torch's own workers"
    if first.cpu_s is not None:
        cost = f"{1000 * first.cpu_s / first.samples:.2f} ms"
        if first.blocked_s > BLOCKED * (first.cpu_s + first.blocked_s):
            blocked = f"{1000 * first.blocked_s / first.samples:.2f} ms"
            cost += f", and {blocked} waiting (storage, network, a busy CPU)"
    lines.append(f"CPU per sample: {cost}")
    sections = {
        "what would help on this machine": help_here(first, seen["cpus"]),
        "CPU hosts": advice.lines if advice else [],
    }
    for title, texts in sections.items():
        lines += [title, *(f"  {text}" for text in texts)] if texts else []
    return [*lines, *(f"  {note}" for note in notes(seen, advice))]


def _loader_line(one: Checked) -> str:
    size = f", {one.bytes / 1000:,.0f} kB" if one.bytes else ""
    batches = f"batches of {one.samples:.0f} samples{size}"
    loader = one.loader
    return f"{loader.place}: {loader.dataset}, {batches}, num_workers={loader.num_workers}"


def notes(seen: Mapping[str, Any], advice: Advice | None) -> list[str]:
    gpu = seen["gpu"]
    by = f"with CUDA events ({gpu})" if gpu else "by the time in next() and between calls"
    return [f"waiting: measured {by}", *(advice.notes if advice else [])]


def as_json(
    loaders: Sequence[Checked], seen: Mapping[str, Any], advice: Advice | None
) -> dict[str, Any]:
    return {name: seen[name] for name in ("cpus", "gpu", "ended")} | {
        "loaders": [
            {**asdict(one), "compute_s": one.compute_s, "trains": one.loader.trains}
            for one in loaders
        ],
        "verdict": headline(loaders[0]),
        "help": help_here(loaders[0], seen["cpus"]),
        "candidates": [asdict(one) for one in advice.table] if advice else [],
        "recommended": asdict(advice.best) if advice and advice.best else None,
        "reasons": advice.lines if advice else [],
        "notes": notes(seen, advice),
    }
