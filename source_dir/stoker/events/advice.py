"""Anywhere: explains a run's bottleneck from its summary, in plain words. Pure; no ray, no torch.

    print(verdict(summary).headline)

Advice is limited to what the summary supports: a run of a few steps gets none, and dollar figures
appear only if every host's price is known.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from stoker.events import prices
from stoker.events.bottleneck import MIN_STEPS, chain_limit, checked, without_one_wait
from stoker.events.summary import Bottleneck, Host, Summary
from stoker.figures import count_of

INPUT_BOUND = 0.10
"""From this share of a step on, waiting for data is the bottleneck."""
IDLE_HOSTS = 0.5
"""Below this mean CPU use of the CPU hosts, fewer of them are considered."""
DEAR_STAGE = 0.4
"""From this share of the chain's CPU time on, a stage is mentioned."""
TAKEN_OVER = 0.2
"""From this share of a train host's CPUs on, CPU hosts are a way to free them."""
HEADROOM = 0.9
"""Planned CPU use; the rest absorbs variation."""

SIDES: dict[Bottleneck, str] = {
    "gpu": "the GPUs are the bottleneck",
    "cpu": "the CPUs that preprocess are the bottleneck",
    "network": "the network to the GPU hosts is the bottleneck",
    "gpu_host_cpu": "the GPU host's own CPU is the bottleneck",
    "lost_hosts": "a lost host's work had to be done elsewhere",
    "late": "preprocessed data comes late, although its CPUs and the network are not at their limit",
}
_WAITS: dict[str, Bottleneck] = {
    "wait_production": "cpu",
    "wait_transfer": "network",
    "wait_collate": "gpu_host_cpu",
    "host_to_device": "gpu_host_cpu",
}


@dataclass(frozen=True)
class Verdict:
    headline: str
    """One sentence."""
    binds: Bottleneck | None
    """The bottleneck; None if the run does not show it."""
    details: list[str] = field(default_factory=list)
    """Further sentences, the most useful first."""


@dataclass(frozen=True)
class _Facts:
    """The summary's figures, in the model's units."""

    rate: float
    """Samples/s."""
    waits: float
    """Share of a step spent waiting for data, in 0…1."""
    binds: Bottleneck
    chain_s: float
    """CPU-seconds of the chain per sample; 0: not measured."""
    train_hosts: list[Host]
    cpu_hosts: list[Host]
    on_gpus: bool
    busy: float
    """Share of the CPU time of hosts that preprocess spent in the chain; 0: not measured."""
    reads_slowly: bool
    """Training waits for blocks to be produced, while the CPUs of those hosts are not busy."""
    produces: bool
    """Training waits most for blocks to be produced."""
    usd_per_hour_of: dict[str, float]
    """The prices used for the run's own cost."""
    prices_as_of: str

    @property
    def label(self) -> str:
        return f"estimated, prices of {self.prices_as_of}"

    @property
    def cpus(self) -> float:
        return sum(host.cpus for host in [*self.train_hosts, *self.cpu_hosts])

    @property
    def unhindered(self) -> float:
        """Samples/s if data were never late; limited to 50 times the rate, beyond which nothing is known."""
        return self.rate / max(1 - self.waits, 0.02)


def verdict(summary: Summary) -> Verdict:
    """What limited a run, and what would help."""
    if summary.script is not None and not summary.speed.steady_samples_per_s:
        return Verdict("own script: the time it waits for data was not measured", None)
    measured = summary.speed.steps or summary.steps
    if measured < MIN_STEPS or not summary.speed.steady_samples_per_s:
        steps = count_of(measured, "step") + ("" if measured == summary.steps else " measured")
        return Verdict(f"too short to judge: {steps}; at least {MIN_STEPS} are needed", None)
    facts = _facts(summary)
    if facts is None:
        return Verdict("no step times were measured", None)
    percent = f"{100 * facts.waits:.0f} %"
    if facts.binds == "gpu":
        who = "the GPUs are the bottleneck" if facts.on_gpus else "training itself is the bottleneck"
        share = f"only {percent}" if facts.waits >= 0.01 else "less than 1 %"
        waits = f"{share} of each step waits for data"
        head = f"well fed: {who}; {waits}"
        return Verdict(head, "gpu", [*_fewer_hosts(summary, facts), *_cost(summary)])
    if facts.binds == "one_wait" and (one := without_one_wait(summary)):
        what = "the first batch of each epoch" if one.first else "one batch"
        took = f"{one.seconds:.1f} s" if one.seconds >= 0.1 else f"{1000 * one.seconds:.0f} ms"
        head = (
            f"one wait explains the input wait of {percent}: {took} for {what}; without it,"
            f" {one.rest_pct:.0f} % of each step waits for data"
        )
        help_ = "it counts for less in longer epochs; smaller blocks (data.block_records) come sooner"
        return Verdict(head, "one_wait", [*([help_] if one.first else []), *_cost(summary)])
    head = f"input-bound: {percent} of each step waits for data; {_who_binds(facts)}"
    advice = {
        "cpu": _more_cpus,
        "network": _less_network,
        "gpu_host_cpu": _less_receiving,
        "lost_hosts": _without_losses,
        "late": _late,
    }
    details = advice[facts.binds](summary, facts)
    if facts.binds == "cpu" and details and "would bring" in details[0]:
        head += f"; {details[0]}"
        details = details[1:]
    return Verdict(head, facts.binds, [*details, *_dear_stage(summary, facts), *_cost(summary)])


