"""Hosts, groups and head from what SageMaker, Slurm and Vertex AI tell a host, in the shapes of real jobs.

Slurm: GUIDE: slurm.schedmd.com/heterogeneous_jobs.html; SBATCH, SRUN: the manual pages, "OUTPUT ENVIRONMENT
VARIABLES"; CONF: slurm.conf(5); RECORDED: a task of Slurm 22.05.8 (Debian 12), without what names that machine.
Vertex AI: DOCUMENTED: "Distributed training"; XMANAGER, GIGL: tests of google-deepmind/xmanager and
Snapchat/GiGL; PRINTED: jobs that print their own variable in public repositories.
"""

# One row of a table on one line reads better than five.
# ruff: noqa: E501

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.hosts.raynode import count_gpus
from stoker.hosts.services import slurm, vertex
from stoker.hosts.services.vertex import CLUSTER_VARIABLE, POOLS_VARIABLE
from stoker.hosts.topology import HOMOGENEOUS, Topology, TopologyError, in_order, label, resolve

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
"""Of SageMaker."""


def job(current: str, **groups: tuple[Any, ...]) -> dict[str, Any]:
    """A resourceconfig.json: group → type, hosts and, if the service tells it, GPUs."""
    listed = [
        {"instance_group_name": name, "instance_type": kind, "hosts": hosts, **dict(gpus)}
        for name, (kind, hosts, *gpus) in groups.items()
    ]
    hosts = sorted(host for group in listed for host in group["hosts"])
    return {"current_host": current, "hosts": hosts, "instance_groups": listed}


TEN = job(
    "algo-10",
    gpu=("ml.p4d.24xlarge", ["algo-10", "algo-2", "algo-11"]),
    cpu=("ml.m5.xlarge", ["algo-1"]),
)
ALONE = {
    "current_host": "algo-10",
    "hosts": ["algo-1", "algo-10", "algo-2"],
    "current_instance_type": "ml.c5.xlarge",
}
LISTED = ALONE | {
    "instance_groups": [
        {
            "instance_group_name": HOMOGENEOUS,
            "instance_type": "ml.c5.xlarge",
            "hosts": ALONE["hosts"],
        }
    ]
}
COUNTED = job(
    "n2", gpu=("a2-highgpu-1g", ["n2"], ("gpus", 1)), cpu=("n2-standard-8", ["n1"], ("gpus", 0))
)
TWO_KINDS = job("algo-2", x=("ml.g5.xlarge", ["algo-1"]), y=("ml.c5.xlarge", ["algo-2"]))

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
LIST_1 = "SLURM_JOB_NODELIST_HET_GROUP_1"

OUTPUTS = {
    "AIP_MODEL_DIR": "gs://bucket/job/model/",
    "AIP_CHECKPOINT_DIR": "gs://bucket/job/checkpoints/",
    "AIP_TENSORBOARD_LOG_DIR": "gs://bucket/job/logs/",
}
DOCUMENTED = {
    f"workerpool{pool}": [f"cmle-{pool}-{i}:2222" for i in range(count)]
    for pool, count in enumerate((1, 2, 2, 3))
}
PRINTED = {"job": '{"python_module":"","package_uris":[],"job_args":[]}', "open_ports": [3333]}
ONE = {"workerpool0": ["a-0:2222"]}


def spec(pool: int, index: Any, cluster: Any, *gpus: int, **more: Any) -> dict[str, str]:
    """A host's variables; `gpus` by pool, as the launcher tells them: pools with GPUs are one group."""
    task = {"type": f"workerpool{pool}", "index": index}
    text = json.dumps({"cluster": cluster, "environment": "cloud", "task": task, **more})
    pools = {
        f"workerpool{i}": {"group": "gpu" if n else f"cpu{i}", "type": "x", "gpus": n}
        for i, n in enumerate(gpus)
    }
    told = {POOLS_VARIABLE: json.dumps(pools)} if gpus else {}
    return {**OUTPUTS, CLUSTER_VARIABLE: text, **told}


def topology(told: Mapping[str, Any], gpu_group: str | None = None) -> Topology:
    """From a resourceconfig.json, or the variables of Slurm or Vertex AI."""
    found = told
    if "instance_groups" not in told and "current_host" not in told:
        service = vertex if CLUSTER_VARIABLE in told else slurm
        found = service.resource_of(told) or {}
    return resolve(found, gpu_group)


