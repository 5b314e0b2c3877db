"""Laptop: a running rehearsal: namespaces, the hosts' output, the end, exit code and report."""

from __future__ import annotations

import contextlib
import filecmp
import functools
import json
import os
import queue
import shlex
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from stoker.config.redaction import scrub
from stoker.errors import UsageError
from stoker.figures import table
from stoker_launcher.rehearsal import world
from stoker_launcher.rehearsal.plan import RehearsalRequest

HELD_LINES = 20
END_S = 60.0
"""How long the kernel may take to end the namespaces once all hosts have ended."""
TOOLS = ("unshare", "nsenter", "mount", "ip", "tc")


def unshare_command() -> list[str]:
    instead = "; `--on local` runs the same job without emulated hosts"
    if not sys.platform.startswith("linux"):
        raise UsageError(
            f"--on rehearsal: needs Linux namespaces, but this is {sys.platform}{instead}"
        )
    if absent := [tool for tool in TOOLS if not shutil.which(tool)]:
        packages = "packages util-linux and iproute2"
        raise UsageError(f"--on rehearsal: needs {', '.join(absent)} ({packages}){instead}")
    reason = ""
    as_user = ["--user", "--map-root-user"]
    for options in [[], as_user] if os.geteuid() == 0 else [as_user]:
        command = ["unshare", *options, *world.NAMESPACES]
        test = "ip link add v0 type veth peer name v1 && mount -t tmpfs none /mnt"
        done = subprocess.run(
            [*command, "sh", "-c", test], capture_output=True, text=True, timeout=30, check=False
        )
        if done.returncode == 0:
            return command
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    raise UsageError(
        f"--on rehearsal: cannot create namespaces on this machine ({reason}); run as root, or allow user"
        f" namespaces{instead}"
    )


@dataclass
class HostResult:
    """The result of one host; times in seconds from the start of the rehearsal."""

    name: str
    group: str
    instance_type: str
    started_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None
    notes: list[str] = field(default_factory=list)
    excused: bool = False
    """An injected fault ended it, so its exit code does not count."""


