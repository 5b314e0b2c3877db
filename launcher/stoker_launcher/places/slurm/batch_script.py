"""Laptop: the batch script of a job, a pure function of its configuration and folders.

`slurm_problems` tells what Slurm would accept, or not even see; the rest is what `sbatch` answers.

Slurm starts the script on the first node; `srun` starts train.py once on every node. Several lines depend on
how Slurm delivers signals: with process tracking by cgroup, only the task itself gets SIGTERM, so train.py
must be the task (`exec`), not a child of a shell.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from stoker.config.loading import SECRETS_FILE
from stoker.config.places import SlurmConfig, SlurmGpuNodesConfig, SlurmNodesConfig
from stoker.config.redaction import redact
from stoker.hosts.raynode import LONGEST_TEMP_DIR
from stoker.place import (
    KILLED_AFTER_VARIABLE,
    PLACE_VARIABLE,
    RUN_DIR_VARIABLE,
    STOP_FILE,
    TOKEN_FILE,
)
from stoker_launcher.job import COMMAND

JOB_FILE = "slurm.job"
"""In the run directory: the job's id."""
EXIT_FILE = "slurm.exit"
"""In the run directory, once the script has ended: its exit code."""
LOG = "logs/slurm.log"
EPILOG = "slurm-epilog.sh"
OWN_FOLDER = "stoker-$SLURM_JOB_ID-$SLURM_PROCID"
"""A host's own temporary folder, for Ray, too: other jobs, and other users, may share the node."""
STOPPED_CODE = 143
LATE_S = 120
"""How much too early the signal before the time limit may seem to come: Slurm rounds it by up to a minute,
and the script starts some time after the job."""

OURS = (
    "account array chdir clusters constraint cpus-per-task error exclusive export gpus gpus-per-node"
    " gpus-per-task gres het-group job-name mem no-kill no-requeue nodes ntasks ntasks-per-node open-mode"
    " output partition qos requeue signal test-only time wait wrap"
)
"""Options that `slurm.*.extra` must not set: the script does, or the job could not be followed."""
LEAST_TO_TRAIN_S = 60
_PATH = re.compile(r"[\w./+,@=:-]+")


def batch_script(config: SlurmConfig, name: str, run_dir: Path) -> str:
    both = config.cpu.nodes > 0
    # What each component of a heterogeneous job needs.
    common = [f"--account={config.account}"] if config.account else []
    if config.max_runtime_s:
        common += [f"--time={clock(config.max_runtime_s)}", f"--signal=TERM@{config.stop_before_s}"]
    # A node that fails costs the job that host, not all of them.
    common += ["--requeue" if config.restarts else "--no-requeue", "--no-kill"]
    lines = [
        "#!/bin/bash",
        *_sbatch(f"--job-name={name}", f"--output={run_dir / LOG}", "--open-mode=append"),
    ]
    lines += _sbatch(f"--chdir={run_dir / 'code'}", *common, *_nodes(config.gpu))
    if both:
        lines += ["#SBATCH hetjob", *_sbatch(*common, *_nodes(config.cpu))]
    lines += [
        "",
        *_beginning(config, run_dir),
        "",
        *_step(config, run_dir, both),
        "",
        *_end(config),
    ]
    return "\n".join(lines) + "\n"


