"""docs/ray/sky.yaml agrees with itself and has only fields of SkyPilot, whose own client `make soak` asks."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
HEADER, GPU, CPU = yaml.safe_load_all((ROOT / "docs/ray/sky.yaml").read_text())


def test_the_tasks_agree_with_one_another() -> None:
    assert {
        "name": "stoker",
        "execution": "parallel",
        "primary_tasks": [GPU["name"]],
        "termination_delay": "30s",
    } == HEADER
    assert CPU["envs"]["HEAD"] == f"{GPU['name']}-0.{HEADER['name']}", (
        "the name that SkyPilot gives its host 0"
    )
    assert CPU["envs"]["PORT"] == GPU["envs"]["PORT"] and CPU["setup"] == GPU["setup"]
    assert GPU["envs"]["CPU_HOSTS"] == str(CPU["num_nodes"])
    pins = (ROOT / "constraints.txt").read_text()
    version = next(line for line in pins.splitlines() if line.startswith("ray=="))
    assert version in GPU["setup"].replace("ray[default]", "ray")
    for task in (GPU, CPU):
        assert task["envs"]["RAY_AUTH_MODE"] == "token" and task["secrets"] == {"RAY_AUTH_TOKEN": None}


TASK_FIELDS = {
    "api_server_access", "config", "envs", "event_callback", "file_mounts", "file_mounts_mapping", "inputs",
    "managed_secrets", "name", "num_nodes", "outputs", "pool", "resources", "run", "secrets", "service",
    "setup", "volume_mounts", "volumes", "workdir",
}  # fmt: skip
RESOURCES_FIELDS = {
    "accelerator_args", "accelerators", "any_of", "autostop", "cloud", "cpus", "disk_size", "disk_tier",
    "ephemeral_storage", "image_id", "infra", "instance_type", "job_recovery", "labels", "local_disk",
    "max_hourly_cost", "memory", "network_tier", "ordered", "ports", "priority", "priority_class", "region",
    "use_spot", "volumes", "zone",
}  # fmt: skip
"""Of SkyPilot 0.14.1, sky/utils/schemas.py: it refuses what is not among them."""


def test_the_tasks_have_only_fields_of_skypilot() -> None:
    for task in (GPU, CPU):
        assert set(task) <= TASK_FIELDS and set(task["resources"]) <= RESOURCES_FIELDS
    assert {mount["mode"] for mount in GPU["file_mounts"].values()} <= {"MOUNT", "COPY", "MOUNT_CACHED"}
