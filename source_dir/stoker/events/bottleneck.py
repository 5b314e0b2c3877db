"""Anywhere: the bottleneck of a run, and a verdict on it in plain words. Pure; no ray, no torch.

    print(verdict(summary).headline)

Advice is limited to what the summary supports: a run of a few steps gets none. What other clusters would
bring and cost, `stoker size JOB --from RUN` tells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from stoker.errors import where_raised
from stoker.events import prices
from stoker.events.summary import STEP_TERMS, Bottleneck, Summary
from stoker.figures import count_of, duration

MIN_STEPS = 10
"""With fewer steps, start-up dominates the measurement."""
INPUT_BOUND = 0.10
"""From this share of a step on, waiting for data is the bottleneck, not the GPU."""
NEAR = 0.7
"""A limit binds only from this share of it on."""
BUSY_PCT = 70.0
"""Below this CPU use, hosts that preprocess are themselves waiting for the data that they read."""
SATURATED_PCT = 90.0
"""From this CPU use of a GPU host on, receiving is limited by its CPUs."""
BUSY_FETCHING = 0.7
"""From this share of CPU time on, the fetching threads are not waiting for the network."""
RECOVERY_S = 60.0
"""How long a run may wait for each lost host: Ray takes about 20 s to notice, then its work is redone."""
IDLE_PCT = 50.0
"""Below this mean CPU use of the CPU hosts, fewer of them may do."""


def _chain_ms(summary: Summary) -> float:
    return sum(float(stage.get("cpu_ms_per_sample", 0)) for stage in summary.chain)


def chain_limit(summary: Summary) -> float | None:
    """Samples/s that the CPUs that preprocess could carry; None if the chain was not measured."""
    chain_ms, hosts = _chain_ms(summary), summary.cluster.at_once()
    working = [host for host in hosts if host.host in summary.chain_tasks_by_host] or hosts
    cpus = sum(host.cpus for host in working)
    return 1000 * cpus / chain_ms if chain_ms > 0 and cpus else None


def network_limit(summary: Summary) -> float | None:
    """Samples/s that the network of the train hosts could carry; None for unknown types."""
    size, hosts = summary.speed.bytes_per_sample, summary.cluster.at_once()
    trains = [host for host in hosts if host.host in summary.train_workers_by_host]
    types = [prices.MACHINES.get(host.type or "") for host in trains]
    if not size or not types or len(hosts) < 2 or None in types:
        return None
    return sum(m.baseline_gbps for m in types if m) * 1e9 / 8 / size


def near(summary: Summary, limit: float | None) -> bool:
    """An unknown limit may bind."""
    return limit is None or summary.speed.steady_samples_per_s >= NEAR * limit


def waiting(summary: Summary) -> float:
    """Share of a step that waits for data, by its terms, or else by the totals."""
    terms = summary.speed.step_terms_ms
    if total := sum(terms.values()):
        return 1 - terms.get("compute", 0.0) / total
    return summary.speed.input_wait_pct / 100


class OneWait(NamedTuple):
    seconds: float
    first: bool
    """It is that for the first batch of each pass."""
    rest_pct: float
    """Input wait without it."""


def _without_one_wait(summary: Summary) -> OneWait | None:
    """The one wait that explains the input wait, without which training would not be input-bound."""
    speed = summary.speed
    total_s = sum(speed.step_terms_ms.values()) * (speed.batches or speed.steps) / 1000
    wait_s = total_s * speed.input_wait_pct / 100
    # Among equals, the first batch: the longest wait usually is for it.
    one_s, first = max((speed.first_wait_s, True), (speed.longest_wait_s, False))
    rest = 100 * max(wait_s - one_s, 0.0) / max(total_s - one_s, 1e-9)
    return OneWait(one_s, first, rest) if one_s > 0 and rest < 100 * INPUT_BOUND else None


def bottleneck(summary: Summary, times: Mapping[str, float]) -> Bottleneck:
    """The GPU; lost hosts or one wait if they explain the whole wait; or what training waited for most."""
    if waiting(summary) < INPUT_BOUND:
        return "gpu"
    waits = {name: times[f"{name}_s"] for name in STEP_TERMS if name != "compute"}
    # Events are of all starts, times of this one.
    here = {host.node_id for host in summary.cluster.hosts}
    lost = sum(each["event"] == "host_lost" and each["node"] in here for each in summary.events)
    if lost and sum(waits.values()) <= RECOVERY_S * lost:
        return "lost_hosts"
    if _without_one_wait(summary):
        return "one_wait"
    production, transfer = waits.pop("wait_production"), waits.pop("wait_transfer")
    preprocess, train = set(summary.chain_tasks_by_host), set(summary.train_workers_by_host)
    if production >= max(transfer, sum(waits.values())):
        busy, both = _mean_pct(summary, preprocess), _mean_pct(summary, preprocess & train)
        if busy is not None and busy < BUSY_PCT:
            return "network"  # to the storage that it reads
        if near(summary, chain_limit(summary)):
            return "cpu"
        # Where training takes the CPUs that preprocess, they are busy, but not with the chain.
        return "late" if both is None or both < SATURATED_PCT else "gpu_host_cpu"
    receiving = _mean_pct(summary, train) or 0.0
    fetching = times["fetch_cpu_s"] / max(times["fetch_s"], 1e-9)
    saturated = receiving >= SATURATED_PCT or fetching >= BUSY_FETCHING
    if saturated or transfer < sum(waits.values()):
        return "gpu_host_cpu"
    return "network" if near(summary, network_limit(summary)) else "late"


def _mean_pct(summary: Summary, names: set[str]) -> float | None:
    used = [float(row["mean_pct"]) for row in summary.host_cpu if row["host"] in names]
    return sum(used) / len(used) if used else None


@dataclass(frozen=True)
class Verdict:
    headline: str
    binds: Bottleneck | None
    """None if the run does not show it."""
    details: list[str] = field(default_factory=list)
    """Further sentences, the most useful first."""


def gpus_used(summary: Summary) -> tuple[int, int]:
    """(GPUs that were busy in some sample, GPUs), of hosts with at least MIN_STEPS samples."""
    rows = [row["max_pct"] for row in summary.host_gpus if row["samples"] >= MIN_STEPS]
    most = [use for row in rows for use in row]
    return sum(use > 0 for use in most), len(most)


def judged(summary: Summary) -> Verdict:
    """The verdict; tolerates invalid figures, as in a file edited by hand."""
    try:
        return verdict(summary)
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        return Verdict(f"no verdict: invalid figures in the summary ({where_raised(error)})", None)


def verdict(summary: Summary) -> Verdict:
    """What limits the run; GPUs that nobody used come first."""
    used, gpus = gpus_used(summary)
    found = _of_waiting(summary)
    if used == gpus:
        return found
    idle = f"GPUs used: {used} of {gpus}"
    if used:
        return replace(found, details=[idle, *found.details])
    never = f"{idle}: their utilization was 0 % in every sample"
    return replace(found, headline=f"{never}; {found.headline}")


def _of_waiting(summary: Summary) -> Verdict:
    speed, terms, binds = summary.speed, summary.speed.step_terms_ms, summary.bottleneck
    if summary.script is not None and not speed.steady_samples_per_s:
        return Verdict("own script: the time it waits for data was not measured", None)
    measured = speed.steps or summary.steps
    if measured < MIN_STEPS or not speed.steady_samples_per_s:
        steps = count_of(measured, "step") + ("" if measured == summary.steps else " measured")
        return Verdict(f"too short to judge: {steps}; at least {MIN_STEPS} are needed", None)
    if not sum(terms.values()) and binds is None:
        return Verdict("no step times were measured", None)
    share = waiting(summary)
    percent = f"{100 * share:.0f} %"
    waits = f"{percent} of each step waits for data"
    trains = summary.train_workers_by_host
    hosts = summary.cluster.at_once()
    cpu_hosts = {h.host for h in hosts if not (h.host in trains if trains else h.gpus)}
    if binds == "gpu" or (share < INPUT_BOUND and terms.get("compute")):
        on_gpus = any(host.gpus for host in hosts if host.host not in cpu_hosts)
        who = "the GPUs are the bottleneck" if on_gpus else "training itself is the bottleneck"
        only = f"only {waits}" if share >= 0.01 else "less than 1 % of each step waits for data"
        fed = Verdict(f"well fed: {who}; {only}", "gpu")
        if (used := _mean_pct(summary, cpu_hosts)) is None or used >= IDLE_PCT:
            return fed
        idle = f"the CPU hosts were only {used:.0f} % busy: fewer may do"
        return replace(fed, details=[f"{idle}; {SIZE}"])
    if binds == "one_wait" and (one := _without_one_wait(summary)):
        what = "the first batch of each epoch" if one.first else "one batch"
        head = (
            f"one wait explains the input wait of {percent}: {duration(one.seconds)} for {what};"
            f" without it, {one.rest_pct:.0f} % of each step waits for data"
        )
        shorter = (
            "it counts for less in longer epochs; smaller blocks (data.block_records) come sooner"
        )
        return Verdict(head, "one_wait", [shorter] if one.first else [])
    rate, limit = speed.steady_samples_per_s, chain_limit(summary)
    busy = rate / limit if limit else 0.0
    if binds == "cpu":
        who = "the CPU hosts" if cpu_hosts else "this host's CPUs"
        head = f"input-bound: {waits}; {who} are the bottleneck"
        if not busy:
            return Verdict(head, "cpu")
        # If data were never late; limited to 50 times the rate, beyond which nothing is known.
        unhindered = rate / max(1 - share, 0.02)
        # The observed rate already includes the CPU time lost between tasks.
        lacking = (unhindered - rate) * _chain_ms(summary) / 1000 / min(busy, 1.0)
        more = (
            f"about {math.ceil(lacking)} more vCPUs would bring up to {unhindered:,.0f} samples/s"
        )
        return Verdict(f"{head}; {more} instead of {rate:,.0f}", "cpu", [SIZE])
    # Blocks may be late while the CPUs that make them are not busy.
    waited = {name: terms.get(name, 0.0) for name in STEP_TERMS if name != "compute"}
    production = 0 < waited["wait_production"] == max(waited.values())
    found = REMEDIES.get((binds, production)) or REMEDIES.get((binds, None))
    if found is None:
        raise ValueError(f"the summary does not show what its bottleneck {binds} says")
    who, remedy = found
    sent = f"{speed.bytes_per_sample / 1000:,.0f} kB"
    spent = f"the CPUs spent only {100 * busy:.0f} % of their time in the chain: " if busy else ""
    details = [remedy.format(spent=spent, busy=f"{100 * busy:.0f} %", sent=sent)]
    return Verdict(f"input-bound: {waits}; {who}", binds, details)


SIZE = "`stoker size JOB --from RUN` tells which hosts would do, and at what cost"
REMEDIES: dict[tuple[Bottleneck | None, bool | None], tuple[str, str]] = {
    ("lost_hosts", None): (
        "a lost host's work had to be done elsewhere",
        "that is over; what limits the run otherwise shows in a longer run, or in one that loses no host",
    ),
    ("late", None): (
        "preprocessed data comes late, although its CPUs and the network are not at their limit",
        "{spent}more CPU hosts would not help; look for few or uneven blocks (data.block_records) and slow"
        " reading",
    ),
    ("network", True): (
        "preprocessing itself waits for the storage that it reads",
        "faster CPUs would not help: move the data closer (a channel, a local disk), or store it in fewer and"
        " larger files; more hosts help if the storage serves each of them equally fast",
    ),
    ("network", False): (
        "the network to the GPU hosts is the bottleneck",
        "each sample sends {sent} over the network; more CPU hosts would not help: send uint8 and convert on"
        " the GPU (on_device), or crop earlier",
    ),
    ("gpu_host_cpu", True): (
        "the GPU host's own CPU is the bottleneck",
        "preprocessing takes {busy} of the CPUs of the host that trains; CPU hosts would take that over",
    ),
    ("gpu_host_cpu", False): (
        "the GPU host's own CPU is the bottleneck",
        "more CPU hosts would not help: assembling batches on the GPU host takes too long; larger blocks"
        " (data.block_records), smaller samples or a GPU host with more vCPUs would help",
    ),
}
"""By bottleneck, and whether training waits most for blocks to be produced (None: either): what it is, and what
would help."""
