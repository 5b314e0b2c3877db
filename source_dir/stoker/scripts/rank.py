"""Train worker: starts the script with torchrun's environment and watches it until it ends."""

from __future__ import annotations

import codecs
import contextlib
import json
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stoker.config.schema import Config
from stoker.errors import ScriptError
from stoker.events import kinds
from stoker.hosts import machine
from stoker.hosts.raynode import end_with_parent
from stoker.place import RUN_DIR_VARIABLE
from stoker.recipe import SOURCE_FOLDER
from stoker.scripts.script_checks import SCRIPT_FOLDER, find_script
from stoker.scripts.supervisor import TRACEBACK, UNCAUGHT, Exit, RankCommand, last_error
from stoker.session import (
    ATTEMPT_VARIABLE,
    CHECKPOINTS_VARIABLE,
    CPU_HOSTS_VARIABLE,
    EVENTS_VARIABLE,
    JOB_VARIABLE,
    SUPERVISOR_VARIABLE,
)
from stoker.storage.checkpoint_store import Cleaner

POLL_S, ORDER_S = 0.2, 1.0
"""Interval of looking at the script, and of asking for orders while there is nothing to tell."""
STOP_SHARE, STOP_S = 0.5, 900.0
"""From the script's SIGTERM to its SIGKILL: this share of the time until the place kills, else so long."""
SOON_S = 10.0
"""The same after another rank has failed."""
ANSWER_S = 60.0
RUNTIME_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
NOT_THE_SCRIPTS = (
    *("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE", RUNTIME_VARIABLE, "PYTHONBREAKPOINT"),
    "STOKER_FORKS",
)
"""Variables that Ray sets for workers; a script that uses Ray is a separate driver."""


def run_driver(settings: dict[str, Any]) -> None:
    """Entered on the head in a task that claims nothing: starts a Ray script.

    With `train.max_failures`, a script that fails is started again.
    """
    supervisor, config = settings["coordinator"], settings["config"]
    supervisor.log.remote(kinds.DriverStarted())
    for left in range(config.train.max_failures, -1, -1):
        try:
            _run(settings, 0, {ATTEMPT_VARIABLE: secrets.token_hex(4)})
            return
        except ScriptError as error:
            if not left:
                raise
            supervisor.log.remote(kinds.TrainWorkerLost(cause=str(error), restarts_left=left - 1))


def run_script(settings: dict[str, Any]) -> None:
    """Entered by Ray Train in every process.

    Settings: config, coordinator (a `Supervisor`), job (id), run_dir, lasting (its copy for other hosts than
    the head), killed_after_s (of the place), head (node id), checkpoint_dir, model_dir, folder (working
    directory, or None for the script's folder), channels (name → path of the data).
    """
    import ray
    import ray.train

    supervisor, rank = settings["coordinator"], ray.train.get_context().get_world_rank()
    node = ray.get_runtime_context().get_node_id()
    supervisor.log.remote(kinds.TrainWorkerStarted(rank=rank, node=node))
    if rank == 0:
        supervisor.log.remote(kinds.PhaseDone(phase="train workers started"))
    settings = {**settings, "run_dir": run_dir_on(node, settings)}
    _run(settings, rank, rank_environment(settings["config"], settings["job"]))


def _run(settings: dict[str, Any], rank: int, own: dict[str, str]) -> None:
    import ray

    config: Config = settings["config"]
    supervisor, attempt = settings["coordinator"], {**os.environ, **own}[ATTEMPT_VARIABLE]
    path = find_script(config)
    for folder in (settings["checkpoint_dir"], settings["model_dir"], settings["run_dir"]):
        Path(folder).mkdir(parents=True, exist_ok=True)
    folder = Path(settings["folder"] or SOURCE_FOLDER / SCRIPT_FOLDER)
    variables = {**environment(settings), **own}
    child = Child([sys.executable, str(path), *config.args], variables, folder)

    def tell(output: str, events: list[dict[str, Any]], end: Exit | None) -> RankCommand:
        call = supervisor.report.remote(attempt, rank, output, events, end)
        order: RankCommand = ray.get(call, timeout=ANSWER_S)
        return order

    try:
        order = watch(child, path.name, rank, tell, settings["killed_after_s"])
    finally:
        child.close()
    if order.failure:
        raise ScriptError(order.failure)


