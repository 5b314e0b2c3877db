"""The fork server. It imports and forks, with one thread, since a fork copies only one."""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

RAY_COMPAT = Path(__file__).parents[2] / "ray_compat.py"


def main(parent: int, path: Sequence[str], modules: Sequence[str]) -> NoReturn:
    """Import the modules and fork; standard input is the socket for requests. End with the parent process."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: even if that is killed
        if os.getppid() == parent:
            listening = socket.socket(fileno=os.dup(0))
            os.dup2(1, 0)
            sys.path[:] = ["", *filter(None, path)]  # a worker puts its folder at the first place
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a job may be started with it ignored
            gc.disable()  # to import faster
            runpy.run_path(str(RAY_COMPAT))["draw_ids_from_the_system"]()
            import_all(modules)
            require_own_ids()
            gc.collect()
            gc.freeze()  # else a worker's first collection would copy every page
            serve(listening)
    finally:
        os._exit(1)


def import_all(names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):  # a worker that needs it will report the error
            importlib.import_module(name)


def require_own_ids() -> None:
    """Exit if two forks would draw the same ids, and so each other's data."""
    from ray import ObjectID

    reading, writing = os.pipe()
    for _ in range(2):
        if (process := os.fork()) == 0:
            os.write(writing, ObjectID.from_random().binary())
            os._exit(0)
        os.waitpid(process, 0)
    os.close(writing)
    with os.fdopen(reading, "rb") as output:
        drawn, size = output.read(), ObjectID.size()
    if len(drawn) != 2 * size or drawn[:size] == drawn[size:]:
        os._exit(1)


def serve(listening: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        with contextlib.suppress(OSError, ValueError):
            connection, _ = listening.accept()
            with connection:
                answer(connection, listening)


def answer(connection: socket.socket, listening: socket.socket) -> None:
    connection.settimeout(10)
    asked, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    try:
        while not asked.endswith(b"\n") and (more := connection.recv(1 << 20)):
            asked += more
        request = json.loads(asked)
        # Fails if the worker no longer waits and has started without a fork.
        connection.sendall(b"1")
        if os.fork() == 0:
            run(request, files, (listening, connection))
        connection.sendall(b"1")
    finally:
        for file in files:
            os.close(file)


def run(
    request: dict[str, Any], files: list[int], not_its_own: tuple[socket.socket, ...]
) -> NoReturn:
    code: Any = 1
    try:
        for connection in not_its_own:
            connection.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        os.setpgid(0, 0)  # Ray kills what is left of a worker's process group after the worker ends
        sys.argv = request["command"]
        sys.path[0] = str(Path(sys.argv[0]).parent)
        gc.enable()
        random.seed()
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed()
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
