"""Part of the service: hosts that come and go: which get work, which leave, and how many are requested.

With `cluster.cpu_hosts`, the service requests CPU hosts from the cluster's autoscaler while training waits for
preprocessing, and lets them go when it no longer does; it never requests GPU hosts. What the run measures says
how many: how fast training would be without waiting, and how long a chain worker takes for a record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from stoker.config.places import CpuHostsConfig
from stoker.events.kinds import CpuHostsRequested, Event, HostsClosing, Note, StepLogged
from stoker.ray_compat import HostRequest
from stoker.serve.accounting import ChainCosts
from stoker.serve.pool import ChainHost
from stoker.sizing.model import ClusterShape, Workload, cheapest_count

GROW_AFTER_S = 5.0
"""How long more hosts must be wanted before the request changes: an epoch's end lasts seconds."""
SPARE = 0.1
"""A host is released only if training that is faster by this share would not need it either, so that
measurement noise around a whole number of hosts does not make the request flap."""
TRAINING_S, PRODUCTION_S = 10.0, 30.0
RENEW_S, EXPIRES_S = 10.0, 60.0
"""Interval at which a request is renewed, and after which it expires: the run has ended, in whatever way."""


@dataclass
class Window:
    """Counts of the last seconds."""

    length_s: float
    entries: deque[tuple[float, float, float]] = field(default_factory=deque)

    def add(self, count: float, seconds: float, late_s: float = 0.0) -> None:
        self.entries.append((count, seconds, late_s))
        while self.sums()[1] - self.entries[0][1] >= self.length_s:
            self.entries.popleft()

    def sums(self) -> tuple[float, float, float]:
        count, seconds, late_s = map(sum, zip((0.0, 0.0, 0.0), *self.entries, strict=True))
        return count, seconds, max(0.0, late_s)


class Scaler:
    """How many CPU hosts to request: with prices, the number with the lowest cost per sample, without, the
    smallest with which training does not wait; more only while training waits longer than the target."""

    def __init__(self, options: CpuHostsConfig) -> None:
        self.options, self.count = options, options.min
        self.steps, self.blocks = Window(TRAINING_S), Window(PRODUCTION_S)
        """Training steps, which waited some of their seconds for preprocessing; blocks, whose seconds of chain
        workers include reading, so that slow storage counts as well."""
        self._cpus = 0
        """Of one CPU host; 0: unknown until the first has joined."""
        self._since: tuple[bool, float] | None = None
        """Whether more or fewer hosts have been wanted, and since when."""

    def look(self, now: float, own: int, joined: list[int], ended: bool = False) -> str:
        """Change `count`, if that is due at `time.monotonic()`; why, else empty.

        Args:
            now: `time.monotonic()`.
            own: chain workers of the hosts that stay anyway.
            joined: chain workers of each requested host that has joined.
            ended: whether all records of the run are preprocessed.
        """
        self._cpus = max(joined, default=self._cpus)
        wanted, reason = self._wanted(own, ended)
        more = wanted > self.count
        if wanted == self.count:
            self._since = None
            return ""
        if self._since is None or self._since[0] != more:
            self._since = more, now
        at_once = ended or not own + self.count
        wait_s = 0.0 if at_once else GROW_AFTER_S if more else self.options.release_after_s
        if now - self._since[1] < wait_s:
            return ""
        self.count, self._since = wanted, None
        return reason

    def _wanted(self, own: int, ended: bool) -> tuple[int, str]:
        samples, seconds, late_s = self.steps.sums()
        records, cpu_s, _ = self.blocks.sums()
        if ended:
            return self.options.min, "all records of the run are preprocessed"
        if not seconds or not records:  # without any CPU nothing would ever be measured
            return self.count if own else max(self.count, 1), "no other host can preprocess"
        late, target = late_s / seconds, self.options.target_wait_pct / 100
        rate = samples / max(seconds - late_s, 1e-6) * (1 - target)
        work = Workload(max(cpu_s / records, 1e-9), gpu_samples_per_s=rate)
        wanted = self._cheapest(work, own)
        if late <= target or wanted <= self.count:
            spare = self._cheapest(replace(work, gpu_samples_per_s=rate * (1 + SPARE)), own)
            wanted = max(self.options.min, min(spare, self.count))
        need = f"{rate:.0f} records/s, of which a CPU preprocesses {1 / work.cpu_s:.1f}"
        return wanted, f"training waits {100 * late:.0f} % of the time; it needs {need}"

    def _cheapest(self, work: Workload, own: int) -> int:
        price, rest = self.options.usd_per_hour, self.options.rest_usd_per_hour
        shape = ClusterShape(
            gpu_host_cpus=own,
            cpu_host_cpus=self._cpus or max(own, 1),
            gpu_host_usd_per_hour=rest or 1.0,
            # Without prices a host costs nearly nothing, so only speed counts.
            cpu_host_usd_per_hour=1e-9 if price is None else price,
        )
        found = max(cheapest_count(work, shape, self.options.max), 0 if own else 1)
        # The CPUs of the first host tell how many more are needed.
        return found if self._cpus else min(found, 1)


