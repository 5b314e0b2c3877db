"""Anywhere: the table of candidate clusters with a recommendation, in plain words. Pure."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

from launcher.advise.size.candidates import (
    Candidate,
    Measured,
    Wanted,
    evaluate,
    judge,
    machines,
    recommend,
    shape_of,
)
from stoker.events import prices
from stoker.events.advice import dearest, family
from stoker.events.prices import PriceList
from stoker.sizing.model import Term, predict

BINDS: dict[Term, str] = {
    "gpu": "GPU",
    "cpu": "CPUs",
    "network": "network",
    "gpu_host_cpu": "GPU host's CPUs",
    "receiver": "receiving thread",
}
CAPACITY_HOSTS = (0, 1, 2, 4, 8)
"""Numbers of CPU hosts in the table if no GPU's rate is known."""

AROUND = ("pack", "task")
"""Work outside the chain's own stages, which no recipe can make cheaper."""
DEAR = 0.3
"""From this share of the chain's CPU time on, a stage is mentioned."""
GROWS, GROWS_AT_MOST = 3.5, 4.5
"""uint8 to float32 makes a sample four times larger."""
LEAST_BYTES = 512
PREFIX = 0.2
"""From this share on, caching the stages before the first random one is suggested."""


@dataclass(frozen=True)
class Advice:
    """The result of `size`."""

    measured: Measured
    wanted: Wanted
    prices: PriceList
    table: list[Candidate]
    best: Candidate | None
    """None if no GPU's rate is known; the table then shows only the capacity of the CPU side."""
    lines: list[str]
    """The recommendation with its reason, then alternatives."""
    notes: list[str]

    @property
    def title(self) -> str:
        if self.best is None:
            return "capacity of the CPU side (no GPU's rate is known)"
        return "hosts for this job, cheapest per sample first"

    def shown(self, limit: int) -> list[Candidate]:
        """The first rows, plus the recommended, the configured and the GPU-only clusters."""
        rows = self.table[:limit]
        bare = [one for one in self.table if not one.cpu_hosts and one.gpu_type in self.wanted.gpu_types]
        return [one for one in self.table if one in [*rows, self.best, *bare] or self.is_configured(one)]

    def is_configured(self, one: Candidate) -> bool:
        """Whether this is the configured cluster."""
        count = one.cpu_hosts
        return self.wanted.configured == (one.gpu_type, one.cpu_type if count else None, count)

    def binds(self, one: Candidate) -> str:
        """The limiting part."""
        return BINDS[one.binds]


def advise(measured: Measured, wanted: Wanted, known: PriceList) -> Advice:
    """Assess all candidates and recommend one, with the reason."""
    notes = [known.label, *measured.notes]
    hints = stage_hints(measured.stages)
    rated = [
        name
        for name in wanted.gpu_types
        if any(measured.work(gpu.gpu_name) is not None for gpu in machines([name]))
    ]
    unrated = [name for name in wanted.gpu_types if name not in rated]
    if unrated and rated:
        notes.append(f"left out, because the rate of the GPU is unknown: {', '.join(unrated)}")
    if not rated:
        table = capacity(measured, wanted, known)
        lines = [
            "no recommendation: how fast a GPU trains this model is unknown, and this machine has no such"
            " GPU. Give its samples per second, --gpu-samples-per-s 400 (or A10G=400), or a run on it,"
            " --from RUN",
            *hints,
        ]
        return Advice(measured, wanted, known, table, None, lines, notes)
    table = evaluate(measured, replace(wanted, gpu_types=tuple(rated)), known)
    best = recommend(table)
    lines = [
        _reason(table, best),
        *_instead(table, best, wanted),
        *_cheaper_chain(measured, wanted, known, best),
    ]
    return Advice(measured, wanted, known, table, best, [*lines, *hints], notes)


def capacity(measured: Measured, wanted: Wanted, known: PriceList) -> list[Candidate]:
    """What GPU hosts with a few CPU hosts could feed if their GPUs were infinitely fast."""
    free = replace(measured, gpu_samples_per_s={"": math.inf}, gpu_spread=0.0)
    counts = [count for count in CAPACITY_HOSTS if count <= wanted.max_cpu_hosts]
    found = []
    for gpu in machines(wanted.gpu_types):
        for cpu in machines(wanted.cpu_types[:2]):
            found += [judge(free, wanted, known, gpu, cpu if count else None, count) for count in counts]
    unique = {(one.gpu_type, one.cpu_type, one.cpu_hosts): one for one in found if one is not None}
    return sorted(unique.values(), key=lambda one: (one.gpu_type, one.cpu_type or "", one.cpu_hosts))