SKIPPED = {name: DOCUMENTED[name] for name in ("workerpool0", "workerpool2")}
SWAPPED = {name: DOCUMENTED[name] for name in ("workerpool1", "workerpool0")}
SHAPES: list[tuple[dict[str, Any], str | None, str, str, str]] = [
    # The first host may be a CPU host, hosts are numbers and not text, and the named group wins.
    (REAL, None, "algo-1", "algo-2", "data_group: algo-1; dnn_group: algo-2"),
    (TEN, None, "algo-10", "algo-2", "cpu: algo-1; gpu: algo-2, algo-10, algo-11"),
    (TWO_KINDS, "y", "algo-2", "algo-2", "x: algo-1; y: algo-2"),
    (ALONE, None, "algo-10", "algo-1", f"{HOMOGENEOUS}: algo-1, algo-2, algo-10"),
    (ALONE | {"instance_groups": []}, None, "algo-10", "algo-1", f"{HOMOGENEOUS}: algo-1, algo-2, algo-10"),
    (LISTED, None, "algo-10", "algo-1", f"{HOMOGENEOUS}: algo-1, algo-2, algo-10"),
    ({"current_host": "algo-1"}, None, "algo-1", "algo-1", f"{HOMOGENEOUS}: algo-1"),
    (COUNTED, None, "n2", "n2", "cpu: n1; gpu: n2"),
    (RECORDED, None, "cpu-2", "gpu-1", "cpu: cpu-1, cpu-2; gpu: gpu-1"),
    (GUIDE | {"SLURM_GPUS_PER_NODE_HET_GROUP_0": "4"}, None, "nid00012", "nid00001", "gpu: nid00001; cpu: nid00011, nid00012"),
    (GUIDE | {"SLURM_GPUS_PER_NODE_HET_GROUP_1": "a:8"}, None, "nid00012", "nid00011", "cpu: nid00001; gpu: nid00011, nid00012"),
    # `--gres=gpu:4` sets no variable that other components see.
    (GUIDE, "component-1", "nid00012", "nid00011", "component-0: nid00001; component-1: nid00011, nid00012"),
    (THREE, None, "big2", "nid00011", "cpu-2: big1, big2; cpu: nid00001; gpu: nid00011, nid00012"),
    (PLAIN, None, "lx18", "lx15", "cpu: lx15, lx18, lx32, lx33"),
    (PLAIN | {"SLURM_GPUS_ON_NODE": "4"}, None, "lx18", "lx15", "gpu: lx15, lx18, lx32, lx33"),
    (PLAIN | {"SLURM_GPUS_PER_NODE": "v100:2"}, None, "lx18", "lx15", "gpu: lx15, lx18, lx32, lx33"),
    (PLAIN | {"SLURM_STEP_NODELIST": "lx[18,33]"}, None, "lx18", "lx18", "cpu: lx18, lx33"),
    # Pools of one group train together, and their order does not matter.
    (spec(1, 1, DOCUMENTED, 8, 8, 0, 0, **PRINTED), None, "cmle-1-1", "cmle-0-0", "gpu: cmle-0-0, cmle-1-0, cmle-1-1; cpu2: cmle-2-0, cmle-2-1; cpu3: cmle-3-0, cmle-3-1, cmle-3-2"),
    (spec(0, 0, SWAPPED, 0, 2), None, "cmle-0-0", "cmle-1-0", "cpu0: cmle-0-0; gpu: cmle-1-0, cmle-1-1"),
    *(
        (spec(2, 1, SKIPPED | skipped, 1, 0, 0), None, "cmle-2-1", "cmle-0-0", "gpu: cmle-0-0; cpu2: cmle-2-0, cmle-2-1")
        for skipped in ({}, {"workerpool1": []}, {"workerpool1": None}, {"workerpool1": {}})
    ),
    # XMANAGER; GIGL: without ports, several replicas in the first pool; PRINTED: machines are unknown.
    (spec(1, 1, DOCUMENTED), "workerpool0", "cmle-1-1", "cmle-0-0", "workerpool0: cmle-0-0; workerpool1: cmle-1-0, cmle-1-1; workerpool2: cmle-2-0, cmle-2-1; workerpool3: cmle-3-0, cmle-3-1, cmle-3-2"),
    (spec(0, 1, {"workerpool0": ["r0-0", "r0-1"], "workerpool3": ["r3-0"]}), "workerpool0", "r0-1", "r0-0", "workerpool0: r0-0, r0-1; workerpool3: r3-0"),
    (spec(0, 0, ONE, **PRINTED), None, "a-0", "a-0", "workerpool0: a-0"),
]  # fmt: skip
"""What a host is told, the group named in the job, this host, the head, and all hosts by group."""


