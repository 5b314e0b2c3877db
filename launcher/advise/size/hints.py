"""Anywhere: hints for a chain to need fewer CPUs. Pure."""

from __future__ import annotations

import itertools
from typing import Any

from launcher.advise.size.candidates import Candidate, Measured, Wanted, shape_of
from stoker.events.advice import dearest, family
from stoker.events.prices import PriceList, machine
from stoker.sizing.model import predict

AROUND = ("pack", "task")
"""Work outside the chain's own stages, which no recipe can make cheaper."""
DEAR = 0.3
"""From this share of the chain's CPU time on, a stage is mentioned."""
GROWS, GROWS_AT_MOST = 3.5, 4.5
"""uint8 to float32 makes a sample four times larger."""
LEAST_BYTES = 512
PREFIX = 0.2
"""From this share on, caching the stages before the first random one is suggested."""


def stage_hints(stages: list[dict[str, Any]]) -> list[str]:
    """Anywhere: the most expensive stage, work that belongs on the GPU, and what can be cached.

    Args:
        stages: as `chain` in summary.json, in the order of the chain, with `random` if known.
    """
    total = sum(_ms(stage) for stage in stages)
    if total <= 0:
        return []
    return [*_dearest(stages, total), *_conversions(stages), *_cacheable(stages, total)]


def needed_chain_ms(measured: Measured, wanted: Wanted, known: PriceList, best: Candidate) -> float | None:
    """Anywhere: chain cost in ms per sample at which the GPU host alone reaches the same rate.

    None if no chain is cheap enough.
    """
    gpu = machine(best.gpu_type)
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
    prefix: list[dict[str, Any]] = []
    for stage in stages:
        if stage.get("random", True):
            break
        prefix.append(stage)
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
