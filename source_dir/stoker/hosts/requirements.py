"""Every host: install packages that the image lacks; runs before any third-party import."""

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
OLDEST_RAY = "2.52"
"""The first release with token authentication."""
OLDEST_TORCH = "2.6"
PYTHONS = ("3.11", "3.12", "3.13")
SUPPORTED_PYTHONS = f"{PYTHONS[0]} to {PYTHONS[-1]}"


CONSTRAINTS = "constraints.txt"
"""In the staged copy: package versions of the submitting machine, for packages that the image lacks."""
REPOSITORY_VARIABLE = "CA_REPOSITORY_ARN"
"""Names a repository of CodeArtifact, as for SageMaker's own toolkits."""
REPOSITORY_ARN = r"arn:aws[\w-]*:codeartifact:([\w-]+):(\d+):repository/([\w.-]+/[\w.-]+)"
OF_TORCH = ("torch", "torchvision", "torchaudio")
OF_THE_IMAGE = (*OF_TORCH, "ray")
"""Must match the image's CUDA and drivers, or all other hosts; requirements must not replace them."""


class InstallError(RuntimeError):
    """Every host: a missing requirement cannot be installed. One line."""


class ConflictError(InstallError):
    """Every host: the user must change the requirements or the image. One line."""


def ensure(folder: Path, install: bool = True) -> list[str]:
    """Every host: install the requirements in `folder/requirements.txt` that are not satisfied yet.

    If there is a `wheels/` folder next to the file, it is the only source (for a VPC without internet). Else
    pip uses the index of a `pip.conf` next to it or of `CA_REPOSITORY_ARN`.
    Packages in `OF_THE_IMAGE` keep the image's version. Missing packages get the versions in `CONSTRAINTS`,
    so that all hosts install the same.

    Args:
        folder: the staged source.
        install: whether to install them; else missing ones are an error.

    Returns:
        The missing requirements, as written in the file; empty if all were satisfied.

    Raises:
        ConflictError: the file requires another version of a package in `OF_THE_IMAGE`, or packages are
            missing and not to be installed.
        InstallError: pip failed or took longer than `INSTALL_TIMEOUT_S`.
    """
    file = folder / "requirements.txt"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    absent = unsatisfied(text)
    if not absent:
        return []
    if not install:
        raise ConflictError(
            f"requirements.txt: {', '.join(absent)} not installed for {sys.executable} on this host; install"
            " the job's requirements in the environment that its hosts use"
        )
    pins = image_pins()
    refuse_replacements(text, pins)
    command = [sys.executable, "-m", "pip", "install", "--no-input", "--progress-bar=off", "-r", str(file)]
    staged = folder / CONSTRAINTS
    wheels, pip_conf = beside(folder, "wheels"), beside(folder, "pip.conf")
    lines = [f"{name}=={version}" for name, version in pins.items()]
    if wheels.exists():
        command += ["--no-index", "--find-links", str(wheels)]
    elif staged.is_file():
        given = _requirements(staged.read_text(encoding="utf-8"))
        lines += [line for line, requirement in given if not installed(requirement.name)]
    environment = {
        **os.environ,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        **({"PIP_CONFIG_FILE": str(pip_conf)} if pip_conf.exists() else {}),
        **code_artifact("" if wheels.exists() else os.environ.get(REPOSITORY_VARIABLE, "")),
    }
    source = "wheels/" if wheels.exists() else "the package index"
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
        cause = errors[-1] if errors else f"pip exit {done.returncode}"
        raise InstallError(re.sub(r"(?<=://)[^/@\s]+(?=@)", "****", f"{what}: {cause}"))
    importlib.invalidate_caches()
    return absent


def beside(folder: Path, name: str) -> Path:
    """Every host: a file or folder next to the job's requirements.txt; a script's are in its folder."""
    scripts = folder / "script" / name
    return scripts if scripts.exists() else folder / name


def code_artifact(repository: str) -> dict[str, str]:
    """Every host: what pip needs for a repository of AWS CodeArtifact: its address with a token of the role.

    Args:
        repository: its ARN; empty: none.

    Raises:
        InstallError: the role may not read it, or there is no boto3.
    """
    if not repository:
        return {}
    try:
        region, account, path = re.fullmatch(REPOSITORY_ARN, repository).groups()  # type: ignore[union-attr]
        domain, _, name = path.partition("/")
        client: Any = importlib.import_module("boto3").client("codeartifact", region_name=region)
        of = {"domain": domain, "domainOwner": account}
        token = client.get_authorization_token(**of)["authorizationToken"]
        endpoint = client.get_repository_endpoint(**of, repository=name, format="pypi")["repositoryEndpoint"]
    except Exception as error:  # botocore's have no common base with the others
        raise InstallError(f"{REPOSITORY_VARIABLE}: {repository} cannot be used: {error}") from None
    return {"PIP_INDEX_URL": f"{endpoint.rstrip('/')}/simple/".replace("://", f"://aws:{token}@", 1)}


