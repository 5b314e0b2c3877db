"""What goes wrong around the head, what a host may not do, and rehearsals beside each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rehearsals import Rehearse, Rehearsed

from launcher.rehearsal import running
from launcher.rehearsal.running import RehearsalRun

pytestmark = pytest.mark.long


def test_tasks_of_hosts_that_are_lost_cut_off_or_frozen_are_done_elsewhere(rehearse: Rehearse) -> None:
    """Long: Ray itself must declare a host lost that neither answers nor closes its connections."""
    done = rehearse(
        "rehearsal.hosts=gpu=1,cpu=3",
        "rehearsal.faults=['kill:algo-2@/driver: task 4 done/', 'partition:algo-3@/driver: task 8 done/', "
        "'pause:algo-4@/driver: task 12 done/']",
        tasks=40,
        task_s=0.5,
        until_left=1,  # the head outlives the faults
    )
    assert done.result["numbers"] == list(range(40))
    assert "the head is gone: Connection timed out; trying to rejoin" in done.log("algo-3")
    assert "left: cannot reach the head" in done.log("algo-3")
    # A frozen host cannot leave by itself: SageMaker would wait for it, so the rehearsal says so.
    assert done.codes == {"algo-1": 0, "algo-2": 137, "algo-3": 0, "algo-4": 137}
    assert "pause at" in done.run.failure_reason, "of all hosts, only the frozen one fails the job"
    assert "was still running 30 s after the head's end" in done.run.failure_reason


def test_hosts_that_are_lost_or_cut_off_for_seconds_join_again_also_over_a_slow_link(
    rehearse: Rehearse,
) -> None:
    """Long: Ray itself must declare the lost machine dead before its tasks are done elsewhere."""
    done = rehearse(
        "rehearsal.hosts=gpu=1,cpu=2",
        "rehearsal.faults=['kill:algo-2@/algo-2 worker. joined the head/', "
        "'return:algo-2@/driver: task 1 done/', 'slow:algo-2@/driver: task 2 done/', "
        "'fast:algo-2@/driver: task 4 done/', 'partition:algo-3@/algo-3 worker. joined the head/', "
        "'heal:algo-3@/trying to rejoin/+2s']",
        tasks=60,
        task_s=0.5,  # longer than the host is away
        until_hosts=3,
    )
    assert done.codes == {"algo-1": 0, "algo-2": 0, "algo-3": 0}
    for host in ("algo-2", "algo-3"):
        assert done.log(host).count("joined the head") == 2, host
    assert set(done.result["tasks_by_host"]) == {"algo-1", "algo-2", "algo-3"}
    notes = " ".join(done.run.results["algo-2"].notes)
    assert [word for word in notes.split() if word in ("kill", "return", "slow", "fast")][:2] == [
        "kill",
        "return",
    ]


def test_a_taken_port_is_named(rehearse: Rehearse) -> None:
    done = rehearse("rehearsal.entry=toolkit", "rehearsal.hosts=gpu=1", "rehearsal.faults=[occupy:algo-1@0s]")
    assert done.code == done.codes["algo-1"] == 1
    cause = "AlgorithmError: cluster.port: port 6379 of the head (10.77.0.2) is taken"
    assert done.run.failure_reason.startswith(cause), "also through the toolkit"
    assert "Ray runtime started" not in done.log("algo-1")


def test_two_beside_each_other_one_without_root_and_a_stranger_one_with_limits(
    start: Callable[..., RehearsalRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who is not root gets the same command inside a user namespace. A client without the token is
    refused there.
    """
    common = ("rehearsal.hosts=gpu=1,cpu=1", "rehearsal.timeout_s=500")
    with monkeypatch.context() as patched:
        patched.setattr(running.os, "geteuid", lambda: 1000)
        assert "--user" in running.unshare_command()
        rootless = start(*common, "rehearsal.link_mbps=200", client=True)
    limited = start(*common, "rehearsal.link_mbps=40", measure=True, tasks=2)
    assert [rootless.wait(), limited.wait()] == [0, 0], rootless.failure_reason + limited.failure_reason
    said = Rehearsed(rootless, 0).result["refused_client"]
    host, code, *_ = said.split(" ")
    assert host == "algo-2" and code != "0"
    assert "IN [" not in said
    assert "auth" in said.lower()
    measured = Rehearsed(limited, 0).result["measured"]
    assert measured["fetch_s"] > 1.5, "84 Mbit at 40 Mbit/s"
