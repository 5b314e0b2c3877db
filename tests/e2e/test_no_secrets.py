"""Jobs that fail with every secret in their message: none is on the screen, in a file or in a command."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from commands import ROOT

pytestmark = pytest.mark.long

KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIAENVIRONMENT00001",
    "AWS_SECRET_ACCESS_KEY": "aws/s3cret+Key42",
    "AWS_SESSION_TOKEN": "session-81f2",
    "HF_TOKEN": "hf-env-77c1",
    "MLFLOW_TRACKING_PASSWORD": "mlflow-pass-93",
    "ALL_PROXY": "http://ann:pr0xy%2Dpass@proxy:3128",
    "PIP_INDEX_URL": "https://ci:index-tok-66@packages.example/wheels",
}
IN_CONFIG = ("tok-0b1d88e2", "Corr3ct stable", "url-secret-19", "tag-secret-67", "env-secret-28")
IN_GIT = "git-token-31"
SECRETS = [
    *[v for v in KEYS.values() if "://" not in v],
    "pr0xy%2Dpass",
    "pr0xy-pass",
    "index-tok-66",
]

SCRIPT = """
import os
import time
from urllib.parse import unquote

print("logged in with", os.environ["HF_TOKEN"], flush=True)
time.sleep(3)
told = " ".join(os.environ[name] for name in os.environ["TOLD"].split())
raise PermissionError(f"401: {told} {unquote(told)}")
"""


def write_jobs(folder: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@host", "-C", str(folder)]
    remote = f"https://oauth2:{IN_GIT}@host/x.git"
    for words in (
        ["init", "-q"],
        ["remote", "add", "origin", remote],
        ["commit", "-qm", "x", "--allow-empty"],
    ):
        subprocess.run([*git, *words], check=True)
    (folder / "script").mkdir()  # what lies in a script's folder is staged as it is
    (folder / "script/fails.py").write_text(SCRIPT)
    token, password, url, tag, variable = IN_CONFIG
    params = {
        "train_records": 96,
        "hf_token": token,
        "database": {"user": "ann", "password": password},
    }
    job = {
        "name": "tells",
        "recipe": "secretive:Tells",
        "params": {**params, "data": f"s3://AKIAINTHEADDRESS0001:{url}@bucket/x"},
        "train": {"epochs": 2, "batch_size": 16, "workers": 1},
        "data": {"bad_record_budget": 0.1},
        "checkpoint": {"every_steps": 2},
        "tracking": {
            "mlflow": {"uri": f"sqlite:///{folder}/mlflow.db", "tags": {"api_key": tag}},
            "sinks": ["secretive:Notebook"],
        },
        "sagemaker": {"environment": {"HF_TOKEN": variable}},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))


def test_no_secret_leaves_a_failing_job(tmp_path: Path) -> None:
    """Two whole jobs side by side: 20 s on two free cores."""
    write_jobs(tmp_path)
    # Without what an earlier test has set in this process, such as its cluster's token.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {**inherited, **KEYS, "NO_PROXY": "*", "TOLD": " ".join(KEYS)}
    program = [sys.executable, str(ROOT / "launcher/submit.py")]
    jobs = (
        ["job.yaml", "--source-dir", str(ROOT / "tests/recipes")],
        ["script/fails.py", "train.workers=1"],
    )
    screens = [tmp_path / "recipe.screen", tmp_path / "script.screen"]
    running = [
        subprocess.Popen(
            [*program, *words], cwd=tmp_path, env=environment, stdout=file, stderr=file
        )
        for words, file in zip(jobs, [screen.open("wb") for screen in screens], strict=True)
    ]
    commands, tokens = set(), set()
    while any(process.poll() is None for process in running):
        for launcher in running:
            for process in descendants(launcher.pid):
                try:
                    commands.add(" ".join(process.cmdline()))
                    tokens.add(process.environ().get("RAY_AUTH_TOKEN", ""))
                except psutil.Error:
                    continue
        time.sleep(0.2)
    assert [process.returncode for process in running] == [1, 1], [s.read_text() for s in screens]
    assert "PermissionError: 401: (redacted) (redacted)" in screens[0].read_text()
    assert "logged in with (redacted)" in screens[1].read_text()
    tokens.discard("")
    assert len(tokens) == 2 and len(commands) > 5, "both clusters were seen"
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    names = {path.name for path in written}
    assert {
        "notebook.txt",
        "report.html",
        "mlflow.db",
        "driver.log",
        "script-rank-0.log",
        "manifest.json",
    } <= names
    own = {tmp_path / "job.yaml", tmp_path / ".git/config"}
    for secret in (*SECRETS, *IN_CONFIG, *tokens, IN_GIT):
        content = secret.encode()
        assert [
            path for path, its in written.items() if content in its and path not in own
        ] == [], secret
        assert [command for command in commands if secret in command] == []


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
