"""What each place is sent, as kept in `requests/`: `UPDATE_REQUESTS=1 pytest` writes them anew."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import type_command

REQUESTS = sorted((Path(__file__).parent / "requests").glob("*.json"))
RECIPE = """
from stoker.recipe import Recipe


class Mine(Recipe):
    data: str = ""
    train: str = ""

    def model(self): ...
"""
SUBMIT = {"sagemaker": "aws ", "vertex": "gcloud ai custom-jobs create", "slurm": "sbatch"}
"""By place, the command that sends a written request."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe, a script and data, in a folder whose files are of 1970, with the accounts of nobody."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "RAY_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    for name in ("own/train.py", "images/a/0.jpg", "rows.parquet"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"1\n")
        os.utime(file, (0, 0))
    (tmp_path / "code").mkdir()
    (tmp_path / "code/mine.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)


def sent_by(on: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """What `--request` writes or, for a RayJob, prints: twice, into the project's own folder."""
    script = any(word.startswith("script=") for word in words)
    folder, end = Path("own" if script else "code"), "zip" if on == "ray" else "json"
    (folder / "job.yaml").write_text("name: own\n" if script else "recipe: mine:Mine\n")
    ray = ["--address", "http://head:8265"] if on == "ray" else []
    command = [str(folder / "job.yaml"), *words, "--on", on, "--offline", *ray, "--request"]
    for name in ("first", "second"):
        code, errors, shown = type_command([*command, f"{folder}/{name}.{end}"], capsys)
        assert (code, errors) == (0, [])
        assert SUBMIT.get(on, "entrypoint: ") in shown
    file = folder / f"second.{end}"
    if on == "slurm":
        assert subprocess.run(["bash", "-n", file]).returncode == 0
        return file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600, "it may hold secrets"
    if on == "ray":
        assert not [name for name in zipfile.ZipFile(file).namelist() if "first" in name]
        printed = yaml.safe_load(shown)
        return printed | {"runtimeEnvYAML": yaml.safe_load(printed["runtimeEnvYAML"])}
    staged = {path.name for path in (folder / "second-code").rglob("*") if "first" in path.name}
    assert staged <= {"first.json"}, "nothing of a request with a token travels with the next job"
    code, errors, _ = type_command([*command, str(file)], capsys)
    assert code == 2 and "exists; remove it" in errors[0]
    return json.loads(file.read_text())


@pytest.mark.parametrize("file", REQUESTS, ids=lambda file: file.stem)
def test_a_job_is_this_request(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = json.loads(file.read_text())
    words = [word.replace("HERE", str(tmp_path)) for word in kept["words"]]
    sent = json.dumps(sent_by(kept["on"], words, capsys))
    for token in tmp_path.rglob(".ray-token"):
        text = token.read_text()
        assert token.stat().st_mode & 0o777 == 0o600 and re.fullmatch("[0-9a-f]{64}", text)
        assert text not in sent
    folders = {str(tmp_path): "HERE", str(Path(sys.executable).parent): "BIN"}
    for folder, name in folders.items():
        sent = sent.replace(folder, name)
    found = json.loads(re.sub(r"\d{8}-\d{6}(-[0-9a-f]{4}|-\d)?", "TIME", sent))
    lines = found.splitlines() if isinstance(found, str) else found
    if os.environ.get("UPDATE_REQUESTS"):
        file.write_text(json.dumps({**kept, "sent": lines}, indent=1) + "\n")
    assert lines == kept["sent"]
