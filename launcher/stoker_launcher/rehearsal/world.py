"""World: process 1 of a rehearsal's private namespaces and parent of all its hosts.

The bridge, links, mounts and hosts exist only inside this process's namespaces. When it ends, for any
reason, the kernel removes them. It ends when its standard input is closed.

Prints events as JSON lines and reads commands (`stop`, `kill`, `fault ACTION HOST`).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from stoker_launcher.rehearsal.host import SPEC_VARIABLE

NAMESPACES = (
    *("--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("--propagation", "private"),
)
"""Options of `unshare`, for each host and for the world itself."""
BRIDGE, BRIDGE_ADDRESS = "stoker0", "02:00:0a:4d:00:01"
TICK_S = 0.05
KILLED_S = 30.0
"""How long the kernel may take to end a killed host; a process that hangs in it can take for ever."""
SLOW = ("rate", "4mbit", "burst", "128kb", "latency", "400ms")


@dataclass
class EmulatedHost:
    spec: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None
    init: int = 0
    kill_at: float | None = None
    overdue_at: float | None = None
    """When it was killed for being overdue."""
    finished: bool = False
    killed: bool = False
    reader: threading.Thread | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    def end(self) -> None:
        """Kill process 1; the kernel then kills all processes of its PID namespace."""
        self.killed = True  # unshare does not report that its child was killed
        _signal(self.init, signal.SIGKILL)

    @property
    def running(self) -> bool:
        return self.process is not None and not self.finished


class World:
    def __init__(self, spec: dict[str, Any]) -> None:
        self._hosts = [EmulatedHost(host) for host in spec["hosts"]]
        self._faults = [Fault(**fault) for fault in spec["faults"]]
        self._linger_s = float(spec["linger_s"])
        self._timeout_s = float(spec["timeout_s"])
        self._stop_grace_s = float(spec["stop_grace_s"])
        self._lines: queue.Queue[tuple[EmulatedHost, str]] = queue.Queue()
        self._started = time.monotonic()
        self._ray_port = int(spec["ray_port"])
        self._head = str(spec["head"])
        self._linger_until: float | None = None

    def run(self) -> None:
        _run("ip", "link", "set", "lo", "up")
        # Without an address of its own, a bridge takes that of a port, and changes it when hosts come and go.
        _run("ip", "link", "add", BRIDGE, "address", BRIDGE_ADDRESS, "type", "bridge")
        _run("ip", "link", "set", BRIDGE, "up")
        self._started = time.monotonic()
        while True:
            for host in self._hosts:
                delay = host.spec["delay_s"]
                if host.process is None and not host.finished and self._now() >= delay:
                    self._start(host)
            self._commands()
            self._report_lines()
            for fault in self._faults:
                if not fault.done and fault.due_s is not None and self._now() >= fault.due_s:
                    fault.done, fault.injected = True, self._apply(fault.action, fault.host)
            self._reap()
            self._deadlines()
            # Late hosts are not awaited once all started ones have ended.
            if any(h.finished for h in self._hosts) and not any(h.running for h in self._hosts):
                break
            time.sleep(TICK_S)
        for host in self._hosts:
            if host.reader is not None:
                host.reader.join(timeout=5)
        self._report_lines()
        for number, fault in enumerate(self._faults):
            if why := fault.missed:
                self._event("world", "missed", number=number, text=why)
        self._event("world", "over")

    def _start(self, host: EmulatedHost) -> None:
        spec = host.spec
        read_end, write_end = os.pipe()
        module = (sys.executable, "-m", "stoker_launcher.rehearsal.host", str(write_end))
        host.process = subprocess.Popen(
            ["unshare", *NAMESPACES, *module],  # noqa: S607 - as the user's PATH has it
            # Every user of this machine can read command lines, and a host's variables may be secret.
            env={**os.environ, SPEC_VARIABLE: json.dumps(spec)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[write_end],
        )
        os.close(write_end)
        host.reader = threading.Thread(target=self._read, args=(host,), daemon=True)
        host.reader.start()
        with open(read_end, "rb") as ready:  # noqa: PTH123 - a descriptor
            if not select.select([ready], [], [], 20)[0] or not ready.read(1):
                self._event(host.name, "note", text="did not start")
                return
        here, there = spec["port"], spec["link"]
        _run("ip", "link", "add", here, "type", "veth", "peer", "name", there)
        _run("ip", "link", "set", here, "master", BRIDGE)
        if spec["rate"]:
            _run("tc", "qdisc", "add", "dev", here, "root", "tbf", *spec["rate"])
        _run("ip", "link", "set", here, "up")
        _run("ip", "link", "set", there, "netns", str(host.process.pid))
        host.init = _child_of(host.process.pid)
        self._event(host.name, "started")

    def _read(self, host: EmulatedHost) -> None:
        for line in host.process.stdout if host.process and host.process.stdout else ():
            self._lines.put((host, line.decode("utf-8", "replace").rstrip("\n")))

    def _report_lines(self) -> None:
        while True:
            try:
                host, line = self._lines.get_nowait()
            except queue.Empty:
                return
            self._event(host.name, "line", text=line)
            for fault in self._faults:
                fault.see(line, self._now())

    def _apply(self, action: str, name: str) -> bool:
        """Whether a host was in a state in which the action has an effect."""
        ready = [
            host for host in self._hosts if name in (host.name, "all") and _takes(action, host)
        ]
        for host in ready:
            self._event(host.name, "fault", text=action)
            self.do(action, host)
        return bool(ready)

    def do(self, action: str, host: EmulatedHost) -> None:
        port = str(host.spec["port"])
        if action == "start":
            self._start(host)
        if action == "return":
            self._renew(host)
            self._start(host)
        if action in ("slow", "fast"):
            rate = SLOW if action == "slow" else host.spec["rate"]
            _run(
                "tc",
                "qdisc",
                "replace",
                "dev",
                port,
                "root",
                *(("tbf", *rate) if rate else ("pfifo",)),
            )
        if action in ("kill", "partition"):
            _run("ip", "link", "set", port, "down")
        if action == "heal":
            _run("ip", "link", "set", port, "up")
        if action == "kill":
            host.end()
        if action == "term":
            _signal(host.init, signal.SIGTERM)
            host.kill_at = time.monotonic() + self._stop_grace_s
        if action == "occupy":
            server = f"socket.create_server(('', {self._ray_port}))"
            listener = f"import socket, time\nserver = {server}\ntime.sleep(1e6)"
            enter = ("nsenter", "--target", str(host.init), "--net", "--pid", "--mount")
            subprocess.Popen([*enter, sys.executable, "-c", listener], stdin=subprocess.DEVNULL)
        if action in ("pause", "resume"):
            for process in _processes_of(host.init):
                _signal(process, signal.SIGSTOP if action == "pause" else signal.SIGCONT)
        if action == "crash":
            for process in _training(host.init)[:1]:
                host.killed = process == host.init
                _signal(process, signal.SIGKILL)

    def _renew(self, host: EmulatedHost) -> None:
        """Leave nothing of the earlier machine but what SageMaker would give the new one."""
        for part in ("tmp", "opt"):
            shutil.rmtree(Path(host.spec["folder"]) / part, ignore_errors=True)
        # The kernel may not have removed the link of the ended namespace yet.
        delete = ["ip", "link", "delete", str(host.spec["port"])]
        subprocess.run(delete, capture_output=True, check=False)
        host.finished = host.killed = False
        host.kill_at = host.overdue_at = None

    def _reap(self) -> None:
        for host in self._hosts:
            if not host.running or host.process is None or host.process.poll() is None:
                continue
            host.finished = True
            code = 137 if host.killed else host.process.returncode
            self._event(host.name, "exited", code=128 - code if code < 0 else code)
            if host.name == self._head:
                self._linger_until = time.monotonic() + self._linger_s

    def _deadlines(self) -> None:
        now = time.monotonic()
        for host in self._hosts:
            if not host.running:
                continue
            if host.overdue_at is not None:
                if now > host.overdue_at + KILLED_S:
                    self._event(host.name, "note", text="could not be killed")
                    host.finished = True
                    self._event(host.name, "exited", code=137)
            elif host.kill_at is not None and now > host.kill_at:
                self._overdue(host, "did not stop within its grace period")
            elif self._linger_until is not None and now > self._linger_until:
                self._overdue(
                    host, f"was still running {self._linger_s:.0f} s after the head's end"
                )
            elif self._now() > self._timeout_s:
                self._overdue(host, f"was still running after {self._timeout_s:.0f} s")

    def _overdue(self, host: EmulatedHost, why: str) -> None:
        self._event(host.name, "overdue", text=why)
        host.overdue_at = time.monotonic()
        host.end()

    def _commands(self) -> None:
        while select.select([sys.stdin], [], [], 0)[0]:
            # `readline` would keep back what came together with a line.
            commands = os.read(sys.stdin.fileno(), 2**16).decode().splitlines()
            if not commands or "kill" in commands:
                os._exit(0)  # the launcher is gone or asked to kill
            for word, *rest in map(str.split, commands):
                if word == "fault":
                    self._apply(*rest)
                for host in self._hosts:
                    if word == "stop" and host.running:
                        self.do("term", host)

    def _event(self, host: str, event: str, **more: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            record = {"at_s": round(self._now(), 2), "host": host, "event": event, **more}
            print(json.dumps(record), flush=True)

    def _now(self) -> float:
        return time.monotonic() - self._started


def _child_of(parent: int) -> int:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(parent).children():
                return child.pid
        time.sleep(0.01)
    raise RuntimeError(f"no child of process {parent}")


def _processes_of(init: int) -> list[int]:
    """All processes in the PID namespace of `init`, itself first; none if that is not a host's own."""
    found = []
    with contextlib.suppress(OSError):
        namespace = Path(f"/proc/{init}/ns/pid").readlink()
        if namespace == Path("/proc/self/ns/pid").readlink():
            return []
        for process in psutil.pids():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{process}/ns/pid").readlink() == namespace:
                    found.append(process)
    return sorted(found)