def unsatisfied(text: str) -> list[str]:
    """Every host: the lines of a requirements file that the installed packages do not satisfy.

    Skips options (`--index-url …`) and checks direct references (`name @ https://…`) by name only.
    """
    return [line for line, requirement in _requirements(text) if not _installed(requirement, set())]


def image_pins() -> dict[str, str]:
    """Every host: the installed packages of `OF_THE_IMAGE`, as name → version."""
    found = {name: installed(name) for name in OF_THE_IMAGE}
    return {name: version for name, version in found.items() if version}


def refuse_replacements(text: str, pins: dict[str, str]) -> None:
    """Every host: reject a requirements file that would replace a package of the image.

    Raises:
        ConflictError: there is a conflict; the message names the line and the image's version.
    """
    for line, requirement in _requirements(text):
        has = pins.get(canonical(requirement.name))
        if has and (requirement.url or not requirement.specifier.contains(has, prereleases=True)):
            raise ConflictError(
                f"requirements.txt: {line} would replace the image's {requirement.name} {has}, which fits its"
                " drivers and the other hosts; remove the line, or choose an image that has that version"
            )


def versions(text: str) -> dict[str, str]:
    """Every host: installed versions of a requirements file's packages and their dependencies.

    Leaves out torch's dependencies and local versions (after `+`), which differ between GPU and CPU images.
    """
    found: dict[str, str] = {}
    waiting = [requirement for _, requirement in _requirements(text)]
    waiting += [_parser()(name) for name in OF_THE_IMAGE]
    seen = set()
    while waiting:
        requirement = waiting.pop()
        name = canonical(requirement.name)
        key = (name, frozenset(requirement.extras))
        version = installed(name)
        if key in seen or not version:
            continue
        seen.add(key)
        found[name] = version.partition("+")[0]
        if name in OF_TORCH:
            continue
        for line in metadata.distribution(name).requires or []:
            needed = _parser()(line)
            if any(_applies(needed, extra) for extra in ("", *requirement.extras)):
                waiting.append(needed)
    return found


def difference(here: dict[str, str], on_head: dict[str, str]) -> str:
    """How a host's packages differ from the head's, as text; "" if they match."""
    texts = [
        f"{name} {here.get(name, '(absent)')} here, {on_head.get(name, '(absent)')} on the head"
        for name in sorted({*here, *on_head})
        if here.get(name) != on_head.get(name)
    ]
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more


def constraint_lines(text: str, given: str = "") -> list[str]:
    """Laptop: lines of a constraints file that pin a requirements file to the versions installed here.

    Torch's packages are left out: those of the image fit its CUDA.

    Args:
        text: content of the requirements file.
        given: the user's own constraints, which take precedence.
    """
    own = {canonical(requirement.name): line for line, requirement in _requirements(given)}
    here = {name: f"{name}=={version}" for name, version in _versions_on_the_laptop(text).items()}
    return [line for name, line in sorted((here | own).items()) if name not in OF_TORCH]


_versions_on_the_laptop = functools.cache(versions)
"""Cached: the installed packages do not change while the launcher runs."""


def at_least(version: str, oldest: str) -> bool:
    """Anywhere: whether a version such as `2.60.0.dev1` is `oldest`, given as `2.52`, or newer."""
    parts = re.match(r"(\d+)\.(\d+)", version)
    return parts is not None and [int(part) for part in parts.groups()] >= [int(n) for n in oldest.split(".")]


def unfit(python: re.Match[str] | None, torch: re.Match[str] | None) -> str:
    """Laptop: why an image does not fit, from the versions in its name as (major, minor); "" if it fits."""
    if python and (version := ".".join(python.groups())) not in PYTHONS:
        return f"Python {version}, but Stoker needs {SUPPORTED_PYTHONS}; choose another image"
    if torch and not at_least(version := ".".join(torch.groups()), OLDEST_TORCH):
        return f"PyTorch {version}, but Stoker needs {OLDEST_TORCH} or newer; choose another image"
    return ""


def canonical(name: str) -> str:
    """Anywhere: `Foo_Bar` → `foo-bar`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _explain_conflict(output: str, pins: dict[str, str]) -> None:
    """Raise a `ConflictError` if pip failed because of a package of the image."""
    for name, version in pins.items():
        if f"(constraint) {name}==" not in output:
            continue
        asking = [line.strip() for line in output.splitlines() if f" depends on {name}" in line]
        raise ConflictError(
            f"requirements.txt: {asking[0] if asking else 'a package needs another ' + name}, but the image's"
            f" {name} {version} stays, which fits its drivers and the other hosts; require a package"
            " version that works with it, or choose another image"
        )


def _requirements(text: str) -> list[tuple[str, Any]]:
    """The lines of a requirements file that apply to this machine, each with its parsed requirement."""
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


def installed(name: str) -> str:
    """Every host: a package's version; empty if it is absent."""
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
    # `ray[data]` is satisfied only if the dependencies of the extra are installed as well.
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
    except ImportError:  # a bare image; pip always vendors a copy
        module = importlib.import_module("pip._vendor.packaging.requirements")
    return module.Requirement
