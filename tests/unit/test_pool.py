"""Chain workers fill the hosts that only preprocess; hosts that train help while data is short."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_a_host_that_comes_late_is_used_and_a_lost_one_is_not() -> None:
    pool = pool_of(A)
    pool.update([A, B], False, 5)
    pool.workers_are({f"p{n}": "a" for n in range(4)}, 5)
    assert pool.missing({"b": 1}) == ["b"] * 3
    pool.update([B], False, 6)
    assert pool.slots == 4 and not pool.may_work("a")


def test_a_host_that_is_about_to_leave_gets_no_chain_worker_and_its_own_end() -> None:
    pool = pool_of(A, B)
    pool.update([A], False, 5, closing=["b"])
    pool.workers_are({"p": "a", "q": "b"}, 6)
    assert pool.leaving == ["q"] and pool.missing({}) == ["a"] * 3
    assert not pool.is_gone("b"), "what it has in hand it delivers"


def test_without_work_no_chain_worker_stays() -> None:
    pool = pool_of(A)
    pool.update([A], False, 5, idle=True)
    pool.workers_are({"p": "a", "q": "a"}, 6)
    assert pool.leaving == ["p", "q"] and pool.missing({}) == []


def test_chain_workers_that_ray_started_elsewhere_end() -> None:
    pool = pool_of(A, B)
    moved = {f"p{n}": "a" for n in range(6)}
    pool.workers_are(moved, 100.0)
    assert pool.leaving == ["p4", "p5"], "those of a lost host"
    pool.workers_are({f"p{n}": "a" for n in range(4)}, 101.0)
    assert not pool.leaving and pool.missing({}) == ["b"] * 4


def test_chain_workers_on_a_host_that_trains_end_when_it_need_not_help() -> None:
    pool = pool_of(GPU, A, hungry=True)
    pool.workers_are({"p": "gpu", "q": "a"}, 3.0)
    assert not pool.leaving
    for now in (100.0, 100.0 + SHRINK_AFTER_S):
        pool.update([GPU, A], False, now)
    pool.workers_are({"p": "gpu", "q": "a"}, 130.0)
    assert pool.leaving == ["p"]


def test_work_that_was_tried_goes_where_chain_workers_run() -> None:
    pool = pool_of(GPU, A, hungry=True)
    pool.workers_are({"p0": "gpu"}, 1.0)
    assert pool.may_work("gpu", {"gpu"}) and not pool.may_work("a", {"gpu"})


def test_avoided_hosts_get_work_only_where_there_is_no_other() -> None:
    pool = pool_of(A, B)
    pool.avoided = {"a"}
    assert not pool.may_work("a") and pool.may_work("b")
    pool.update([A], False, 5)
    assert pool.may_work("a")


def test_work_goes_where_it_has_not_failed_yet() -> None:
    pool = pool_of(A, B, ChainHost("c", 2))
    assert [node for node in "abc" if pool.may_work(node, {"a", "b"})] == ["c"]
    pool.avoided = {"c"}
    assert [node for node in "abc" if pool.may_work(node, {"a"})] == ["b"]
    assert [node for node in "abc" if pool.may_work(node, {"a", "b"})], "rather there than where it hangs"


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(0, 9), st.booleans())))
def test_every_slot_gets_one(shape: dict[str, tuple[int, bool]]) -> None:
    hosts = [ChainHost(node, slots, trains) for node, (slots, trains) in shape.items()]
    missing = Counter(pool_of(*hosts, hungry=True).missing({}))
    assert missing == {h.node: h.slots for h in hosts if h.slots}


def node(
    name: str, cpus: float, group: str | None = None, gpus: int = 0, alive: bool = True
) -> dict[str, Any]:
    labels = {} if group is None else {"stoker.group": group}
    return {"NodeID": name, "Alive": alive, "Labels": labels, "Resources": {"CPU": cpus, "GPU": gpus}}


def hosts_of(nodes: list[dict[str, Any]], **changes: Any) -> dict[str, tuple[int, bool]]:
    known: dict[str, Any] = {"groups": [], "own_group": "gpu", "training": Counter()} | changes
    found = chain_hosts(nodes, group_label="stoker.group", **known)
    return {host.node: (host.slots, host.trains) for host in found}


def test_the_group_of_the_head_trains_and_lost_hosts_do_not_count() -> None:
    lost = node("x", 8, "cpu", alive=False)
    nodes = [node("h", 3, "gpu", 1), node("g2", 3, "gpu"), node("c", 8, "cpu"), lost]
    assert hosts_of(nodes) == {"h": (3, True), "g2": (3, True), "c": (8, False)}


def test_groups_that_may_preprocess_restrict_the_hosts() -> None:
    nodes = [node("h", 3, "gpu", 1), node("c", 8, "cpu"), node("d", 8, "more")]
    assert set(hosts_of(nodes, groups=["cpu"])) == {"c"}


def test_a_cluster_that_stoker_did_not_form_keeps_a_core_for_each_train_worker() -> None:
    nodes = [node("g", 8, gpus=4), node("c", 8)]
    assert hosts_of(nodes, own_group=None) == {"g": (4, True), "c": (8, False)}
    assert hosts_of(nodes, own_group=None, training=Counter(g=1)) == {"g": (7, True), "c": (8, False)}
    assert hosts_of([node("g", 1, gpus=1)], own_group=None) == {"g": (1, True)}, "never none at all"


def test_where_train_workers_run_is_where_training_happens() -> None:
    nodes = [node("a", 2), node("b", 2)]
    assert hosts_of(nodes, own_group=None, training=Counter(b=1)) == {"a": (2, False), "b": (2, True)}
