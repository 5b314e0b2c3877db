"""The SageMaker SDK in an environment of its own: 1.5 GB that only its own tests need."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from launcher.rehearsal import sagemaker_hosts

VERSION = "3.27.0"


def sdk_python() -> Path:
    """A Python that has the SDK; installed into the cache folder the first time (a minute or two)."""
    folder = sagemaker_hosts.cache_folder().parent / f"sagemaker-{VERSION}-py{sys.version_info.minor}"
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").is_file():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            pip = [str(python), "-m", "pip", "install", "--quiet", "--no-input"]
            subprocess.run([*pip, f"sagemaker=={VERSION}"], check=True, timeout=900)
            (folder / "complete").touch()
    return python


def train_through_sdk(overrides: list[str], environment: dict[str, str], root: Path) -> str:
    """Build `model_trainer(job)` and call its `train()`; the training job's name."""
    script = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "from stoker.config.loading import load\n"
        "from launcher.job import open_job\n"
        "from launcher.places.sagemaker import model_trainer\n"
        "trainer = model_trainer(open_job(load(None, sys.argv[1:])))\n"
        "trainer.train(wait=False, logs=False)\n"
        "print('job:', trainer._latest_training_job.training_job_name)\n"
    )
    done = subprocess.run(
        [str(sdk_python()), "-c", script, *overrides],
        capture_output=True,
        text=True,
        timeout=240,
        env={
            **os.environ,
            **environment,
            "PYTHONPATH": f"{root}:{root / 'source_dir'}",
            "SAGEMAKER_VALIDATE_ROLE": "false",  # moto cannot simulate policies
        },
    )
    names = [line for line in done.stdout.splitlines() if line.startswith("job: ")]
    assert names, done.stdout[-2000:] + done.stderr[-4000:]
    return names[-1].removeprefix("job: ")
