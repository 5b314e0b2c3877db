"""Script: the Ray cluster that makes batches.

Tried in this order: the cluster that this process is connected to; `address` or RAY_ADDRESS; the cluster that
the ranks of a torchrun job share; a new cluster on this machine, which ends with the process.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil

from stoker import ray_compat
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.hosts import forks
from stoker.hosts.cluster import LocalCluster, refuse_old_ray, set_environment
from stoker.hosts.machine import runs
from stoker.session import JOB_VARIABLE

RANKS_WAIT_S = 120.0
IMPORTED = ("torch.utils.data", "stoker.loader.work", "stoker.loader.loader_service")
"""Imported by the service and chain workers in addition to what recipes need."""
WITH_THE_SCRIPT = (
    "torchvision.transforms.v2",
    "torchvision.datasets",
    "cv2",
    "pandas",
    "scipy",
    "albumentations",
)
"""Imported once before forking if the script has imported them, instead of once per chain worker."""
CONNECT_S = 10.0
_CONNECTED: dict[str, int] = {}
"""Connection to Ray → the process that made it; a fork inherits the connection, which does not work there."""
_joined: dict[str, str] = {}
"""Address by which this process has connected → the connection."""


def connect(address: str | None) -> None:
    ray: Any = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        if _CONNECTED.setdefault(_connection(), os.getpid()) != os.getpid():
            raise UsageError(
                "stoker.DataLoader: this process was forked after its parent had begun a pass, and Ray does"
                " not work in forks; start it by multiprocessing's spawn"
            )
        there = str(ray.get_runtime_context().gcs_address)
        same = not address or address == there or _joined.get(address) == _connection()
        if not same and ":" in str(address) and "//" not in str(address):
            raise UsageError(
                f"stoker.DataLoader: address={address}, but this process is connected to the Ray cluster at"
                f" {there}; a process works with one cluster, so leave the address out"
            )
        return
    refuse_old_ray()
    address = address or os.environ.get("RAY_ADDRESS")
    with keeping_sigterm():
        if address:
            _join(address)
            _joined[address] = _connection()
        elif int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
            _with_other_ranks()
        else:
            _start()
    _CONNECTED[_connection()] = os.getpid()


def _connection() -> str:
    import ray

    return str(ray.get_runtime_context().get_worker_id())


@contextlib.contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Connecting to Ray replaces the script's handler of SIGTERM, with which it may save its state.

    Also installs Python's handler again in place of Ray's own, which prints the stacks of its threads.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            own = (
                before
                if callable(before) or before == signal.SIG_IGN
                else signal.getsignal(signal.SIGTERM)
            )
            signal.signal(signal.SIGTERM, own or signal.SIG_DFL)


def service_name() -> str:
    import ray

    own = os.environ.get(JOB_VARIABLE) or _torchrun()
    return own or str(ray.get_runtime_context().get_job_id())


def _torchrun() -> str:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    # Single-node jobs have the same run id and address on every machine: "none" and "localhost".
    local = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return "-".join(
        [*(os.environ.get(n, "") for n in names), *([socket.gethostname()] if local else [])]
    )


def _join(address: str) -> None:
    import ray

    host, _, port = address.rpartition(":")
    refused = f"stoker.DataLoader: no Ray cluster answers at {address}"
    if port.isdigit() and "//" not in address:
        try:  # Ray itself would retry for minutes
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except OSError as error:
            raise UsageError(f"{refused}: {error}") from None
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(f"{refused}: {error}") from None


def _start() -> None:
    set_environment(secrets.token_hex(32))
    ray_compat.read_environment_again()
    also = [name for name in WITH_THE_SCRIPT if name in sys.modules]
    imports = (*forks.FOR_CHAINS, *IMPORTED, *also)
    made: Future[LocalCluster] = Future()

    def hold() -> None:
        """Ray's daemons end with the thread that started them, and this one may be a short one."""
        try:
            made.set_result(LocalCluster(Config(), imports))
        except BaseException as error:
            made.set_exception(error)
        threading.Event().wait()

    threading.Thread(target=hold, name="ray", daemon=True).start()
    stack, own = contextlib.ExitStack(), os.getpid()
    stack.enter_context(made.result())
    # A fork of this process must not stop the cluster.
    atexit.register(lambda: stack.close() if os.getpid() == own else None)


def _with_other_ranks() -> None:
    """Under torchrun: local rank 0 starts a cluster; the others read its address from a private file."""
    folder = Path(tempfile.gettempdir()) / f"stoker-ranks-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
        raise UsageError(
            f"stoker.DataLoader: {folder} belongs to another user or is open to others; remove it"
        )
    # A run id may contain anything.
    file = folder / f"{os.getppid()}-{hashlib.sha256(_torchrun().encode()).hexdigest()}.json"
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        import ray

        _start()
        about = {
            "address": ray.get_runtime_context().gcs_address,
            "token": os.environ["RAY_AUTH_TOKEN"],
            "pid": os.getpid(),
        }
        _forget_killed(file)
        draft = file.with_suffix(".new")
        draft.touch(mode=0o600)
        draft.write_text(json.dumps(about))
        draft.rename(file)
        atexit.register(_leave, file, os.getpid())
        return
    deadline = time.monotonic() + RANKS_WAIT_S
    # A file older than torchrun is left over from a killed process with the same id.
    since = psutil.Process(os.getppid()).create_time() - 1.0
    while not (file.exists() and file.stat().st_mtime > since):
        if time.monotonic() > deadline:
            raise UsageError(
                f"stoker.DataLoader: local rank 0 started no Ray cluster within {RANKS_WAIT_S:.0f} s;"
                " every rank must iterate over its loaders"
            )
        time.sleep(0.05)
    about = json.loads(file.read_text())
    set_environment(about["token"])
    ray_compat.read_environment_again()
    _join(about["address"])
    file.with_suffix(f".{os.getpid()}").touch(mode=0o600)


def _leave(file: Path, own: int) -> None:
    """At exit of local rank 0: wait for ranks that use its cluster, unless it fails: then they fail soon."""
    if os.getpid() != own:
        return
    file.unlink(missing_ok=True)
    deadline = time.monotonic() + RANKS_WAIT_S
    others = _others(file)
    while not hasattr(sys, "last_value") and time.monotonic() < deadline:
        if not any(map(runs, others)):
            break
        time.sleep(0.05)
    for each in others.values():
        each.unlink(missing_ok=True)


def _forget_killed(file: Path) -> None:
    """Local rank 0: remove the files of torchruns that have ended, and of an earlier one of this name."""
    for left_behind in file.parent.iterdir():
        number = left_behind.name.partition("-")[0]
        if left_behind.stem == file.stem or not (number.isdigit() and runs(int(number))):
            left_behind.unlink(missing_ok=True)


def _others(file: Path) -> dict[int, Path]:
    found = (each for each in file.parent.iterdir() if each.stem == file.stem)
    return {int(each.suffix[1:]): each for each in found if each.suffix[1:].isdigit()}
