"""Laptop: shows a rehearsal on the terminal: host output in colour and a closing table."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.rehearsal.plan import PlannedHost

if TYPE_CHECKING:
    from launcher.rehearsal.running import RehearsalRun

_COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "bright_red")


class Display:
    """Laptop: prints to standard output, in colour only on a terminal."""

    def __init__(self, hosts: tuple[PlannedHost, ...]) -> None:
        self._console = Console(soft_wrap=True, highlight=False)
        self._colours = {
            f"[{host.group} {host.name}": _COLOURS[number % len(_COLOURS)]
            for number, host in enumerate(hosts)
        }

    def line(self, text: str) -> None:
        """Print one line of a host, with its origin in colour."""
        end = text.find("]") + 1
        origin = text[:end]
        colour = next((c for start, c in self._colours.items() if origin.startswith(start)), None)
        if colour is None:
            self._console.print(Text(text))
        else:
            self._console.print(Text.assemble((origin, colour), text[end:]))

    def closing(self, run: RehearsalRun) -> None:
        """Print the table of hosts, forming and leaving times, and the failure reason."""
        table = Table(title=f"rehearsal {run.id}: {run.status().split(':')[0]}")
        for name in ("host", "group", "type", "started", "ended", "exit code", "notes"):
            table.add_column(name)
        for result in run.results.values():
            table.add_row(
                result.name,
                result.group,
                result.instance_type,
                "never" if result.started_s is None else f"{result.started_s:.1f} s",
                "" if result.ended_s is None else f"{result.ended_s:.1f} s",
                "" if result.exit_code is None else str(result.exit_code),
                "; ".join(result.notes),
            )
        self._console.print(table)
        if run.formed_after_last_host_s is not None:
            self._console.print(
                f"cluster formed {run.formed_after_last_host_s} s after the last host started"
            )
        if run.workers_gone_s is not None:
            self._console.print(f"worker hosts gone {run.workers_gone_s} s after the head ended")
        for clash in run.clashes:
            self._console.print(f"conflict: {clash}", style="yellow")
        if run.failure_reason:
            self._console.print(Text(f"FailureReason: {run.failure_reason}", style="red"))
        for text in results(run.run_dir, run.status() == "succeeded"):
            self._console.print(Text(text))


def results(run_dir: Path, succeeded: bool) -> list[str]:
    """Laptop: the lines that name what a rehearsal left on this machine; its hosts named their own paths."""
    lines = {"results": ("", "."), "model": ("", "model"), "report": ("", "report.html")}
    lines |= {"next": ("tensorboard --logdir ", "tensorboard")} if succeeded else {}
    lines |= {} if succeeded else {"details": ("", "logs/driver.log")}
    return [
        f"{title}: {command}{shlex.quote(str(run_dir / name)) if command else run_dir / name}"
        for title, (command, name) in lines.items()
        if (run_dir / name).exists()
    ]
