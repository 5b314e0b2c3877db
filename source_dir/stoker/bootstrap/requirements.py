"""Every host: install what the image lacks, before anything but the standard library is used."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

INSTALL_TIMEOUT_S = 900


class InstallError(RuntimeError):
    """Every host: a requirement is absent and cannot be installed; one line."""


def ensure(folder: Path) -> list[str]:
    """Every host: install `folder/requirements.txt` where it is not satisfied yet.

    A folder `wheels/` beside the file is then the only source, for a VPC without internet.

    Returns:
        What was absent, as written in the file; empty where nothing had to be done.

    Raises:
        InstallError: pip failed or took longer than `INSTALL_TIMEOUT_S`.
    """
    file = folder / "requirements.txt"
    absent = unsatisfied(file.read_text(encoding="utf-8")) if file.is_file() else []
    if not absent:
        return []
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "-r", str(file)]
    wheels = folder / "wheels"
    if wheels.is_dir():
        command += ["--no-index", "--find-links", str(wheels)]
    environment = {
        **os.environ,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
    }
    source = "wheels/" if wheels.is_dir() else "the package index"
    what = f"requirements.txt: cannot install {', '.join(absent)} from {source}"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, env=environment
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"{what}: pip took more than {INSTALL_TIMEOUT_S} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise InstallError(f"{what}: {errors[-1] if errors else f'pip exit {done.returncode}'}")
    importlib.invalidate_caches()
    return absent


def unsatisfied(text: str) -> list[str]:
    """Every host: the lines of a requirements file that the installed packages do not satisfy.

    Options (`--index-url …`) and direct references (`name @ https://…`) count by the name alone.
    """
    absent = []
    for raw in text.splitlines():
        line = raw.split(" #")[0].strip()
        if not line or line.startswith(("#", "-")):
            continue
        if not _satisfied(line, set()):
            absent.append(line)
    return absent


def _satisfied(line: str, seen: set[tuple[str, str]]) -> bool:
    requirement = _parser()(line)
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        return True
    return _installed(requirement, seen)


def _installed(requirement: Any, seen: set[tuple[str, str]]) -> bool:
    try:
        found = metadata.distribution(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    if requirement.specifier and not requirement.specifier.contains(found.version, prereleases=True):
        return False
    # `ray[data]` is satisfied only where what the extra asks for is there as well.
    for extra in requirement.extras:
        if (requirement.name, extra) in seen:
            continue
        seen.add((requirement.name, extra))
        for line in found.requires or []:
            needed = _parser()(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                continue
            if needed.marker.evaluate({"extra": extra}) and not _installed(needed, seen):
                return False
    return True


def _parser() -> Any:
    try:
        module = importlib.import_module("packaging.requirements")
    except ImportError:  # a bare image: pip always carries its own copy
        module = importlib.import_module("pip._vendor.packaging.requirements")
    return module.Requirement