def _reason(table: list[Candidate], best: Candidate) -> str:
    """Compare the recommendation with the same GPU host alone."""
    head = f"recommended: {best.hosts}, ${best.usd_per_million_samples:.2f} per 1M samples"
    alone = _alone(table, best)
    if best.cpu_hosts and alone is not None:
        saved = 1 - best.usd_per_million_samples / alone.usd_per_million_samples
        gain = best.samples_per_s / alone.samples_per_s
        reason = f"{100 * saved:.0f} % less than {alone.hosts} alone and {gain:.1f} times as fast"
        return f"{head}: {reason}; then {_then(best)}{_doubt(best, alone)}"
    others = [one for one in table if one.cpu_hosts]
    like = [one for one in others if one.gpu_type == best.gpu_type]
    if like:
        cheapest = _cheapest(like)
        more = cheapest.usd_per_million_samples / best.usd_per_million_samples - 1
        why = "no CPU hosts: " + (
            "the GPU host feeds its GPU alone"
            if best.binds == "gpu"
            else "they would cost more than they gain"
        )
        cost = f"the best with them, {cheapest.hosts}, costs {100 * more:.0f} % more per sample"
        return f"{head}: {why}; {cost}{_doubt(best, cheapest)}"
    if others:
        cheapest = _cheapest(others)
        more = cheapest.usd_per_million_samples / best.usd_per_million_samples - 1
        return (
            f"{head}: a bigger GPU host instead of CPU hosts; the best with them, {cheapest.hosts}, costs"
            f" {100 * more:.0f} % more per sample at {cheapest.samples_per_s / best.samples_per_s:.2f} times"
            f" the speed{_doubt(best, cheapest)}"
        )
    return f"{head}: {_then(best)}"


def _cheapest(table: list[Candidate]) -> Candidate:
    return min(table, key=lambda one: one.usd_per_million_samples)


def _then(best: Candidate) -> str:
    return {
        "gpu": "the GPU is the limit, more CPUs would be idle",
        "cpu": "the CPUs are still the limit, the next host would cost more than it gains",
        "network": "the network is the limit, more CPU hosts would not help",
        "gpu_host_cpu": "the GPU host's own CPUs are the limit, more CPU hosts would not help",
        "receiver": "the receiving thread is the limit, more CPU hosts would not help",
    }[best.binds]


def _doubt(best: Candidate, other: Candidate) -> str:
    """Mention that the measurement cannot tell the two apart."""
    low = best.usd_per_hour / best.high
    high = best.usd_per_hour / best.low
    other_low, other_high = other.usd_per_hour / other.high, other.usd_per_hour / other.low
    if high >= other_low and low <= other_high:
        return " (within the uncertainty of the measurement: try both for an epoch)"
    return ""


def _instead(table: list[Candidate], best: Candidate, wanted: Wanted) -> list[str]:
    """Compare the configured cluster, and a bigger GPU host, with the recommendation."""
    lines = []
    if wanted.configured is not None:
        kind, cpu, count = wanted.configured
        now = next(
            (one for one in table if (one.gpu_type, one.cpu_type, one.cpu_hosts) == (kind, cpu, count)), None
        )
        if now is not None and now != best:
            more = now.usd_per_million_samples / best.usd_per_million_samples - 1
            slower = best.samples_per_s / now.samples_per_s
            fewer = "larger or more than needed; " if now.binds == "gpu" and best.binds == "gpu" else ""
            lines.append(
                f"configured now: {now.hosts}: {fewer}{100 * more:.0f} % more expensive per sample;"
                f" the recommendation is {slower:.2f} times as fast"
            )
    own = prices.MACHINES.get(best.gpu_type)
    kinds = [
        m.type for m in prices.MACHINES.values() if own and m.gpu_name == own.gpu_name and m.vcpus > own.vcpus
    ]
    larger = [one for one in table if not one.cpu_hosts and one.gpu_type in kinds]
    if best.cpu_hosts and larger:
        cheapest = _cheapest(larger)
        more = cheapest.usd_per_million_samples / best.usd_per_million_samples - 1
        lines.append(
            f"or a bigger GPU host, {cheapest.hosts}: ${cheapest.usd_per_million_samples:.2f} per 1M"
            f" samples ({100 * more:+.0f} %), {cheapest.samples_per_s:,.0f} samples/s"
        )
    return lines


