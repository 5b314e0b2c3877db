"""Train worker: runs the script as a child process: captures its output, stops it and cleans up."""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.session import EVENTS_VARIABLE

MOST_BYTES = 1 << 18
"""Read limit per poll; a script that prints faster blocks, as on a slow terminal."""
PART_EVERY_S = 10.0
"""Interval for forwarding incomplete lines, such as progress bars."""
PIPE_S = 2.0
"""How long to wait for output of leftover processes after the script has ended."""
TAIL_CHARACTERS = 1 << 16
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class Child:
    """The user's script and all processes that it starts."""

    def __init__(self, command: list[str], environment: Mapping[str, str], folder: Path) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="stoker-script-")
        self._events = Path(self._scratch.name) / "events.jsonl"
        self._events.touch()
        self._events_read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._part, self._part_since = "", time.monotonic()
        self.tail = ""
        """Tail of its output."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._pipe = os.fdopen(reading, "rb", buffering=0)
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, EVENTS_VARIABLE: str(self._events)},
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            start_new_session=True,  # the job forwards Ctrl-C and can kill the whole group
            preexec_fn=_die_with_parent,
        )
        os.close(writing)
        self._open = True
        self._ended_at: float | None = None

    def poll(self) -> int | None:
        """Its exit code, once it has ended and all output is read."""
        code = self._process.poll()
        if code is None:
            return None
        self._ended_at = self._ended_at or time.monotonic()
        if self._open and time.monotonic() - self._ended_at > PIPE_S:
            self.kill()
        return None if self._open and time.monotonic() - self._ended_at < 2 * PIPE_S else code

    def output(self) -> str:
        """Its output since the last call, in whole lines."""
        data = b""
        while self._open and len(data) < MOST_BYTES:
            more = self._pipe.read(MOST_BYTES - len(data))
            if more is None:
                break
            self._open = bool(more)
            data += more
        text = self._part + self._decoder.decode(data, final=not self._open)
        late = time.monotonic() - self._part_since > PART_EVERY_S
        whole = len(text) if late or not self._open or len(text) > MOST_BYTES else text.rfind("\n") + 1
        if whole:
            self._part_since = time.monotonic()
        text, self._part = text[:whole], text[whole:]
        self.tail = (self.tail + text)[-TAIL_CHARACTERS:]
        return text

    def events(self) -> list[dict[str, Any]]:
        """Its `stoker.log` events since the last call."""
        with self._events.open("rb") as file:
            file.seek(self._events_read)
            data = file.read()
        lines = data[: data.rfind(b"\n") + 1]
        self._events_read += len(lines)
        return [json.loads(line) for line in lines.splitlines()]

    def terminate(self) -> None:
        """Send SIGTERM to the script only."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the script and all processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Clean up all processes and files."""
        self.kill()
        self._process.wait()
        self._pipe.close()
        self._scratch.cleanup()


def _die_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
