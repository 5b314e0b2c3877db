"""Chain workers fill the hosts that only preprocess; hosts that train help; hosts that leave get no work."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.config.places import CpuHostsConfig
from stoker.config.schema import Config
from stoker.events.kinds import Event, Note, StepLogged
from stoker.serve.accounting import ChainCosts
from stoker.serve.pool import GROW_AFTER_S, SHRINK_AFTER_S, ChainHost, Pool, chain_hosts
from stoker.serve.scaling import EXPIRES_S, RENEW_S, Elastic

GPU, A, B = ChainHost("gpu", 4, trains=True), ChainHost("a", 4), ChainHost("b", 4)


def pool_of(*hosts: ChainHost, hungry: bool = False) -> Pool:
    pool = Pool()
    for now in (0.0, GROW_AFTER_S):
        pool.update(hosts, hungry, now)
    return pool


def test_hosts_that_train_help_once_data_has_been_short_and_until_it_has_not_been() -> None:
    pool = Pool()
    hosts, now = [GPU, A, B], 100.0
    pool.update(hosts, True, now)
    assert pool.wanted == {"a": 4, "b": 4} and not pool.may_work("gpu")
    pool.update(hosts, True, now + GROW_AFTER_S)
    assert pool.slots == 12 and pool.may_work("gpu")
    pool.update(hosts, False, now + 10)
    assert pool.slots == 12, "a process is not ended for a moment of plenty"
    assert not pool.may_work("gpu"), "but has nothing to do"
    pool.update(hosts, True, now + 20)
    pool.update(hosts, False, now + 21)
    pool.update(hosts, False, now + 21 + SHRINK_AFTER_S)
    assert pool.slots == 8


@pytest.mark.parametrize("trains", [True, False])
def test_on_one_host_it_makes_no_difference_whether_it_trains(trains: bool) -> None:
    assert pool_of(ChainHost("only", 2, trains)).missing({}) == ["only"] * 2


@pytest.mark.parametrize(
    ("staying", "options", "running", "leaving", "missing"),
    [
        pytest.param(
            [A], {"closing": ["b"]}, {"p": "a", "q": "b"}, ["q"], ["a"] * 3, id="its host leaves"
        ),
        pytest.param([A], {"idle": True}, {"p": "a", "q": "a"}, ["p", "q"], [], id="no work"),
        pytest.param([A, B], {}, {f"p{n}": "a" for n in range(5)}, ["p4"], ["b"] * 4, id="moved"),
        pytest.param([GPU, A], {}, {"p": "gpu", "q": "a"}, ["p"], ["a"] * 3, id="it trains"),
    ],
)
def test_chain_workers_where_none_belong_end(
    staying: list[ChainHost],
    options: dict[str, Any],
    running: dict[str, str],
    leaving: list[str],
    missing: list[str],
) -> None:
    pool = pool_of(A, B)
    pool.update(staying, False, 100.0, **options)
    pool.workers_are(running, 101.0)
    assert pool.leaving == leaving
    assert pool.missing({}) == missing
    assert not pool.is_gone("b") or "b" not in options.get("closing", ()), (
        "it delivers what it has begun"
    )


@pytest.mark.parametrize(
    ("avoided", "tried", "works"),
    [
        ("", "ab", "c"),
        ("c", "a", "b"),
        ("a", "", "bc"),
        ("abc", "", "abc"),
        ("", "abc", "abc"),
    ],
)
def test_work_goes_where_it_has_not_failed_or_been_late(
    avoided: str, tried: str, works: str
) -> None:
    pool = pool_of(A, B, ChainHost("c", 2))
    pool.avoided = set(avoided)
    assert [node for node in "abc" if pool.may_work(node, set(tried))] == list(works)


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(0, 9), st.booleans())))
def test_every_slot_gets_one(shape: dict[str, tuple[int, bool]]) -> None:
    hosts = [ChainHost(node, slots, trains) for node, (slots, trains) in shape.items()]
    missing = Counter(pool_of(*hosts, hungry=True).missing({}))
    assert missing == {h.node: h.slots for h in hosts if h.slots}


def node(
    name: str, cpus: float, group: str | None = None, gpus: int = 0, alive: bool = True
) -> dict[str, Any]:
    labels = {} if group is None else {"stoker-group": group}
    return {
        "NodeID": name,
        "Alive": alive,
        "Labels": labels,
        "Resources": {"CPU": cpus, "GPU": gpus},
    }


def hosts_of(
    nodes: list[dict[str, Any]], own: str = "", training: Counter[str] | None = None
) -> dict[str, tuple[int, bool]]:
    found = chain_hosts(Config(), own, nodes, training or Counter())
    return {host.node: (host.slots, host.trains) for host in found}


def test_the_group_of_the_head_trains_and_lost_hosts_do_not_count() -> None:
    lost = node("x", 8, "cpu", alive=False)
    nodes = [node("h", 3, "gpu", 1), node("g2", 3, "gpu"), node("c", 8, "cpu"), lost]
    assert hosts_of(nodes, own="h") == {"h": (3, True), "g2": (3, True), "c": (8, False)}


def test_a_cluster_that_stoker_did_not_form_keeps_a_core_for_each_train_worker() -> None:
    nodes = [node("g", 8, gpus=4), node("c", 8)]
    assert hosts_of(nodes) == {"g": (4, True), "c": (8, False)}
    assert hosts_of(nodes, training=Counter(g=1)) == {"g": (7, True), "c": (8, False)}
    assert hosts_of([node("g", 1, gpus=1)]) == {"g": (1, True)}, "never none at all"


def test_where_train_workers_run_is_where_training_happens() -> None:
    nodes = [node("a", 2), node("b", 2)]
    assert hosts_of(nodes, training=Counter(b=1)) == {"a": (2, False), "b": (2, True)}


TRAINS = ChainHost("g", 2, trains=True, name="gpu-1")


class Given:
    def __init__(self, count: int = 0) -> None:
        self.count, self.options = count, CpuHostsConfig(max=9)
        self.steps: list[tuple[float, float, float]] = []
        self.blocks: list[tuple[float, float]] = []
        self.next: tuple[int, str] | None = None
        self.looked: tuple[int, list[int], bool] | None = None

    def stepped(self, samples: float, seconds: float, late_s: float) -> None:
        self.steps.append((samples, seconds, late_s))

    def made(self, records: float, seconds: float) -> None:
        self.blocks.append((records, seconds))

    def look(self, now: float, own: int, joined: list[int], ended: bool) -> str:
        self.looked = own, joined, ended
        (self.count, reason), self.next = self.next or (self.count, ""), None
        return reason

    def missing(self, now: float) -> int:
        return 0


class Requests:
    def __init__(self) -> None:
        self.sent: list[tuple[int, float]] = []

    def send(self, count: int, expires_s: float) -> None:
        self.sent.append((count, expires_s))


class Case:
    def __init__(self, count: int = 0, scaled: bool = True) -> None:
        self.given, self.requests, self.events = Given(count), Requests(), list[Event]()
        self.costs = {"train": ChainCosts(), "val": ChainCosts()}
        self.elastic: Any = Elastic(self.events.append, self.costs, CpuHostsConfig())
        if scaled:
            self.elastic.scaler, self.elastic._request = self.given, self.requests

    def told(self) -> list[tuple[str, dict[str, Any]]]:
        return [(event.event, event.values()) for event in self.events]

    def staying(
        self,
        *hosts: ChainHost,
        draining: set[str] = frozenset(),  # type: ignore[assignment]
        now: float = 0.0,
        bound: tuple[str, ...] = (),
    ) -> list[str]:
        return [host.node for host in self.elastic.split([*hosts], draining, now, False, bound)]


def cpu(node: str) -> ChainHost:
    return ChainHost(node, 4, name=f"cpu-{node}", scaled=True)


def test_the_hosts_that_joined_last_leave_first_and_come_back_if_needed() -> None:
    case = Case(count=3)
    assert case.staying(TRAINS, cpu("b")) == ["g", "b"]
    assert case.staying(TRAINS, cpu("a"), cpu("b"), cpu("c")) == ["g", "a", "b", "c"]
    case.given.next = (1, "because")
    assert case.staying(TRAINS, cpu("a"), cpu("b"), cpu("c")) == ["g", "b"]
    assert case.elastic.closing == {"a", "c"}
    assert case.told() == [
        ("cpu_hosts", {"count": 1, "reason": "because"}),
        ("closing", {"nodes": ["a", "c"]}),
    ]
    case.given.next = (2, "more")
    assert case.staying(TRAINS, cpu("a"), cpu("b"), cpu("c")) == ["g", "a", "b"]
    assert case.given.looked == (2, [4], False), "decided from the host that was in use"


def test_a_host_that_reads_a_stream_is_let_go_when_that_has_ended() -> None:
    """Another process would have to read the stream again, which not all streams allow."""
    case = Case(count=2)
    case.staying(TRAINS, cpu("a"), cpu("b"))
    case.given.next = (0, "enough")
    assert case.staying(TRAINS, cpu("a"), cpu("b"), bound=("b",)) == ["g", "b"]
    assert case.staying(TRAINS, cpu("a"), cpu("b")) == ["g"]
    assert case.staying(TRAINS, cpu("b"), draining={"b"}, bound=("b",)) == ["g"], (
        "what others take away, goes"
    )


def test_a_chain_worker_that_reads_a_stream_stays_where_others_end() -> None:
    pool = Pool(bound={"p2"})
    pool.update([TRAINS, cpu("a")], False, 0.0)
    pool.workers_are({"p1": "g", "p2": "g"}, 0.0)
    assert pool.leaving == ["p1"]


def test_a_host_that_has_left_is_not_taken_for_a_lost_one() -> None:
    case = Case(count=2)
    case.staying(TRAINS, cpu("a"), cpu("b"))
    case.given.next = (1, "because")
    case.staying(TRAINS, cpu("a"), cpu("b"))
    case.staying(TRAINS, cpu("a"))
    assert case.told()[-1] == ("closing", {"nodes": ["b"]}), "still named, and told once"
    case.given.next = (0, "done")
    case.staying(TRAINS, cpu("a"))
    assert case.told()[-1] == ("closing", {"nodes": ["b", "a"]})


def test_a_host_that_the_cluster_takes_away_gets_no_work_whoever_added_it() -> None:
    for case in (Case(count=2), Case(scaled=False)):
        assert case.staying(TRAINS, cpu("a"), cpu("b"), draining={"a"}) == ["g", "b"]
        assert case.staying(TRAINS, cpu("a"), cpu("b"), draining={"a"}) == ["g", "b"]
        notes = [event.text for event in case.events if isinstance(event, Note)]
        assert notes == ["host cpu-a is about to be taken away: it gets no more work"]
    assert case.staying(cpu("a"), draining={"a"}) == ["a"], "the only one works to the end"
    assert case.elastic.closing == set(), "and keeps its chain workers"


def step(
    number: int, epoch: int, samples: int, elapsed_s: float, production: float = 0.0
) -> StepLogged:
    terms = {"wait_production": production, "compute": 100.0 - production}
    return StepLogged(
        step=number, epoch=epoch, epoch_samples=samples, elapsed_s=elapsed_s, terms_ms=terms,
        loss=1.0, lr=0.1, wait_s=0.0,
    )  # fmt: skip


def test_training_is_measured_between_logged_steps_without_the_start() -> None:
    case = Case()
    case.elastic.stepped(step(1, 0, 16, 40.0, 99.0))  # waits for processes to start
    case.elastic.stepped(step(11, 0, 176, 41.0, 50.0))
    case.elastic.stepped(step(16, 1, 48, 0.5))  # a new pass counts from its own beginning
    case.elastic.stepped(step(11, 1, 16, 0.1, 90.0))  # started again from a checkpoint
    case.elastic.stepped(step(21, 1, 176, 1.1, 10.0))
    assert case.given.steps == [
        (160, pytest.approx(1.0), pytest.approx(0.5)),
        (48, 0.5, 0.0),
        (160, pytest.approx(1.0), pytest.approx(0.1)),
    ]


def test_a_request_is_renewed_before_it_expires_and_changed_at_once() -> None:
    case = Case(count=2)
    for now in range(int(3 * RENEW_S)):
        case.staying(TRAINS, now=float(now))
        case.elastic.send(float(now))
    assert case.requests.sent == [(2, EXPIRES_S)] * 3 and RENEW_S < EXPIRES_S / 2
    case.given.next = (5, "more")
    case.staying(TRAINS, now=30.5)
    case.elastic.send(30.5)
    assert case.requests.sent[-1] == (5, EXPIRES_S)


def test_blocks_of_all_splits_count_once() -> None:
    case = Case()
    case.costs["train"].records, case.costs["train"].seconds = 100, 4.0
    case.staying(TRAINS)
    case.costs["val"].records, case.costs["val"].seconds = 50, 1.0
    case.staying(TRAINS)
    case.staying(TRAINS)
    assert case.given.blocks == [(100, 4.0), (50, 1.0)]