@pytest.mark.parametrize(("told", "gpu_group", "host", "head", "groups"), SHAPES)
def test_hosts_groups_and_head_are_those_of_the_service(
    told: dict[str, Any], gpu_group: str | None, host: str, head: str, groups: str
) -> None:
    found = topology(told, gpu_group)
    assert (found.host, found.head) == (host, head)
    assert found.role == ("head" if host == head else "worker")
    assert found.trains == (found.group == found.gpu_group)
    assert found.hosts[0] == head and {*found.describe(found.hosts).split("; ")} == {
        *groups.split("; ")
    }


def test_every_host_agrees_on_everything_but_itself() -> None:
    mixed = {
        "a": ("ml.c5.xlarge", ["algo-3", "algo-1"]),
        "b": ("ml.g6.xlarge", ["algo-4", "algo-2"]),
    }
    sets = [
        [topology(job(f"algo-{n}", **mixed)) for n in range(1, 5)],
        [topology(RECORDED | {"SLURMD_NODENAME": n}) for n in ("gpu-1", "cpu-1", "cpu-2")],
        [
            topology(spec(pool, index, DOCUMENTED, 0, 1, 0, 0))
            for pool, members in enumerate(DOCUMENTED.values())
            for index in range(len(members))
        ],
    ]
    for found in sets:
        assert len({(each.hosts, str(each.groups)) for each in found}) == 1
        assert [each.role for each in found].count("head") == 1
    assert sets[0][0].hosts == ("algo-2", "algo-4", "algo-1", "algo-3")
    assert {group.instance_type for group in sets[1][0].groups} == {"gpu", "cpu"}, "the partitions"


FORM = f"^{CLUSTER_VARIABLE}: .*$"
WRONG: list[tuple[dict[str, Any], str | None, str]] = [
    (TWO_KINDS, "gpus", r"cluster.gpu_group: no group is named 'gpus'; found: x \(ml.g5.xlarge\), y \("),
    (job("a", x=("ml.g5.xlarge", ["a"]), y=("ml.p3.2xlarge", ["b"])), None, "cluster.gpu_group: several groups have GPUs"),
    (job("a", x=("ml.c5.xlarge", ["a"]), y=("ml.m5.xlarge", ["b"])), None, "no group's type is known to have GPUs"),
    (job("a", x=("ml.trn1.2xlarge", ["a"]), y=("", ["b"])), None, "no group's type is known to have GPUs"),
    (REAL | {"current_host": "algo-7"}, None, "current_host 'algo-7'"),
    (REAL | {"hosts": ["algo-1", "algo-2", "algo-3"]}, None, "no instance group holds algo-3"),
    (job("n1", gpu=("", ["n1"])) | {"hosts": ["n1", "n3"], "source": "X"}, None, "X: no instance group holds n3"),
    (GUIDE, None, r"cluster\.gpu_group: no group.*component-1"),
    (GUIDE | {"SLURMD_NODENAME": ""}, None, "SLURMD_NODENAME is not set"),
    (GUIDE | {LIST_1: ""}, None, f"{LIST_1} is not set"),
    (GUIDE | {"SLURM_HET_SIZE": "two"}, None, "SLURM_HET_SIZE='two'"),
    (GUIDE | {"SLURM_JOB_NODELIST": "nid00001"}, None, "leaves out nid00011, nid00012.*--het-group=0,1"),
    (GUIDE | {LIST_1: "nid[00001-00002]", "SLURM_JOB_NODELIST": ""}, None, "nid00001 bel"),
    (GUIDE | {"SLURMD_NODENAME": "nid7", "SLURM_GPUS_HET_GROUP_0": "1"}, None, "'nid7' is not among"),
    (GUIDE | {f"SLURM_GPUS_HET_GROUP_{n}": "1" for n in (0, 1)}, None, "several groups have GPUs"),
    (RECORDED | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, None, "several tasks on a node"),
    (RECORDED | {"SLURM_STEP_TASKS_PER_NODE": "1,12(x2)"}, None, "several tasks on a node"),
    (RECORDED | {"SLURM_LOCALID": "1"}, None, "several tasks on a node"),
    (PLAIN | {"SLURM_JOB_NODELIST": ""}, None, "SLURM_JOB_NODELIST is not set"),
    ({"STOKER_PLACE": "slurm"}, None, "no SLURM_STEP_ID; start train.py with srun"),
    (spec(0, 0, DOCUMENTED, **PRINTED), None, "cluster.gpu_group: no group's type is known to have GPUs"),
    *(
        ({**OUTPUTS, CLUSTER_VARIABLE: text, vertex.JOB_VARIABLE: "7"}, None, FORM)
        for text in ('{"cluster": {"workerpool0"', '["workerpool0"]', "", json.dumps({"cluster": ONE}))
    ),
    *(
        (spec(pool, index, cluster) | {vertex.JOB_VARIABLE: "7"}, None, FORM)
        for pool, index, cluster in (
            (0, 0, {"chief": ["a:1"]}), (1, 0, ONE), (0, 1, ONE), (0, "0", ONE), (0, None, ONE), (0, 0, {"workerpool0": [7]}),
        )
    ),
    (spec(0, 0, ONE) | {POOLS_VARIABLE: '{"workerpool1": {}}'}, None, f"^{POOLS_VARIABLE}: "),
    (spec(0, 0, ONE) | {"AIP_CHECKPOINT_DIR": ""}, None, "^AIP_CHECKPOINT_DIR: "),
    (spec(0, 0, ONE) | {"AIP_MODEL_DIR": "/m"}, None, "^AIP_MODEL_DIR: "),
    # Else each host would train alone, and exit with 0.
    ({"STOKER_PLACE": "vertex", CLUSTER_VARIABLE: ""}, None, "not set, so this host knows no others"),
]  # fmt: skip
"""What a host is told, the group named in the job, and a part of the refusal."""


