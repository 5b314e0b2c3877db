"""Every call that is not part of Ray's public API. Each is looked for before it is used, and none is needed
for correctness.

Imports nothing of Stoker: `hosts/forks/fork_server.py` runs it as a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import MemberDescriptorType
from typing import Any

UNUSED = ("ray.serve.scripts", "ray.util.state.state_cli", "ray.dashboard.modules.job.cli")
"""Optional subcommands of Ray's command line: importing them takes 0.8 s of CPU per host, the rest 0.3 s."""
COMMAND_LINE = "from stoker.ray_compat import ray_command_line; ray_command_line()"
NOT_FORKED = "workers are not forked from one process and start slowly"
WORKERS_VARIABLE = "STOKER_RAY_WORKERS"
"""For Ray's daemons: the folder of Ray's own programs for workers."""
FORKS = Path(__file__).with_name("hosts") / "forks"
AGENT_PORTS = (
    "METRICS_AGENT_PORT_NAME",
    "METRICS_EXPORT_PORT_NAME",
    "DASHBOARD_AGENT_LISTEN_PORT_NAME",
)
OTHER_PORTS = ("GCS_SERVER_PORT_NAME", "RUNTIME_ENV_AGENT_PORT_NAME")
"""The raylet waits for a file with each port. What is not known here could be another of the agent's."""


def ray_command_line() -> None:
    """Be Ray's command line `ray`, in a process of its own; its daemons fork workers if there is a server."""
    if os.environ.get("STOKER_FORKS"):
        try:
            fork_workers()
        except (ImportError, AttributeError) as error:
            print(f"{NOT_FORKED}: {error}", flush=True)
    sys.modules.update(dict.fromkeys(UNUSED))  # type: ignore[arg-type]
    try:
        from ray.scripts.scripts import main
    except ImportError:
        for name in UNUSED:
            sys.modules.pop(name, None)
        from ray.scripts.scripts import main
    main()


def with_slots(kind: type, reduced: Any) -> Any:
    """Have a class that Ray's cloudpickle sends by value keep its `__slots__`, which it would lose."""
    slots = vars(kind).get("__slots__")
    named = issubclass(kind, tuple)  # whose slots are always empty
    if slots is None or named or not isinstance(reduced, tuple) or len(reduced[1]) < 4:
        return reduced
    call, (metaclass, name, bases, body, *rest), (content, more), *others = reduced
    members = {name for name, value in content.items() if isinstance(value, MemberDescriptorType)}
    slots = slots if isinstance(slots, str) else tuple(slots)
    content = {name: value for name, value in content.items() if name not in members}
    return (
        call,
        (metaclass, name, bases, {**body, "__slots__": slots}, *rest),
        (content, more),
        *others,
    )


