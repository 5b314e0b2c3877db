"""Anywhere: the table of candidate clusters with a recommendation, in plain words. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from launcher.advise.size.candidates import Candidate, Measured, Wanted, evaluate, judge, machines, recommend
from launcher.advise.size.hints import needed_chain_ms, stage_hints
from stoker.events import prices
from stoker.events.prices import PriceList
from stoker.sizing.model import Term

BINDS: dict[Term, str] = {
    "gpu": "GPU",
    "cpu": "CPUs",
    "network": "network",
    "gpu_host_cpu": "GPU host's CPUs",
    "receiver": "receiving thread",
}
CAPACITY_HOSTS = (0, 1, 2, 4, 8)
"""Numbers of CPU hosts in the table if no GPU's rate is known."""


@dataclass(frozen=True)
class Advice:
    """Anywhere: the result of `size`."""

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
        """Anywhere: the first rows, plus the recommended, the configured and the GPU-only clusters."""
        rows = self.table[:limit]
        bare = [one for one in self.table if not one.cpu_hosts and one.gpu_type in self.wanted.gpu_types]
        return [one for one in self.table if one in [*rows, self.best, *bare] or self.is_configured(one)]

    def is_configured(self, one: Candidate) -> bool:
        """Anywhere: whether this is the configured cluster."""
        count = one.cpu_hosts
        return self.wanted.configured == (one.gpu_type, one.cpu_type if count else None, count)

    def binds(self, one: Candidate) -> str:
        """Anywhere: the limiting part."""
        return BINDS[one.binds]


def advise(measured: Measured, wanted: Wanted, known: PriceList) -> Advice:
    """Anywhere: assess all candidates and recommend one, with the reason."""
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
    """Anywhere: what GPU hosts with a few CPU hosts could feed if their GPUs were infinitely fast."""
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
