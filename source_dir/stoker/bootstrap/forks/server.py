"""Every host: the process that has imported, and forks; it has one thread, as a fork copies only that."""

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
from pathlib import Path
from typing import Any, NoReturn

TRAINING = "training"
"""The socket, beside the first, of the process from which those that train are forked."""


def main(path: str, parent: int, modules: list[str], later: list[str]) -> None:
    """Every host: import, then fork a worker for whoever asks, until the parent process ends.

    Args:
        path: of the socket.
        parent: process id.
        modules: imported before anybody is answered.
        later: what only those that train need; a fork of this process imports it and serves them.
    """
    end_with(parent, Path(path).parent)
    draw_ids_from_the_system()
    training = str(Path(path).parent / TRAINING)
    prepare(modules)
    here = os.getpid()
    second = os.fork() if later else 0
    if later and not second:
        end_with(here, Path(path).parent)
        prepare(later)
        serve_all(training)

    def reap(*_: Any) -> None:
        """Workers that have ended leave no trace; if the second server has, this one stands in."""
        with contextlib.suppress(ChildProcessError):
            while (process := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                if process == second:
                    stand_in(path, training)

    signal.signal(signal.SIGCHLD, reap)
    if not later:
        stand_in(path, training)
    serve_all(path)


def prepare(modules: list[str]) -> None:
    """Every host: import what forks are to have."""
    for name in modules:
        load(name)
    refuse_shared_chance()
    gc.collect()
    gc.freeze()  # else a worker's first collection would copy all of it


def stand_in(path: str, training: str) -> None:
    """Every host: let the first server be asked for those that train, too."""
    Path(training).unlink(missing_ok=True)
    Path(training).symlink_to(path)


def serve_all(path: str) -> NoReturn:
    """Every host: fork for whoever asks at this socket."""
    if signal.getsignal(signal.SIGCHLD) in (signal.SIG_DFL, None):
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path + ".new")
        server.listen(256)
        Path(path + ".new").rename(path)
        while True:
            with contextlib.suppress(OSError, ValueError):
                connection, _ = server.accept()
                with connection:
                    serve(connection, server)


def load(name: str) -> None:
    """Every host: import a module, where there is one; a worker that needs it says what is wrong with it."""
    with contextlib.suppress(Exception):
        importlib.import_module(name)


def draw_ids_from_the_system() -> None:
    """Every host: let no import draw an id from the random numbers of Ray's library.

    It takes entropy from the system with its first draw. After that, forks would draw the same ids for their
    tasks and objects as one another, and get one another's data. A class that is decorated with `ray.remote`
    draws one.
    """
    with contextlib.suppress(ImportError, AttributeError):
        import ray.actor

        plain = ray.actor.ActorClassID

        class Drawn:
            """In place of the class of these ids, where `ray.actor` asks for a new one."""

            @staticmethod
            def from_random() -> Any:
                return plain(os.urandom(plain.size()))

        ray.actor.ActorClassID = Drawn


def refuse_shared_chance() -> None:
    """Every host: end, so that workers start as Ray starts them, if two forks draw the same ids."""
    drawn = {draw_in_a_fork() for _ in range(2)}
    if len(drawn) < 2 or b"" in drawn:
        os.kill(os.getpid(), signal.SIGTERM)


def draw_in_a_fork() -> bytes:
    """Every host: an id as a fork of this process would draw it."""
    from ray import ObjectID

    reading, writing = os.pipe()
    if (process := os.fork()) == 0:
        try:
            os.write(writing, ObjectID.from_random().binary())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as output:
        found = output.read()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process, 0)
    return found


def serve(connection: socket.socket, server: socket.socket) -> None:
    """Every host: one request: fork, and confirm it."""
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


def run(request: dict[str, Any], files: list[int], not_its_own: tuple[socket.socket, ...]) -> None:
    """A forked worker: become what was asked for; does not return."""
    code = 1
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
        os.setpgid(0, 0)  # Ray ends what is left of a worker's process group when the worker has ended
        sys.argv = request["command"]
        sys.path[0] = str(Path(sys.argv[0]).parent)
        fresh_chance()
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


def fresh_chance() -> None:
    """A forked worker: its random numbers are its own, as those of a process that has just started."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def end_with(parent: int, folder: Path) -> None:
    """Every host: end when the process that started this one does, by force, too, and leave no file."""

    def end(*_: Any) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        end()


if __name__ == "__main__":
    # Ray's workers have no use for this folder, and it has modules with common names.
    sys.path.pop(0)
    sys.path.insert(0, "")
    middle = sys.argv.index("-")
    try:
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3:middle], sys.argv[middle + 1 :])
    finally:
        # Nobody is to wait for a socket that does not come.
        shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)
