"""Started by Ray as a worker: requests a fork and exits, so it imports little."""

import json
import os
import socket
import sys
import time
from pathlib import Path

WAIT_S = 40.0
"""How long to wait for the fork server to import; Ray waits 60 s for a worker."""


def main(arguments: list[str]) -> None:
    command = [str(Path(os.environ["STOKER_RAY_WORKERS"]) / "default_worker.py"), *arguments]
    if not forked(command):  # as without a fork server
        os.execv(sys.executable, [sys.executable, *command])  # noqa: S606 - Ray's own command


def forked(command: list[str]) -> bool:
    """Request a fork with this process's environment, folder and output."""
    path = os.environ.get("STOKER_FORKS", "")  # importing the package would take longer
    if path and os.environ.get("STOKER_TRAINS"):
        path = str(Path(path).parent / "training")
    what = {"command": command, "environment": dict(os.environ), "folder": str(Path.cwd())}
    asked = json.dumps(what).encode()
    deadline = time.monotonic() + WAIT_S
    while path and Path(path).parent.is_dir() and time.monotonic() < deadline:
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.connect(path)
                socket.send_fds(server, [asked[:1]], [0, 1, 2])
                server.sendall(asked[1:] + b"\n")
                return bool(server.recv(1))
        except FileNotFoundError:
            time.sleep(0.02)  # it is still importing
        except OSError:
            return False
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
