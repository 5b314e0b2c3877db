"""Laptop: after a rehearsal, move what SageMaker would upload to S3 to the run directory."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Iterable
from pathlib import Path

from stoker.config.redaction import scrub
from stoker.hosts.output import FAILURE_CHARACTERS


def collect(hosts: dict[str, Path], run_dir: Path, given: Iterable[Path] = ()) -> list[str]:
    """Laptop: merge model, output and checkpoints of all hosts, as SageMaker does.

    Args:
        hosts: host name → the folder mounted as its `/opt/ml`.
        run_dir: the run directory on this machine.
        given: the checkpoints that every host was given, to resume from.

    Returns:
        One line per file that two hosts wrote; SageMaker keeps one of them, unspecified which.
    """
    folders = {"output/data": run_dir, "model": run_dir / "model", "checkpoints": run_dir / "checkpoints"}
    return merge(hosts, folders, given)


def merge(sources: dict[str, Path], folders: dict[str, Path], given: Iterable[Path] = ()) -> list[str]:
    """Laptop: move the files below all sources to common folders.

    Args:
        sources: name of a host, or of what several share → its folder.
        folders: path below each source → where its files go.
        given: files and folders that each source had in `checkpoints` from the start.

    Returns:
        One line per file that two sources wrote.
    """
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


def failure_of(ml: Path) -> str:
    """Laptop: what a host wrote to `/opt/ml/output/failure`, truncated as by SageMaker."""
    file = ml / "output" / "failure"
    return file.read_text(errors="replace")[:FAILURE_CHARACTERS] if file.is_file() else ""


def keep_ray_logs(host_folder: Path, target: Path) -> None:
    """Laptop: copy a host's Ray logs; used for failed runs."""
    logs = [path for path in (host_folder / "tmp").glob("sray-*/s/session_2*/logs") if path.is_dir()]
    for folder in logs[-1:]:
        shutil.copytree(
            folder, target, dirs_exist_ok=True, ignore_dangling_symlinks=True, copy_function=_scrubbed
        )
    for started in (host_folder / "tmp").glob("sray-*/ray.log"):
        target.mkdir(parents=True, exist_ok=True)
        _scrubbed(started, target / "ray-start.log")


def _scrubbed(source: str | Path, target: str | Path) -> None:
    """Copy a log of Ray, which quotes what the job's code prints and raises."""
    text = Path(source).read_bytes().decode(errors="surrogateescape")
    Path(target).write_bytes(scrub(text).encode(errors="surrogateescape"))


def remove(folder: Path) -> None:
    """Laptop: remove the hosts' folders; raises if a mount below them would be emptied as well."""
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    prefix = f"{folder.resolve()}/"
    below = [path for path in mounted if path.startswith(prefix)]
    if below:
        raise RuntimeError(f"still mounted, not removed: {', '.join(below)}")
    shutil.rmtree(folder)
