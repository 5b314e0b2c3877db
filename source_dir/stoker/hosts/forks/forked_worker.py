"""Started by Ray as a worker: requests a fork and exits, so it imports little."""

import json
import os
import socket
import sys
from pathlib import Path

WAIT_S = 40.0
"""How long to wait for the fork server to import; Ray waits 60 s for a worker."""


def main(arguments: list[str]) -> None:
    command = [str(Path(os.environ["STOKER_RAY_WORKERS"]) / "default_worker.py"), *arguments]
    if not forked(command):  # as without a fork server
        os.execv(sys.executable, [sys.executable, *command])  # noqa: S606 - Ray's own command


def forked(command: list[str]) -> bool:
    """Request a fork with this process's environment, folder and output."""
    what = {"command": command, "environment": dict(os.environ), "folder": str(Path.cwd())}
    asked = json.dumps(what).encode() + b"\n"
    try:
        with socket.socket(socket.AF_UNIX) as server:
            # Without a timeout: a full queue is waited for. (Importing the package's name would take longer.)
            server.connect(os.environ.get("STOKER_FORKS", ""))
            server.settimeout(WAIT_S)
            socket.send_fds(server, [asked[:1]], [0, 1, 2])
            server.sendall(asked[1:])
            return server.recv(1) + server.recv(1) == b"11"  # "still there?" and "forked"
    except OSError:
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