def _who_binds(facts: _Facts) -> str:
    if facts.binds == "cpu":
        who = "the CPU hosts" if facts.cpu_hosts else "this host's CPUs"
        return f"{who} are the bottleneck"
    if facts.reads_slowly:
        return "preprocessing itself waits for the storage that it reads"
    return SIDES[facts.binds]


def _facts(summary: Summary) -> _Facts | None:
    speed = summary.speed
    found = _waiting(summary)
    if found is None:
        return None
    waits, binds = found
    hosts = summary.cluster.at_once()
    training = summary.train_workers_by_host
    trains = [h for h in hosts if h.host in training] if training else [h for h in hosts if h.gpus]
    trains = trains or hosts
    limit, production = chain_limit(summary), _mostly_waits_for_production(summary)
    binds = checked(summary, binds, production)
    return _Facts(
        rate=speed.steady_samples_per_s,
        waits=waits,
        binds=binds,
        chain_s=sum(float(stage.get("cpu_ms_per_sample", 0)) for stage in summary.chain) / 1000,
        train_hosts=trains,
        cpu_hosts=[h for h in hosts if h not in trains],
        on_gpus=any(h.gpus for h in trains),
        busy=speed.steady_samples_per_s / limit if limit else 0.0,
        reads_slowly=binds == "network" and production,
        produces=production,
        usd_per_hour_of=dict((summary.cost or {}).get("usd_per_hour_by_type") or {}),
        prices_as_of=str((summary.cost or {}).get("prices_as_of") or prices.PRICES_AS_OF),
    )


def _mostly_waits_for_production(summary: Summary) -> bool:
    waits = {name: summary.speed.step_terms_ms.get(name, 0.0) for name in _WAITS}
    return waits["wait_production"] > 0 and max(waits, key=lambda name: waits[name]) == "wait_production"


def _waiting(summary: Summary) -> tuple[float, Bottleneck] | None:
    """(share of a step that waits, bottleneck), from the terms of a step or else from the totals."""
    terms = summary.speed.step_terms_ms
    total = sum(terms.values())
    if total > 0:
        waits: dict[Bottleneck, float] = {}
        for name, side in _WAITS.items():
            waits[side] = waits.get(side, 0.0) + terms.get(name, 0.0)
        share = sum(waits.values()) / total
        if share < INPUT_BOUND:
            return share, "gpu"
        if summary.bottleneck is not None and summary.bottleneck != "gpu":
            # The run's own verdict also considers how busy the hosts were.
            return share, summary.bottleneck
        return share, max(waits, key=lambda side: waits[side])
    if summary.bottleneck is None:
        return None
    return summary.speed.input_wait_pct / 100, summary.bottleneck


def _more_cpus(summary: Summary, facts: _Facts) -> list[str]:
    """How many more CPUs would be enough, or why more would not help."""
    if facts.chain_s <= 0 or not facts.busy:
        return []
    # The observed rate already includes the CPU time lost between tasks.
    lacking = (facts.unhindered - facts.rate) * facts.chain_s / min(facts.busy, 1.0)
    target = f"bring up to {facts.unhindered:,.0f} samples/s instead of {facts.rate:,.0f}"
    kind = _kind_to_add(facts)
    if kind is None:
        return [f"about {math.ceil(lacking)} more vCPUs would {target}"]
    count = math.ceil(lacking / kind.vcpus)
    more = "more " if facts.cpu_hosts else ""
    return [f"{count} {more}{kind.type} would {target}", *_worth_it(facts, kind, count)]


def _kind_to_add(facts: _Facts) -> prices.Machine | None:
    """The type of the present CPU hosts; without any, a small one if the GPU host is a known type."""
    if facts.cpu_hosts:
        types = Counter(_type(host) for host in facts.cpu_hosts)
        return prices.machine(types.most_common(1)[0][0])
    known = all(prices.machine(_type(host)) for host in facts.train_hosts)
    return prices.machine("ml.c5.xlarge") if known else None


def _worth_it(facts: _Facts, kind: prices.Machine, count: int) -> list[str]:
    """Whether the additional hosts pay for themselves, if all prices are known."""
    now = _usd_per_hour(facts, [*facts.train_hosts, *facts.cpu_hosts])
    each = _price(facts, kind.type)
    if now is None or each is None:
        return []
    before = now / facts.rate / 3600 * 1e6
    after = (now + count * each) / facts.unhindered / 3600 * 1e6
    figures = f"${after:.2f} instead of ${before:.2f} per 1M samples ({facts.label})"
    if after < before:
        return [f"that would cost {figures}"]
    return [f"that would not pay off: {figures}; a cheaper chain is the better investment"]


