"""Every host: form the job's Ray cluster, on the head wait for its hosts, and connect to it."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stoker.config.schema import Config
from stoker.errors import INSTALL_TRAIN, UsageError
from stoker.hosts import forks, machine, raynode, requirements
from stoker.hosts.output import say
from stoker.hosts.raynode import ClusterError, RayNode
from stoker.hosts.topology import Topology, label
from stoker.place import PACKAGE_VARIABLE, PLACE_VARIABLE, RUN_DIR_VARIABLE, TOKEN_FILE, local_place
from stoker.storage.checkpoint_store import Cleaner

REPORT_EVERY_S = 5.0
GONE_S = 60.0
"""After this, a host that was lost has had time to be back."""
LOOPBACK = "127.0.0.1"


class LocalCluster:
    """Laptop: a one-machine Ray cluster with its own token. It starts in the background.

    Its daemons end with the thread that creates it. Call `set_environment` before.
    """

    def __init__(self, config: Config, imports: Sequence[str]) -> None:
        # A single machine is never preempted in part, so there is nothing to watch.
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        # By default Ray's workers run at nice 15, and would starve beside whatever else runs on a laptop.
        os.environ.setdefault("RAY_worker_niceness", "0")
        self._dashboard = config.cluster.dashboard
        self._token_file = local_place().run_dir / TOKEN_FILE
        self._address = f"{LOOPBACK}:{raynode.free_port()}"
        self._folder = raynode.private_folder()
        self._cleaner = Cleaner(self._folder, raynode.PREFIX)
        arguments = raynode.arguments_for(
            address=LOOPBACK,
            labels={"stoker-group": "local"},
            cpus=config.cluster.cpus or machine.cores(),
            gpus=None,
            prints=config.driver,
        )
        arguments += raynode.store_arguments(config.cluster.object_store_mb)
        arguments += ["--head", f"--port={self._address.partition(':')[2]}"]
        arguments += dashboard_arguments(config)
        self._node = RayNode(arguments, self._folder, forks.started(imports, self._folder))

    def stop(self) -> None:
        self._node.stop(grace_s=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> None:
        try:
            import ray

            self._node.wait_started()
            context = ray.init(
                address=self._address, log_to_driver=False, logging_level=logging.ERROR
            )
        except BaseException:
            self.stop()
            raise
        if self._dashboard:
            write_token(self._token_file, os.environ["RAY_AUTH_TOKEN"])
            show = f"cat {shlex.quote(str(self._token_file))}"
            say(f"dashboard: http://{context.dashboard_url}  log in with the run's token: {show}")

    def __exit__(self, *_: object) -> None:
        import ray

        if self._dashboard:
            self._token_file.unlink(missing_ok=True)
        ray.shutdown()
        self.stop()


def dashboard_arguments(config: Config) -> list[str]:
    """Head: whoever may enter this machine reaches the dashboard, and must give the token."""
    include = str(config.cluster.dashboard).lower()
    return [f"--include-dashboard={include}", f"--dashboard-host={LOOPBACK}"]


@contextmanager
def connected() -> Iterator[None]:
    """A job's process on a Ray cluster: connect to that cluster with the token it runs under."""
    set_ray_train()
    forbid_unpickling()
    import ray

    where = os.environ.get("RAY_ADDRESS", "this machine")
    needs: dict[str, Any] | None = None
    # Under Ray Jobs, workers have it already.
    if (package := os.environ.get(PACKAGE_VARIABLE)) is not None:
        names = (PLACE_VARIABLE, RUN_DIR_VARIABLE, "RAY_TRAIN_V2_ENABLED")
        needs = {"working_dir": package, "env_vars": {name: os.environ[name] for name in names}}
    try:
        ray.init(
            address="auto", log_to_driver=False, logging_level=logging.ERROR, runtime_env=needs
        )
    except (OSError, RuntimeError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise ClusterError(
            f"cannot use the Ray cluster of {where}: {cause}; its token (RAY_AUTH_MODE, RAY_AUTH_TOKEN) and"
            " its versions of Ray and Python must be those of this process"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def refuse_old_ray() -> None:
    here, oldest = requirements.installed("ray"), requirements.OLDEST_RAY
    if not requirements.at_least(here, oldest):
        remedy = f"pip install 'ray[data,train]>={oldest}'" if here else INSTALL_TRAIN
        raise UsageError(
            f"Ray {here or '(absent)'} of {sys.executable}: Stoker requires {oldest} or newer; {remedy}"
        )


def set_environment(token: str, dashboard: bool = False) -> None:
    """Set what all Ray processes of the job must agree on. Call it before importing ray."""
    refuse_old_ray()
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = token
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
    os.environ.pop("RAY_ADDRESS", None)
    forbid_unpickling()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Otherwise a recipe that uses Ray too early would start a second cluster.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    set_ray_train()
    os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
    # As newer versions do by default; older ones print three lines about it.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Remove a stopped host at once instead of after Ray's 30 s drain.
    os.environ["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    # Declare a lost machine dead after about 20 s instead of 65 s.
    os.environ.setdefault("RAY_health_check_period_ms", "2000")
    os.environ.setdefault("RAY_health_check_timeout_ms", "4000")
    os.environ.setdefault("RAY_health_check_failure_threshold", "4")
    # A slow or busy host may need more than Ray's 30 s to start.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "90")
    # By default Ray retries a task that ran out of memory forever.
    os.environ.setdefault("RAY_task_oom_retries", "8")
    # The dashboard alone shows reports of each task, and metrics.
    for name in ("RAY_task_events_report_interval_ms", "RAY_enable_metrics_collection"):
        if not dashboard:
            os.environ.setdefault(name, "0")
        elif os.environ.get(name) == "0":
            del os.environ[name]
    # Without keepalive, calls to a lost machine, and the tasks that ran on it, hang for seven minutes.
    os.environ.setdefault("RAY_grpc_client_keepalive_time_ms", "15000")
    os.environ.setdefault("RAY_grpc_client_keepalive_timeout_ms", "8000")


def forbid_unpickling() -> None:
    """Unset what lets Ray unpickle the contents of data files."""
    for name in [name for name in os.environ if name.startswith("RAY_DATA_AUTOLOAD_")]:
        del os.environ[name]


def write_token(file: Path, token: str) -> None:
    """Only this user can read the file, while terminal output is easily shared."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as output:
        output.write(token + "\n")


def read_token(folder: Path) -> str:
    file = folder / TOKEN_FILE
    try:
        token = file.read_text().strip()
    except OSError:
        raise ClusterError(
            f"{TOKEN_FILE} is missing next to train.py, so the hosts share no token; submit with "
            f"launcher/submit.py, or before a manual upload run: openssl rand -hex 32 > {TOKEN_FILE}"
        ) from None
    if len(token) < 32:
        raise ClusterError(
            f"{TOKEN_FILE}: a token of {len(token)} characters is too short; use 32 or more"
        )
    return token


def ray_labels(topology: Topology) -> dict[str, str]:
    labels = {"stoker-group": label(topology.group), "stoker.host": label(topology.host)}
    kind = next(group.instance_type for group in topology.groups if group.name == topology.group)
    return labels | ({"stoker.type": kind} if kind else {})


def present_hosts(topology: Topology) -> dict[str, dict[str, Any]]:
    import ray

    by_label = {label(host): host for host in topology.hosts}
    alive = [node for node in ray.nodes() if node["Alive"]]
    names = [(by_label.get(node.get("Labels", {}).get("stoker.host", "")), node) for node in alive]
    return {name: node for name, node in names if name}


def wait_for_hosts(
    topology: Topology,
    config: Config,
    started: float,
    check: Callable[[], None],
) -> list[str]:
    """Wait until all hosts have joined, or after the timeout accept `cluster.min_cpu_hosts` of them.

    A host that was here and is lost is not waited for until the timeout, because its instance is gone.
    `check` raises to give up.
    """
    timeout, least = config.cluster.join_timeout_s, config.cluster.min_cpu_hosts
    reported = 0.0
    seen: dict[str, float] = {}
    while True:
        check()
        present, now = present_hosts(topology), time.monotonic()
        seen |= dict.fromkeys(present, now)
        missing = [host for host in topology.hosts if host not in present]
        waited = now - started
        if not missing:
            return list(present)
        absent = topology.describe(missing)
        gone = [host for host in missing if now - seen.get(host, now) > GONE_S]
        late = waited > timeout
        without = missing if late else gone
        cpu_hosts = {h for h in topology.hosts if topology.group_of(h) != topology.gpu_group}
        enough = (
            least is not None and cpu_hosts >= {*without} and len(cpu_hosts - {*without}) >= least
        )
        if without == missing and enough:
            say(
                f"continuing without {absent} after {waited:.0f} s: cluster.min_cpu_hosts is {least}"
            )
            return list(present)
        if late:
            raise ClusterError(f"hosts that did not join within {timeout:.0f} s: {absent}")
        if gone and not enough:
            raise ClusterError(
                f"hosts that were lost while the cluster formed: {topology.describe(gone)};"
                " cluster.min_cpu_hosts lets a run start without CPU hosts"
            )
        if now - reported > REPORT_EVERY_S:
            reported = now
            there = topology.describe(present) or "none"
            so_far = f"{waited:.0f} of {timeout:.0f} s"
            say(f"waiting for hosts, {so_far}; missing: {absent}; joined: {there}")
        time.sleep(0.25)


def set_ray_train() -> None:
    """Training processes and their parents: configure Ray Train through the environment."""
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    # Keep train workers in the job's folder, so that the recipe's relative paths resolve.
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    # What a recipe prints reaches standard output, so the screen, and not Ray Train's logger instead.
    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"
    # Detect the end of training within 0.5 s and a hung train worker within 2 instead of 10 minutes.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    os.environ.setdefault("RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S", "120")
