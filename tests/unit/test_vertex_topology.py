"""The topology from the shapes that CLUSTER_SPEC has in real Vertex AI jobs, and from damaged ones.

Sources: (1) Google Cloud documentation, "Distributed training"; (2) google-deepmind/xmanager, tests of
`xmanager.cloud.utils`; (3) Snapchat/GiGL, tests of its Vertex AI context; (4) jobs that print their own
variable in public repositories.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker.hosts.services.vertex import CLUSTER_VARIABLE, POOLS_VARIABLE, resource_of
from stoker.hosts.topology import Topology, TopologyError, resolve

OUTPUTS = {
    "AIP_MODEL_DIR": "gs://bucket/job/model/",
    "AIP_CHECKPOINT_DIR": "gs://bucket/job/checkpoints/",
    "AIP_TENSORBOARD_LOG_DIR": "gs://bucket/job/logs/",
}
NOT_TOLD = '{"python_module":"","package_uris":[],"job_args":[]}'
"""The field `job` as hosts show it (4): a string without machines."""


def spec(pool: str, index: Any, cluster: Any, **more: Any) -> dict[str, Any]:
    return {
        "cluster": cluster,
        "environment": "cloud",
        "task": {"type": pool, "index": index},
        **more,
    }


def host_of(found: Any, **variables: str) -> dict[str, Any]:
    text = found if isinstance(found, str) else json.dumps(found)
    resource = resource_of({**OUTPUTS, CLUSTER_VARIABLE: text, **variables})
    assert resource is not None
    return dict(resource)


def topology(found: Any, gpu_group: str | None = None, **variables: str) -> Topology:
    return resolve(host_of(found, **variables), gpu_group)


DOCUMENTED = {
    "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
    "workerpool1": ["cmle-training-workerpool1-ab-0:2222", "cmle-training-workerpool1-ab-1:2222"],
    "workerpool2": ["cmle-training-workerpool2-ab-0:2222", "cmle-training-workerpool2-ab-1:2222"],
    "workerpool3": [f"cmle-training-workerpool3-ab-{i}:2222" for i in range(3)],
}


def told(*gpus: int) -> dict[str, str]:
    """The launcher's description of pools: those with GPUs are one group."""
    pools = {
        f"workerpool{i}": {"group": "gpu" if n else f"cpu{i}", "type": "x", "gpus": n}
        for i, n in enumerate(gpus)
    }
    return {POOLS_VARIABLE: json.dumps(pools)}


def test_pools_of_one_group_train_together_and_their_order_does_not_matter() -> None:
    """(1): a chief and workers with GPUs, then CPU hosts; and CPU hosts first."""
    found = topology(spec("workerpool1", 1, DOCUMENTED, job=NOT_TOLD), **told(8, 8, 0, 0))
    assert (found.head, found.role) == ("cmle-training-workerpool0-ab-0", "worker")
    assert found.group == found.gpu_group == "gpu"
    assert found.trains and len(found.hosts) == 8
    assert [group.gpus for group in found.groups] == [8, 0, 0]
    said = found.describe(found.hosts)
    assert said.startswith("gpu: cmle-training-workerpool0-ab-0, cmle-training-workerpool1-ab-0")
    pools = {name: DOCUMENTED[name] for name in ("workerpool1", "workerpool0")}
    for pool, index, role in (("workerpool0", 0, "worker"), ("workerpool1", 0, "head")):
        found = topology(spec(pool, index, pools), **told(0, 2))
        assert (found.head, found.role) == ("cmle-training-workerpool1-ab-0", role)
        assert found.hosts[-1] == "cmle-training-workerpool0-ab-0"


