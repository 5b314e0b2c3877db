"""Jobs that `--on slurm` refuses before it submits anything, with Slurm's commands faked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import type_command
from tests.fakes.slurm import commands_in

REFUSED = [
    ("output_dir=runs", "output_dir: must be an absolute folder that all nodes"),
    ("output_dir=/shared/%u", "has characters that Slurm's options"),
    ("slurm.gpu.gpus=0", "slurm.gpu.gpus: 0, but these nodes train"),
    ("slurm.gpu.nodes=0", "slurm.gpu.nodes: input should be greater than or equal to 1"),
    ("slurm.cpu.nodes=-1", "slurm.cpu.nodes: input should be greater than or equal to 0"),
    ("slurm.cpu.partition=cpu", "slurm.cpu: partition set, but nodes is 0"),
    ("slurm.cpu.gpus=1", "slurm.cpu.gpus: unknown key"),
    ("slurm.max_runtime_s=-5", "slurm.max_runtime_s: input should be greater"),
    ("slurm.max_runtime_s=4h", "slurm.max_runtime_s: input should be a valid"),
    ("slurm.max_runtime_s=200", "200 leaves no time to train, as the run stops 180 s"),
    ("slurm.stop_before_s=-1", "slurm.stop_before_s: input should be greater"),
    (
        "slurm.gpu.extra=[--time=1:00:00]",
        "slurm.gpu.extra: --time is set by Stoker; see the keys of slurm.gpu and slurm",
    ),
    ("slurm.gpu.extra=[reservation=x]", "must have the form --option"),
    (
        "slurm={gpu: {partition: gpu, cpus: 8}, cpu: {partition: gpu, nodes: 1, cpus: 8}}",
        "slurm.cpu.partition: is that of slurm.gpu, so both could get the same node",
    ),
    (
        "slurm.gpu.partition=gpus",
        "slurm.gpu.partition: this cluster has no partition 'gpus'; did you mean gpu?",
    ),
    ("slurm.cpu={nodes: 1, partition: closed}", "slurm.cpu.partition: partition closed is not up"),
    ("slurm.gpu.partition=cpu", "nodes of partition cpu have no GPUs"),
    ("slurm.gpu.gpus=16", "16, but nodes of partition gpu have at most 8"),
    ("slurm.gpu.nodes=9", "slurm.gpu.nodes: 9, but partition gpu has only 3"),
    ("slurm.gpu.cpus=999", "999, but nodes of partition gpu have at most 128"),
    (
        "slurm={cpu: {partition: cpu, nodes: 1}, max_runtime_s: 172800}",
        "slurm.max_runtime_s: 172800, but partition cpu allows at most 86400 (1-00:00:00)",
    ),
    ("slurm.image=x.sif", "slurm: container and image require each other"),
    ("slurm.mounts=[/data]", "slurm: mounts require a container"),
    ("slurm={setup: ['#SBATCH --mem=4G']}", "slurm.setup[0]: #SBATCH lines"),
    ("slurm={setup: ['export API_KEY=abc123']}", "slurm.setup[0]: API_KEY looks like a secret"),
    ("--address http://h:1", "--address: is not supported with --on slurm"),
    ("cluster.cpu_hosts.max=2", "with --on slurm hosts cannot be added"),
    ("--resume auto", "with --on slurm each launch writes its own"),
]
"""(what is set or typed, what is said)"""


@pytest.fixture
def login_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return commands_in(tmp_path / "bin", monkeypatch)


def type_job(
    folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[str], str]:
    (folder / "job.yaml").write_text(f"name: job\nrecipe: rows:Counting\noutput_dir: {folder}/shared\n")
    return type_command([str(folder / "job.yaml"), *words, "--on", "slurm"], capsys)


@pytest.mark.parametrize(("typed", "message"), REFUSED)
def test_wrong_jobs_are_refused_before_anything_is_submitted(
    typed: str, message: str, login_node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = typed.split() if typed.startswith("--") else [typed]
    code, told, _ = type_job(tmp_path, words, capsys)
    assert code == 2 and len(told) == 1, told
    assert message in told[0]
    assert not (tmp_path / "shared").exists()


def test_all_problems_are_told_at_once(
    login_node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["slurm.gpu.gpus=0", "slurm.gpu.partition=nowhere", "slurm.max_runtime_s=1", "output_dir=runs"]
    assert len(type_job(tmp_path, wrong, capsys)[1]) == 4


def test_a_machine_without_slurm_says_where_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, told, _ = type_job(tmp_path, [], capsys)
    assert (code, len(told)) == (2, 1) and "sinfo: not found on this machine" in told[0]
    assert type_job(tmp_path, ["--dry-run", "--offline"], capsys)[0] == 0


def test_a_refusal_of_slurm_leaves_nothing(
    login_node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told, _ = type_job(tmp_path, [], capsys)
    assert (code, told) == (2, ["error: sbatch: not in this test"])
    assert not (tmp_path / "shared").exists()
