"""Run a program with torch's loader and with Stoker's, and compare the losses that it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SCRIPTS = Path(__file__).parent / "programs" / "scripts"
IMPORT = re.compile(r"^from torch\.utils\.data import .*\bDataLoader\b.*$", re.MULTILINE)
REPLACED = "import stoker; stoker.replace_torch_loader()"
"""The line of docs/dataloader.md for trainers that make their own loaders."""
COUNTED = """
import atexit
from torch.utils.data import dataloader as _torch

def _counted(iterator, *arguments, _original=_torch._BaseDataLoaderIter.__init__):
    _made.append(1)
    _original(iterator, *arguments)

_made, _torch._BaseDataLoaderIter.__init__ = [], _counted
atexit.register(lambda: print("made by torch", len(_made)))
"""
"""Stands before a program in all runs, and counts the passes of torch's own loader."""
LINE = re.compile(r"^(?:loss|batch) .*$", re.MULTILINE)


def with_stoker(program: str) -> str:
    """The program with its one line changed: the import, or else the line for trainers."""
    changed, count = IMPORT.subn(r"\g<0>; from stoker import DataLoader", program)
    assert count <= 1
    return changed if count else f"{REPLACED}\n{program}"


def trained(
    folder: Path, program: str, *arguments: str, ranks: int = 1, **variables: str
) -> tuple[list[list[str]], int]:
    """Per rank the lines of the losses that a program prints, and the passes that torch's loader made."""
    folder.mkdir()
    (folder / "program.py").write_text(COUNTED + program)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "STOKER_"))}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1"}
    how = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    how += ["--redirects=1", "--log-dir=logs"]
    command = [sys.executable, *(how if ranks > 1 else ()), "program.py", *arguments]
    with (folder / "stdout.log").open("w") as stdout, (folder / "stderr.log").open("w") as stderr:
        done = subprocess.run(
            command,
            env=environment | variables,
            cwd=folder,
            stdout=stdout,
            stderr=stderr,
            timeout=550,
        )
    printed = [path.read_text() for path in sorted(folder.rglob("stdout.log"))]
    said = "".join(printed) + (folder / "stderr.log").read_text()
    assert done.returncode == 0, said[-6000:]
    made = sum(map(int, re.findall(r"^made by torch (\d+)$", said, re.MULTILINE)))
    return [LINE.findall(text) for text in printed if text], made


def trains_alike(
    folder: Path, name: str, *arguments: str, steps: int, ranks: int = 1, **variables: str
) -> None:
    """Both runs print the same lines, at least `steps` a rank, and Stoker made every batch of the second."""
    program = (SCRIPTS / f"{name}.py").read_text()
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(trained, folder / kind, text, *arguments, ranks=ranks, **variables)
            for kind, text in (("torch", program), ("stoker", with_stoker(program)))
        ]
    (theirs, by_torch), (ours, left) = (run.result() for run in runs)
    assert ours == theirs, f"compare {folder}/*/stdout.log"
    assert len(theirs) == ranks
    for lines in theirs:
        assert len(lines) >= steps and len(set(lines)) > steps / 2, lines
    assert by_torch and not left, f"torch's loader made {by_torch} and {left} passes"
