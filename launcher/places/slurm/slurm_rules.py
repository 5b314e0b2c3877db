"""Laptop: what is wrong with a job for Slurm, before it waits in a queue for hours."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from launcher.places.slurm.batch_script import OURS, clock
from launcher.places.slurm.slurm_commands import Partition
from stoker.config.places import SlurmConfig, SlurmGpuNodesConfig, SlurmNodesConfig
from stoker.config.redaction import is_secret
from stoker.errors import nearest

LONGEST_SIGNAL_S = 65_535
"""The largest time that `sbatch --signal` accepts."""
LEAST_TO_TRAIN_S = 60
_PATH = re.compile(r"[\w./+,@=:-]+")
_WORD = re.compile(r"[\w.:+-]+")


def problems_of(config: SlurmConfig, output_dir: str) -> list[str]:
    """The problems that show without asking the cluster, one line each."""
    problems = []
    if not PurePosixPath(output_dir).is_absolute():
        problems.append(
            f"output_dir: must be an absolute folder that all nodes of the cluster share (got {output_dir!r})"
        )
    elif not _PATH.fullmatch(output_dir):
        problems.append(
            f"output_dir: {output_dir!r} has characters that Slurm's options give a meaning; rename it"
        )
    if config.gpu.gpus < 1:
        problems.append(
            f"slurm.gpu.gpus: {config.gpu.gpus}, but these nodes train; set at least 1, and put nodes without"
            " GPUs into slurm.cpu"
        )
    if config.gpu.nodes < 1:
        problems.append(f"slurm.gpu.nodes: {config.gpu.nodes}; at least 1 node must train")
    if config.cpu.nodes < 0:
        problems.append(f"slurm.cpu.nodes: {config.cpu.nodes}; set 0 for none")
    elif config.cpu.nodes == 0 and config.cpu.model_fields_set - {"nodes"}:
        given = ", ".join(sorted(config.cpu.model_fields_set - {"nodes"}))
        problems.append(
            f"slurm.cpu: {given} set, but nodes is 0; set slurm.cpu.nodes, or leave the others out"
        )
    problems += _time_problems(config)
    for section, nodes in _components(config):
        problems += [problem for option in nodes.extra for problem in _extra_problems(section, option)]
        for key in ("partition", "qos", "gpu_type"):
            value = getattr(nodes, key, None)
            if value is not None and not _WORD.fullmatch(value):
                problems.append(f"{section}.{key}: {value!r} is no name")
        if nodes.constraint is not None and not nodes.constraint.strip():
            problems.append(f"{section}.constraint: is empty; leave it out")
    if config.account is not None and not _WORD.fullmatch(config.account):
        problems.append(f"slurm.account: {config.account!r} is no name")
    same = config.cpu.nodes > 0 and config.cpu.partition == config.gpu.partition
    if same and config.cpu.cpus and config.gpu.cpus:
        problems.append(
            "slurm.cpu.partition: is that of slurm.gpu, so both could get the same node; use another one, or"
            " leave out slurm.cpu.cpus to request whole nodes"
        )
    for at, line in enumerate(config.setup):
        if line.lstrip().startswith("#SBATCH"):
            problems.append(
                f"slurm.setup[{at}]: #SBATCH lines belong into slurm.gpu.extra and slurm.cpu.extra"
            )
    problems += [
        f"slurm.setup[{at}]: {name} looks like a secret, which the script and the run's files would show;"
        " export it in the shell that submits, or read it from a private file: $(cat ~/.key)"
        for at, line in enumerate(config.setup)
        for name, value in re.findall(r"(\w+)=[\"']?([^\s\"']+)", line)
        if is_secret(name, value) and not value.startswith("$")
    ]
    problems += [
        f"slurm.mounts: {path!r} must be /path or /path:/inside" for path in config.mounts if path[:1] != "/"
    ]
    return problems


def cluster_problems(config: SlurmConfig, known: dict[str, Partition]) -> list[str]:
    """What the cluster's partitions cannot give; Slurm would queue most of it for ever."""
    problems = []
    for section, nodes in _components(config):
        wanted = nodes.partition or ""
        if wanted and wanted not in known:
            names = sorted(name for name in known if name)
            hint = nearest(wanted, names, f"partitions: {', '.join(names)}")
            problems.append(f"{section}.partition: this cluster has no partition {wanted!r}{hint}")
        elif wanted in known:
            problems += _partition_problems(section, nodes, known[wanted], config.max_runtime_s)
        else:
            problems.append(
                f"{section}.partition: this cluster has no default partition; name one of sinfo's"
            )
    return problems


def _partition_problems(
    section: str, nodes: SlurmNodesConfig, partition: Partition, max_runtime_s: int | None
) -> list[str]:
    name = f"partition {partition.name}"
    problems = []
    if not partition.up:
        problems.append(f"{section}.partition: {name} is not up; ask your administrators, or choose another")
    if nodes.nodes > partition.nodes:
        problems.append(f"{section}.nodes: {nodes.nodes}, but {name} has only {partition.nodes}")
    if nodes.cpus and nodes.cpus > partition.cpus:
        problems.append(f"{section}.cpus: {nodes.cpus}, but nodes of {name} have at most {partition.cpus}")
    if isinstance(nodes, SlurmGpuNodesConfig) and nodes.gpus > partition.gpus:
        problems.append(
            f"{section}.gpus: {nodes.gpus}, but nodes of {name} have at most {partition.gpus}"
            if partition.gpus
            else f"{section}.partition: nodes of {name} have no GPUs; training needs them"
        )
    limit = partition.limit_s
    if max_runtime_s and limit is not None and max_runtime_s > limit:
        problems.append(
            f"slurm.max_runtime_s: {max_runtime_s}, but {name} allows at most {limit} ({clock(limit)});"
            " set that: the job requeues itself at its limit and resumes (slurm.restarts)"
        )
    return problems


def _time_problems(config: SlurmConfig) -> list[str]:
    limit, before = config.max_runtime_s, config.stop_before_s
    if limit is not None and limit < 1:
        return [f"slurm.max_runtime_s: {limit}; set the seconds that one start may take, such as 14400"]
    if not 1 <= before <= LONGEST_SIGNAL_S:
        return [f"slurm.stop_before_s: {before} is not between 1 and {LONGEST_SIGNAL_S}"]
    if limit is not None and limit - before < LEAST_TO_TRAIN_S:
        return [
            f"slurm.max_runtime_s: {limit} leaves no time to train, as the run stops {before} s before"
            " (slurm.stop_before_s)"
        ]
    return []


def _extra_problems(section: str, option: str) -> list[str]:
    name, sign, _ = option.removeprefix("--").partition("=")
    if not option.startswith("--") or (" " in name and not sign) or "\n" in option:
        return [f"{section}.extra: {option!r} must have the form --option or --option=value"]
    if name in OURS:
        return [f"{section}.extra: --{name} is set by Stoker; see the keys of {section} and slurm"]
    return []


def _components(config: SlurmConfig) -> list[tuple[str, SlurmNodesConfig]]:
    cpu: list[tuple[str, SlurmNodesConfig]] = [("slurm.cpu", config.cpu)] if config.cpu.nodes > 0 else []
    return [("slurm.gpu", config.gpu), *cpu]
