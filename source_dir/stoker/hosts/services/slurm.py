"""Every host: Slurm describes the job's step in environment variables. Pure but for reading them.

The variables are those of the section "OUTPUT ENVIRONMENT VARIABLES" of Slurm's srun(1) and sbatch(1), and of
"Environment Variables" in its guide to heterogeneous jobs: a component's variables end in `_HET_GROUP_<n>`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.hosts.services import Service
from stoker.hosts.topology import TopologyError
from stoker.place import (
    KILLED_AFTER_VARIABLE,
    ORIGINS_FILE,
    PLACE_VARIABLE,
    RUN_DIR_VARIABLE,
    TOKEN_FILE,
    RunPlace,
)

NAME = "slurm"
PORTS = range(20_000, 30_000, 2)
"""The head's, for jobs that set none: above those of Ray's workers, below the kernel's ephemeral ones."""
STORE_SHARE, LEAST_STORE_MB = 0.3, 80
"""On a shared node, Ray's object store takes this share of the job's memory, and at least so many MB."""
MOST_HOSTS = 65_536
CODE = Path(__file__).resolve().parents[3]
"""The folder of train.py."""
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_GPU_VARIABLES = ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS")


def hosts_in(hostlist: str) -> list[str]:
    """Expand Slurm's hostlist syntax: `gpu[01-03,07],cpu-[1-2]x` → gpu01, gpu02, …, cpu-2x."""
    # Commas inside brackets separate numbers, all others separate hosts.
    found: list[str] = []
    for word in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|[\[\],]", hostlist):
        if word == ",":
            continue
        parts = re.split(r"\[([^\[\]]*)\]", word)
        if word in "[]" or not word.strip():
            raise TopologyError(f"Slurm: cannot read the host list {hostlist!r}")
        choices = [_numbers(part, hostlist) if i % 2 else [part] for i, part in enumerate(parts)]
        found += map("".join, itertools.islice(itertools.product(*choices), MOST_HOSTS + 1))
        if len(found) > MOST_HOSTS:
            raise TopologyError(f"Slurm: more than {MOST_HOSTS} hosts in {hostlist!r}")
    return found


def resource_of(variables: Mapping[str, str]) -> dict[str, Any] | None:
    """Hosts and groups in the form of resourceconfig.json; None outside a job step.

    A component with GPUs is the group `gpu`, one without is `cpu`; its type is the partition.
    """
    if "SLURM_JOB_ID" not in variables or "SLURM_STEP_ID" not in variables:
        if variables.get(PLACE_VARIABLE) == NAME:
            raise TopologyError(
                "Slurm: no SLURM_STEP_ID; start train.py with srun, one task per node"
            )
        return None
    host = _needed(variables, "SLURMD_NODENAME")
    tasks = variables.get("SLURM_STEP_TASKS_PER_NODE", "")
    if variables.get("SLURM_LOCALID", "0") != "0" or re.search(r"(^|,)([02-9]|1\d)", tasks):
        raise TopologyError(
            f"Slurm: several tasks on a node (SLURM_STEP_TASKS_PER_NODE={tasks}); start one per node, with"
            " srun --ntasks-per-node=1"
        )
    size = variables.get("SLURM_HET_SIZE")
    components = _components(variables, size) if size else [_alone(variables)]
    hosts = [host for component in components for host in component["hosts"]]
    twice = sorted({name for name in hosts if hosts.count(name) > 1})
    if twice:
        raise TopologyError(
            f"Slurm: {', '.join(twice)} belongs to several components of the job, which must not share nodes;"
            " request whole nodes (--exclusive) or different partitions"
        )
    mine = [
        component["instance_group_name"] for component in components if host in component["hosts"]
    ]
    return {
        "source": "Slurm's host lists",
        "current_host": host,
        "current_group_name": mine[0] if mine else None,
        "hosts": hosts,
        "instance_groups": components,
    }


def port_of(job_id: str) -> int:
    """The head's port; jobs that share a node have different ones, unless 5000 ids apart."""
    return PORTS[int(job_id) % len(PORTS)]


def resource() -> Mapping[str, Any] | None:
    """None also for what is typed in a step without being a staged job."""
    staged = (CODE / TOKEN_FILE).is_file() or os.environ.get(PLACE_VARIABLE) == NAME
    return resource_of(os.environ) if staged else None


def place() -> RunPlace:
    own = f"run-{_job_id(os.environ)}"
    run = Path(os.environ.get(RUN_DIR_VARIABLE) or own).resolve()
    return RunPlace(
        NAME,
        run,
        run / "checkpoints",
        run / "model",
        failure=run / "failure",
        killed_after_s=float(os.environ.get(KILLED_AFTER_VARIABLE) or 0) or None,
        job=_job_id(os.environ),
    )


