"""What a release states of its dependencies: the SBOM, and what is known of their vulnerabilities."""

from __future__ import annotations

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from scripts import audit
from scripts.sbom import pinned
from tests.fakes.answers import Answer, answering

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_the_sbom_is_valid_and_lists_every_pinned_package(tmp_path: Path) -> None:
    target = tmp_path / "new/stoker.json"
    subprocess.run([sys.executable, str(ROOT / "scripts/sbom.py"), str(target)], check=True)
    assert not JsonStrictValidator(SchemaVersion.V1_6).validate_str(target.read_text())
    bom = json.loads(target.read_text())
    found = {component["name"]: component["version"] for component in bom["components"]}
    assert found == pinned((ROOT / "constraints.txt").read_text())
    assert {"ray", "torch"} <= found.keys()
    assert all(c["purl"].startswith("pkg:pypi/") for c in bom["components"])
    assert bom["metadata"]["component"]["name"] == "stoker"
    assert sum("licenses" in component for component in bom["components"]) > 50


def mirror(request: BaseHTTPRequestHandler) -> Answer:
    """As package mirrors do that know nothing of vulnerabilities."""
    html = request.path.startswith("/html")
    return 200, "text/html", b"<html></html>" if html else b'{"info": {}}'


@pytest.mark.parametrize("path", ["/html", "/json", ":1"])
@pytest.mark.long
def test_an_audit_without_data_is_no_all_clear(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CI", raising=False)
    with answering(mirror) as address:
        service = f"http://127.0.0.1{path}" if path == ":1" else f"{address}{path}"
        assert audit.main(service) == 0
        [line] = capsys.readouterr().out.splitlines()
        assert (
            line == f"audit: {service} gives no vulnerability data from here; nothing was checked"
        )
        monkeypatch.setenv("CI", "true")
        assert audit.main(service) == 1
