"""Head: hosts that come and go: requests CPU hosts from an autoscaler, and empties those that leave.

An autoscaler removes a host only when nothing runs on it and nothing is stored there. So a host that is no
longer needed gets no work, its chain workers end, its blocks are used up, and then its agent ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from stoker.config.places import CpuHostsConfig
from stoker.config.schema import Config
from stoker.hosts.topology import GROUP_LABEL, label
from stoker.ray_compat import HostRequest
from stoker.serve.accounting import ChainCosts
from stoker.serve.pool import ChainHost, chain_hosts

if TYPE_CHECKING:
    from stoker.serve.attempt import Attempt

RENEW_S, EXPIRES_S = 10.0, 60.0
"""Interval at which a request is renewed, and after which it expires: the run has ended, in whatever way."""


class Hosts:
    """Head: the current preprocessing hosts.

    Args:
        config: `data.preprocess_on` restricts them.
        own_node: this host's Ray node.
    """

    def __init__(self, config: Config, own_node: str) -> None:
        self.groups = [label(group) for group in config.data.preprocess_on]
        self.own_node = own_node
        scaling = config.cluster.cpu_hosts
        self.resource = scaling.resource if scaling.max else ""

    def __call__(self, training: Counter[str]) -> list[ChainHost]:
        import ray

        nodes = ray.nodes()
        own: dict[str, str] = next((n["Labels"] for n in nodes if n["NodeID"] == self.own_node), {})
        return chain_hosts(
            nodes,
            groups=self.groups,
            group_label=GROUP_LABEL,
            own_group=own.get(GROUP_LABEL),
            training=training,
            resource=self.resource,
        )


class Scaling(Protocol):
    """Head: decides how many CPU hosts to request; see `stoker.sizing.scaler`."""

    count: int
    options: CpuHostsConfig

    def stepped(self, samples: float, seconds: float, late_s: float) -> None: ...
    def made(self, records: float, seconds: float) -> None: ...
    def look(self, now: float, own: int, joined: list[int], ended: bool) -> Any: ...
    def missing(self, now: float) -> int: ...


@dataclass
class Scaled:
    """Head: a run whose number of CPU hosts changes.

    It reports to `scaler` what training and the chain workers have done, and sends what `scaler` decides.
    """

    scaler: Scaling
    request: HostRequest
    chain: Mapping[str, ChainCosts]
    known: list[str] = field(default_factory=list)
    """Nodes of the hosts that were added, in the order in which they joined."""
    _last: dict[str, Any] | None = None
    """The last `step` event."""
    _made: tuple[int, float] = (0, 0.0)
    """Records and seconds of all blocks so far."""
    _sent: float = -RENEW_S

    def stepped(self, values: dict[str, Any]) -> None:
        """Take the fields of a `step` event."""
        if not (terms := values.get("terms_ms")):
            return
        before, self._last = self._last, values
        if before is None or values["step"] <= before["step"]:
            return  # the first batch of a start also waits for processes to start
        samples, seconds = values["epoch_samples"], values["elapsed_s"]
        if values["epoch"] == before["epoch"]:
            samples, seconds = samples - before["epoch_samples"], seconds - before["elapsed_s"]
        # Terms are means since the previous event.
        late = terms["wait_production"] / (sum(terms.values()) or 1.0)
        self.trained(samples, seconds, late * seconds)

    def trained(self, samples: float, seconds: float, late_s: float) -> None:
        """Take what training did in some seconds, of which it waited for preprocessing for `late_s`."""
        self.scaler.stepped(samples, seconds, late_s)

    def look(self, hosts: list[ChainHost], now: float, ended: bool) -> Any:
        """The scaler's decision, if there is a new one."""
        records, seconds = (
            sum(getattr(c, name) for c in self.chain.values()) for name in ("records", "seconds")
        )
        before, self._made = self._made, (records, seconds)
        if records > before[0]:
            self.scaler.made(records - before[0], seconds - before[1])
        scaled = {host.node: host for host in hosts if host.scaled}
        self.known = [node for node in self.known if node in scaled]
        self.known += [node for node in scaled if node not in self.known]
        joined = [scaled[node].slots for node in self.known[: self.scaler.count]]
        own = sum(host.slots for host in hosts if not host.scaled)
        decision = self.scaler.look(now, own, joined, ended)
        if decision is not None:
            self._sent = -RENEW_S
        return decision

    def send(self, now: float) -> None:
        """Send or renew the request; the coordinator's lock is not held."""
        if now - self._sent >= RENEW_S:
            self._sent = now
            self.request.send(self.scaler.count, EXPIRES_S)


