"""Policies, manifests and commands in the documentation are valid and say what the code does."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml

from stoker.config.places import CpuHostsConfig
from tests.fakes.aws import moto_server

DOCS = Path(__file__).resolve().parents[2] / "docs"
CONSTRAINTS = (DOCS.parent / "constraints.txt").read_text()
WITHOUT_NARROWER_RESOURCE = {
    "batch:ListServiceJobs",
    *("ecr:GetAuthorizationToken", "cloudwatch:PutMetricData"),
    *("servicequotas:ListServiceQuotas", "sts:GetServiceBearerToken"),
}


def statements(name: str) -> list[dict[str, Any]]:
    policy = json.loads((DOCS / "iam" / f"{name}.json").read_text())
    return [dict(statement) for statement in policy["Statement"]]


def listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


@pytest.mark.parametrize("name", ["launcher", "job-role"])
def test_policies_hold_no_wildcard_action(name: str) -> None:
    for statement in statements(name):
        actions = listed(statement["Action"])
        assert not any("*" in action for action in actions), statement
        if "*" in listed(statement["Resource"]):
            assert all(
                a in WITHOUT_NARROWER_RESOURCE or a.startswith(("ec2:", "ssmmessages:"))
                for a in actions
            ), statement


@pytest.mark.long
def test_iam_accepts_the_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    with moto_server() as environment:
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        iam: Any = boto3.session.Session().client("iam")
        for name in ("launcher", "job-role"):
            text = (DOCS / "iam" / f"{name}.json").read_text()
            for word, value in (
                ("ACCOUNT", "123456789012"),
                ("REGION", "us-east-1"),
                ("BUCKET", "bucket"),
            ):
                text = text.replace(word, value)
            iam.create_policy(PolicyName=name, PolicyDocument=text)
        trust = re.findall(r"```json\n(.*?)```", (DOCS / "iam" / "README.md").read_text(), re.S)[0]
        iam.create_role(RoleName="StokerJob", AssumeRolePolicyDocument=trust)


def ray_version() -> str:
    found = re.search(r"^ray==(\S+)", CONSTRAINTS, re.M)
    assert found
    return found[1]


def ray_start_options() -> set[str]:
    from ray.scripts.scripts import start

    return {option.lstrip("-") for parameter in start.params for option in parameter.opts}


AWS_RAY = "2.58.0"
"""Of AWS's image ray:train-ml-cuda."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ray", "tag"),
    [("rayjob.yaml", ray_version(), ray_version()), ("rayjob-aws.yaml", AWS_RAY, "train-ml-cuda")],
)
def test_rayjob_names_what_the_job_needs(name: str, ray: str, tag: str) -> None:
    job = yaml.safe_load((DOCS / "ray" / name).read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert spec["entrypoint"] == "python train.py --config job.yaml"
    environment = yaml.safe_load(spec["runtimeEnvYAML"])
    assert environment["env_vars"]["STOKER_PLACE"] == "ray"
    assert environment["env_vars"]["STOKER_RUN_DIR"].startswith("/")
    assert all(isinstance(value, str) for value in environment["env_vars"].values())
    assert cluster["rayVersion"] == ray
    assert cluster["authOptions"] == {"mode": "token"}
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    assert {group["labels"]["stoker-group"] for group in groups.values()} == {"gpu", "cpu"}
    assert groups["cpu"]["replicas"] > 0
    options = ray_start_options()
    for group in [cluster["headGroupSpec"], *groups.values()]:
        assert set(group["rayStartParams"]) <= options
        pod = group["template"]["spec"]
        mounts = {mount["name"] for c in pod["containers"] for mount in c["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert tag in container["image"] and "command" not in container
            assert container["resources"]["requests"] == container["resources"]["limits"]
    gpus = [name for name, g in groups.items() if "nvidia.com/gpu" in str(g["template"])]
    assert gpus == ["gpu"]


def test_aws_manifest_fits_aws_image() -> None:
    """Its Ray is one of the tested sets; what the image lacks is installed; the queue is named."""
    job = yaml.safe_load((DOCS / "ray" / "rayjob-aws.yaml").read_text())
    sets = (DOCS.parent / "scripts" / "versions.sh").read_text()
    assert f"packages middle 3.13 'ray=={AWS_RAY}'" in sets
    requirements = (DOCS.parent / "source_dir" / "requirements.txt").read_text().splitlines()
    installed = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["pip"]
    assert installed == [one for one in requirements if not one.startswith(("#", "ray["))]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert job["spec"]["shutdownAfterJobFinishes"], "Kueue waits for the end of the cluster"
    cluster = job["spec"]["rayClusterSpec"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        (container,) = group["template"]["spec"]["containers"]
        gpu = "nvidia.com/gpu" in container["resources"]["limits"]
        void = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in container.get("env", [])
        assert gpu != void
        assert "/tmp/ray" in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_rays_autoscaler_reads_the_spot_manifest_as_meant() -> None:
    """Ray's own translation of a KubeRay cluster into the configuration of its autoscaler."""
    from ray.autoscaler._private.kuberay.autoscaling_config import (
        _derive_autoscaling_config_from_ray_cr,
    )

    job = yaml.safe_load((DOCS / "ray" / "rayjob-spot.yaml").read_text())
    about = {"name": "spot", "namespace": "default"}
    config = _derive_autoscaling_config_from_ray_cr(
        {"metadata": about, "spec": job["spec"]["rayClusterSpec"]}
    )
    types = config["available_node_types"]
    hosts, trains = types["cpu"], types["gpu"]
    assert (hosts["min_workers"], hosts["max_workers"]) == (0, 8)
    assert hosts["resources"][CpuHostsConfig().resource] == 1 and hosts["resources"]["CPU"] == 15
    assert hosts["labels"]["stoker-group"] == "cpu"
    assert (trains["min_workers"], trains["max_workers"]) == (1, 1) and trains["resources"][
        "GPU"
    ] == 1
    assert CpuHostsConfig().resource not in trains["resources"]
    assert config["idle_timeout_minutes"] == 1


def test_cluster_launcher_file_is_what_ray_accepts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    monkeypatch.setenv("HOME", str(tmp_path))
    config = yaml.safe_load((DOCS / "ray" / "cluster.yaml").read_text())
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    validate_config(prepare_config(dict(config)))
    options = ray_start_options()
    commands = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    starts = [command for command in commands if "ray start" in command]
    assert len(starts) == 2
    for command in starts:
        assert command.startswith("RAY_AUTH_MODE=token ") and "--labels=stoker-group=" in command
        used = {
            word.lstrip("-").partition("=")[0]
            for word in shlex.split(command)
            if word.startswith("--")
        }
        assert used <= options, used - options
    assert any(f"=={ray_version()}" in command for command in config["setup_commands"])