class RehearsalRun:
    def __init__(
        self, request: RehearsalRequest, process: subprocess.Popen[str], show: bool
    ) -> None:
        self.id, self.run_dir = request.run_dir.name, request.run_dir
        self.results = {h.name: HostResult(h.name, h.group, h.instance_type) for h in request.hosts}
        self.failure_reason = ""
        self.formed_s: float | None = None
        self.clashes: list[str] = []
        self.missed: list[str] = []
        self._request, self._process = request, process
        self._tell: Callable[[str], object] = functools.partial(print, flush=True) if show else str
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._code: int | None = None
        self._broken = ""
        self._spoke: set[str] = set()
        self._held: dict[str, deque[str]] = {}
        self._reader = threading.Thread(target=self._follow, name="rehearsal", daemon=True)
        self._reader.start()

    def status(self) -> str:
        if self._code is None:
            return "running"
        if self._code == 0:
            return "succeeded"
        word = "interrupted" if self._code in (130, 143) else "failed"
        return f"{word}: {self.failure_reason}" if self.failure_reason else word

    def logs(self, follow: bool = False) -> Iterator[str]:
        """Output lines as they arrive, each prefixed with its host; with `follow` until the end."""
        while True:
            try:
                line = self._lines.get(block=follow)
            except queue.Empty:
                return
            if line is None:
                self._lines.put(None)
                return
            yield line

    def wait(self) -> int:
        """Block until the end; returns the job's exit code. Ctrl-C stops the hosts; twice kills them."""
        interrupted = False
        while True:
            try:
                for line in self.logs(follow=True):
                    self._tell(line)
                self._reader.join()
                break
            except KeyboardInterrupt:
                if interrupted:
                    self.kill()
                else:
                    self.stop()
                    self._tell("stopping all hosts; press Ctrl-C again to kill them")
                interrupted = True
        if interrupted:
            self._code = 130
        for line in closing_lines(self):
            self._tell(line)
        return 1 if self._code is None else self._code

    def stop(self) -> None:
        """Send SIGTERM to process 1 of every host, later SIGKILL, as StopTrainingJob does."""
        self._command("stop")

    def inject(self, action: str, host: str) -> None:
        """Inject one of `world.ACTIONS` now; the end of the run makes it void."""
        if action not in world.ACTIONS or host not in self.results:
            raise ValueError(f"no action {action!r}, or no host {host!r}")
        self._command(f"fault {action} {host}")

    def kill(self) -> None:
        self._command("kill")

    @property
    def process_id(self) -> int:
        """The process in whose network namespace the hosts' bridge is."""
        return self._process.pid

    @property
    def workers_gone_s(self) -> float | None:
        """Seconds from the head's end until the last worker host ended."""
        head = self.results[self._request.head]
        others = [
            r.ended_s for r in self.results.values() if r is not head and r.ended_s is not None
        ]
        if head.ended_s is None or not others:
            return None
        return round(max(0.0, *(ended - head.ended_s for ended in others)), 2)

    @property
    def formed_after_last_host_s(self) -> float | None:
        """Seconds from the last host's start until the cluster formed."""
        starts = [r.started_s for r in self.results.values() if r.started_s is not None]
        if self.formed_s is None or not starts:
            return None
        return round(self.formed_s - max(s for s in starts if s <= self.formed_s), 2)

    def _follow(self) -> None:
        with contextlib.ExitStack() as stack:
            files = {
                name: stack.enter_context((self.run_dir / "logs" / f"{name}.log").open("w"))
                for name in self.results
            }
            for text in self._process.stdout or ():
                try:
                    event = json.loads(text)
                except ValueError:
                    self._broken = text.strip()
                    continue
                self._take(event, files)
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._broken = self._broken or f"its processes still run {END_S:.0f} s after its end"
        try:
            self._finish()
        finally:
            self._lines.put(None)

    def _take(self, event: dict[str, Any], files: Mapping[str, TextIO]) -> None:
        if event["host"] == "world":
            if event["event"] == "broken":
                self._broken = str(event["text"])
            if event["event"] == "missed":
                fault = self._request.job.resolved.config.rehearsal.faults[event["number"]]
                self.missed.append(f"{fault}: {event['text']}")
            return
        result = self.results[event["host"]]
        kind, at = event["event"], float(event["at_s"])
        if kind == "line":
            line = str(event["text"])
            files[result.name].write(line + "\n")
            files[result.name].flush()
            self._show(result, line)
            if self.formed_s is None and world.FORMED in line:
                self.formed_s = at
            return
        if kind == "started":
            result.started_s, result.ended_s, result.exit_code = at, None, None
        if kind == "exited":
            result.ended_s, result.exit_code = at, int(event["code"])
        if kind in ("fault", "overdue", "note"):
            result.notes.append(f"{event['text']} at {at:.0f} s")
        if kind == "fault" and event["text"] in ("kill", "crash", "partition", "pause"):
            result.excused = True
        if kind == "overdue":
            result.excused = False
        origin = f"[{result.group} {result.name}]"
        if kind == "exited" and result.exit_code and result.name not in self._spoke:
            for line in self._held.pop(result.name, ()):
                self._lines.put(f"{origin} {line}")
        what = f"{kind} {event.get('text') or event.get('code', '')}".strip()
        self._lines.put(f"{origin} -- {what} at {at:.1f} s")

    def _show(self, result: HostResult, line: str) -> None:
        """Show Stoker's lines at once; hold back those of the toolkit and pip until a host fails silently."""
        if line.startswith(f"[{result.group} {result.name} "):
            self._lines.put(line)
            self._spoke.add(result.name)
        elif " ERROR " in line:
            self._lines.put(f"[{result.group} {result.name}] {line}")
        elif line.strip():
            self._held.setdefault(result.name, deque(maxlen=HELD_LINES)).append(line)

    def _finish(self) -> None:
        folder = self.run_dir / "hosts"
        self._code = self._verdict(folder)
        self.clashes = self._request.shape.collect(self._request, folder)
        if self._code != 0:
            for name in self.results:
                keep_ray_logs(folder / name, self.run_dir / "logs" / f"{name}-ray")
        remove(folder)
        (self.run_dir / "rehearsal.json").write_text(json.dumps(self.report(), indent=1))

    def report(self) -> dict[str, Any]:
        return {
            "exit_code": self._code,
            "status": self.status(),
            "failure_reason": self.failure_reason,
            "formed_after_last_host_s": self.formed_after_last_host_s,
            "workers_gone_s": self.workers_gone_s,
            "clashes": self.clashes,
            "missed_faults": self.missed,
            "hosts": [vars(result) for result in self.results.values()],
        }

    def _verdict(self, folder: Path) -> int:
        """The job's exit code: the head's, else that of a host whose failure fails the job on its service."""
        for host in sorted(self._request.hosts, key=lambda host: host.name != self._request.head):
            result = self.results[host.name]
            if host.name != self._request.head and (result.started_s is None or result.excused):
                continue
            code = 1 if result.exit_code is None else result.exit_code
            if code == 0:
                continue
            left = self._request.shape.failure(self._request, folder, host)
            reason = left or self._broken or "; ".join(result.notes)
            self.failure_reason = (
                f"AlgorithmError: {reason or 'no reason given'}, exit code: {code}"
            )
            return code
        if self.missed:
            self.failure_reason = "the job succeeded, but not all faults were injected"
        return int(bool(self.missed))

    def _command(self, word: str) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(word + "\n")
                self._process.stdin.flush()