class Elastic:
    """Which hosts get work, which are about to leave, and the request for CPU hosts."""

    def __init__(
        self,
        event: Callable[[Event], None],
        chain: Mapping[str, ChainCosts],
        options: CpuHostsConfig,
    ) -> None:
        self._event, self._chain = event, chain
        self.scaler = Scaler(options) if options.max else None
        """None: the number of hosts is fixed."""
        self._request = HostRequest(options.resource) if options.max else None
        self.closing: set[str] = set()
        """Nodes of hosts that are about to leave."""
        self._draining: set[str] = set()
        self._joined: list[str] = []
        """Nodes of the hosts that were added, in the order in which they joined."""
        self._let_go: list[str] = []
        """Nodes of hosts that are no longer requested, also of those that have left."""
        self._last: StepLogged | None = None
        self._made: tuple[int, float] = (0, 0.0)
        """Records and seconds of all blocks so far."""
        self._sent = -RENEW_S

    def stepped(self, event: StepLogged) -> None:
        if self.scaler is None or not (terms := event.terms_ms):
            return
        before, self._last = self._last, event
        if before is None or event.step <= before.step:
            return  # the first batch of a start also waits for processes to start
        samples, seconds = event.epoch_samples, event.elapsed_s
        if event.epoch == before.epoch:
            samples, seconds = samples - before.epoch_samples, seconds - before.elapsed_s
        # Terms are means since the previous event.
        late = terms["wait_production"] / (sum(terms.values()) or 1.0)
        self.scaler.steps.add(samples, seconds, late * seconds)

    def send(self, now: float) -> None:
        """Send or renew the request; the service's lock is not held."""
        if self.scaler is not None and self._request is not None and now - self._sent >= RENEW_S:
            self._sent = now
            self._request.send(self.scaler.count, EXPIRES_S)

    def split(
        self,
        hosts: list[ChainHost],
        draining: set[str],
        now: float,
        ended: bool,
        bound: Collection[str] = (),
    ) -> list[ChainHost]:
        """The hosts that stay; those in `bound` have work that no other can continue, and are not let go.

        `ended`: all passes are produced.
        """
        for host in hosts:
            if host.node in draining - self._draining:
                text = f"host {host.name} is about to be taken away: it gets no more work"
                self._event(Note(text=text))
        self._draining = draining
        self.closing = {host.node for host in hosts if host.node in draining}
        self._scale([host for host in hosts if host.node not in draining], now, ended, bound)
        staying = [host for host in hosts if host.node not in self.closing]
        if not staying:
            self.closing = set()  # the last ones work to their end
        return staying or hosts

    def _scale(
        self, hosts: list[ChainHost], now: float, ended: bool, bound: Collection[str]
    ) -> None:
        if (scaler := self.scaler) is None:
            return
        records = sum(each.records for each in self._chain.values())
        seconds = sum(each.seconds for each in self._chain.values())
        if records > self._made[0]:
            scaler.blocks.add(records - self._made[0], seconds - self._made[1])
        self._made = records, seconds
        slots = {host.node: host.slots for host in hosts if host.scaled}
        self._joined = [*dict.fromkeys([n for n in self._joined if n in slots] + [*slots])]
        own = sum(host.slots for host in hosts if not host.scaled)
        used = [slots[node] for node in self._joined[: scaler.count]]
        if reason := scaler.look(now, own, used, ended):
            self._sent = -RENEW_S
            self._event(CpuHostsRequested(count=scaler.count, reason=reason))
        # The last hosts leave first: they have cached least.
        unneeded = [node for node in self._joined[scaler.count :] if node not in bound]
        self.closing |= {*unneeded}
        # Released hosts stay in the list, to distinguish them from lost ones.
        let_go = [node for node in self._let_go if node not in self._joined] + unneeded
        if {*let_go} != {*self._let_go}:
            self._let_go = let_go
            self._event(HostsClosing(nodes=let_go))
