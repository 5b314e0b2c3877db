"""Laptop: what would help a script that waits for data, on the machine where it was checked. Pure."""

from __future__ import annotations

import math

from launcher.advise.check.fetching import draws
from launcher.advise.check.verdict import Checked, Fetched, duration
from stoker.events.advice import DEAR_STAGE

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
