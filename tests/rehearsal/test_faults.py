"""What goes wrong around the head, what a host may not do, and rehearsals beside each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rehearsals import Rehearse, Rehearsed

from launcher.rehearsal import isolation
from launcher.rehearsal.running import RehearsalRun


def test_hosts_that_are_lost_or_cut_off_cost_no_task(rehearse: Rehearse) -> None:
    """Four hosts start, and Ray takes some twenty seconds to give up one that vanished."""
    done = rehearse(
        "rehearsal.entry=container",
        "rehearsal.hosts=gpu=1,cpu=3",
        "rehearsal.faults=['kill:algo-3@/driver: task 4 done/', 'partition:algo-4@/driver: task 8 done/']",
        tasks=40,
        task_s=0.5,
    )
    assert done.code == 0, done.run.failure_reason
    assert done.result["numbers"] == list(range(40))
    assert "leaving: the head is gone" in done.log("algo-4")
    assert done.codes == {"algo-1": 0, "algo-2": 0, "algo-3": 137, "algo-4": 0}


def test_tasks_of_a_frozen_host_are_done_elsewhere_and_the_host_is_named(rehearse: Rehearse) -> None:
    """Long: Ray itself must declare a host lost that neither answers nor closes its connections."""
    done = rehearse(
        "rehearsal.entry=container",
        "rehearsal.hosts=gpu=1,cpu=1",
        "rehearsal.faults=['pause:algo-2@/driver: task 4 done/']",
        tasks=24,
        task_s=0.5,
    )
    assert done.result["numbers"] == list(range(24))
    assert done.codes["algo-1"] == 0
    # A frozen host cannot leave by itself: SageMaker would wait for it, so the rehearsal says so.
    assert done.codes["algo-2"] == 137
    assert "pause at" in done.run.failure_reason
    assert "was still running 30 s after the head's end" in done.run.failure_reason


def test_a_taken_port_is_named(rehearse: Rehearse) -> None:
    done = rehearse("rehearsal.hosts=gpu=1,cpu=1", "rehearsal.faults=[occupy:algo-1@0s]")
    assert done.code == 1
    assert "cluster.port: port 6379 of the head (10.77.0.2) is taken" in done.run.failure_reason
    assert "Ray runtime started" not in done.log("algo-1")


def test_a_wrong_gpu_group_is_refused_with_those_found(rehearse: Rehearse) -> None:
    done = rehearse("rehearsal.hosts=gpu=1,cpu=1", "sagemaker.hyperparameters={cluster.gpu_group: gpus}")
    assert done.code == 1  # the toolkit reports every failure of user code as 1
    expected = "cluster.gpu_group: no group is named 'gpus'; found: gpu (ml.g5.xlarge), cpu (ml.c5.xlarge)"
    assert expected in done.run.failure_reason


def test_a_user_namespace_is_enough_and_a_client_without_the_token_is_refused(
    rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a user who is not root gets: the same command inside a user namespace."""
    monkeypatch.setattr(isolation.os, "geteuid", lambda: 1000)
    assert "--user" in isolation.unshare_command()
    done = rehearse(
        "rehearsal.entry=container", "rehearsal.hosts=gpu=1,cpu=1", "rehearsal.link_mbps=200", client=True
    )
    assert done.code == 0, done.run.failure_reason
    said = done.result["refused_client"]
    host, code, *_ = said.split(" ")
    assert host == "algo-2" and code != "0"
    assert "IN [" not in said
    assert "auth" in said.lower()


def test_two_rehearsals_beside_each_other_and_one_has_limits(start: Callable[..., RehearsalRun]) -> None:
    common = ("rehearsal.entry=container", "rehearsal.timeout_s=500")
    alone = start("rehearsal.hosts=gpu=1", *common)
    limited = start(
        "rehearsal.hosts=gpu=1,cpu=1",
        *common,
        "rehearsal.link_mbps=40",
        "rehearsal.cpu_quota=0.5",
        measure=True,
        tasks=2,
    )
    assert [alone.wait(), limited.wait()] == [0, 0], alone.failure_reason + limited.failure_reason
    assert set(Rehearsed(alone, 0).result["tasks_by_host"]) == {"algo-1"}
    measured = Rehearsed(limited, 0).result["measured"]
    assert measured["burn_s"] > 1.7, "half a core needs two seconds for one second of work"
    assert measured["fetch_s"] > 1.5, "84 Mbit at 40 Mbit/s"