def _less_network(summary: Summary, facts: _Facts) -> list[str]:
    if facts.reads_slowly:
        return [
            "faster CPUs would not help: move the data closer (a channel, a local disk), or store it in"
            " fewer and larger files; more hosts help if the storage serves each of them equally fast"
        ]
    size = summary.speed.bytes_per_sample
    text = f"each sample sends {size / 1000:,.0f} kB over the network; more CPU hosts would not help"
    sizes = [float(stage.get("bytes_out", 0)) for stage in summary.chain]
    grown = next((i for i in range(1, len(sizes)) if sizes[i] >= 3.5 * sizes[i - 1] > 0), None)
    if grown is not None and sizes[-1] >= 3.5 * sizes[grown - 1]:
        name = summary.chain[grown].get("stage")
        factor = sizes[grown] / sizes[grown - 1]
        return [text, f"stage {name} makes samples {factor:.0f} times larger: move it to on_device()"]
    return [text, "send uint8 and convert on the GPU (on_device), or crop earlier"]


def _late(summary: Summary, facts: _Facts) -> list[str]:
    spent = f"the CPUs spent only {100 * facts.busy:.0f} % of their time in the chain: " if facts.busy else ""
    look = "look for few or uneven blocks (data.block_records) and slow reading"
    return [f"{spent}more CPU hosts would not help; {look}"]


def _less_receiving(summary: Summary, facts: _Facts) -> list[str]:
    if facts.produces:  # its CPUs train and preprocess
        share = f"preprocessing takes {100 * facts.busy:.0f} % of the CPUs of the host that trains"
        return [f"{share}: CPU hosts would {'take that over' if facts.busy >= TAKEN_OVER else 'not help'}"]
    return [
        "more CPU hosts would not help: assembling batches on the GPU host takes too long; larger blocks"
        " (data.block_records), smaller samples or a GPU host with more vCPUs would help"
    ]


def _without_losses(summary: Summary, facts: _Facts) -> list[str]:
    return ["that is over; what limits the run otherwise shows in a longer run, or in one that loses no host"]


def _fewer_hosts(summary: Summary, facts: _Facts) -> list[str]:
    """Whether fewer CPU hosts would be enough."""
    count = len(facts.cpu_hosts)
    if not count:
        return []
    names = {host.host for host in facts.cpu_hosts}
    used = [float(row["mean_pct"]) / 100 for row in summary.host_cpu if row["host"] in names]
    if used:
        busy = sum(used) / len(used)
    elif facts.chain_s > 0:
        busy = facts.busy
    else:
        return []
    enough = math.ceil(count * busy / HEADROOM)
    if busy >= IDLE_HOSTS or enough >= count:
        return []
    text = f"the CPU hosts were only {100 * busy:.0f} % busy: {enough or 'none'} instead of {count} would do"
    saved = _usd_per_hour(facts, facts.cpu_hosts)
    if saved is not None:
        text += f" and save ${saved * (count - enough) / count:.2f} an hour ({facts.label})"
    return [text]


def _dear_stage(summary: Summary, facts: _Facts) -> list[str]:
    """The most expensive stage, or series of stages with the same name."""
    if facts.chain_s <= 0 or facts.binds != "cpu":
        return []
    name, cost, kinds = dearest(summary.chain)
    share = cost / (1000 * facts.chain_s)
    if share < DEAR_STAGE or kinds < 2:
        return []
    return [
        f"{name} takes {100 * share:.0f} % of the chain's CPU time ({cost:.1f} ms per sample):"
        " make it cheaper first"
    ]


def dearest(stages: list[dict[str, Any]]) -> tuple[str, float, int]:
    """The most expensive family of stages, its ms per sample, and the number of families."""
    costs: defaultdict[str, float] = defaultdict(float)
    for stage in stages:
        costs[family(str(stage.get("stage", "")))] += float(stage.get("cpu_ms_per_sample", 0))
    name = max(costs, key=lambda family: costs[family])
    return name, costs[name], len(costs)


def family(stage: str) -> str:
    """A stage's name without its number, so that `blur 1` … `blur 10` count as one."""
    return re.sub(r"[\s#_-]*\d+$", "", stage) or stage


def _cost(summary: Summary) -> list[str]:
    cost = summary.cost or {}
    if cost.get("usd_per_million_samples") is None:
        return []
    return [
        f"${cost['usd_per_million_samples']:.2f} per 1M samples at the steady rate,"
        f" ${cost['usd']:.2f} for this run (estimated, prices of {cost.get('prices_as_of')})"
    ]


def _usd_per_hour(facts: _Facts, hosts: list[Host]) -> float | None:
    each = [_price(facts, _type(host)) for host in hosts]
    known = [price for price in each if price is not None]
    return sum(known) if known and len(known) == len(each) else None


def _price(facts: _Facts, instance_type: str) -> float | None:
    about = prices.machine(instance_type)
    return facts.usd_per_hour_of.get(instance_type, about.price_per_hour_usd if about else None)


def _type(host: Host) -> str:
    return str(host.model_dump().get("type") or "")