def clock(seconds: int) -> str:
    """Seconds as Slurm writes a time limit, `1-04:00:00`; it counts in minutes, so rounded up."""
    minutes = -(-seconds // 60)
    days, rest = divmod(minutes, 24 * 60)
    return (
        f"{days}-{rest // 60:02}:{rest % 60:02}:00"
        if days
        else f"{rest // 60:02}:{rest % 60:02}:00"
    )


def _nodes(nodes: SlurmNodesConfig) -> list[str]:
    options = [f"--partition={nodes.partition}"] if nodes.partition else []
    options += [f"--nodes={nodes.nodes}", "--ntasks-per-node=1"]
    if isinstance(nodes, SlurmGpuNodesConfig):
        kind = f"{nodes.gpu_type}:" if nodes.gpu_type else ""
        options.append(f"--gpus-per-node={kind}{nodes.gpus}")
    options.append(f"--cpus-per-task={nodes.cpus}" if nodes.cpus else "--exclusive")
    if nodes.memory_gb:
        options.append(f"--mem={nodes.memory_gb}G")
    elif nodes.cpus is None:
        options.append("--mem=0")  # all of it
    options += [f"--constraint={nodes.constraint}"] if nodes.constraint else []
    options += [f"--qos={nodes.qos}"] if nodes.qos else []
    return [*options, *nodes.extra]


def _sbatch(*options: str) -> list[str]:
    """Lines of #SBATCH, whose quotes work like a shell's."""
    plain = re.compile(r"[\w./:=@%+,&|*()!-]+")
    return [f"#SBATCH {word if plain.fullmatch(word) else shlex.quote(word)}" for word in options]


def _beginning(config: SlurmConfig, run_dir: Path) -> list[str]:
    own = "" if config.setup or config.image else str(Path(sys.executable).parent)
    # A process of Ray that is still starting when its host dies would create the folder again.
    epilog = (
        f'grep -lsz "^TMPDIR=.*/{OWN_FOLDER}$" /proc/[0-9]*/environ | cut -d/ -f3 | xargs -r kill -9;'
        f' rm -rf "${{TMPDIR:-/tmp}}/{OWN_FOLDER}" "/tmp/{OWN_FOLDER}"'
    )
    return [
        f"export {PLACE_VARIABLE}=slurm {RUN_DIR_VARIABLE}={shlex.quote(str(run_dir))}",
        *(
            [f"export {KILLED_AFTER_VARIABLE}={config.stop_before_s}"]
            if config.max_runtime_s
            else []
        ),
        f'cd "${RUN_DIR_VARIABLE}/code" || exit 1',
        # A job keeps its id when it is requeued; a script that is submitted twice has another one.
        f'(set -C; echo "$SLURM_JOB_ID" > ../{JOB_FILE}) 2>/dev/null',
        f'owner="$(cat ../{JOB_FILE})"',
        'if [ -n "$owner" ] && [ "$owner" != "$SLURM_JOB_ID" ]; then',
        '  echo "error: job $SLURM_JOB_ID does not start: its script is that of job $owner; to continue'
        f' it, submit the job with --resume ${RUN_DIR_VARIABLE}" >&2',
        "  exit 2",
        "fi",
        'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then',
        f"  rm -f ../failure ../{EXIT_FILE}  # of the start before",
        "fi",
        f'echo "$SLURM_JOB_ID" > ../{JOB_FILE}',
        f"printf '#!/bin/bash\\n%s\\n' {shlex.quote(epilog)} > ../{EPILOG} && chmod u+x ../{EPILOG}",
        *([f'export PATH={shlex.quote(own)}:"$PATH"'] if own else []),
        *config.setup,
        *([f'cd "${RUN_DIR_VARIABLE}/code" || exit 1'] if config.setup else []),
    ]


def _step(config: SlurmConfig, run_dir: Path, both: bool) -> list[str]:
    """Start train.py once on every node; the end of one host ends no other."""
    step = ["srun", "--kill-on-bad-exit=0", "--wait=0", "--no-kill", "--cpu-bind=none", "--mem=0"]
    step += ["--het-group=0,1"] if both else []
    step.append(f'--task-epilog="${RUN_DIR_VARIABLE}/{EPILOG}"')
    command = shlex.join(COMMAND)
    if config.container == "pyxis":
        mounts = ",".join(
            f"{path}:{path}" if ":" not in path else path for path in [str(run_dir), *config.mounts]
        )
        step += [f"--container-image={shlex.quote(config.image or '')}"]
        step += [
            f"--container-mounts={shlex.quote(mounts)}",
            f"--container-workdir={shlex.quote(str(run_dir))}/code",
        ]
    if config.container == "apptainer":
        binds = ",".join([str(run_dir), *config.mounts])
        words = [
            "apptainer",
            "exec",
            "--nv",
            "--bind",
            binds,
            "--pwd",
            f"{run_dir}/code",
            config.image or "",
        ]
        command = f"{shlex.join(words)} {command}"
    host = [
        f'export TMPDIR="${{TMPDIR:-/tmp}}/{OWN_FOLDER}" STOKER_HOST_CPUS="$SLURM_CPUS_ON_NODE"',
        "# The sockets of Ray need short paths.",
        'export RAY_TMPDIR="$TMPDIR"',
        f'[ "${{#TMPDIR}}" -le {LONGEST_TEMP_DIR} ] || RAY_TMPDIR="/tmp/{OWN_FOLDER}"',
        "# Ray opens its folders to all users of the node; these contain them.",
        'for own in "$TMPDIR" "$RAY_TMPDIR"; do',
        '  (umask 077; mkdir -p "$own") && [ -O "$own" ] && chmod 700 "$own" && continue',
        '  echo "$own: belongs to somebody else, or cannot be made" >&2; exit 1',
        "done",
        f"exec {command}",
    ]
    return [
        "# scancel and preemptions signal this script, too; the time limit and `stoker stop` only the hosts.",
        "signalled=",
        "trap 'signalled=1' TERM",
        f"if [ -e ../{STOP_FILE} ]; then",
        f"  rm ../{STOP_FILE}; echo 'stopped before its hosts started' > ../failure; exit {STOPPED_CODE}",
        "fi",
        "# They describe the first component, and srun would apply them to all nodes.",
        "unset SLURM_CPUS_PER_TASK SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU",
        f"{' '.join(step)} bash -c {shlex.quote(chr(10).join(['', *host]))}",
        "code=$?",
        "# srun's code is the highest of all hosts: a lost CPU host does not fail a run, and none succeeds",
        "# without a result. grep comes first, because opening a file refreshes what NFS knows of it.",
        """if grep -q '^ "status": "succeeded"' ../summary.json 2>/dev/null \\""",
        f"    && [ ../summary.json -nt ../{JOB_FILE} ]; then code=0",
        """elif [ "$code" = 0 ]; then code=1; echo 'the job ended without a result' > ../failure; fi""",
    ]


def _end(config: SlurmConfig) -> list[str]:
    lines = []
    if config.max_runtime_s and config.restarts:
        restarts = config.restarts
        near = max(0, config.max_runtime_s - config.stop_before_s - LATE_S)
        lines += [
            f'if [ "$code" = {STOPPED_CODE} ] && [ -z "$signalled" ] && [ ! -e ../{STOP_FILE} ] \\',
            f'    && [ "$SECONDS" -ge {near} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then',
            '  echo "time limit: requeueing the job, which resumes from its checkpoint"',
            f'  scontrol requeue "$SLURM_JOB_ID" && exit {STOPPED_CODE}',
            "fi",
        ]
    keep = '[ -n "$signalled" ] || ' if config.restarts else ""
    return [
        *lines,
        f"{keep}rm -f {TOKEN_FILE} {SECRETS_FILE}  # a preempted job still needs them",
        f"rm -f ../{STOP_FILE}",
        f'echo "$code" > ../{EXIT_FILE}',
        'exit "$code"',
    ]


def slurm_problems(config: SlurmConfig, output_dir: str) -> Iterator[str]:
    if not PurePosixPath(output_dir).is_absolute():
        where = "an absolute folder that all nodes of the cluster share"
        yield f"output_dir: must be {where} (got {output_dir!r})"
    elif not _PATH.fullmatch(output_dir):
        yield f"output_dir: {output_dir!r} has characters that Slurm's options give a meaning; rename it"
    if config.cpu.nodes == 0 and config.cpu.model_fields_set - {"nodes"}:
        given = ", ".join(sorted(config.cpu.model_fields_set - {"nodes"}))
        yield f"slurm.cpu: {given} set, but nodes is 0; set slurm.cpu.nodes, or leave the others out"
    if (
        config.max_runtime_s is not None
        and config.max_runtime_s - config.stop_before_s < LEAST_TO_TRAIN_S
    ):
        yield (
            f"slurm.max_runtime_s: {config.max_runtime_s} leaves no time to train, as the run stops"
            f" {config.stop_before_s} s before (slurm.stop_before_s)"
        )
    for section, nodes in _components(config):
        for option in nodes.extra:
            name, sign, _ = option.removeprefix("--").partition("=")
            if not option.startswith("--") or (" " in name and not sign) or "\n" in option:
                yield f"{section}.extra: {option!r} must have the form --option or --option=value"
            elif ours := next(
                (one for one in OURS.split() if one.startswith(name)), ""
            ):  # sbatch completes names
                yield f"{section}.extra: --{ours} is Stoker's to set; see the keys of {section} and slurm"
    for at, line in enumerate(config.setup):
        key = f"slurm.setup[{at}]"
        if line.lstrip().startswith("#SBATCH"):
            yield f"{key}: #SBATCH lines belong into slurm.gpu.extra and slurm.cpu.extra"
        for name, value in re.findall(r"(\w+)=[\"']?([^\s\"']+)", line):
            if redact(value, name) != value and not value.startswith("$"):
                yield (
                    f"{key}: {name} looks like a secret, which the script and the run's files would show;"
                    " export it in the shell that submits, or read it from a private file: $(cat ~/.key)"
                )


def _components(config: SlurmConfig) -> list[tuple[str, SlurmNodesConfig]]:
    cpu: list[tuple[str, SlurmNodesConfig]] = (
        [("slurm.cpu", config.cpu)] if config.cpu.nodes > 0 else []
    )
    return [("slurm.gpu", config.gpu), *cpu]