def given() -> dict[str, str]:
    """As other jobs may run on the node; what the job sets itself is left out."""
    values = {"cluster.port": str(port_of(_job_id(os.environ)))}
    if memory := memory_mb(os.environ):
        values["cluster.object_store_mb"] = str(max(LEAST_STORE_MB, int(memory * STORE_SHARE)))
    try:
        own = json.loads((CODE / ORIGINS_FILE).read_text())
    except (OSError, ValueError):
        own = {}
    return {key: value for key, value in values.items() if key not in own}


def memory_mb(variables: Mapping[str, str]) -> int:
    """The memory that the job has on this node, MB; 0 if it has all of it."""
    host, end = variables.get("SLURMD_NODENAME"), ""
    for number in range(_count(variables.get("SLURM_HET_SIZE", ""))):
        if host in hosts_in(variables.get(f"SLURM_JOB_NODELIST_HET_GROUP_{number}", "")):
            end = f"_HET_GROUP_{number}"
    per_cpu = _count(variables.get(f"SLURM_MEM_PER_CPU{end}", ""))
    whole = _count(variables.get(f"SLURM_MEM_PER_NODE{end}", ""))
    return whole or per_cpu * _count(variables.get("SLURM_CPUS_ON_NODE", ""))


def _job_id(variables: Mapping[str, str]) -> str:
    # In a heterogeneous job the id of the first component, which is the same on every host.
    return variables.get("SLURM_JOB_ID_HET_GROUP_0") or variables.get("SLURM_JOB_ID", "0")


def _components(variables: Mapping[str, str], size: str) -> list[dict[str, Any]]:
    if not size.isdigit() or not int(size):
        raise TopologyError(f"Slurm: SLURM_HET_SIZE={size!r} is not a number of components")
    ends = [f"_HET_GROUP_{number}" for number in range(int(size))]
    lists = [hosts_in(_needed(variables, f"SLURM_JOB_NODELIST{end}")) for end in ends]
    # In a step it has the nodes of all components that the step runs on.
    here = hosts_in(variables.get("SLURM_JOB_NODELIST", ""))
    if here and (absent := [host for hosts in lists for host in hosts if host not in here]):
        groups = ",".join(map(str, range(int(size))))
        raise TopologyError(
            f"Slurm: this step leaves out {', '.join(absent)}; start it on every component of the job, with"
            f" srun --het-group={groups}"
        )
    gpus = [_gpus(variables, end, len(hosts)) for end, hosts in zip(ends, lists, strict=True)]
    if not any(gpus):
        # GPUs requested with --gres are not visible to other components; set cluster.gpu_group.
        return [
            {"instance_group_name": f"component-{number}", "hosts": hosts}
            for number, hosts in enumerate(lists)
        ]
    seen = {"gpu": 0, "cpu": 0}
    found = []
    for end, hosts, number in zip(ends, lists, gpus, strict=True):
        kind = "gpu" if number else "cpu"
        seen[kind] += 1
        name = kind if seen[kind] == 1 else f"{kind}-{seen[kind]}"
        found.append(_group(name, variables.get(f"SLURM_JOB_PARTITION{end}", ""), hosts, number))
    return found


def _alone(variables: Mapping[str, str]) -> dict[str, Any]:
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    nodes = next((variables[name] for name in names if variables.get(name)), "")
    hosts = hosts_in(nodes or _needed(variables, names[1]))
    number = _gpus(variables, "", len(hosts)) or _count(variables.get("SLURM_GPUS_ON_NODE", ""))
    return _group(
        "gpu" if number else "cpu", variables.get("SLURM_JOB_PARTITION", ""), hosts, number
    )


def _group(name: str, partition: str, hosts: list[str], gpus: int) -> dict[str, Any]:
    return {"instance_group_name": name, "instance_type": partition, "hosts": hosts, "gpus": gpus}


def _gpus(variables: Mapping[str, str], end: str, hosts: int) -> int:
    """GPUs per host of a component; 0 if it requested none."""
    for name in _GPU_VARIABLES:
        if number := _count(variables.get(name + end, "")):
            return -(-number // max(hosts, 1)) if name == "SLURM_GPUS" else number
    return 0


def _count(text: str) -> int:
    """`4`, `a100:4` or `a100:2,v100:1` as a number of GPUs; a type alone is one."""
    words = [word.rpartition(":")[2] for word in text.split(",") if word.strip()]
    return sum(int(word) if word.isdigit() else 1 for word in words)


def _needed(variables: Mapping[str, str], name: str) -> str:
    if not variables.get(name):
        raise TopologyError(f"Slurm: {name} is not set on this host; start train.py with srun")
    return variables[name]


def _numbers(text: str, hostlist: str) -> list[str]:
    """`01-03,07` → 01, 02, 03, 07: numbers of a range are as wide as its first one."""
    found: list[str] = []
    for word in text.split(","):
        parts = _RANGE.fullmatch(word)
        first, last = (parts[1], parts[2] or parts[1]) if parts else ("1", "0")
        if not int(first) <= int(last) < int(first) + MOST_HOSTS:
            raise TopologyError(f"Slurm: cannot read the host list {hostlist!r}")
        found += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return found


SERVICE = Service(resource=resource, place=place, given=given, installs=False)
