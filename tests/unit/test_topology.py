"""The topology from the shapes that resourceconfig.json has in real jobs."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.hosts.topology import HOMOGENEOUS, TopologyError, in_order, label, resolve

REAL = {
    "current_group_name": "data_group",
    "current_host": "algo-1",
    "current_instance_type": "ml.c5.xlarge",
    "hosts": ["algo-1", "algo-2"],
    "instance_groups": [
        {"hosts": ["algo-1"], "instance_group_name": "data_group", "instance_type": "ml.c5.xlarge"},
        {"hosts": ["algo-2"], "instance_group_name": "dnn_group", "instance_type": "ml.g5.xlarge"},
    ],
    "network_interface_name": "eth0",
}


def job(current: str, **groups: tuple[str, list[str]]) -> dict[str, Any]:
    hosts = [host for _, members in groups.values() for host in members]
    return {
        "current_host": current,
        "hosts": sorted(hosts),
        "instance_groups": [
            {"instance_group_name": name, "instance_type": kind, "hosts": members}
            for name, (kind, members) in groups.items()
        ],
        "network_interface_name": "eth0",
    }


def test_the_first_host_may_be_a_cpu_host() -> None:
    topology = resolve(REAL)
    assert (topology.gpu_group, topology.head, topology.role) == ("dnn_group", "algo-2", "worker")
    assert (topology.group, topology.hosts) == ("data_group", ("algo-2", "algo-1"))
    assert resolve({**REAL, "current_host": "algo-2"}).role == "head"


def test_hosts_are_numbers_not_text() -> None:
    members = ["algo-10", "algo-2", "algo-11"]
    resource = job("algo-10", gpu=("ml.p4d.24xlarge", members), cpu=("ml.m5.xlarge", ["algo-1"]))
    topology = resolve(resource)
    assert topology.head == "algo-2"
    assert topology.hosts == ("algo-2", "algo-10", "algo-11", "algo-1")
    assert in_order(["algo-10", "algo-9", "b", "algo-1"]) == ["algo-1", "algo-9", "algo-10", "b"]


def test_every_host_agrees_on_everything_but_itself() -> None:
    groups: dict[str, tuple[str, list[str]]] = {
        "a": ("ml.c5.xlarge", ["algo-3", "algo-1"]),
        "b": ("ml.g6.xlarge", ["algo-4", "algo-2"]),
    }
    seen = {resolve(job(host, **groups)).hosts for host in ("algo-1", "algo-2", "algo-3", "algo-4")}
    assert seen == {("algo-2", "algo-4", "algo-1", "algo-3")}


@pytest.mark.parametrize("listed", [[], None, "one"])
def test_homogeneous_jobs(listed: Any) -> None:
    hosts = ["algo-1", "algo-10", "algo-2"]
    resource = {"current_host": "algo-10", "hosts": hosts, "current_instance_type": "ml.c5.xlarge"}
    if listed is not None:
        group = {
            "instance_group_name": HOMOGENEOUS,
            "instance_type": "ml.c5.xlarge",
            "hosts": hosts,
        }
        resource["instance_groups"] = [group] if listed else []
    topology = resolve(resource)
    assert (topology.gpu_group, topology.head) == (HOMOGENEOUS, "algo-1")
    assert topology.hosts == ("algo-1", "algo-2", "algo-10")
    assert topology.trains and topology.role == "worker"


def test_a_single_host_is_the_head() -> None:
    assert resolve({"current_host": "algo-1", "hosts": ["algo-1"]}).role == "head"
    assert resolve({"current_host": "algo-1"}).hosts == ("algo-1",)


def test_the_named_group_wins_over_the_types() -> None:
    resource = job("algo-2", x=("ml.g5.xlarge", ["algo-1"]), y=("ml.c5.xlarge", ["algo-2"]))
    assert resolve(resource, "y").head == "algo-2"


@pytest.mark.parametrize(
    ("gpu_group", "kinds", "says"),
    [
        (
            "gpus",
            ("ml.g5.xlarge", "ml.c5.xlarge"),
            "no group is named 'gpus'; found: x (ml.g5.xlarge)",
        ),
        (None, ("ml.g5.xlarge", "ml.p3.2xlarge"), "several groups have GPUs"),
        (None, ("ml.c5.xlarge", "ml.m5.xlarge"), "no group's type is known to have GPUs"),
        (None, ("ml.trn1.2xlarge", ""), "no group's type is known to have GPUs"),
    ],
)
def test_what_cannot_be_chosen_is_refused_with_the_groups_found(
    gpu_group: str | None, kinds: tuple[str, str], says: str
) -> None:
    resource = job("algo-1", x=(kinds[0], ["algo-1"]), y=(kinds[1], ["algo-2"]))
    with pytest.raises(TopologyError) as refused:
        resolve(resource, gpu_group)
    assert says in str(refused.value)
    assert "cluster.gpu_group" in str(refused.value)
    assert "x (" in str(refused.value) and "y (" in str(refused.value)


def test_files_that_contradict_themselves() -> None:
    with pytest.raises(TopologyError, match="current_host 'algo-7'"):
        resolve({**REAL, "current_host": "algo-7"})
    with pytest.raises(TopologyError, match="no instance group holds algo-3"):
        resolve({**REAL, "hosts": ["algo-1", "algo-2", "algo-3"]})


def test_labels_hold_any_name_and_stay_apart() -> None:
    assert label("gpu_group.1") == "gpu_group.1"
    odd = [
        label("feed er/01"),
        label("feed er 01"),
        label("x" * 64),
        label("x" * 63 + "-"),
        label("é"),
    ]
    assert len(set(odd)) == len(odd)
    assert all(len(text) <= 63 and text[0].isalnum() and text[-1].isalnum() for text in odd)


def test_a_service_that_counts_gpus_need_not_name_types_that_are_known() -> None:
    resource = job("n2", gpu=("a2-highgpu-1g", ["n2"]), cpu=("n2-standard-8", ["n1"]))
    with pytest.raises(TopologyError, match="no group's type is known to have GPUs"):
        resolve(resource)
    for group, gpus in zip(resource["instance_groups"], (1, 0), strict=True):
        group["gpus"] = gpus
    assert resolve(resource).head == "n2"


def test_messages_name_what_the_service_said() -> None:
    with pytest.raises(TopologyError, match="CLUSTER_SPEC: no instance group holds n3"):
        resolve(job("n1", gpu=("", ["n1"])) | {"hosts": ["n1", "n3"], "source": "CLUSTER_SPEC"})
