"""Chain tasks fill the hosts that only preprocess; hosts that train help when data is short."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.data.engine.placement import ChainHost, Placement, chain_hosts


def placed(*hosts: ChainHost) -> Placement:
    placement = Placement()
    placement.update(hosts)
    return placement


def send_all(placement: Placement, hungry: bool) -> list[str]:
    """Where tasks go, one after the other, until there is no room."""
    sent = []
    while node := placement.choose(hungry):
        placement.send(node)
        sent.append(node)
    return sent


def test_hosts_that_train_get_tasks_only_when_the_others_are_full() -> None:
    placement = placed(ChainHost("gpu", 4, trains=True), ChainHost("a", 4), ChainHost("b", 4))
    sent = send_all(placement, hungry=True)
    assert set(sent[:8]) == {"a", "b"}, "first the slots of the hosts that only preprocess"
    assert sent[8:12] == ["gpu"] * 4, "then the CPUs that train workers leave free"
    assert Counter(sent) == {"gpu": 5, "a": 5, "b": 5}, "at last one task waits at each"


def test_hosts_that_train_do_nothing_while_enough_data_is_ready() -> None:
    placement = placed(ChainHost("gpu", 4, trains=True), ChainHost("a", 4))
    assert set(send_all(placement, hungry=False)) == {"a"}


@pytest.mark.parametrize("trains", [True, False])
def test_on_one_host_it_makes_no_difference_whether_it_trains(trains: bool) -> None:
    assert send_all(placed(ChainHost("only", 2, trains)), hungry=False) == ["only"] * 3


def test_a_host_that_comes_late_is_used_and_a_lost_one_is_not() -> None:
    placement = placed(ChainHost("a", 2))
    assert send_all(placement, hungry=False) == ["a"] * 3
    placement.update([ChainHost("a", 2), ChainHost("late", 2)])
    assert send_all(placement, hungry=False) == ["late"] * 3
    placement.update([ChainHost("late", 2)])
    # Tasks of the lost host end elsewhere; that makes no room on a host that is gone.
    placement.end("a")
    assert placement.choose(hungry=True) == ""
    placement.end("late")
    assert placement.choose(hungry=True) == "late"


def test_a_preferred_host_is_taken_while_it_has_room() -> None:
    placement = placed(ChainHost("a", 2), ChainHost("b", 2))
    for _ in range(3):
        assert placement.choose(hungry=False, prefer="b") == "b"
        placement.send("b")
    assert placement.choose(hungry=False, prefer="b") == "a"
    assert placement.choose(hungry=False, prefer="gone") == "a"


def test_what_a_host_that_trains_has_does_not_call_it_while_enough_is_ready() -> None:
    placement = placed(ChainHost("gpu", 4, trains=True), ChainHost("a", 4))
    assert placement.choose(hungry=False, prefer="gpu") == "a"
    assert placement.choose(hungry=True, prefer="gpu") == "gpu"
    assert placed(ChainHost("gpu", 4, trains=True)).choose(hungry=False, prefer="gpu") == "gpu"


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(0, 9), st.booleans())))
def test_no_host_is_sent_more_than_it_has_room_for(shape: dict[str, tuple[int, bool]]) -> None:
    hosts = [ChainHost(node, slots, trains) for node, (slots, trains) in shape.items()]
    sent = Counter(send_all(placed(*hosts), hungry=True))
    assert sent == {host.node: host.room for host in hosts if host.slots}


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