class Elastic:
    """Head: part of the coordinator; decides which hosts get work and which are about to leave.

    Args:
        event: receives (event, values).
        scaled: None: the run does not change the number of its hosts.
    """

    def __init__(self, event: Callable[..., None], scaled: Scaled | None = None) -> None:
        self._event, self._scaled = event, scaled
        self.closing: set[str] = set()
        """Nodes of hosts that are about to leave."""
        self._draining: set[str] = set()
        self._let_go: list[str] = []
        """Nodes of hosts that are no longer requested, also of those that have left."""

    def stepped(self, values: dict[str, Any]) -> None:
        """Take the fields of a `step` event."""
        if self._scaled is not None:
            self._scaled.stepped(values)

    def trained(self, samples: float, seconds: float, late_s: float) -> None:
        """Take what training did in some seconds, of which it waited for preprocessing for `late_s`."""
        if self._scaled is not None:
            self._scaled.trained(samples, seconds, late_s)

    def split(
        self,
        hosts: list[ChainHost],
        draining: set[str],
        now: float,
        attempt: Attempt | None,
        bound: Collection[str] = (),
    ) -> list[ChainHost]:
        """The hosts that stay; called with the coordinator's lock held.

        Args:
            hosts: that may preprocess.
            draining: nodes that the cluster takes away, such as spot hosts.
            now: `time.monotonic()`.
            attempt: the current one.
            bound: nodes with work that no other can continue; they are not let go.
        """
        for host in hosts:
            if host.node in draining - self._draining:
                self._event("note", text=f"host {host.name} is about to be taken away: it gets no more work")
        self._draining = draining
        self.closing = {host.node for host in hosts if host.node in draining}
        if self._scaled is not None:
            left = [host for host in hosts if host.node not in draining]
            ended = attempt is not None and attempt.all_produced
            self._scale(self._scaled, left, now, ended, bound)
        staying = [host for host in hosts if host.node not in self.closing]
        if not staying:
            self.closing = set()  # the last ones work to their end
        return staying or hosts

    def _scale(
        self, scaled: Scaled, hosts: list[ChainHost], now: float, ended: bool, bound: Collection[str]
    ) -> None:
        decision = scaled.look(hosts, now, ended)
        # The last hosts leave first: they have cached least.
        unneeded = [node for node in scaled.known[scaled.scaler.count :] if node not in bound]
        self.closing |= set(unneeded)
        if decision is not None:
            self._event("cpu_hosts", count=decision.count, reason=decision.reason)
        # Those that have left meanwhile stay in the list: that is how the others tell them from lost ones.
        left = [node for node in self._let_go if node not in scaled.known]
        if {*left, *unneeded} != {*self._let_go}:
            self._let_go = left + unneeded
            self._event("closing", nodes=self._let_go)
        if missing := scaled.scaler.missing(now):
            self._event(
                "note",
                text=f"requested {missing} CPU hosts, but only {len(scaled.known)} have joined: does the"
                " cluster have an autoscaler, a node type with cluster.cpu_hosts.resource, and capacity?",
            )

    def send(self, now: float) -> None:
        """Send the request for hosts, if there is one to send."""
        if self._scaled is not None:
            self._scaled.send(now)
