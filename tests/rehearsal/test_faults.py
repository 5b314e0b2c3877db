"""What goes wrong around the head, what a host may not do, and rehearsals beside each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rehearsals import Rehearse

from launcher.rehearsal import isolation
from launcher.rehearsal.running import RehearsalRun


def test_a_lost_cpu_host_costs_no_task(rehearse: Rehearse) -> None:
    done = rehearse(
        "rehearsal.entry=container",
        "rehearsal.faults=['kill:algo-3@/driver: task 10 done/']",
        tasks=60,
        task_s=0.5,
    )
    assert done.code == 0, done.run.failure_reason
    assert done.result["numbers"] == list(range(60))
    assert done.codes == {"algo-1": 0, "algo-2": 0, "algo-3": 137}


def test_a_taken_port_is_named(rehearse: Rehearse) -> None:
    done = rehearse("rehearsal.hosts=gpu=1,cpu=1", "rehearsal.faults=[occupy:algo-1@0s]")
    assert done.code == 1
    assert "cluster.port: port 6379 of the head (10.77.0.2) is taken" in done.run.failure_reason
    assert done.run.results["algo-1"].ended_s is not None and done.run.results["algo-1"].ended_s < 20


def test_a_wrong_gpu_group_is_refused_with_those_found(rehearse: Rehearse) -> None:
    done = rehearse("sagemaker.hyperparameters={cluster.gpu_group: gpus}")
    assert done.code == 1  # the toolkit reports every failure of user code as 1
    expected = "cluster.gpu_group: no group is named 'gpus'; found: gpu (ml.g5.xlarge), cpu (ml.c5.xlarge)"
    assert expected in done.run.failure_reason


def test_a_client_without_the_token_is_refused(rehearse: Rehearse) -> None:
    done = rehearse("rehearsal.entry=container", "rehearsal.hosts=gpu=1,cpu=1", client=True)
    assert done.code == 0, done.run.failure_reason
    said = done.result["refused_client"]
    host, code, *_ = said.split(" ")
    assert host == "algo-2" and code != "0"
    assert "IN [" not in said
    assert "auth" in said.lower()


def test_two_rehearsals_beside_each_other(start: Callable[..., RehearsalRun]) -> None:
    options = ("rehearsal.hosts=gpu=1,cpu=1", "rehearsal.entry=container", "rehearsal.timeout_s=200")
    runs = [start(*options), start(*options)]
    assert [run.wait() for run in runs] == [0, 0]
    assert all((run.run_dir / "result.json").is_file() for run in runs)


def test_a_user_namespace_is_enough(rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user who is not root gets: the same command inside a user namespace."""
    monkeypatch.setattr(isolation.os, "geteuid", lambda: 1000)
    assert "--user" in isolation.unshare_command()
    done = rehearse("rehearsal.hosts=gpu=1,cpu=1", "rehearsal.link_mbps=200")
    assert done.code == 0, done.run.failure_reason


def test_link_and_cpu_limits_hold(rehearse: Rehearse) -> None:
    done = rehearse(
        "rehearsal.hosts=gpu=1,cpu=1",
        "rehearsal.entry=container",
        "rehearsal.link_mbps=40",
        "rehearsal.cpu_quota=0.5",
        measure=True,
        tasks=2,
    )
    assert done.code == 0, done.run.failure_reason
    measured = done.result["measured"]
    assert measured["burn_s"] > 1.7, "half a core needs two seconds for one second of work"
    assert 1.5 < measured["fetch_s"] < 15, "84 Mbit at 40 Mbit/s"


def test_a_host_that_is_cut_off_leaves_and_the_job_goes_on(rehearse: Rehearse) -> None:
    done = rehearse(
        "rehearsal.entry=container",
        "rehearsal.faults=['partition:algo-3@/driver: task 4 done/']",
        tasks=40,
        task_s=0.5,
    )
    assert done.code == 0, done.run.failure_reason
    assert done.result["numbers"] == list(range(40))
    assert "leaving: the head is gone" in done.log("algo-3")
    assert done.codes["algo-3"] == 0


def test_tasks_of_a_frozen_host_are_done_elsewhere_and_the_host_is_named(rehearse: Rehearse) -> None:
    done = rehearse(
        "rehearsal.entry=container",
        "rehearsal.faults=['pause:algo-3@/driver: task 4 done/']",
        tasks=40,
        task_s=0.5,
    )
    assert done.result["numbers"] == list(range(40))
    assert done.codes["algo-1"] == done.codes["algo-2"] == 0
    # A frozen host cannot leave by itself: SageMaker would wait for it, so the rehearsal says so.
    assert done.codes["algo-3"] == 137
    assert "pause at" in done.run.failure_reason
    assert "was still running 30 s after the head's end" in done.run.failure_reason