def run_dir_on(node: str, settings: dict[str, Any]) -> str:
    """The run directory, which on another host than the head's would be lost with the host."""
    return str(settings["run_dir" if node == settings["head"] else "lasting"])


def watch(
    child: Child, script: str, rank: int, tell: Any, killed_after_s: float | None = None
) -> RankCommand:
    stop_s = STOP_S if killed_after_s is None else killed_after_s * STOP_SHARE
    asked_at: float | None = None
    end: Exit | None = None
    killed, order, told = "", RankCommand(), -ORDER_S
    while True:
        code = child.poll() if end is None else None
        output, events = child.output(), child.events()
        if code is not None and end is None:
            line = last_error(child.tail, script) if code == UNCAUGHT else ""
            end = Exit(rank, code, asked_at is not None, line, child.failed_at)
            output += killed
        if output or events or end is not None or time.monotonic() - told >= ORDER_S:
            order, told = tell(output, events, end), time.monotonic()
        if order.over:
            return order
        if end is None and order.stop:
            if asked_at is None:
                asked_at = time.monotonic()
                child.terminate()
            given = SOON_S if order.soon else stop_s
            if not killed and time.monotonic() - asked_at > given:
                killed = (
                    f"stoker: the script did not end within {given:g} s of SIGTERM and was killed\n"
                )
                child.kill()
        if len(output) < POLL_S * 1_000_000:
            child.listen(POLL_S)


