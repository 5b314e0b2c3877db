"""Writes the SBOM of a release (CycloneDX 1.6): the packages of constraints.txt and their licenses.

python scripts/sbom.py build/stoker-0.1.0.cdx.json
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

from stoker import __version__

ROOT = Path(__file__).resolve().parent.parent


def sbom(pins: dict[str, str]) -> str:
    """The SBOM as JSON.

    Args:
        pins: version by package.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    release = Component(
        name=project["name"],
        version=__version__,
        type=ComponentType.FRAMEWORK,
        bom_ref=project["name"],
        licenses=[LicenseExpression(project["license"])],
    )
    bom = Bom()
    bom.metadata.component = release
    for name, version in pins.items():
        address = PackageURL("pypi", name=re.sub(r"[-_.]+", "-", name).lower(), version=version)
        license_ = license_of(name, version)
        bom.components.add(
            Component(
                name=name,
                version=version,
                purl=address,
                bom_ref=str(address),
                licenses=[LicenseExpression(license_)] if license_ else [],
            )
        )
    bom.register_dependency(release, bom.components)
    return make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1)


def license_of(name: str, version: str) -> str | None:
    """The SPDX expression of an installed package; another version than the pinned one is an error."""
    try:
        installed = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if installed.version != version:
        sys.exit(
            f"error: {name}: {installed.version} is installed, {version} is pinned; run make setup"
        )
    return installed.metadata.get("License-Expression")


def pinned(text: str) -> dict[str, str]:
    """Version by package of a constraints file."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return dict(line.split("==") for line in lines if line)


if __name__ == "__main__":
    target = Path(
        sys.argv[1] if len(sys.argv) > 1 else ROOT / f"build/stoker-{__version__}.cdx.json"
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(sbom(pinned((ROOT / "constraints.txt").read_text())) + "\n")
    print(target)