def _cheaper_chain(measured: Measured, wanted: Wanted, known: PriceList, best: Candidate) -> list[str]:
    """How cheap the chain must be to need no CPU hosts."""
    name = next((m.type for m in machines(wanted.gpu_types) if _same_gpu(m.type, best.gpu_type)), "")
    if not name or (not best.cpu_hosts and name == best.gpu_type):
        return []
    needed = needed_chain_ms(measured, wanted, known, replace(best, gpu_type=name))
    if needed is None:
        return []
    now = 1000 * measured.cpu_s
    alone = judge(replace(measured, cpu_s=needed / 1000), wanted, known, machines([name])[0], None, 0)
    if alone is None:
        return []
    saved = 1 - alone.usd_per_million_samples / best.usd_per_million_samples
    return [
        f"or a faster chain: at {needed:.2f} ms per sample instead of {now:.2f}, {alone.hosts} alone would be"
        f" enough, and a sample would cost another {100 * saved:.0f} % less"
    ]


def _same_gpu(one: str, other: str) -> bool:
    """Whether hosts of both types have the same GPUs in the same number."""
    here, there = prices.machine(one), prices.machine(other)
    return bool(here and there and (here.gpu_name, here.gpus) == (there.gpu_name, there.gpus))


def _alone(table: list[Candidate], best: Candidate) -> Candidate | None:
    return next((one for one in table if one.gpu_type == best.gpu_type and not one.cpu_hosts), None)


def stage_hints(stages: list[dict[str, Any]]) -> list[str]:
    """The most expensive stage, work that belongs on the GPU, and what can be cached.

    Args:
        stages: as `chain` in summary.json, in the order of the chain, with `random` if known.
    """
    total = sum(_ms(stage) for stage in stages)
    if total <= 0:
        return []
    return [*_dearest(stages, total), *_conversions(stages), *_cacheable(stages, total)]


def needed_chain_ms(measured: Measured, wanted: Wanted, known: PriceList, best: Candidate) -> float | None:
    """Chain cost in ms per sample at which the GPU host alone reaches the same rate.

    None if no chain is cheap enough.
    """
    gpu = prices.machine(best.gpu_type)
    work = measured.work(gpu.gpu_name, 0, wanted.speed) if gpu else None
    shape = shape_of(wanted, known, gpu, None, 0) if gpu else None
    if work is None or shape is None or best.samples_per_s <= 0:
        return None
    slots = (shape.gpu_host_cpus - shape.reserved_cpus) * shape.gpu_hosts * shape.gpu_host_efficiency
    cpus = shape.gpu_host_cpus * shape.gpu_hosts
    seconds = min(slots / best.samples_per_s, cpus / best.samples_per_s - work.other_s)
    alone = predict(work, shape).samples_per_s
    return None if seconds <= 0 or alone >= best.samples_per_s * 0.999 else 1000 * seconds * wanted.speed


def _dearest(stages: list[dict[str, Any]], total: float) -> list[str]:
    name, cost, kinds = dearest(stages)
    if cost < DEAR * total or kinds < 2 or name in AROUND:
        return []
    count = sum(family(str(stage["stage"])) == name for stage in stages)
    several = f" in {count} stages" if count > 1 else ""
    return [f"{name} takes {100 * cost / total:.0f} % of the chain, {cost:.1f} ms per sample{several}"]


def _conversions(stages: list[dict[str, Any]]) -> list[str]:
    hints = []
    for before, stage in itertools.pairwise(stages):
        small, large = float(before.get("bytes_out", 0)), float(stage.get("bytes_out", 0))
        # Decoding, or making a sample from its index, has other factors and must happen here.
        if small >= LEAST_BYTES and GROWS <= large / small <= GROWS_AT_MOST and not _decodes(stage):
            hints.append(
                f"{stage['stage']} makes each sample {large / small:.0f} times larger before it crosses the"
                " network: move it to on_device()"
            )
        elif "normalize" in str(stage["stage"]).lower():
            hints.append(f"{stage['stage']} costs {_ms(stage):.2f} ms here and almost nothing in on_device()")
    return hints


def _decodes(stage: dict[str, Any]) -> bool:
    return "decode" in str(stage["stage"]).lower()


def _cacheable(stages: list[dict[str, Any]], total: float) -> list[str]:
    if any(stage["stage"] == "keep" for stage in stages):  # the run had a cache already
        return []
    prefix = list(itertools.takewhile(lambda stage: not stage.get("random", True), stages))
    if not prefix or prefix[-1]["stage"] == "read":
        return []
    share = sum(_ms(stage) for stage in prefix) / total
    if share < PREFIX:
        return []
    size = float(prefix[-1].get("bytes_out", 0))
    return [
        f"stages up to {prefix[-1]['stage']} are deterministic, {100 * share:.0f} % of the chain: data.cache"
        f" (memory or disk) skips them from the second epoch on, at {size / 1000:,.0f} kB per record"
    ]


def _ms(stage: dict[str, Any]) -> float:
    return float(stage.get("cpu_ms_per_sample", 0))
