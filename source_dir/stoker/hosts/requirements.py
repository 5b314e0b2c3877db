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

from stoker.config.redaction import redact
from stoker.errors import StokerError

INSTALL_TIMEOUT_S = 900
MOST_OF_PIP = 900
"""Characters of pip's words in a failure."""
OLDEST_RAY, OLDEST_TORCH = "2.52", "2.6"
"""Ray's is the first release with token authentication."""
PYTHONS = ("3.11", "3.12", "3.13")
SUPPORTED_PYTHONS = f"{PYTHONS[0]} to {PYTHONS[-1]}"
CONSTRAINTS = "constraints.txt"
"""In the staged copy: package versions of the submitting machine, for packages that the image lacks."""
REPOSITORY_VARIABLE = "CA_REPOSITORY_ARN"
"""Names a repository of CodeArtifact, as for SageMaker's own toolkits."""
REPOSITORY_ARN = r"arn:aws[\w-]*:codeartifact:([\w-]+):(\d+):repository/([\w.-]+)/([\w.-]+)"
OF_TORCH = ("torch", "torchvision", "torchaudio")
OF_THE_IMAGE = (*OF_TORCH, "ray")
"""Must match the image's CUDA and drivers, or all other hosts; requirements must not replace them."""


class InstallError(StokerError):
    """A missing requirement cannot be installed."""


class ConflictError(InstallError):
    """The user must change the requirements or the image."""

    exit_code = 2


