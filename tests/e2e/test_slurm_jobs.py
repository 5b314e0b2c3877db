"""Jobs through a real Slurm: heterogeneous, requeued, stopped and failed ones, as a user types them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT
from slurm_cluster import SlurmCluster, absent

from tests.summaries import EVERYWHERE, fields, trained
from tests.waiting import until

if reason := absent():
    pytest.skip(reason, allow_module_level=True)

PATIENCE_S = 400
RECIPE = """
import time
from pathlib import Path
from recipes.digits import Digits

class Paced(Digits):
    go: str

    def training_step(self, model, batch):
        if model.training:
            with Path(self.go).with_name("steps").open("ab") as steps:
                steps.write(b".")
                until = time.monotonic() + 5 * (steps.tell() > 23)  # from the second epoch on
            while time.monotonic() < until and not Path(self.go).exists():
                time.sleep(0.1)
        while Path(self.go).with_name("hold").exists():
            time.sleep(0.1)
        return super().training_step(model, batch)

class Broken(Digits):
    def model(self):
        raise RuntimeError("the weights were never released")
"""
SMALL = ("cluster.object_store_mb=100", "data.block_records=64", "tracking.tensorboard=false")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "source_dir" / "recipes", folder / "source" / "recipes")
    (folder / "source" / "paced.py").write_text(RECIPE)
    return folder


class Submitted:
    def __init__(self, cluster: SlurmCluster, folder: Path, name: str, *overrides: str) -> None:
        self.cluster, self.output_dir, self.name = cluster, folder / "runs", name
        words = [
            str(ROOT / "source_dir/configs/digits.yaml"),
            *(
                f"name={name}",
                f"output_dir={self.output_dir}",
                "recipe=paced:Paced",
                *SMALL,
                *overrides,
            ),
            *(f"params.data={folder}/.data/digits/webdataset", "data.prepare=recipes.digits:write"),
            *("--source-dir", str(folder / "source"), "--on", "slurm"),
        ]
        self.screen = folder / f"{name}.txt"
        with self.screen.open("w") as output:
            command = cluster.command(*self.program, *words, cwd=folder)
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    program = (sys.executable, str(ROOT / "launcher/submit.py"))

    @property
    def run_dir(self) -> Path:
        return next(self.output_dir.glob(f"{self.name}-*"))

    @property
    def job(self) -> str:
        return (self.run_dir / "slurm.job").read_text().strip()

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "summary.json").read_text()))

    def stoker(self, *words: str) -> str:
        return self.cluster.run(*self.program, *words)

    def wait_for_line(self, text: str) -> None:
        self.wait_until(lambda: text in self.screen.read_text(), f"the line {text!r}")

    def wait_until(self, condition: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, (
                f"no {name}: {self.told()}"
            )
            time.sleep(0.2)

    def code(self) -> int:
        code = self.process.wait(timeout=PATIENCE_S)
        print(self.told())
        return code

    def told(self) -> str:
        return f"{self.screen.read_text()}\n{self.cluster.logs()}"


def kill_task_on(node: str, job: str) -> None:
    """End a host as a crash does: Slurm sees its task killed."""
    own = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_JOB_ID={job}".encode()}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            started = (process / "cmdline").read_bytes().split(b"\0")[1:2] == [b"train.py"]
            if started and own <= set((process / "environ").read_bytes().split(b"\0")):
                os.kill(int(process.name), signal.SIGKILL)


@pytest.mark.soak
def test_a_requeued_job_of_gpu_and_cpu_nodes_resumes_and_trains_every_record_once(
    slurm: SlurmCluster, project: Path
) -> None:
    """Its command follows it through the requeue. After that it loses its CPU host, which fails nothing.

    Two Ray clusters of two hosts: about 40 s alone.
    """
    go = project / "go"
    nodes = (
        "slurm.gpu.partition=gpu",
        "slurm.cpu.partition=cpu",
        "slurm.cpu.nodes=1",
        "slurm.max_runtime_s=3600",
    )
    exact = ("data.order=exact", "tracking.record_ids=true", "train.epochs=2", f"params.go={go}")
    job = Submitted(slurm, project, "requeued", *nodes, *exact)
    job.wait_for_line("epoch 1/2 done")
    slurm.run("scontrol", "requeue", job.job)
    job.wait_for_line("stopped, with a checkpoint committed")
    job.wait_for_line("waiting for nodes (BeginTime)")
    assert job.stoker("status", f"slurm:{job.job}").startswith(
        "running: requeued, waiting for nodes"
    )
    assert job.summary["status"] == "interrupted"
    stopped_at = max(int(path.name[5:]) for path in (job.run_dir / "checkpoints").glob("step-*"))

    slurm.run(
        "scontrol", "update", f"JobId={job.job}", "StartTime=now"
    )  # Slurm would wait for two minutes
    job.wait_for_line("resumed from")
    (hold := project / "hold").touch()
    kill_task_on("cpu-1", job.job)
    job.wait_for_line("host lost: cpu-1")
    go.touch()
    hold.unlink()
    assert job.code() == 0
    summary = job.summary
    assert (summary["status"], summary["place"], summary["epochs"]) == ("succeeded", "slurm", 2)
    assert fields(summary) == EVERYWHERE
    resumed = [event["step"] for event in summary["events"] if event["event"] == "resumed"]
    assert resumed == [stopped_at]
    assert summary["records"]["read"] == summary["records"]["trained"] == 2 * 1437
    assert [trained(job.run_dir, epoch) for epoch in range(2)] == [1437] * 2
    assert re.search(r"srun: error: cpu-1: task \d: Killed", job.screen.read_text())

    log = job.stoker("logs", str(job.run_dir))
    for line in ("[gpu gpu-1 head] done", "[cpu cpu-1 worker] joined"):
        assert line in log and line in job.screen.read_text()
    assert (job.run_dir / "model/model.safetensors").is_file()
    assert not (job.run_dir / "code/.ray-token").exists(), "nothing needs the token any more"
    assert not list(Path(tempfile.gettempdir()).glob(f"stoker-{job.job}-*")), (
        "the epilog removed the hosts' temporary files"
    )


@pytest.mark.long
def test_a_job_of_gpu_and_cpu_nodes_is_stopped_with_a_checkpoint_and_stays_stopped(
    slurm: SlurmCluster, project: Path
) -> None:
    """A Ray cluster of two hosts: about 20 s alone."""
    nodes = (
        "slurm.gpu.partition=gpu",
        "slurm.cpu.partition=cpu",
        "slurm.cpu.nodes=1",
        "slurm.gpu.cpus=2",
    )
    paced = (*nodes, f"params.go={project}/never", "train.epochs=50", "slurm.max_runtime_s=3600")
    job = Submitted(slurm, project, "stopped", *paced, "slurm.gpu.extra=['--comment=two words']")
    job.wait_for_line("epoch 1/50 done")
    assert "Comment=two words" in slurm.run("scontrol", "show", "job", job.job)
    job.stoker("stop", str(job.run_dir))
    assert job.code() == 143
    summary = job.summary
    assert (summary["status"], summary["place"]) == ("interrupted", "slurm")
    assert fields(summary) == EVERYWHERE
    groups = {host["host"]: host["group"] for host in summary["cluster"]["hosts"]}
    assert groups == {"gpu-1": "gpu", "cpu-1": "cpu"}
    assert summary["train_workers_by_host"] == {"gpu-1": 1}
    assert {host["cpus"] for host in summary["cluster"]["hosts"]} == {2}, (
        "those that Slurm allocated"
    )
    assert list((job.run_dir / "checkpoints").glob("step-*")), "what it resumes from"
    log = job.stoker("logs", str(job.run_dir))
    assert (
        "[cpu cpu-1 worker] joined" in log and "[cpu cpu-1 worker] joined" in job.screen.read_text()
    )
    assert not (job.run_dir / "code/.ray-token").exists(), "nothing needs the token any more"
    assert f"continue: the same command with --resume {job.run_dir}" in job.screen.read_text()
    assert "with a checkpoint committed" in (job.run_dir / "failure").read_text()
    temporary = f"stoker-{job.job}-*"
    until(lambda: not list(Path(tempfile.gettempdir()).glob(temporary)))  # the epilog removes them
    assert job.stoker("status", f"slurm:{job.job}").startswith("interrupted")
    again = subprocess.run(
        slurm.command(*job.program, "stop", str(job.run_dir)), capture_output=True, text=True
    )
    assert (again.returncode, again.stdout) == (
        2,
        "",
    ) and "has already ended: interrupted" in again.stderr


def test_a_failed_job_names_its_cause(slurm: SlurmCluster, project: Path) -> None:
    """A Ray cluster of one host: about 10 s alone."""
    job = Submitted(slurm, project, "failed", "recipe=paced:Broken", "train.epochs=1")
    assert job.code() == 1
    assert "the weights were never released" in (job.run_dir / "failure").read_text()
    status = job.stoker("status", str(job.run_dir))
    assert status.startswith("failed") and "the weights were never released" in status


def test_what_slurm_refuses_is_told_in_its_words_and_leaves_nothing(
    slurm: SlurmCluster, project: Path
) -> None:
    for wrong in (
        "slurm.gpu.nodes=2",
        "slurm.gpu.gpus=8",
        "slurm.gpu.cpus=64",
        "slurm.gpu.partition=nowhere",
        "slurm.gpu.extra=[--reservation=spring]",
    ):
        job = Submitted(slurm, project, "refused", f"params.go={project}/never", wrong)
        assert job.process.wait(timeout=PATIENCE_S) == 2, wrong
        told = job.screen.read_text()
        assert told.startswith("error: sbatch: ") and len(told.splitlines()) == 1, told
    assert not list((project / "runs").glob("refused-*")), "a run that was refused leaves nothing"
