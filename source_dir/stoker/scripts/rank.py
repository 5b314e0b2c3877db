"""Train worker: starts the script with torchrun's environment and watches it until it ends."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from stoker.config.schema import Config
from stoker.errors import ScriptError
from stoker.hosts import machine
from stoker.place import RUN_DIR_VARIABLE
from stoker.recipe import SOURCE_FOLDER
from stoker.scripts.failures import UNCAUGHT, Exit, last_error
from stoker.scripts.process import Child
from stoker.scripts.script_checks import SCRIPT_FOLDER, find_script
from stoker.scripts.supervisor import Order, Report
from stoker.session import CHECKPOINTS_VARIABLE, CPU_HOSTS_VARIABLE, JOB_VARIABLE
from stoker.train.trainer import ATTEMPT_VARIABLE

POLL_S = 0.2
STOP_S = 60.0
"""Time from SIGTERM to SIGKILL; the driver gives up after 90 s, SageMaker after 120 s."""
SOON_S = 10.0
"""The same after another rank has failed."""
ANSWER_S = 60.0
RUNTIME_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
NOT_THE_SCRIPTS = (
    *("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE", RUNTIME_VARIABLE, "PYTHONBREAKPOINT"),
    *("STOKER_FORKS", "STOKER_TRAINS"),
)
"""Variables that Ray sets for workers; a script that uses Ray is a separate driver."""


def run_script(settings: dict[str, Any]) -> None:
    """Entered by Ray Train in every process.

    Settings: config, coordinator (a `Supervisor`), job (id), run_dir, lasting (its copy for other hosts than
    the head), head (node id), checkpoint_dir, model_dir, folder (working directory, or None for the script's
    folder), channels (name → path of the data).
    """
    import ray
    import ray.train

    supervisor, rank = settings["coordinator"], ray.train.get_context().get_world_rank()
    node = ray.get_runtime_context().get_node_id()
    supervisor.log.remote("train_worker", {"rank": rank, "node": node})
    if rank == 0:
        supervisor.log.remote("phase", {"phase": "train workers started"})
    settings = {**settings, "run_dir": run_dir_on(node, settings)}
    config: Config = settings["config"]
    path = find_script(config)
    for folder in (settings["checkpoint_dir"], settings["model_dir"], settings["run_dir"]):
        Path(folder).mkdir(parents=True, exist_ok=True)
    folder = Path(settings["folder"] or SOURCE_FOLDER / SCRIPT_FOLDER)
    child = Child([sys.executable, str(path), *config.args], environment(settings), folder)

    def tell(output: str = "", end: Exit | None = None) -> Order:
        report = Report(os.environ[ATTEMPT_VARIABLE], rank, output, child.events(), end)
        order: Order = ray.get(supervisor.report.remote(report), timeout=ANSWER_S)
        return order

    try:
        order = watch(child, path.name, rank, tell)
    finally:
        child.close()
    if order.failure:
        raise ScriptError(order.failure)


def run_dir_on(node: str, settings: dict[str, Any]) -> str:
    """The run directory, which on another host than the head's would be lost with the host."""
    return str(settings["run_dir" if node == settings["head"] else "lasting"])


def watch(child: Child, script: str, rank: int, tell: Any) -> Order:
    """Relay output and orders until all ranks have ended."""
    asked_at: float | None = None
    end: Exit | None = None
    killed = ""
    while True:
        code = child.poll() if end is None else None
        output = child.output()
        if code is not None and end is None:
            line = last_error(child.tail, script) if code == UNCAUGHT else ""
            end = Exit(rank, code, asked_at is not None, line)
            output += killed
        order: Order = tell(output, end)
        if order.over:
            return order
        if end is None and order.stop:
            if asked_at is None:
                asked_at = time.monotonic()
                child.terminate()
            given = SOON_S if order.soon else STOP_S
            if not killed and time.monotonic() - asked_at > given:
                killed = f"stoker: the script did not end within {given:g} s of SIGTERM and was killed\n"
                child.kill()
        if len(output) < POLL_S * 1_000_000:
            time.sleep(POLL_S)


def environment(settings: dict[str, Any]) -> dict[str, str]:
    """The environment of `torchrun`, and variables for the run and its Ray cluster."""
    import ray

    context, config = ray.train.get_context(), settings["config"]
    local_size = context.get_local_world_size()
    threads = config.train.threads or max(1, machine.cores() // local_size)
    size, rank = str(context.get_world_size()), str(context.get_world_rank())
    given = {name: value for name, value in os.environ.items() if name not in NOT_THE_SCRIPTS}
    paths = [str(SOURCE_FOLDER), *filter(None, [given.get("PYTHONPATH")])]
    return {
        **given,
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(context.get_node_rank()),
        "NODE_RANK": str(context.get_node_rank()),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        # PyTorch and Lightning detect an external launcher by these.
        "TORCHELASTIC_RUN_ID": settings["job"],
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(config.train.max_failures),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        RUN_DIR_VARIABLE: settings["run_dir"],
        JOB_VARIABLE: settings["job"],
        CHECKPOINTS_VARIABLE: settings["checkpoint_dir"],
        CPU_HOSTS_VARIABLE: config.cluster.cpu_hosts.model_dump_json(),
        "SM_MODEL_DIR": settings["model_dir"],
        **{f"SM_CHANNEL_{name.upper()}": path for name, path in settings["channels"].items()},
        **_same_runtime_environment(),
    }


def _same_runtime_environment() -> dict[str, str]:
    """The runtime environment with the job's code, on a cluster that the job did not form.

    The script's tasks need it, too; Ray passes it to a job's driver in this variable.
    """
    import ray

    runtime = ray.get_runtime_context().runtime_env
    shared = {key: runtime[key] for key in ("working_dir", "pip") if runtime.get(key)}
    return {RUNTIME_VARIABLE: json.dumps({"runtime_env": shared})} if shared else {}
