"""Slurm's variables become hosts and groups: shapes from its documentation, and one recorded from a cluster.

GUIDE: slurm.schedmd.com/heterogeneous_jobs.html, "Launching Applications" and "Environment Variables".
SBATCH, SRUN: the manual pages sbatch(1) and srun(1), "OUTPUT ENVIRONMENT VARIABLES"; CONF: slurm.conf(5).
RECORDED: the environment of a task of Slurm 22.05.8 (Debian 12), without what names that machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.hosts.raynode import count_gpus
from stoker.hosts.services.slurm import hosts_in, memory_mb, port_of, resource_of
from stoker.hosts.topology import Topology, TopologyError, resolve

GUIDE = {
    "SLURM_JOB_ID": "11751",
    "SLURM_STEP_ID": "0",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "11751",
    "SLURM_JOB_ID_HET_GROUP_1": "11752",
    "SLURM_JOB_NODELIST": "nid[00001,00011-00012]",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "nid00001",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "nid[00011-00012]",
    "SLURMD_NODENAME": "nid00012",
}
RECORDED = {
    "SLURMD_NODENAME": "cpu-2",
    "SLURM_CPUS_ON_NODE": "3",
    "SLURM_GPUS_PER_NODE_HET_GROUP_0": "1",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_ID_HET_GROUP_0": "1",
    "SLURM_JOB_ID_HET_GROUP_1": "2",
    "SLURM_JOB_NODELIST": "cpu-[1-2],gpu-1",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu-1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu-[1-2]",
    "SLURM_JOB_PARTITION_HET_GROUP_0": "gpu",
    "SLURM_JOB_PARTITION_HET_GROUP_1": "cpu",
    "SLURM_LOCALID": "0",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "cpu-[1-2],gpu-1",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}
PLAIN = {
    "SLURM_JOB_ID": "827",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "lx[15,18,32-33]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURMD_NODENAME": "lx18",
}
THREE = GUIDE | {
    "SLURM_HET_SIZE": "3",
    "SLURM_JOB_NODELIST": "nid[00001,00011-00012],big[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_2": "big[1-2]",
    "SLURM_GPUS_PER_NODE_HET_GROUP_1": "volta:3,kepler:5",  # SBATCH
    "SLURMD_NODENAME": "big2",
}
FIRST, OTHERS, ALL = ("nid00001",), ("nid00011", "nid00012"), ("lx15", "lx18", "lx32", "lx33")
GROUPS: list[tuple[dict[str, str], dict[str, tuple[str, ...]], str]] = [
    (RECORDED, {"gpu": ("gpu-1",), "cpu": ("cpu-1", "cpu-2")}, "gpu-1"),
    (GUIDE | {"SLURM_GPUS_PER_NODE_HET_GROUP_0": "4"}, {"gpu": FIRST, "cpu": OTHERS}, "nid00001"),
    (GUIDE | {"SLURM_GPUS_PER_NODE_HET_GROUP_1": "a:8"}, {"cpu": FIRST, "gpu": OTHERS}, "nid00011"),
    (THREE, {"cpu": FIRST, "gpu": OTHERS, "cpu-2": ("big1", "big2")}, "nid00011"),
    (PLAIN, {"cpu": ALL}, "lx15"),
    (PLAIN | {"SLURM_GPUS_ON_NODE": "4"}, {"gpu": ALL}, "lx15"),
    (PLAIN | {"SLURM_GPUS_PER_NODE": "v100:2"}, {"gpu": ALL}, "lx15"),
    # A step on a part of a job is that part.
    (PLAIN | {"SLURM_STEP_NODELIST": "lx[18,33]"}, {"cpu": ("lx18", "lx33")}, "lx18"),
]


def topology(variables: dict[str, str], gpu_group: str | None = None) -> Topology:
    found = resource_of(variables)
    assert found is not None
    return resolve(found, gpu_group)


@pytest.mark.parametrize(("variables", "groups", "head"), GROUPS)
def test_variables_are_groups_and_a_head(
    variables: dict[str, str], groups: dict[str, tuple[str, ...]], head: str
) -> None:
    found = topology(variables)
    assert {group.name: group.hosts for group in found.groups} == groups
    assert found.head == head and found.host == variables["SLURMD_NODENAME"]
    gpus = {group.gpus for group in found.groups if group.name == "gpu"}
    assert variables is not THREE or gpus == {8}


def test_every_host_sees_the_same_groups() -> None:
    hosts = ("gpu-1", "cpu-1", "cpu-2")
    found = [topology({**RECORDED, "SLURMD_NODENAME": host}) for host in hosts]
    assert [each.role for each in found] == ["head", "worker", "worker"]
    assert len({str(each.groups) for each in found}) == 1
    assert {group.instance_type for group in found[0].groups} == {"gpu", "cpu"}, "the partitions"


def test_components_that_do_not_tell_their_gpus_need_the_key() -> None:
    """`--gres=gpu:4` sets no variable that other components see."""
    with pytest.raises(TopologyError, match=r"cluster\.gpu_group: no group.*component-1"):
        topology(GUIDE)
    assert topology(GUIDE, "component-1").head == "nid00011"


def test_no_step_is_no_host_of_slurm() -> None:
    of_the_script = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_PROCID": "0"}
    assert resource_of({}) is None and resource_of(of_the_script) is None


LIST_1 = "SLURM_JOB_NODELIST_HET_GROUP_1"
WRONG: list[tuple[dict[str, str], dict[str, str], str]] = [
    (GUIDE, {"SLURMD_NODENAME": ""}, "SLURMD_NODENAME is not set"),
    (GUIDE, {LIST_1: ""}, f"{LIST_1} is not set"),
    (GUIDE, {"SLURM_HET_SIZE": "two"}, "SLURM_HET_SIZE='two'"),
    (GUIDE, {"SLURM_HET_SIZE": "0"}, "SLURM_HET_SIZE='0'"),
    (GUIDE, {"SLURM_JOB_NODELIST": "nid00001"}, "leaves out nid00011, nid00012.*--het-group=0,1"),
    (GUIDE, {LIST_1: "nid[00001-00002]", "SLURM_JOB_NODELIST": ""}, "nid00001 bel"),
    (GUIDE, {"SLURMD_NODENAME": "nid7", "SLURM_GPUS_HET_GROUP_0": "1"}, "'nid7' is not among"),
    (GUIDE, {f"SLURM_GPUS_HET_GROUP_{n}": "1" for n in (0, 1)}, "several groups have GPUs"),
    (RECORDED, {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, "several tasks on a node"),
    (RECORDED, {"SLURM_STEP_TASKS_PER_NODE": "1,12(x2)"}, "several tasks on a node"),
    (RECORDED, {"SLURM_LOCALID": "1"}, "several tasks on a node"),
    (PLAIN, {"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is not set"),
    (PLAIN, {"SLURM_JOB_NODELIST": "lx[15"}, "cannot read the host list"),
    ({"STOKER_PLACE": "slurm"}, {}, "no SLURM_STEP_ID; start train.py with srun"),
]


@pytest.mark.parametrize(("base", "change", "message"), WRONG)
def test_wrong_or_partial_variables_are_one_line(
    base: dict[str, str], change: dict[str, str], message: str
) -> None:
    with pytest.raises(TopologyError, match=message) as raised:
        topology({**base, **change})
    assert "\n" not in str(raised.value)


HOST_LISTS = {
    "alpha,beta,gamma": "alpha beta gamma",  # CONF
    "lx[15,18,32-33]": "lx15 lx18 lx32 lx33",  # CONF
    "gpu[01-03,07],cpu-[1-2]x": "gpu01 gpu02 gpu03 gpu07 cpu-1x cpu-2x",
    "rack[0-1]_blade[0-1]": "rack0_blade0 rack0_blade1 rack1_blade0 rack1_blade1",  # CONF
    "n[8-11]": "n8 n9 n10 n11",
    "n[098-101]": "n098 n099 n100 n101",
    "a.example.org": "a.example.org",
    "linux[0000-1023]": " ".join(f"linux{number:04}" for number in range(1024)),  # CONF
}


def test_host_lists() -> None:
    assert {text: " ".join(hosts_in(text)) for text in HOST_LISTS} == HOST_LISTS


NO_LISTS = ["n[1", "n1]", "n[]", "n[3-1]", "n[a-b]", "n[1-]", "n[[1]]", "n[1-9999999]", "[", " "]


@pytest.mark.parametrize("text", NO_LISTS)
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(TopologyError, match=r"cannot read the host list|more than"):
        hosts_in(text)


@given(st.text(alphabet="ab01[],- ", max_size=20))
def test_any_text_is_a_list_or_an_error(text: str) -> None:
    try:
        found: Any = hosts_in(text)
    except TopologyError:
        return
    assert not [name for name in found if set(name) & set("[],")]


VISIBLE = {None: 4, "0,1": 2, "": 0, "0,1,2,3,4,5,6,7": 4, "-1": 0, "1,-1,2": 1, "NoDevFiles": 0}


@pytest.mark.parametrize(("visible", "gpus"), VISIBLE.items())
def test_only_the_gpus_that_slurm_gave_the_job_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, gpus: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus(tmp_path) == gpus


def test_memory_is_that_of_the_hosts_own_component() -> None:
    own = {"SLURM_MEM_PER_NODE": "8", "SLURM_MEM_PER_NODE_HET_GROUP_1": "2048"}
    assert memory_mb(RECORDED) == 0, "--mem=0: the whole node"
    assert memory_mb(RECORDED | own) == 2048
    assert memory_mb(RECORDED | {"SLURM_MEM_PER_CPU_HET_GROUP_1": "500"}) == 1500
    assert memory_mb(PLAIN | {"SLURM_MEM_PER_NODE": "4096"}) == 4096


def test_jobs_that_share_a_node_get_ports_of_their_own() -> None:
    ports = [port_of(str(job)) for job in range(100_000, 101_000)]
    assert len(set(ports)) == len(ports)
    assert all(port % 2 == 0 and 20_000 <= port < 30_000 for port in ports), (
        "the door takes the next one"
    )
