"""Every host: started by Ray as a worker: requests a fork and exits, so it imports little."""

import json
import os
import socket
import sys
import time
from pathlib import Path

SOCKET_VARIABLE, TRAINS_VARIABLE = "STOKER_FORKS", "STOKER_TRAINS"  # importing the package would take longer
WAIT_S = 40.0
"""How long to wait for the fork server to import; Ray waits 60 s for a worker."""


def main() -> None:
    """Every host: run this process's command in a fork, or here if there is no fork server."""
    ray = next(folder for entry in sys.path if (folder := Path(entry) / "ray" / "_private").is_dir())
    command = [str(ray / "workers" / "default_worker.py"), *sys.argv[1:]]
    if not forked(command):
        os.execv(sys.executable, [sys.executable, *command])  # noqa: S606 - Ray's own command


def forked(command: list[str]) -> bool:
    """Every host: request a fork with this process's environment, folder and output; whether it was made."""
    path = os.environ.get(SOCKET_VARIABLE, "")
    if path and os.environ.get(TRAINS_VARIABLE):
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
    main()