def ensure(folder: Path, install: bool = True) -> list[str]:
    """Install the requirements in `folder/requirements.txt` that are not satisfied yet.

    If there is a `wheels/` folder next to the file, it is the only source (for a VPC without internet). Else
    pip uses the index of a `pip.conf` next to it or of `CA_REPOSITORY_ARN`.
    Packages in `OF_THE_IMAGE` keep the image's version. Missing packages get the versions in `CONSTRAINTS`,
    so that all hosts install the same. Without `install`, missing ones are an error. Returns those that were
    missing, as written in the file.
    """
    file, staged, pins = folder / "requirements.txt", folder / CONSTRAINTS, image_pins()
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    absent = unsatisfied(text)
    if not absent:
        return []
    if not install:
        raise ConflictError(
            f"requirements.txt: {', '.join(absent)} not installed for {sys.executable} on this host;"
            " install them in the environment that the job's hosts use"
        )
    for line, requirement in _requirements(text):
        has = pins.get(canonical(requirement.name))
        # pip lets a file of the same version replace the image's
        if has and (requirement.url or not _fits(requirement)):
            raise ConflictError(
                f"requirements.txt: {line} would replace the image's {requirement.name} {has}; require"
                " a version that works with it, or choose another image"
            )
    constraints = [f"{name}=={version}" for name, version in pins.items()]
    command = [sys.executable, "-m", "pip", "install", "--no-input", "--progress-bar=off"]
    environment = os.environ | {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
    }
    if (wheels := _beside(folder, "wheels")).exists():
        command += ["--no-index", "--find-links", str(wheels)]
    else:
        environment |= _code_artifact(os.environ.get(REPOSITORY_VARIABLE, ""))
        given = _requirements(staged.read_text(encoding="utf-8")) if staged.is_file() else []
        constraints += [line for line, one in given if not installed(one.name)]
    if (pip_conf := _beside(folder, "pip.conf")).exists():
        environment["PIP_CONFIG_FILE"] = str(pip_conf)
    what = f"requirements.txt: cannot install {', '.join(absent)}"
    with tempfile.NamedTemporaryFile("w", prefix="stoker-constraints-", suffix=".txt") as pinned:
        pinned.write("\n".join(constraints) + "\n")
        pinned.flush()
        try:
            done = subprocess.run(
                [*command, "-r", str(file), "-c", pinned.name],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=INSTALL_TIMEOUT_S,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            raise InstallError(f"{what}: pip took more than {INSTALL_TIMEOUT_S} s") from None
    if done.returncode:
        raise InstallError(f"{what}: {redact(' '.join(done.stdout.split()))[-MOST_OF_PIP:]}")
    importlib.invalidate_caches()
    return absent


def _beside(folder: Path, name: str) -> Path:
    """A file or folder next to the job's requirements.txt; a script's are in its folder."""
    scripts = folder / "script" / name
    return scripts if scripts.exists() else folder / name


def _code_artifact(repository: str) -> dict[str, str]:
    """What pip needs for a repository of AWS CodeArtifact: its address with the role's token."""
    if not repository:
        return {}
    try:
        region, account, domain, name = re.fullmatch(REPOSITORY_ARN, repository).groups()  # type: ignore[union-attr]
        client: Any = importlib.import_module("boto3").client("codeartifact", region_name=region)
        of = {"domain": domain, "domainOwner": account}
        token = client.get_authorization_token(**of)["authorizationToken"]
        endpoint = client.get_repository_endpoint(**of, repository=name, format="pypi")[
            "repositoryEndpoint"
        ]
    except Exception as error:  # botocore's have no common base with the others
        raise InstallError(f"{REPOSITORY_VARIABLE}: {repository} cannot be used: {error}") from None
    return {
        "PIP_INDEX_URL": f"{endpoint.rstrip('/')}/simple/".replace("://", f"://aws:{token}@", 1)
    }


def unsatisfied(text: str) -> list[str]:
    """The lines of a requirements file that the installed packages do not satisfy.

    Skips options (`--index-url …`) and checks direct references (`name @ https://…`) by name only.
    `ray[data]` is satisfied only if what the extra needs is installed as well.
    """
    return [line for line, requirement in _requirements(text) if not _satisfied(requirement)]


def _satisfied(requirement: Any) -> bool:
    if not _fits(requirement):
        return False
    needs = [_parse(line) for line in metadata.requires(requirement.name) or []]
    optional = [need for need in needs if not _applies(need)]
    return all(_fits(n) for n in optional if any(_applies(n, e) for e in requirement.extras))


@functools.cache
def versions(text: str) -> dict[str, str]:
    """Installed versions of a requirements file's packages, of the image's and of what these need.

    Leaves out torch's dependencies and local versions (after `+`), which differ between GPU and CPU images.
    """
    found, seen = dict[str, str](), set[tuple[str, frozenset[str]]]()
    waiting = [requirement for _, requirement in _requirements(text)]
    waiting += map(_parse, OF_THE_IMAGE)
    while waiting:
        wanted = waiting.pop()
        key = (name := canonical(wanted.name)), frozenset(wanted.extras)
        if key not in seen and (version := installed(name)):
            seen.add(key)
            found[name] = version.partition("+")[0]
            needs = [] if name in OF_TORCH else map(_parse, metadata.requires(name) or [])
            waiting += [n for n in needs if any(_applies(n, e) for e in ("", *wanted.extras))]
    return found


def _requirements(text: str) -> list[tuple[str, Any]]:
    """The lines of a requirements file that apply to this machine, each with its parsed requirement."""
    lines = [raw.split(" #")[0].strip() for raw in text.splitlines()]
    found = [(line, _parse(line)) for line in lines if line and not line.startswith(("#", "-"))]
    return [(line, requirement) for line, requirement in found if _applies(requirement)]


def _parse(line: str) -> Any:
    try:
        module = importlib.import_module("packaging.requirements")
    except ImportError:  # a bare image; pip always vendors a copy
        module = importlib.import_module("pip._vendor.packaging.requirements")
    return module.Requirement(line)


def _applies(requirement: Any, extra: str = "") -> bool:
    return requirement.marker is None or bool(requirement.marker.evaluate({"extra": extra}))


def _fits(requirement: Any) -> bool:
    version = installed(requirement.name)
    return bool(version) and requirement.specifier.contains(version, prereleases=True)


def installed(name: str) -> str:
    """A package's version; empty if it is absent.

    Once Ray is imported, its own copies of a few packages stand first on the path. They do not count: a host
    that has not imported it yet would seem to have others.
    """
    path = [folder for folder in sys.path if not folder.endswith("ray/thirdparty_files")]
    return next((found.version for found in metadata.distributions(name=name, path=path)), "")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def image_pins() -> dict[str, str]:
    return {name: version for name in OF_THE_IMAGE if (version := installed(name))}


def at_least(version: str, oldest: str) -> bool:
    """Whether a version, with its pre-releases, is `oldest` or newer."""
    return bool(_parse(f"any>={oldest}.dev0").specifier.contains(version, prereleases=True))


def difference(here: dict[str, str], on_head: dict[str, str]) -> str:
    """The packages whose versions differ, three at most; empty if none do."""
    other = [name for name in sorted({*here, *on_head}) if here.get(name) != on_head.get(name)]
    found = [
        (name, here.get(name, "(absent)"), on_head.get(name, "(absent)")) for name in other[:3]
    ]
    return "; ".join(f"{name} {own} here, {head} on the head" for name, own, head in found)


def constraint_lines(text: str, given: str = "") -> list[str]:
    """Laptop: lines of a constraints file that pin a requirements file to the versions installed here.

    Torch's packages are left out: those of the image fit its CUDA.
    """
    own = {canonical(requirement.name): line for line, requirement in _requirements(given)}
    here = {name: f"{name}=={version}" for name, version in versions(text).items()}
    return [line for name, line in sorted((here | own).items()) if name not in OF_TORCH]
