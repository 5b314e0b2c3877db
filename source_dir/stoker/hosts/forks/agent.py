"""Every host: replaces Ray's dashboard agent when the dashboard is off.

Ray's agent would spend a second of CPU on imports, write to three files that it serves nothing, and wait.
The raylet treats the agent's exit as a failure, so this one keeps running. It imports little, because it
starts while everything else does.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
NOT_SERVED = "-1"


def main() -> None:
    """Every host: take the command line of Ray's agent; run Ray's agent if it has something to serve."""
    given = dict(word[2:].split("=", 1) for word in sys.argv if word.startswith("--") and "=" in word)
    if "--minimal" not in sys.argv:
        os.execv(sys.executable, [sys.executable, "-u", *sys.argv[1:]])  # noqa: S606 - Ray's own command
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    parent = os.getppid()
    if Path(f"/proc/{parent}/comm").read_text().strip() != "raylet":
        return  # the raylet was killed before
    for port in PORTS:
        file = Path(given["session-dir"]) / f"{port}_{given['node-id']}"
        draft = file.with_suffix(".draft")
        draft.write_text(NOT_SERVED)
        draft.rename(file)
    while os.getppid() == parent:
        signal.sigtimedwait([signal.SIGCHLD], 5)


if __name__ == "__main__":
    main()