def name_classes(pickled: bytes, buffers: Sequence[Any]) -> bytes:
    """Name the classes that Ray's cloudpickle sends by value by all that is sent with them.

    It names them at random in each process, so what ranks of one script send would never be equal. A class keeps
    its earlier names, too, so a process still gets its own classes back. Without these attributes of Ray,
    the names stay random.
    """
    from ray.cloudpickle import cloudpickle

    by_name = getattr(cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})
    by_class = getattr(cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", None)
    classes = [(pickled.find(name.encode()), name, kind) for name, kind in list(by_name.items())]
    classes = sorted(each for each in classes if each[0] >= 0)
    if by_class is None or not classes:
        return pickled
    nameless = pickled
    for nth, (_, name, _) in enumerate(classes):
        nameless = nameless.replace(name.encode(), b"%032d" % nth)
    content = hashlib.sha256(nameless)
    for buffer in buffers:
        content.update(buffer)
    for nth, (_, name, kind) in enumerate(classes):
        new = hashlib.sha256(content.digest() + b"%d" % nth).hexdigest()[: len(name)]
        pickled = pickled.replace(name.encode(), new.encode())
        by_name[new], by_class[kind] = kind, new
    return pickled


def fork_workers() -> None:
    """Have the daemons that this process starts run `hosts/forks/` for each worker.

    Without a dashboard, it also skips the daemons that only feed the dashboard, and the server for Ray
    clients outside the cluster. Written for Ray 2.60.
    """
    from ray._private import node, utils
    from ray._private.parameter import RayParams

    original = RayParams.update_if_absent
    for owner, name in ((node.Node, "start_api_server"), (utils, "get_dashboard_dependency_error")):
        getattr(owner, name)  # they are replaced below

    def update_if_absent(self: RayParams, **values: object) -> None:
        if "worker_path" in values:
            os.environ[WORKERS_VARIABLE] = str(Path(str(values["worker_path"])).parent)
            values["worker_path"] = str(FORKS / "forked_worker.py")
            values["setup_worker_path"] = str(FORKS / "setup_worker.py")
            if not self.include_dashboard:
                leave_out_the_agent()
                self.no_monitor = True
                self.ray_client_server_port = None
                # Makes Ray believe that the dashboard's dependencies are not installed.
                utils.get_dashboard_dependency_error = lambda: ImportError("not shown")
                # The other daemons would wait for its start.
                node.Node.start_api_server = lambda self, **_: setattr(self, "_webui_url", "")
        original(self, **values)

    RayParams.update_if_absent = update_if_absent


def leave_out_the_agent() -> None:
    """Replace the dashboard's agent, which takes 2 s of CPU and 150 MB on every host, by an idle process.

    The raylet ends with its agent, so there must be one. The ports are those of an agent that offers nothing.
    """
    try:
        from ray import _raylet
        from ray._private import services

        library: Any = _raylet
        names = [getattr(library, name) for name in AGENT_PORTS]
        persist_port, start = library.persist_port, services.start_ray_process
    except (ImportError, AttributeError):
        return
    there = {name for name in dir(library) if name.endswith("_PORT_NAME")}
    if there - {*AGENT_PORTS, *OTHER_PORTS}:
        return
    option = "--dashboard_agent_command="

    def start_ray_process(command: list[str], *args: Any, **values: Any) -> Any:
        words = [word for word in command if word.startswith("--") and "=" in word]
        given = dict(word.split("=", 1) for word in words)
        starts = any(word.startswith(option) for word in command)
        if starts and {"--session_dir", "--node_id"} <= set(given):
            for name in names:
                persist_port(given["--session_dir"], given["--node_id"], name, -1)
            idle = (
                f"{option}{shlex.join([sys.executable, '-S', '-E', str(FORKS / 'idle_agent.py')])}"
            )
            command = [idle if word.startswith(option) else word for word in command]
        return start(command, *args, **values)

    services.start_ray_process = start_ray_process


def draw_ids_from_the_system() -> None:
    """Prevent imports from drawing an id from Ray's random number generator.

    The generator seeds itself at its first draw. Forks made after that would draw identical task and object
    ids and receive each other's data. Decorating a class with `ray.remote` draws one. The fork server
    refuses to serve where two forks draw the same.
    """
    try:
        import ray.actor

        plain = ray.actor.ActorClassID
    except (ImportError, AttributeError):
        return

    class Drawn:
        @staticmethod
        def from_random() -> Any:
            return plain(os.urandom(plain.size()))

    ray.actor.ActorClassID = Drawn


def read_environment_again() -> None:
    """Script, before it starts or joins a cluster: apply the token that is now in the environment.

    Ray reads its authentication mode and token once, when its library loads; a script may have loaded it
    long before it creates its loaders. Without this call, such a script must set the token first.
    """
    from ray import _raylet

    library: Any = _raylet
    with contextlib.suppress(AttributeError):
        library.Config.initialize("")
        library.AuthenticationTokenLoader.instance().reset_cache()


def ended_jobs() -> set[str] | None:
    """Ids of the Ray jobs whose driver has ended, also by SIGKILL; None: this Ray does not tell."""
    try:
        from ray._private.worker import global_worker

        client = global_worker.gcs_client
        jobs = client.get_all_job_info(
            skip_submission_job_info_field=True, skip_is_running_tasks_field=True
        )
        return {job.hex() for job, about in jobs.items() if about.is_dead}
    except (ImportError, AttributeError, TypeError):
        return None


def draining_nodes() -> set[str]:
    """Nodes that the cluster is about to take away, such as spot hosts.

    Empty where this Ray does not tell: then they are lost like any other.
    """
    import ray

    try:
        return set(ray._private.state.state.get_draining_nodes())
    except (AttributeError, TypeError):
        return set()


def look_at_tasks_every(seconds: float) -> None:
    """Data service: how often Ray Data looks at executions of this process while none of their tasks ends.

    By default ten times a second, which takes 2 % of a core, and so does a Ray that does not tell.
    """
    with contextlib.suppress(ImportError):
        from ray.data._internal.execution import streaming_executor_state as state

        if hasattr(state, "WAIT_FOR_TASK_COMPLETION_TIMEOUT_S"):
            state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S = seconds


def train_callbacks() -> Any:
    """Ray script: the class of Ray Train that calls a `UserCallback`, for callbacks named in a variable.

    Raises ImportError or AttributeError where this Ray has none.
    """
    from ray.train.v2._internal.callbacks import env_callback, user_callback

    env_callback._initialize_env_callbacks  # noqa: B018 - a Ray without it ignores the variable
    return user_callback.UserCallbackHandler


def leave_out_the_cleaner() -> None:
    """Before a trainer of this process starts: leave out an actor that cannot work without a dashboard.

    Ray Train 2.60 starts one in each run. It asks the dashboard whether the run's controller still lives, to
    free its placement group after a crash. Where there is no dashboard, it learns nothing, looks for the
    dashboard for 40 s, and so the end of a run waits for it until Ray gives up after 12 s.
    """
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from ray._private.worker import global_worker
        from ray.train.v2._internal.execution.callback import ControllerCallback
        from ray.train.v2.api import data_parallel_trainer

        data_parallel_trainer.PlacementGroupCleanerCallback  # noqa: B018 - it is replaced below
        if not global_worker.gcs_client.internal_kv_get(b"dashboard", b"dashboard"):
            data_parallel_trainer.PlacementGroupCleanerCallback = ControllerCallback


class HostRequest:
    """A run's request for hosts, sent to the cluster's autoscaler.

    The public `request_resources` keeps a single request per cluster, that of its last caller, until another
    call replaces it. The actor of Ray Data, where there is one, adds up the requests of all jobs and lets
    them expire, so that the hosts of a killed job are released.

    Args:
        resource: custom resource of which each of the hosts has 1.
    """

    def __init__(self, resource: str) -> None:
        self._resource, self._id, self._actor = resource, f"stoker-{uuid.uuid4().hex}", None
        with contextlib.suppress(ImportError, AttributeError):
            from ray.data._internal.cluster_autoscaler import (
                default_autoscaling_coordinator as of_ray_data,
            )

            self._actor = of_ray_data.get_or_create_autoscaling_coordinator()

    def send(self, count: int, expires_s: float) -> None:
        """Request this many hosts in all, including those that have joined; does not wait."""
        from ray.autoscaler.sdk import request_resources

        hosts = [{self._resource: 1}] * count
        if self._actor is None:
            request_resources(bundles=hosts)
            return
        self._actor.request_resources.remote(
            requester_id=self._id, resources=hosts, expire_after_s=expires_s
        )
