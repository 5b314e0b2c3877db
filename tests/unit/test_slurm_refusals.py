"""Jobs that `--on slurm` refuses before it submits anything, with Slurm's commands faked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import type_command
from tests.fakes.slurm import commands_in

REFUSED = {
    "a relative output folder": (
        "output_dir: runs",
        [],
        "output_dir: must be an absolute folder that all nodes",
    ),
    "an output folder with a pattern": ("output_dir: /shared/%u", [], "has characters that Slurm's options"),
    "no GPU to train": ("", ["slurm.gpu.gpus=0"], "slurm.gpu.gpus: 0, but these nodes train"),
    "no node to train": ("", ["slurm.gpu.nodes=0"], "slurm.gpu.nodes: 0; at least 1 node must train"),
    "fewer than no nodes": ("", ["slurm.cpu.nodes=-1"], "slurm.cpu.nodes: -1; set 0 for none"),
    "a partition for no nodes": ("", ["slurm.cpu.partition=cpu"], "slurm.cpu: partition set, but nodes is 0"),
    "GPUs that preprocess": ("", ["slurm.cpu.gpus=1"], "slurm.cpu.gpus: unknown key"),
    "a time limit in the past": ("", ["slurm.max_runtime_s=-5"], "slurm.max_runtime_s: -5; set the seconds"),
    "a time limit in words": ("", ["slurm.max_runtime_s=4h"], "slurm.max_runtime_s: input should be a valid"),
    "no time to train": (
        "",
        ["slurm.max_runtime_s=200"],
        "200 leaves no time to train, as the run stops 180 s",
    ),
    "a stop after the end": ("", ["slurm.stop_before_s=-1"], "slurm.stop_before_s: -1 is not between 1 and"),
    "an option of ours": (
        "",
        ["slurm.gpu.extra=[--time=1:00:00]"],
        "slurm.gpu.extra: --time is set by Stoker; see the keys of slurm.gpu and slurm",
    ),
    "an option without dashes": ("", ["slurm.gpu.extra=[reservation=x]"], "must have the form --option"),
    "nodes that both groups could get": (
        "slurm: {gpu: {partition: gpu, cpus: 8}, cpu: {partition: gpu, nodes: 1, cpus: 8}}",
        [],
        "slurm.cpu.partition: is that of slurm.gpu, so both could get the same node",
    ),
    "no such partition": (
        "",
        ["slurm.gpu.partition=gpus"],
        "slurm.gpu.partition: this cluster has no partition 'gpus'; did you mean gpu?",
    ),
    "a partition that is down": (
        "",
        ["slurm.cpu={nodes: 1, partition: closed}"],
        "slurm.cpu.partition: partition closed is not up",
    ),
    "a partition without GPUs": ("", ["slurm.gpu.partition=cpu"], "nodes of partition cpu have no GPUs"),
    "more GPUs than a node has": ("", ["slurm.gpu.gpus=16"], "16, but nodes of partition gpu have at most 8"),
    "more nodes than there are": (
        "",
        ["slurm.gpu.nodes=9"],
        "slurm.gpu.nodes: 9, but partition gpu has only 3",
    ),
    "more CPUs than a node has": (
        "",
        ["slurm.gpu.cpus=999"],
        "999, but nodes of partition gpu have at most 128",
    ),
    "longer than the partition allows": (
        "slurm: {cpu: {partition: cpu, nodes: 1}, max_runtime_s: 172800}",
        [],
        "slurm.max_runtime_s: 172800, but partition cpu allows at most 86400 (1-00:00:00)",
    ),
    "an image that nothing runs": (
        "",
        ["slurm.image=x.sif"],
        "slurm: container and image require each other",
    ),
    "mounts of no container": ("", ["slurm.mounts=[/data]"], "slurm: mounts require a container"),
    "a relative mount": (
        "slurm: {container: pyxis, image: x, mounts: [data]}",
        [],
        "slurm.mounts: 'data' must be /path or /path:/inside",
    ),
    "an option among the shell lines": (
        "slurm: {setup: ['#SBATCH --mem=4G']}",
        [],
        "slurm.setup[0]: #SBATCH lines",
    ),
    "a secret among the shell lines": (
        "slurm: {setup: ['export API_KEY=abc123']}",
        [],
        "slurm.setup[0]: API_KEY looks like a secret",
    ),
    "an account of two words": ("", ["slurm.account=a b"], "slurm.account: 'a b' is no name"),
    "an address": ("", ["--address", "http://h:1"], "--address: is not supported with --on slurm"),
    "an autoscaler's hosts": ("", ["cluster.cpu_hosts.max=2"], "with --on slurm hosts cannot be added"),
    "resuming whatever was last": ("", ["--resume", "auto"], "with --on slurm each launch writes its own"),
}


@pytest.fixture
def login_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return commands_in(tmp_path / "bin", monkeypatch)


def type_job(
    folder: Path, text: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[str], str]:
    shared = "" if "output_dir" in text else f"output_dir: {folder}/shared\n"
    (folder / "job.yaml").write_text(f"name: job\nrecipe: rows:Counting\n{shared}{text}\n")
    return type_command([str(folder / "job.yaml"), *words, "--on", "slurm"], capsys)


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_jobs_are_refused_before_anything_is_submitted(
    case: str, login_node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, words, message = REFUSED[case]
    code, told, _ = type_job(tmp_path, text, words, capsys)
    assert code == 2 and len(told) == 1, told
    assert message in told[0]
    assert not (tmp_path / "shared").exists()


def test_all_problems_are_told_at_once(
    login_node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["slurm.gpu.gpus=0", "slurm.gpu.partition=nowhere", "slurm.max_runtime_s=1", "output_dir=runs"]
    assert len(type_job(tmp_path, "", wrong, capsys)[1]) == 4


def test_a_machine_without_slurm_says_where_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, told, _ = type_job(tmp_path, "", [], capsys)
    assert (code, len(told)) == (2, 1) and "sinfo: not found on this machine" in told[0]
    assert type_job(tmp_path, "", ["--dry-run", "--offline"], capsys)[0] == 0


def test_a_refusal_of_slurm_leaves_nothing(
    login_node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told, _ = type_job(tmp_path, "", [], capsys)
    assert (code, told) == (2, ["error: sbatch: not in this test"])
    assert not (tmp_path / "shared").exists()
