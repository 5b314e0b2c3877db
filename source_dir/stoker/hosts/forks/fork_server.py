"""The fork server. It imports and forks, with one thread, since a fork copies only one."""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

RAY_COMPAT = Path(__file__).parents[2] / "ray_compat.py"


ENVIRONMENT = {
    # Ray's value for a worker with one CPU; numerical libraries read it only once.
    "OMP_NUM_THREADS": "1",
    # An import that asks PyTorch for a GPU must not initialize CUDA, which would then fail in the forks.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Arrow's library starts a thread for it, although Arrow uses another allocator.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


def main(parent: int, early: Sequence[str]) -> NoReturn:
    """Import the `early` modules and follow the instructions; end with the parent process."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for number in (1, 2):
            os.dup2(null, number)
        os.closerange(3, 1 << 16)
        end_with(parent)
        os.environ.update({**ENVIRONMENT, **os.environ})
        sys.path[:1] = []  # this folder
        gc.disable()  # to import faster
        import_all(early)
        told = json.loads(sys.stdin.readline() or "null")
        if told is not None:
            os.environ.update({**ENVIRONMENT, **told.pop("environment")})
            os.chdir(told.pop("folder"))
            sys.path[:] = ["", *filter(None, told.pop("python_path"))]  # a worker puts its own folder first
            serve_forks(parent, **told)
    finally:
        os._exit(1)


def serve_forks(parent: int, path: str, modules: Sequence[str], later: Sequence[str]) -> NoReturn:
    """Import the modules, then fork a worker per request at the socket `path` until the parent process ends.

    A second process also imports `later`, which only train workers need, and forks those.
    """
    folder = Path(path).parent
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.close(null)
        end_with(parent, folder)
        runpy.run_path(str(RAY_COMPAT))["draw_ids_from_the_system"]()
        import_for_forks(modules, folder / "wanted")
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        here, training = os.getpid(), str(folder / "training")
        if not later:
            Path(training).symlink_to(path)
        elif os.fork() == 0:
            end_with(here, folder)
            import_for_forks(later, folder / "wanted")
            path = training
        serve(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # else workers would wait for a socket that never appears
        os._exit(1)


def end_with(parent: int, folder: Path | None = None) -> None:
    """Exit with the parent process, even if that is killed, and remove the folder."""

    def end(*_: Any) -> None:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    # Without a folder at once, even if a library is just being loaded.
    signal.signal(signal.SIGTERM, signal.SIG_DFL if folder is None else end)
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        end()


def import_for_forks(modules: Sequence[str], wanted: Path) -> None:
    """Import modules, and those whose names are written to the file `wanted` meanwhile.

    Exit if two forks would draw the same ids, and so each other's data.
    """
    names, done = list(modules), set[str]()
    while names:
        import_all(names)
        done.update(names)
        noted = wanted.read_text().split() if wanted.is_file() else []
        names = [name for name in noted if name not in done]
    drawn = {draw_in_a_fork() for _ in range(2)}
    if len(drawn) < 2 or b"" in drawn:
        os.kill(os.getpid(), signal.SIGTERM)
    gc.collect()
    gc.freeze()  # else a worker's first collection would copy every page


def import_all(names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):  # a worker that needs it will report the error
            importlib.import_module(name)


def draw_in_a_fork() -> bytes:
    from ray import ObjectID

    reading, writing = os.pipe()
    if (process := os.fork()) == 0:
        try:
            os.write(writing, ObjectID.from_random().binary())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as output:
        drawn = output.read()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process, 0)
    return drawn


def serve(path: str) -> NoReturn:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path + ".new")
        server.listen(256)
        Path(path + ".new").rename(path)
        while True:
            with contextlib.suppress(OSError, ValueError):
                connection, _ = server.accept()
                with connection:
                    answer(connection, server)


def answer(connection: socket.socket, server: socket.socket) -> None:
    connection.settimeout(10)
    asked, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    try:
        while not asked.endswith(b"\n"):
            more = connection.recv(1 << 20)
            if not more:
                return
            asked += more
        request = json.loads(asked)
        if os.fork() == 0:
            run(request, files, (server, connection))
        connection.sendall(b"1")
    finally:
        for file in files:
            os.close(file)


def run(request: dict[str, Any], files: list[int], not_its_own: tuple[socket.socket, ...]) -> NoReturn:
    code: Any = 1
    try:
        for connection in not_its_own:
            connection.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
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
    main(int(sys.argv[1]), sys.argv[2:])
