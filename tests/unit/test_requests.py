"""The whole request of each place, as kept in `requests/`: `UPDATE_REQUESTS=1 pytest` writes them anew."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.config.loading import load
from stoker_launcher.job import open_job
from stoker_launcher.places import Options, Resume, place_named

REQUESTS = sorted((Path(__file__).parent / "requests").glob("*.json"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script and its data, in a folder whose files are of 1970, with the accounts of nobody."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "RAY_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("own/train.py", "images/a/0.jpg", "rows.parquet"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"1\n")
        os.utime(file, (0, 0))
    monkeypatch.chdir(tmp_path)


def sent_by(on: str, words: list[str], here: str) -> Any:
    job = open_job(load(None, [word.replace("HERE", here) for word in words]))
    options = Options(on=on, offline=True, address="http://head:8265", install="install" in words)
    request: Any = place_named(on).plan(job, options, Resume())
    if on == "slurm":
        assert subprocess.run(["bash", "-n"], input=request.script, text=True).returncode == 0
        return request.script
    return request.body("gcs://package") if on == "ray" else request.for_command_line()


@pytest.mark.parametrize("file", REQUESTS, ids=lambda file: file.stem)
def test_a_job_is_this_request(file: Path, tmp_path: Path) -> None:
    kept = json.loads(file.read_text())
    sent = json.dumps(sent_by(kept["on"], kept["words"], str(tmp_path)))
    folders = {str(tmp_path): "HERE", str(Path(sys.executable).parent): "BIN"}
    for folder, name in folders.items():
        sent = sent.replace(folder, name)
    found = json.loads(re.sub(r"\d{8}-\d{6}(-[0-9a-f]{4})?", "TIME", sent))
    lines = found.splitlines() if isinstance(found, str) else found
    if os.environ.get("UPDATE_REQUESTS"):
        file.write_text(json.dumps({**kept, "sent": lines}, indent=1) + "\n")
    assert lines == kept["sent"]
