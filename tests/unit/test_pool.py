"""Chain workers fill the hosts that only preprocess; hosts that train help; hosts that leave get no work."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.config.schema import Config
from stoker.serve.pool import GROW_AFTER_S, SHRINK_AFTER_S, ChainHost, Pool, chain_hosts

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


def test_a_chain_worker_that_reads_a_stream_stays_where_others_end() -> None:
    pool = Pool(bound={"p2"})
    pool.update([TRAINS, ChainHost("a", 4)], False, 0.0)
    pool.workers_are({"p1": "g", "p2": "g"}, 0.0)
    assert pool.leaving == ["p1"]