@pytest.mark.parametrize(("told", "gpu_group", "message"), WRONG)
def test_what_is_wrong_partial_or_ambiguous_is_one_line(
    told: dict[str, Any], gpu_group: str | None, message: str
) -> None:
    with pytest.raises(TopologyError, match=message) as raised:
        topology(told, gpu_group)
    assert "\n" not in str(raised.value)


def test_elsewhere_the_variables_mean_nothing() -> None:
    of_the_script = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_PROCID": "0"}
    assert slurm.resource_of({}) is None and slurm.resource_of(of_the_script) is None
    other = {CLUSTER_VARIABLE: '{"clusterSpec": {"Master": ["host:1"]}}'}
    assert vertex.resource_of({}) is None and vertex.resource_of(other) is None


HOST_LISTS = {
    "alpha,beta,gamma": "alpha beta gamma",  # CONF
    "lx[15,18,32-33]": "lx15 lx18 lx32 lx33",  # CONF
    "gpu[01-03,07],cpu-[1-2]x": "gpu01 gpu02 gpu03 gpu07 cpu-1x cpu-2x",
    "rack[0-1]_blade[0-1]": "rack0_blade0 rack0_blade1 rack1_blade0 rack1_blade1",  # CONF
    "n[098-101]": "n098 n099 n100 n101",
    "a.example.org": "a.example.org",
    "linux[0000-1023]": " ".join(f"linux{number:04}" for number in range(1024)),  # CONF
}


def test_host_lists() -> None:
    assert {text: " ".join(slurm.hosts_in(text)) for text in HOST_LISTS} == HOST_LISTS
    for text in ("n[1", "n1]", "n[]", "n[3-1]", "n[a-b]", "n[1-]", "n[[1]]", "n[1-9999999]", " "):
        with pytest.raises(TopologyError, match=r"cannot read the host list|more than"):
            slurm.hosts_in(text)


@given(st.text(alphabet="ab01[],- ", max_size=20))
def test_any_text_is_a_list_or_an_error(text: str) -> None:
    try:
        found: Any = slurm.hosts_in(text)
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
    assert slurm.memory_mb(RECORDED) == 0, "--mem=0: the whole node"
    assert slurm.memory_mb(RECORDED | own) == 2048
    assert slurm.memory_mb(RECORDED | {"SLURM_MEM_PER_CPU_HET_GROUP_1": "500"}) == 1500
    assert slurm.memory_mb(PLAIN | {"SLURM_MEM_PER_NODE": "4096"}) == 4096


def test_names_stay_apart_as_labels_and_jobs_of_a_node_by_their_ports() -> None:
    assert in_order(["algo-10", "algo-9", "b", "algo-1"]) == ["algo-1", "algo-9", "algo-10", "b"]
    assert label("gpu_group.1") == "gpu_group.1"
    names = ("feed er/01", "feed er 01", "x" * 64, "x" * 63 + "-", "é")
    odd = {label(name) for name in names}
    assert len(odd) == len(names)
    assert all(len(text) <= 63 and text[0].isalnum() and text[-1].isalnum() for text in odd)
    ports = {slurm.port_of(str(number)) for number in range(100_000, 101_000)}
    assert len(ports) == 1000 and all(port % 2 == 0 for port in ports), "the door takes the next"
