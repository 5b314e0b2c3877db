"""Every host: the fork server. It imports and forks, with one thread, since a fork copies only one."""

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
"""Name of the second socket, of the process from which train workers are forked."""


def main(path: str, parent: int, modules: list[str], later: list[str]) -> None:
    """Every host: import the modules, then fork a worker per request until the parent process ends.

    Args:
        path: path of the socket.
        parent: process id of the parent.
        modules: modules to import before serving requests.
        later: modules that only train workers need; a fork of this process imports them and serves those.
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
        """Reap finished workers; if the second server has ended, serve its requests too."""
        with contextlib.suppress(ChildProcessError):
            while (process := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                if process == second:
                    stand_in(path, training)

    signal.signal(signal.SIGCHLD, reap)
    if not later:
        stand_in(path, training)
    serve_all(path)


def begin(path: str, parent: int, modules: list[str], later: list[str]) -> NoReturn:
    """A fork of the process that needs the workers: become its fork server; see `main`."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.closerange(3, 1 << 16)
        sys.path.insert(0, "")
        main(path, parent, modules, later)
    finally:
        # Otherwise workers would wait for a socket that never appears.
        shutil.rmtree(Path(path).parent, ignore_errors=True)
        os._exit(1)


def prepare(modules: list[str]) -> None:
    """Every host: import modules for the forks and check that forks are safe."""
    for name in modules:
        load(name)
    refuse_shared_chance()
    gc.collect()
    gc.freeze()  # else a worker's first collection would copy every page


def stand_in(path: str, training: str) -> None:
    """Every host: let the first server also fork train workers."""
    Path(training).unlink(missing_ok=True)
    Path(training).symlink_to(path)


def serve_all(path: str) -> NoReturn:
    """Every host: serve fork requests at this socket."""
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
    """Every host: import a module, ignoring errors; a worker that needs it will report them."""
    with contextlib.suppress(Exception):
        importlib.import_module(name)


def draw_ids_from_the_system() -> None:
    """Every host: prevent imports from drawing an id from Ray's random number generator.

    The generator seeds itself at its first draw. Forks made after that would draw identical task and object
    ids and receive each other's data. Decorating a class with `ray.remote` draws one.
    """
    with contextlib.suppress(ImportError, AttributeError):
        import ray.actor

        plain = ray.actor.ActorClassID

        class Drawn:
            """Replaces the id class in `ray.actor` and draws ids from the system."""

            @staticmethod
            def from_random() -> Any:
                return plain(os.urandom(plain.size()))

        ray.actor.ActorClassID = Drawn


def refuse_shared_chance() -> None:
    """Every host: exit if two forks draw the same ids; workers then start as in plain Ray."""
    drawn = {draw_in_a_fork() for _ in range(2)}
    if len(drawn) < 2 or b"" in drawn:
        os.kill(os.getpid(), signal.SIGTERM)


def draw_in_a_fork() -> bytes:
    """Every host: the id that a fork of this process draws."""
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
    """Every host: handle one request: fork and confirm."""
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
    """A forked worker: run the requested command; does not return."""
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
        os.setpgid(0, 0)  # Ray kills what is left of a worker's process group after the worker ends
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
    """A forked worker: reseed the random number generators, as in a new process."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def end_with(parent: int, folder: Path) -> None:
    """Every host: exit with the parent process, even if that is killed, and remove the folder."""

    def end(*_: Any) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        end()


if __name__ == "__main__":
    # Ray's workers do not need this folder, and its modules have common names.
    sys.path.pop(0)
    sys.path.insert(0, "")
    middle = sys.argv.index("-")
    try:
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3:middle], sys.argv[middle + 1 :])
    finally:
        # Otherwise workers would wait for a socket that never appears.
        shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)