def rank_environment(config: Config, job: str) -> dict[str, str]:
    """The variables that torchrun sets."""
    import ray.train

    context = ray.train.get_context()
    local_size = context.get_local_world_size()
    threads = config.train.threads or max(1, machine.cores() // local_size)
    size, rank = str(context.get_world_size()), str(context.get_world_rank())
    return {
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
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(config.train.max_failures),
        "OMP_NUM_THREADS": str(threads),
    }


def environment(settings: dict[str, Any]) -> dict[str, str]:
    import ray

    config: Config = settings["config"]
    given = {name: value for name, value in os.environ.items() if name not in NOT_THE_SCRIPTS}
    paths = [str(SOURCE_FOLDER), *filter(None, [given.get("PYTHONPATH")])]
    of_the_job = {
        RUN_DIR_VARIABLE: settings["run_dir"],
        JOB_VARIABLE: settings["job"],
        CHECKPOINTS_VARIABLE: settings["checkpoint_dir"],
        CPU_HOSTS_VARIABLE: config.cluster.cpu_hosts.model_dump_json(),
        "SM_MODEL_DIR": settings["model_dir"],
        **{f"SM_CHANNEL_{name.upper()}": path for name, path in settings["channels"].items()},
    }
    if config.driver:
        of_the_job[SUPERVISOR_VARIABLE] = settings["job"]
        with contextlib.suppress(ImportError, AttributeError):  # then only stoker.log reports
            from stoker.scripts.train_reports import CALLBACK, VARIABLE

            given[VARIABLE] = ",".join(filter(None, [given.get(VARIABLE), CALLBACK]))
    return {
        **given,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        **of_the_job,
        **runtime_environment(of_the_job if config.driver else {}),
    }


def runtime_environment(variables: dict[str, str]) -> dict[str, str]:
    """What the script's own tasks and actors need: the job's code, if the job did not form the cluster, and
    a Ray script's `variables`. Ray passes it to a driver in a variable.
    """
    import ray

    runtime = ray.get_runtime_context().runtime_env
    shared = {key: runtime[key] for key in ("working_dir", "pip") if runtime.get(key)}
    shared |= {"env_vars": variables} if variables else {}
    return {RUNTIME_VARIABLE: json.dumps({"runtime_env": shared})} if shared else {}


MOST_BYTES = 1 << 18
"""Read limit per poll; a script that prints faster blocks, as on a slow terminal."""
PART_EVERY_S = 10.0
"""Interval for forwarding incomplete lines, such as progress bars."""
PIPE_S = 2.0
"""How long to wait for output of leftover processes after the script has ended."""
NOTE_S = 0.02
"""How exactly the time of a failure is known."""
TAIL_CHARACTERS = 1 << 16
PREFIX = "stoker-script-"


class Child:
    """The user's script and all processes that it starts."""

    def __init__(self, command: list[str], environment: Mapping[str, str], folder: Path) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix=PREFIX)
        self._cleaner = Cleaner(Path(self._scratch.name), PREFIX)  # if this process is killed
        self._events = Path(self._scratch.name) / "events.jsonl"
        self._events.touch()
        self._events_read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._part, self._part_since = "", time.monotonic()
        self.tail = ""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._pipe = os.fdopen(reading, "rb", buffering=0)
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, EVENTS_VARIABLE: str(self._events)},
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            start_new_session=True,  # the job forwards Ctrl-C and can kill the whole group
            preexec_fn=partial(end_with_parent, signal.SIGKILL),
        )
        os.close(writing)
        self._open = True
        self._data = b""
        self._ended_at: float | None = None
        self._traced_at = self.failed_at = math.inf
        """The second as in `Exit.at`."""

    def poll(self) -> int | None:
        """Its exit code, once it has ended and all output is read."""
        code = self._process.poll()
        if code is None:
            return None
        if self._ended_at is None:
            self._ended_at = time.monotonic()
            self.failed_at = self._traced_at if code == UNCAUGHT else time.time()
        if self._open and time.monotonic() - self._ended_at > PIPE_S:
            self.kill()
        return None if self._open and time.monotonic() - self._ended_at < 2 * PIPE_S else code

    def output(self) -> str:
        while self._open and len(self._data) < MOST_BYTES and self._read():
            pass
        data, self._data = self._data, b""
        text = self._part + self._decoder.decode(data, final=not self._open)
        late = time.monotonic() - self._part_since > PART_EVERY_S
        whole = (
            len(text) if late or not self._open or len(text) > MOST_BYTES else text.rfind("\n") + 1
        )
        if whole:
            self._part_since = time.monotonic()
        text, self._part = text[:whole], text[whole:]
        self.tail = (self.tail + text)[-TAIL_CHARACTERS:]
        return text

    def listen(self, for_s: float) -> None:
        """Wait so long, and note when a traceback comes or the process ends."""
        until = time.monotonic() + for_s
        while self._ended_at is None and (left := until - time.monotonic()) > 0:
            full = not self._open or len(self._data) >= MOST_BYTES
            if not (full or self._read()):
                select.select([self._pipe], [], [], min(left, NOTE_S))
            # Even a script that prints all the time wakes this process at intervals only.
            time.sleep(min(left, NOTE_S if full else NOTE_S / 4))
            self.poll()
        time.sleep(max(0.0, until - time.monotonic()))

    def _read(self) -> bool:
        more = self._pipe.read(MOST_BYTES - len(self._data))
        self._open = more is None or bool(more)
        self._data += more or b""
        if more and TRACEBACK.encode() in self._data[-len(more) - len(TRACEBACK) :]:
            self._traced_at = time.time()
        return bool(more)

    def events(self) -> list[dict[str, Any]]:
        with self._events.open("rb") as file:
            file.seek(self._events_read)
            data = file.read()
        lines = data[: data.rfind(b"\n") + 1]
        self._events_read += len(lines)
        return [json.loads(line) for line in lines.splitlines()]

    def terminate(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._pipe.close()
        self._scratch.cleanup()
