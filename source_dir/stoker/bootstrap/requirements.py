"""Every host: install what the image lacks, before anything but the standard library is used."""

from __future__ import annotations

import functools
import importlib
import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

INSTALL_TIMEOUT_S = 900


CONSTRAINTS = "constraints.txt"
"""In the staged copy: the versions on the machine that submitted, for what the image lacks."""
OF_THE_IMAGE = ("torch", "torchvision", "torchaudio", "ray")
"""Fits the image's CUDA and drivers, or every other host: no requirement may replace it."""


class InstallError(RuntimeError):
    """Every host: a requirement is absent and cannot be installed; one line."""


class ConflictError(InstallError):
    """Every host: a requirement would replace a package of the image; one line."""


def ensure(folder: Path) -> list[str]:
    """Every host: install `folder/requirements.txt` where it is not satisfied yet.

    A folder `wheels/` beside the file is then the only source, for a VPC without internet. Packages of
    the image in `OF_THE_IMAGE` stay as they are; what the image lacks gets the versions of `CONSTRAINTS`, so
    that all hosts install the same.

    Returns:
        What was absent, as written in the file; empty where nothing had to be done.

    Raises:
        ConflictError: the file asks for another version of what belongs to the image.
        InstallError: pip failed or took longer than `INSTALL_TIMEOUT_S`.
    """
    file = folder / "requirements.txt"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    absent = unsatisfied(text)
    if not absent:
        return []
    pins = image_pins()
    refuse_replacements(text, pins)
    command = [sys.executable, "-m", "pip", "install", "--no-input", "--progress-bar=off", "-r", str(file)]
    wheels, staged = folder / "wheels", folder / CONSTRAINTS
    lines = [f"{name}=={version}" for name, version in pins.items()]
    if wheels.is_dir():
        command += ["--no-index", "--find-links", str(wheels)]
    elif staged.is_file():
        given = _requirements(staged.read_text(encoding="utf-8"))
        lines += [line for line, requirement in given if not _version(requirement.name)]
    environment = {
        **os.environ,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
    }
    source = "wheels/" if wheels.is_dir() else "the package index"
    what = f"requirements.txt: cannot install {', '.join(absent)} from {source}"
    with tempfile.NamedTemporaryFile("w", prefix="stoker-constraints-", suffix=".txt") as constraints:
        constraints.write("\n".join(lines) + "\n")
        constraints.flush()
        try:
            done = subprocess.run(
                [*command, "-c", constraints.name],
                capture_output=True,
                text=True,
                timeout=INSTALL_TIMEOUT_S,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            raise InstallError(f"{what}: pip took more than {INSTALL_TIMEOUT_S} s") from None
    if done.returncode:
        _explain_conflict(done.stdout + done.stderr, pins)
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise InstallError(f"{what}: {errors[-1] if errors else f'pip exit {done.returncode}'}")
    importlib.invalidate_caches()
    return absent


def unsatisfied(text: str) -> list[str]:
    """Every host: the lines of a requirements file that the installed packages do not satisfy.

    Options (`--index-url …`) and direct references (`name @ https://…`) count by the name alone.
    """
    return [line for line, requirement in _requirements(text) if not _installed(requirement, set())]


def image_pins() -> dict[str, str]:
    """Every host: what the image has of `OF_THE_IMAGE`, name → version."""
    found = {name: _version(name) for name in OF_THE_IMAGE}
    return {name: version for name, version in found.items() if version}


def refuse_replacements(text: str, pins: dict[str, str]) -> None:
    """Every host: refuse a requirements file that names another version of what belongs to the image.

    Raises:
        ConflictError: naming the line and the image's version.
    """
    for line, requirement in _requirements(text):
        has = pins.get(canonical(requirement.name))
        if has and (requirement.url or not requirement.specifier.contains(has, prereleases=True)):
            raise ConflictError(
                f"requirements.txt: {line} would replace the image's {requirement.name} {has}, which fits its"
                " drivers and the other hosts; remove the line, or choose an image that has that version"
            )


def versions(text: str) -> dict[str, str]:
    """Every host: the versions here of what a requirements file asks for, and of what that needs.

    What torch needs differs between images for GPUs and for CPUs, and so does the part after `+`.
    """
    found: dict[str, str] = {}
    waiting = [requirement for _, requirement in _requirements(text)]
    waiting += [_parser()(name) for name in OF_THE_IMAGE]
    seen = set()
    while waiting:
        requirement = waiting.pop()
        name = canonical(requirement.name)
        key = (name, frozenset(requirement.extras))
        version = _version(name)
        if key in seen or not version:
            continue
        seen.add(key)
        found[name] = version.partition("+")[0]
        if name in OF_THE_IMAGE[:3]:
            continue
        for line in metadata.distribution(name).requires or []:
            needed = _parser()(line)
            if any(_applies(needed, extra) for extra in ("", *requirement.extras)):
                waiting.append(needed)
    return found


def difference(here: dict[str, str], on_head: dict[str, str]) -> str:
    """Every host: how the packages here differ from the head's, in words; "" where they do not."""
    texts = [
        f"{name} {here.get(name, '(absent)')} here, {on_head.get(name, '(absent)')} on the head"
        for name in sorted({*here, *on_head})
        if here.get(name) != on_head.get(name)
    ]
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more


def constraint_lines(text: str, given: str = "") -> list[str]:
    """Laptop: the versions here of all that a requirements file needs, as lines of a constraints file.

    Args:
        text: of the requirements file.
        given: the user's own constraints, which come first. What belongs to the image is left out.
    """
    own = {canonical(requirement.name): line for line, requirement in _requirements(given)}
    here = {name: f"{name}=={version}" for name, version in _versions_on_the_laptop(text).items()}
    return [line for name, line in sorted((here | own).items()) if name not in OF_THE_IMAGE]


_versions_on_the_laptop = functools.cache(versions)
"""Nothing is installed while the launcher runs."""


def canonical(name: str) -> str:
    """Anywhere: `Foo_Bar` → `foo-bar`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _explain_conflict(output: str, pins: dict[str, str]) -> None:
    """Raise what pip says of a package of the image, where that is why it gave up."""
    for name, version in pins.items():
        if f"(constraint) {name}==" not in output:
            continue
        asking = [line.strip() for line in output.splitlines() if f" depends on {name}" in line]
        raise ConflictError(
            f"requirements.txt: {asking[0] if asking else 'a package needs another ' + name}, but the image's"
            f" {name} {version} stays, which fits its drivers and the other hosts; ask for a version of the"
            " package that goes with it, or choose another image"
        )


def _requirements(text: str) -> list[tuple[str, Any]]:
    """The lines of a requirements file that name a package for this machine, with what they say."""
    found = []
    for raw in text.splitlines():
        line = raw.split(" #")[0].strip()
        if not line or line.startswith(("#", "-")):
            continue
        requirement = _parser()(line)
        if _applies(requirement, ""):
            found.append((line, requirement))
    return found


def _applies(requirement: Any, extra: str) -> bool:
    return requirement.marker is None or bool(requirement.marker.evaluate({"extra": extra}))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


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
            asked_for = _applies(needed, extra) and not _applies(needed, "")
            if asked_for and not _installed(needed, seen):
                return False
    return True


def _parser() -> Any:
    try:
        module = importlib.import_module("packaging.requirements")
    except ImportError:  # a bare image: pip always carries its own copy
        module = importlib.import_module("pip._vendor.packaging.requirements")
    return module.Requirement
