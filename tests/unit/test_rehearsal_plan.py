"""Planning a rehearsal: hosts, faults, channels; nothing is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from stoker.config.loading import load
from stoker.errors import UsageError
from stoker.events.console import closing_rows
from stoker.events.summary import Summary
from stoker_launcher.job import Job, Project
from stoker_launcher.places import rehearsal
from stoker_launcher.rehearsal import running
from stoker_launcher.rehearsal.plan import fault_of, plan, plan_hosts
from stoker_launcher.rehearsal.running import merge, results
from stoker_launcher.rehearsal.sagemaker_hosts import hyperparameters, outputs, resource_config
from tests.waiting import until


def job(*overrides: str, data: dict[str, str] | None = None) -> Job:
    resolved = load(None, overrides)
    return Job(resolved, Project(resolved.config), data or {})


def test_hosts_are_numbered_in_order_and_typed_by_group() -> None:
    late = "rehearsal.join_delay={algo-2: 30, algo-3: never}"
    request = plan(job("rehearsal.hosts=cpu=10,gpu=1", late))
    assert request.head == request.hosts[-1].name == "algo-11"
    assert [request.hosts[at].instance_type for at in (0, 10)] == ["ml.c5.xlarge", "ml.g5.xlarge"]
    assert [host.delay_s for host in request.hosts[:3]] == [0, 30, float("inf")]
    written = resource_config(request.hosts, request.hosts[1])
    assert written["hosts"][:3] == ["algo-1", "algo-10", "algo-11"]
    assert written["current_group_name"] == "cpu"
    text = request.render()
    assert "30 s late" in text and "never comes" in text and "5.1.4 starts train.py" in text
    for entry in ("rehearsal.entry=container", "rehearsal.like=vertex"):
        assert "train.py is process 1" in plan(job(entry)).render()


def test_a_named_gpu_group_and_given_types() -> None:
    named = ["rehearsal.hosts=a=1,my trainers=2", "cluster.gpu_group=my trainers"]
    types = [host.instance_type for host in plan_hosts(load(None, named).config)]
    assert types == ["ml.c5.xlarge", "ml.g5.xlarge", "ml.g5.xlarge"]
    assert plan(job("rehearsal.hosts=x=1:ml.p4d.24xlarge,y=1:ml.m5.xlarge")).head == "algo-1"
    assert plan(job("rehearsal.hosts=only=2")).head == "algo-1"


def test_faults_know_their_moment() -> None:
    assert fault_of("kill:algo-3@20s", ["algo-3"]).due_s == 20
    formed = fault_of("term:all@formed+5s", ["algo-3"])
    assert formed.due_s is None
    formed.see("nothing", 3)
    formed.see("[gpu algo-1 head] cluster formed in 8.1 s: gpu: algo-1", 9)
    assert formed.due_s == 14
    formed.see("cluster formed in 8.1 s", 20)
    assert formed.due_s == 14
    line = fault_of("partition:algo-3@/epoch [12]/+0.5s", ["algo-3"])
    line.see("epoch 2", 7)
    assert line.due_s == 7.5


UNSHARE = """#!/bin/bash
eval "echo > /dev/fd/${@: -1}"
exec {fd}>&-
echo "epoch 1"
bash -c 'until [ -e "$OVER" ]; do sleep 0.1; done' & wait
"""


def test_a_rehearsal_whose_faults_were_not_injected_does_not_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("unshare", UNSHARE), ("ip", "#!/bin/sh\n"), ("tc", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    over = tmp_path / "over"
    monkeypatch.setenv("OVER", str(over))

    def rehearse(*faults: str) -> tuple[int, str]:
        request = plan(job("rehearsal.hosts=gpu=2", f"rehearsal.faults={json.dumps(faults)}"))
        request = replace(request, run_dir=tmp_path / f"run-{len(faults)}")
        (request.run_dir / "logs").mkdir(parents=True)
        (request.run_dir / "hosts").mkdir()
        hosts = [
            {"name": h.name, "delay_s": 0, "port": "v", "link": "h", "rate": []}
            for h in request.hosts
        ]
        times = {
            "linger_s": 90,
            "timeout_s": 90,
            "stop_grace_s": 90,
            "ray_port": 1,
            "head": request.head,
        }
        spec = {"hosts": hosts, "faults": [asdict(fault) for fault in request.faults], **times}
        (request.run_dir / "world.json").write_text(json.dumps(spec))
        command = [
            sys.executable,
            "-m",
            "stoker_launcher.rehearsal.world",
            str(request.run_dir / "world.json"),
        ]
        world = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=STDOUT, text=True)
        run = running.RehearsalRun(request, world, True)
        # Whatever is due at the first line is injected before the end of a host is looked for.
        logs = [request.run_dir / "logs" / f"{host.name}.log" for host in request.hosts]
        until(lambda: all(log.exists() and "epoch 1\n" in log.read_text() for log in logs))
        for action in ("slow", "fast"):  # also together
            run.inject(action, "algo-1")
        until(lambda: [note.split()[0] for note in run.results["algo-1"].notes] == ["slow", "fast"])
        over.touch()
        code = run.wait()
        over.unlink()
        return code, capsys.readouterr().out

    stranger = subprocess.Popen([sys.executable, "-c", "input()", "train.py"], stdin=PIPE)
    code, shown = rehearse("slow:algo-2@/epoch 1/")
    assert (code, "not injected" in shown) == (0, False), shown
    late, never, vain = "kill:algo-2@600s", "kill:algo-2@/epoch 99/", "return:algo-2@0s"
    code, shown = rehearse(late, never, vain, "crash:algo-2@0s")
    assert code == 1 and "the job succeeded, but not all faults were injected" in shown, shown
    assert f"not injected: {late}: the job ended before" in shown
    assert f"not injected: {never}: no line matched" in shown
    for text in (vain, "crash:algo-2@0s"):
        assert f"not injected: {text}: the host was in no state for it" in shown
    assert stranger.poll() is None, "not a process of a host"
    stranger.communicate(b"\n")


def test_hosts_get_strings_of_json_and_channels(tmp_path: Path) -> None:
    made = job("sagemaker.hyperparameters={train.lr: 0.1, name: x}")
    given = {"config": '"job.yaml"', "train.lr": "0.1", "name": '"x"'}
    assert hyperparameters(made, "container") == given
    assert hyperparameters(made, "toolkit") == given | {
        "sagemaker_program": '"train.py"',
        "sagemaker_submit_directory": '"/opt/ml/input/data/code/sourcedir.tar.gz"',
    }
    (tmp_path / "labels.csv").touch()
    request = plan(job(data={"images": str(tmp_path), "labels": str(tmp_path / "labels.csv")}))
    folders = [
        channel.path_on_host.removeprefix("/opt/ml/input/data/") for channel in request.channels
    ]
    assert folders == ["images", "labels/labels.csv"]


def test_a_machine_without_namespaces_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.sys, "platform", "darwin")
    with pytest.raises(UsageError, match="--on local"):
        running.unshare_command()
    monkeypatch.undo()
    monkeypatch.setattr(running.shutil, "which", lambda tool: None if tool == "ip" else tool)
    with pytest.raises(UsageError, match="iproute2"):
        running.unshare_command()


def test_a_toolkit_that_cannot_be_installed_is_refused_before_anything_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(running, "unshare_command", lambda: ["unshare"])
    monkeypatch.setattr(metadata, "version", lambda _: "5.1.3")  # another one beside this project
    with pytest.raises(
        UsageError, match=r"cannot install sagemaker-training 5\.1\.4: .*entry=container"
    ):
        rehearsal.submit(plan(job(f"output_dir={tmp_path / 'runs'}")))
    assert not (tmp_path / "runs").exists()


def test_outputs_are_merged_and_clashes_named(tmp_path: Path) -> None:
    for host in ("algo-1", "algo-2"):
        ml = tmp_path / host
        (ml / "model").mkdir(parents=True)
        (ml / "output" / "data").mkdir(parents=True)
        (ml / "model" / "weights").write_text(host)
        (ml / "output" / "data" / f"{host}.txt").write_text(host)
    run_dir = tmp_path / "run"
    hosts = {host: tmp_path / host for host in ("algo-1", "algo-2")}
    clashes = merge(hosts, outputs(run_dir))
    assert clashes == ["model/weights: written by algo-1 and algo-2"]
    assert (run_dir / "model" / "weights").read_text() == "algo-1"
    assert (run_dir / "algo-2.txt").is_file()


def test_the_closing_lines_name_paths_on_this_machine(tmp_path: Path) -> None:
    summary = Summary(name="digits", place="rehearsal", model="/opt/ml/model")
    shown = [name for name, _ in closing_rows(summary, "/opt/ml/output/data")]
    assert not {"model", "run", "report", "next"} & set(shown), "paths within an emulated host"
    for name in ("tensorboard", "logs", "report.html", "logs/driver.log"):
        path = tmp_path / name
        path.touch() if path.suffix else path.mkdir()
    both = [f"results: {tmp_path}", f"report: {tmp_path}/report.html"]
    tensorboard = f"next: tensorboard --logdir {tmp_path}/tensorboard"
    assert results(tmp_path, succeeded=True) == [*both, tensorboard]
    assert results(tmp_path, succeeded=False) == [*both, f"details: {tmp_path}/logs/driver.log"]


@pytest.mark.parametrize("writer", ["algo-1", "algo-2"])
def test_a_checkpoint_that_a_host_was_given_and_left_alone_is_no_conflict(
    tmp_path: Path, writer: str
) -> None:
    given = tmp_path / "before" / "last.pt"
    given.parent.mkdir()
    given.write_text("old")
    hosts = {host: tmp_path / host for host in ("algo-1", "algo-2", "algo-3")}
    for host, ml in hosts.items():
        (ml / "checkpoints").mkdir(parents=True)
        (ml / "checkpoints" / "last.pt").write_text("new" if host == writer else "old")
    assert merge(hosts, outputs(tmp_path / "run"), [given]) == []
    assert (tmp_path / "run" / "checkpoints" / "last.pt").read_text() == "new"