def closing_lines(run: RehearsalRun) -> list[str]:
    rows = [
        (
            result.name,
            result.group,
            result.instance_type,
            "never" if result.started_s is None else f"{result.started_s:.1f} s",
            "" if result.ended_s is None else f"{result.ended_s:.1f} s",
            "" if result.exit_code is None else str(result.exit_code),
            "; ".join(result.notes),
        )
        for result in run.results.values()
    ]
    head = ("host", "group", "type", "started", "ended", "exit code", "notes")
    lines = [f"\nrehearsal {run.id}: {run.status().split(':')[0]}", table(head, rows)]
    if (formed_s := run.formed_after_last_host_s) is not None:
        lines.append(f"cluster formed {formed_s} s after the last host started")
    if (gone_s := run.workers_gone_s) is not None:
        lines.append(f"worker hosts gone {gone_s} s after the head ended")
    lines += [f"conflict: {clash}" for clash in run.clashes]
    lines += [f"not injected: {missed}" for missed in run.missed]
    lines += [f"FailureReason: {run.failure_reason}"] if run.failure_reason else []
    return [*lines, *results(run.run_dir, run.status() == "succeeded")]


def results(run_dir: Path, succeeded: bool) -> list[str]:
    """The lines that name what a rehearsal left on this machine; its hosts named their own paths."""
    lines = {"results": ("", "."), "model": ("", "model"), "report": ("", "report.html")}
    lines |= {"next": ("tensorboard --logdir ", "tensorboard")} if succeeded else {}
    lines |= {} if succeeded else {"details": ("", "logs/driver.log")}
    return [
        f"{title}: {command}{shlex.quote(str(run_dir / name)) if command else run_dir / name}"
        for title, (command, name) in lines.items()
        if (run_dir / name).exists()
    ]


def merge(
    sources: dict[str, Path], folders: dict[str, Path], given: Iterable[Path] = ()
) -> list[str]:
    clashes: list[str] = []
    originals = {
        Path("checkpoints", file.relative_to(top.parent)): file
        for top in given
        for file in (top, *top.rglob("*"))
    }
    for source, target in folders.items():
        writer: dict[Path, str] = {}
        found: list[tuple[bool, str, Path, Path]] = []
        for host, base in sources.items():
            for file in sorted((base / source).rglob("*")):
                if not file.is_dir() and (file.is_file() or file.is_symlink()):
                    name = file.relative_to(base / source)
                    original = originals.get(Path(source, name))
                    same = original is not None and filecmp.cmp(file, original, shallow=False)
                    found.append((same, host, name, file))
        # A file that a host was given and left alone gives way to one that another host wrote.
        for same, host, name, file in sorted(found, key=lambda one: one[0]):
            if name in writer:
                if not same and not filecmp.cmp(file, target / name, shallow=False):
                    clashes.append(f"{source}/{name}: written by {writer[name]} and {host}")
                continue
            writer[name] = host
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(file, target / name)
    return clashes


def keep_ray_logs(host_folder: Path, target: Path) -> None:
    logs = [
        path for path in (host_folder / "tmp").glob("sray-*/s/session_2*/logs") if path.is_dir()
    ]
    for folder in logs[-1:]:
        shutil.copytree(
            folder,
            target,
            dirs_exist_ok=True,
            ignore_dangling_symlinks=True,
            copy_function=_scrubbed,
        )
    for started in (host_folder / "tmp").glob("sray-*/ray.log"):
        target.mkdir(parents=True, exist_ok=True)
        _scrubbed(started, target / "ray-start.log")


def _scrubbed(source: str | Path, target: str | Path) -> None:
    """Copy a log of Ray, which quotes what the job's code prints and raises."""
    text = Path(source).read_bytes().decode(errors="surrogateescape")
    Path(target).write_bytes(scrub(text).encode(errors="surrogateescape"))


def remove(folder: Path) -> None:
    """Remove the hosts' folders; raises if a mount below them would be emptied as well."""
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    prefix = f"{folder.resolve()}/"
    below = [path for path in mounted if path.startswith(prefix)]
    if below:
        raise RuntimeError(f"still mounted, not removed: {', '.join(below)}")
    shutil.rmtree(folder)
