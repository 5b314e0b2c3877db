"""What a release states of its dependencies: the SBOM, and what is known of their vulnerabilities."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from scripts import audit
from scripts.sbom import pinned

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


class Mirror(BaseHTTPRequestHandler):
    """Answers as package mirrors do that know nothing of vulnerabilities."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html></html>" if self.path.startswith("/html") else b'{"info": {}}')

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.mark.parametrize("path", ["/html", "/json", ":1"])
@pytest.mark.long
def test_an_audit_without_data_is_no_all_clear(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = HTTPServer(("127.0.0.1", 0), Mirror)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    service = f"http://127.0.0.1{path}" if path == ":1" else f"http://127.0.0.1:{server.server_port}{path}"
    monkeypatch.delenv("CI", raising=False)
    assert audit.main(service) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line == f"audit: {service} gives no vulnerability data from here; nothing was checked"
    monkeypatch.setenv("CI", "true")
    assert audit.main(service) == 1
    server.shutdown()
    server.server_close()
