"""The SageMaker SDK in an environment outside this one: its pins on pyarrow and botocore exclude ours."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from stoker_launcher.rehearsal import sagemaker_hosts

ROOT = Path(__file__).resolve().parents[2]
V3, V2 = "3.27.0", "2.257.0"


def sdk_python(version: str) -> Path:
    """A Python that has the SDK, and what the launcher needs; installed into the cache folder once."""
    name = f"sagemaker-{version}-py{sys.version_info.minor}"
    folder = sagemaker_hosts.cache_folder().parent / name
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").is_file():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            pip = [str(python), "-m", "pip", "install", "--quiet", "--no-input"]
            what = [f"sagemaker=={version}"]
            if version == V3:  # the launcher runs beside it
                needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
                what += [*needed["dependencies"], *needed["optional-dependencies"]["sagemaker"]]
            subprocess.run([*pip, *what], check=True, timeout=1500)
            (folder / "complete").touch()
    return python


def in_sdk(version: str, script: str, environment: dict[str, str], *arguments: str) -> Any:
    """What the script prints last, as JSON."""
    done = subprocess.run(
        [str(sdk_python(version)), "-W", "ignore", "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            **environment,
            "PYTHONPATH": f"{ROOT / 'launcher'}:{ROOT / 'source_dir'}",
            "SAGEMAKER_VALIDATE_ROLE": "false",  # moto cannot simulate policies
        },
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