def _training(init: int) -> list[int]:
    found = []
    for process in _processes_of(init):
        with contextlib.suppress(psutil.Error):
            if any(word.endswith("train.py") for word in psutil.Process(process).cmdline()[:4]):
                found.append(process)
    return found


def _takes(action: str, host: EmulatedHost) -> bool:
    if action == "crash":
        return host.running and bool(_training(host.init))
    return {"start": host.process is None, "return": host.finished}.get(action, host.running)


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if process:
            os.kill(process, number)


def _run(*command: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


ACTIONS = {
    "start": "start a host whose join_delay is never",
    "return": "start a host again that has ended, as a new machine of the same name",
    "kill": "lose the machine: cut its link, then kill every process on it",
    "crash": "kill only train.py, as the kernel does when memory runs out",
    "pause": "suspend every process of the host",
    "resume": "resume them",
    "partition": "cut the link",
    "heal": "restore the link",
    "slow": "limit the link to 4 Mbit/s",
    "fast": "lift that limit",
    "occupy": "let another program listen on Ray's port",
    "term": "SIGTERM to the host's process 1, SIGKILL after 120 s, as StopTrainingJob does",
}
FORMED = "cluster formed in"


@dataclass
class Fault:
    """One fault; `due_s` is set once its time is known."""

    action: str
    host: str
    pattern: str | None
    later_s: float
    due_s: float | None
    done: bool = False
    injected: bool = False

    @property
    def missed(self) -> str:
        """Why it was never injected; empty if it was."""
        if self.done:
            return "" if self.injected else "the host was in no state for it"
        return "no line matched" if self.due_s is None else "the job ended before"

    def see(self, line: str, now_s: float) -> None:
        if self.due_s is None and self.pattern is not None and re.search(self.pattern, line):
            self.due_s = now_s + self.later_s


if __name__ == "__main__":
    try:
        World(json.loads(Path(sys.argv[1]).read_text())).run()
    except Exception as error:
        broken = {"at_s": 0, "host": "world", "event": "broken", "text": str(error)}
        print(json.dumps(broken), flush=True)
        sys.exit(1)
