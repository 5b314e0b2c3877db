"""Jobs through commands that behave as Slurm's do; wrong ones are refused before anything is written."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.checkpoints.format import Content, save
from stoker.config.loading import load
from stoker.errors import UsageError
from stoker.hosts.services import slurm as service
from stoker.storage.checkpoint_store import open_store
from stoker_launcher import run_directory
from stoker_launcher.job import open_job
from stoker_launcher.places import Resume, attach, slurm
from stoker_launcher.places.remote import UnansweredError
from stoker_launcher.places.slurm import SlurmRun, slurm_commands
from tests.command_line import type_command
from tests.fakes.slurm import commands_in, fake

ID_IS_GONE = "slurm_load_jobs error: Invalid job id specified"
NODES = "gpu: {partition: gpu, gpus: 4, cpus: 16, memory_gb: 64}, cpu: {partition: cpu, nodes: 2}"


@pytest.fixture
def login_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return commands_in(tmp_path / "bin", monkeypatch)


def planned(folder: Path, *overrides: str) -> slurm.SlurmRequest:
    resolved = load(None, ["name=probe", f"output_dir={folder}/shared", *overrides])
    return slurm.plan(open_job(resolved), offline=True)


def test_the_environment_is_this_commands_or_that_of_the_setup_lines(tmp_path: Path) -> None:
    own = f"export PATH={Path(sys.executable).parent}"
    assert own in planned(tmp_path).script
    script = planned(tmp_path, "slurm.setup=[source /venv/bin/activate]").script
    back = 'cd "$STOKER_RUN_DIR/code" || exit 1'
    assert own not in script
    assert script.index("source /venv") < script.rindex(back), "the job's own code runs"


def test_a_relative_checkpoint_folder_is_that_of_the_command(
    tmp_path: Path, login_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given, meant in (
        ("kept", str(tmp_path / "kept")),
        ("/shared/kept", "/shared/kept"),
        ("s3://b/k",) * 2,
    ):
        request = planned(tmp_path, f"checkpoint.dir={given}")
        assert (f"checkpoint.dir = {meant} must be shared" in request.render()) == (given == "kept")
        staged = request.stage().run_dir / "code/job.yaml"
        assert load(staged).config.checkpoint.dir == meant


def test_a_second_launch_does_not_continue_the_run_in_a_relative_checkpoint_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(None, ["name=probe", "recipe=rows:Counting", "checkpoint.dir=kept"]).config
    assert run_directory.resolve_resume(None, slurm.PLACE, config) == Resume()
    save(open_store("kept"), Content({"w": torch.zeros(1)}, {}, {"step": 1}))
    with pytest.raises(UsageError, match=r"kept has checkpoints of another run \("):
        run_directory.resolve_resume(None, slurm.PLACE, config)
    assert run_directory.resolve_resume("auto", slurm.PLACE, config) == Resume("auto")
    script = load(None, ["name=probe", "script=t.py", "checkpoint.dir=kept"]).config
    assert run_directory.resolve_resume(None, slurm.PLACE, script) == Resume(), "it decides itself"


def started(
    script: str, run_dir: Path, job_id: int, **variables: str
) -> subprocess.CompletedProcess[str]:
    head = script.partition("\nsrun ")[0]
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": str(job_id), **variables}
    return subprocess.run(["bash"], input=head, text=True, capture_output=True, env=environment)


def test_a_script_that_is_submitted_twice_does_not_mix_two_runs(
    tmp_path: Path, login_node: Path
) -> None:
    request = planned(tmp_path)
    request.write(tmp_path / "job.sh")
    assert started(request.script, request.run_dir, 42).returncode == 0
    assert started(request.script, request.run_dir, 42, SLURM_RESTART_COUNT="1").returncode == 0, (
        "requeued"
    )
    again = started(request.script, request.run_dir, 43)
    assert (
        again.returncode == 2
        and "job 43 does not start: its script is that of job 42" in again.stderr
    )
    assert f"--resume {request.run_dir}" in again.stderr
    assert (request.run_dir / "slurm.job").read_text() == "42\n"
    fake(login_node, "scontrol", f"echo 'JobId=43 WorkDir={request.run_dir}/code'")
    with pytest.raises(UsageError, match="slurm:43: its script is that of job 42"):
        attach("slurm:43")


def test_a_site_with_a_long_temporary_folder_gets_short_paths_for_ray(tmp_path: Path) -> None:
    step = next(part for part in planned(tmp_path).script.split("'") if "export TMPDIR" in part)
    lines = step.partition("for own")[0] + 'echo "$TMPDIR $RAY_TMPDIR"'
    long = "/scratch/users/somebody/tmp/of/jobs/42"
    for site, folders in {
        "": "/tmp/stoker-42-1 /tmp/stoker-42-1",
        "/scratch/42": "/scratch/42/stoker-42-1 /scratch/42/stoker-42-1",
        long: f"{long}/stoker-42-1 /tmp/stoker-42-1",
    }.items():
        environment = {
            "SLURM_JOB_ID": "42",
            "SLURM_PROCID": "1",
            **({"TMPDIR": site} if site else {}),
        }
        done = subprocess.run(
            ["bash"], input=lines, text=True, capture_output=True, env=environment
        )
        assert done.stdout.strip() == folders, done.stderr


def test_variables_of_sbatch_and_of_a_surrounding_job_do_not_reach_the_submission(
    tmp_path: Path, login_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(login_node, "sbatch", f"env > {tmp_path}/seen; echo '42;cluster'")
    given = {
        "SBATCH_PARTITION": "debug",
        "SLURM_MEM_PER_NODE": "8",
        "SLURM_CONF": "/etc/s.conf",
        "MINE": "1",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert slurm.submit(planned(tmp_path)).id == "slurm:42"
    seen = (tmp_path / "seen").read_text()
    assert "SLURM_CONF=/etc/s.conf" in seen and "MINE=1" in seen
    assert "SBATCH_PARTITION" not in seen and "SLURM_MEM_PER_NODE" not in seen


@pytest.mark.parametrize(
    ("answer", "job"),
    [
        ("Welcome to job 7 of 9!\\n42", "slurm:42"),
        ("42;cluster\\nBudget left: 30 h", "slurm:42"),
        ("", ""),
        ("Submitted to the night queue", ""),
    ],
)
def test_a_job_is_submitted_if_sbatch_names_it(
    tmp_path: Path, login_node: Path, answer: str, job: str
) -> None:
    fake(login_node, "sbatch", f"printf '{answer}\n'")
    if job:
        assert slurm.submit(planned(tmp_path)).id == job
    else:
        with pytest.raises(UnansweredError, match="the job may be queued"):
            slurm.submit(planned(tmp_path))


DONE, STOPPED = (
    {"summary.json": f'{{"status": "{word}"}}'} for word in ("succeeded", "interrupted")
)
NAN, LINE = {"failure": "loss is NaN\n"}, {"logs/slurm.log": "x"}
STATUS: list[tuple[str, str, dict[str, str], str]] = [
    ("42|PENDING|Resources", "", {}, "running: waiting for nodes (Resources)"),
    ("42+1|PENDING|None\n42+0|PENDING|Priority", "", {}, "running: waiting for nodes (Priority)"),
    ("42|RUNNING|None", "", {}, "running: running"),
    ("42|PENDING|JobHeldUser", "", {}, "running: waiting for nodes (JobHeldUser, held until"),
    ("42|SPECIAL_EXIT|None", "", {}, "running: waiting for nodes (SPECIAL_EXIT, held until"),
    (
        "42|PENDING|BeginTime",
        "",
        {"summary.json": "{}"},
        "running: requeued, waiting for nodes (Be",
    ),
    ("", "JobState=CANCELLED", {}, "interrupted: cancelled before it started"),
    ("", "JobState=COMPLETED", DONE, "succeeded"),
    ("", "JobState=FAILED", NAN, "failed: loss is NaN"),
    ("", "JobState=NODE_FAIL", {}, "failed: the job ended without a line of output (NODE_FAIL)"),
    ("", "JobState=TIMEOUT", LINE | STOPPED, "interrupted"),
    ("", "JobState=PREEMPTED", LINE | {"summary.json": '{"status": "running"}'}, "failed"),
    ("", "", LINE, "failed: the job ended without a result (no longer known to Slurm)"),
]
"""What squeue and scontrol say, the files of the run, and its status."""


@pytest.mark.parametrize(("queue", "controller", "files", "status"), STATUS)
def test_status_is_what_the_queue_and_the_run_directory_say(
    login_node: Path,
    tmp_path: Path,
    queue: str,
    controller: str,
    files: dict[str, str],
    status: str,
) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "logs").mkdir(parents=True)
    for name, text in {"slurm.job": "42\n", **files}.items():
        (run_dir / name).write_text(text)
    fake(login_node, "squeue", f"echo '{queue}'" if queue else f"echo '{ID_IS_GONE}' >&2; exit 1")
    fake(
        login_node,
        "scontrol",
        f"echo 'JobId=42 {controller}'" if controller else f"echo '{ID_IS_GONE}' >&2; exit 1",
    )
    fake(login_node, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert attach(str(run_dir)).status().startswith(status)


CODES = [
    ("2", "JobState=FAILED ExitCode=2:0", 2, 2),
    ("", "JobState=FAILED ExitCode=143:0", 143, 143),  # NFS shows the file later
    ("", "JobState=COMPLETED ExitCode=0:0", 0, 1),
    ("", "JobState=CANCELLED ExitCode=0:15", 0, 143),  # after its end, or before its start
    ("", "JobState=NODE_FAIL ExitCode=0:0", 0, 1),
]


@pytest.mark.parametrize(("file", "controller", "code", "without_result"), CODES)
def test_the_exit_code_is_the_scripts_or_else_slurms(
    login_node: Path, tmp_path: Path, file: str, controller: str, code: int, without_result: int
) -> None:
    (tmp_path / "slurm.exit").write_text(file)
    (tmp_path / "summary.json").write_text('{"status": "succeeded"}')
    fake(login_node, "squeue", f"echo '{ID_IS_GONE}' >&2; exit 1")
    fake(login_node, "scontrol", f"echo 'JobId=42 {controller}'")
    assert SlurmRun("42", tmp_path).wait() == code
    (tmp_path / "summary.json").unlink()
    assert SlurmRun("42", tmp_path).wait() == without_result


@pytest.mark.parametrize(("state", "words"), [("PENDING", "42"), ("RUNNING", "--signal=TERM 42")])
def test_stop_takes_a_waiting_job_out_of_the_queue_and_signals_a_running_one(
    login_node: Path, tmp_path: Path, state: str, words: str
) -> None:
    fake(login_node, "squeue", f"echo '42|{state}|None'")
    fake(login_node, "scancel", f'echo "$*" > {tmp_path}/asked')
    SlurmRun("42", tmp_path).stop()
    assert (tmp_path / "asked").read_text().strip() == words
    assert (tmp_path / "stop.requested").exists(), "at its time limit, too, it is not requeued"


def test_an_unknown_job_id_is_one_line(login_node: Path) -> None:
    fake(login_node, "scontrol", f"echo '{ID_IS_GONE}' >&2; exit 1")
    fake(login_node, "sacct", "exit 1")
    with pytest.raises(UsageError, match="slurm:42: Slurm does not know this job any more"):
        attach("slurm:42")
    with pytest.raises(UsageError, match="write slurm:<job id>"):
        attach("slurm:last")


def test_a_controller_that_is_away_while_a_job_runs_is_waited_for(
    login_node: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(slurm, "POLL_S", 0.05)
    (tmp_path / "summary.json").write_text('{"status": "succeeded"}')
    away = f"rm {tmp_path}/away 2>/dev/null || exit 0; echo 'Unable to contact slurm controller' >&2; exit 1"
    fake(login_node, "squeue", away)
    fake(login_node, "scontrol", "echo JobState=COMPLETED ExitCode=0:0")
    for submitted in (True, False):
        (tmp_path / "away").touch()
        run = SlurmRun("7", tmp_path, ask_every_s=0, submitted=submitted)
        if submitted:
            assert run.wait() == 0
            assert "asking again for up to 600 s" in capsys.readouterr().err
        else:  # nobody has seen this job
            with pytest.raises(UsageError, match="Unable to contact"):
                run.wait()


def test_port_and_store_fit_a_shared_node_unless_the_job_sets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "70007")
    monkeypatch.setattr(service, "CODE", tmp_path)
    assert service.given() == {"cluster.port": str(service.port_of("70007"))}
    (tmp_path / "job.origins.json").write_text('{"cluster.port": "job.yaml"}')
    assert service.given() == {}
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "10000")
    assert service.given() == {"cluster.object_store_mb": "3000"}, (
        "the node's memory is not all the job's"
    )


def type_job(
    folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[str], str]:
    (folder / "job.yaml").write_text(
        f"name: job\nrecipe: rows:Counting\noutput_dir: {folder}/shared\n"
    )
    return type_command([str(folder / "job.yaml"), *words, "--on", "slurm"], capsys)


def test_a_machine_without_slurm_and_a_refusal_are_one_line_and_leave_nothing(
    login_node: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, told, _ = type_job(tmp_path, [], capsys)
    assert (code, told) == (2, ["error: sbatch: not in this test"])
    monkeypatch.setenv("PATH", str(tmp_path))
    code, told, _ = type_job(tmp_path, [], capsys)
    assert (code, len(told)) == (2, 1) and "sbatch: not found on this machine" in told[0]
    assert not (tmp_path / "shared").exists()
    assert type_job(tmp_path, ["--dry-run", "--offline"], capsys)[0] == 0


def test_the_run_directory_of_a_job_that_may_be_queued_stays(
    login_node: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slurm_commands, "TIMEOUT_S", 1)
    fake(login_node, "sbatch", '[ "$1" = --test-only ] || exec sleep 60')
    fake(login_node, "squeue", "echo '7|/elsewhere'")
    run = subprocess.run  # the other commands answer in time, however busy the machine is

    def answers(command: tuple[str, ...], **given: Any) -> Any:
        return run(command, **given | ({} if "--parsable" in command else {"timeout": 60}))

    monkeypatch.setattr(subprocess, "run", answers)
    code, (told,), _ = type_job(tmp_path, [], capsys)
    (run_dir,) = (tmp_path / "shared").iterdir()
    assert code == 2 and (run_dir / "code/train.py").is_file()
    assert (
        f"no answer from Slurm within 1 s; the job may be queued all the same, so {run_dir} stays"
        in told
    )


def test_a_job_is_found_in_the_queue_if_the_answer_of_sbatch_is_lost(
    login_node: Path, tmp_path: Path
) -> None:
    """Heterogeneous jobs are listed once for each component."""
    fake(login_node, "sbatch", "echo queued")
    rows = f'for at in {tmp_path}/shared/*/code; do echo "41+0|$at"; echo "41+1|$at"; done'
    fake(login_node, "squeue", rows)
    run = slurm.submit(planned(tmp_path))
    assert (run.id, run.run_dir.parent) == ("slurm:41", tmp_path / "shared")


def test_jobs_that_are_staged_in_the_same_second_have_scripts_of_their_own(tmp_path: Path) -> None:
    first, second = (planned(tmp_path) for _ in range(2))
    staged = first.stage(), replace(second, run_dir=first.run_dir, script=first.script).stage()
    assert staged[0].run_dir != staged[1].run_dir
    assert [f"{one.run_dir}/code" in one.script for one in staged] == [True, True]
