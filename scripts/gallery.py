"""Run the jobs of the gallery and keep their reports: `python scripts/gallery.py [NAME …]`, five minutes."""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PAGES, TERMINAL = ROOT / "docs" / "gallery", ROOT / "docs" / "images" / "terminal.svg"
LOST = "rehearsal.faults=['kill:algo-3@/epoch 2\\/8 done/']"
JOBS: dict[str, list[str]] = {
    "digits": ["example:digits"],
    "lost_host": ["example:digits", "--on", "rehearsal", "rehearsal.hosts=gpu=1,cpu=2", LOST],
    "images": ["example:images"],
    "segmentation": ["example:segmentation"],
    "text": ["example:text"],
    "audio": ["example:audio"],
    "video": ["example:video"],
    "own_script": [str(PAGES / "own_script.py")],
}
"""Name → arguments of `submit.py`. The first one writes data that others read, too."""
WIDTH = 120


def main(names: list[str]) -> None:
    """Run the named jobs, or all, in one folder."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in dict.fromkeys(["digits", *names] if names else JOBS):
            screen = run([sys.executable, str(ROOT / "launcher/submit.py"), *JOBS[name]], scratch)
            report = (Path(scratch) / "runs/latest/report.html").read_text(encoding="utf-8")
            (PAGES / f"{name}.html").write_text(without_folders(report, scratch), encoding="utf-8")
            if name == "digits":
                TERMINAL.write_text(
                    picture(f"$ make demo\n{without_folders(screen, scratch)}"), encoding="utf-8"
                )
            shutil.rmtree(Path(scratch) / "runs")


def run(command: list[str], folder: str) -> str:
    """Run a command in a terminal and return what it shows.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    shown, given = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=given, stdout=given, stderr=given
    )
    os.close(given)
    output = b""
    with os.fdopen(shown, "rb", buffering=0) as screen:
        try:
            while some := screen.read(1 << 16):
                output += some
        except OSError:
            pass  # Linux reports the end of a terminal like this
    print(output.decode())
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command)
    return output.decode().replace("\r\n", "\n")


def without_folders(text: str, scratch: str) -> str:
    """Paths below the scratch folder and this checkout as relative ones."""
    for folder in (str(Path(scratch).resolve()), str(ROOT)):
        text = text.replace(f"{folder}/", "")
    return text


def picture(screen: str) -> str:
    """A terminal's output as SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(screen))
    svg = console.export_svg(title="make demo")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # from the web


if __name__ == "__main__":
    main(sys.argv[1:])