@pytest.mark.parametrize(
    "skipped", [{}, {"workerpool1": []}, {"workerpool1": None}, {"workerpool1": {}}]
)
def test_a_skipped_pool_has_no_replicas(skipped: dict[str, Any]) -> None:
    """(1): `{}` for pool 1; pools keep their numbers."""
    pools = {name: DOCUMENTED[name] for name in ("workerpool0", "workerpool2")}
    found = topology(spec("workerpool2", 1, {**pools, **skipped}), **told(1, 0, 0))
    assert [group.name for group in found.groups] == ["gpu", "cpu2"]
    assert found.host == "cmle-training-workerpool2-ab-1"


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "xmanager": (spec("workerpool1", 1, DOCUMENTED), "cmle-training-workerpool1-ab-1"),
    # Without ports, several replicas in the first pool.
    "gigl": (
        spec("workerpool0", 1, {"workerpool0": ["r0-0", "r0-1"], "workerpool3": ["r3-0"]}),
        "r0-1",
    ),
    "printed by a job": (
        spec("workerpool3", 2, DOCUMENTED, job=NOT_TOLD, open_ports=[3333]),
        "cmle-training-workerpool3-ab-2",
    ),
}


@pytest.mark.parametrize(("found", "host"), OTHERS.values(), ids=OTHERS)
def test_shapes_of_other_projects(found: dict[str, Any], host: str) -> None:
    """(2), (3), (4)."""
    resource = host_of(found)
    assert resource["current_host"] == host
    assert topology(found, gpu_group="workerpool0").head == resource["hosts"][0]


def test_a_single_replica_trains_whatever_its_machine() -> None:
    """(4): a log of a job with one pool."""
    pools = {"workerpool0": ["cmle-training-workerpool0-d3072ebba8-0:2222"]}
    found = topology(spec("workerpool0", 0, pools, job=NOT_TOLD))
    assert (found.role, found.trains) == ("head", True)


def test_every_host_agrees_on_everything_but_itself() -> None:
    seen = {
        topology(spec(pool, index, DOCUMENTED), **told(0, 1, 0, 0)).hosts
        for pool, members in DOCUMENTED.items()
        for index in range(len(members))
    }
    assert len(seen) == 1


def test_elsewhere_the_variables_mean_nothing() -> None:
    assert resource_of({}) is None
    assert resource_of({CLUSTER_VARIABLE: '{"clusterSpec": {"Master": ["host:1"]}}'}) is None
    with pytest.raises(TopologyError, match="not set, so this host knows no others"):
        resource_of({"STOKER_PLACE": "vertex"})  # else each host would train alone, and exit with 0


ONE = {"workerpool0": ["a-0:2222"]}


@pytest.mark.parametrize(
    "found",
    [
        '{"cluster": {"workerpool0"',
        '["workerpool0"]',
        "",
        {"task": {"type": "workerpool0", "index": 0}},
        {"cluster": ONE},
        spec("workerpool0", 0, {"chief": ["a:1"]}),
        spec("workerpool1", 0, ONE),
        spec("workerpool0", 1, ONE),
        spec("workerpool0", "0", ONE),
        spec("workerpool0", None, ONE),
        spec("workerpool0", 0, {"workerpool0": [7]}),
    ],
)
def test_a_variable_of_another_form_is_one_line(found: Any) -> None:
    text = found if isinstance(found, str) else json.dumps(found)
    with pytest.raises(TopologyError, match=f"^{CLUSTER_VARIABLE}: .*$"):
        resource_of({**OUTPUTS, CLUSTER_VARIABLE: text, "CLOUD_ML_JOB_ID": "7"})


@pytest.mark.parametrize(
    ("name", "value"),
    [(POOLS_VARIABLE, '{"workerpool1": {}}'), ("AIP_CHECKPOINT_DIR", ""), ("AIP_MODEL_DIR", "/m")],
)
def test_pools_that_nobody_described_and_outputs_outside_of_buckets_are_refused(
    name: str, value: str
) -> None:
    cluster = {CLUSTER_VARIABLE: json.dumps(spec("workerpool0", 0, ONE))}
    with pytest.raises(TopologyError, match=f"^{name}: "):
        resource_of({**OUTPUTS, **cluster, name: value})


def test_pools_of_unknown_machines_need_a_name_for_the_one_that_trains() -> None:
    """(4): `job` tells no machines, and nobody else does."""
    with pytest.raises(
        TopologyError, match=r"cluster.gpu_group: no group's type is known to have GPUs"
    ):
        topology(spec("workerpool0", 0, DOCUMENTED, job=NOT_TOLD))
