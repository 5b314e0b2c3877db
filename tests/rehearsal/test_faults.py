"""What goes wrong around the head, what a host may not do, and rehearsals beside each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rehearsals import Rehearse, Rehearsed

from stoker_launcher.places import rehearsal
from stoker_launcher.rehearsal import running
from stoker_launcher.rehearsal.running import RehearsalRun
from tests.waiting import until

pytestmark = pytest.mark.long


Start = Callable[..., RehearsalRun]


class Disturbed:
    """A rehearsal whose faults are injected once all its hosts have joined and work is under way."""

    def __init__(self, run: RehearsalRun) -> None:
        self.run, self.inject = run, run.inject
        for host in run.results:
            self.wait_for(host, "driver: running" if host == "algo-1" else "joined the head")

    def log(self, host: str) -> str:
        file = self.run.run_dir / "logs" / f"{host}.log"
        return file.read_text() if file.exists() else ""

    def wait_for(self, host: str, text: str, times: int = 1) -> None:
        until(lambda: self.log(host).count(text) >= times or self.run.status() != "running", 450)

    def end(self) -> Rehearsed:
        code = self.run.wait()
        print(self.log("algo-1")[-6000:], self.run.report())
        return Rehearsed(self.run, code)


def test_tasks_of_hosts_that_are_lost_cut_off_or_frozen_are_done_elsewhere(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long: Ray itself must declare a host lost that neither answers nor closes its connections."""
    monkeypatch.setattr(rehearsal, "LINGER_S", 75.0)  # after 60 s the host cut off leaves
    hosts = ("rehearsal.hosts=gpu=1,cpu=3", "rehearsal.timeout_s=500")
    disturbed = Disturbed(start(*hosts, tasks=40, task_s=0.5, until_lost=3))
    disturbed.wait_for("algo-1", "driver: task 4 done")
    for host, fault in (("algo-2", "kill"), ("algo-3", "partition"), ("algo-4", "pause")):
        disturbed.inject(fault, host)
    done = disturbed.end()
    numbers = done.result["numbers"]
    assert numbers == list(range(len(numbers))) and len(numbers) >= 40
    assert "the head is gone: Connection timed out; trying to rejoin" in done.log("algo-3")
    assert "left: cannot reach the head" in done.log("algo-3")
    # A frozen host cannot leave by itself: SageMaker would wait for it, so the rehearsal says so.
    assert done.codes == {"algo-1": 0, "algo-2": 137, "algo-3": 0, "algo-4": 137}
    assert "pause at" in done.run.failure_reason, "of all hosts, only the frozen one fails the job"
    assert "was still running 75 s after the head's end" in done.run.failure_reason


def test_hosts_that_are_lost_or_cut_off_for_seconds_join_again_also_over_a_slow_link(
    start: Start,
) -> None:
    """Long: Ray itself must declare the lost machine dead before its tasks are done elsewhere."""
    hosts = ("rehearsal.hosts=gpu=1,cpu=2", "rehearsal.timeout_s=500")
    disturbed = Disturbed(start(*hosts, tasks=60, task_s=0.5, until_hosts=3, until_lost=2))
    disturbed.inject("kill", "algo-2")
    disturbed.inject("partition", "algo-3")
    until(lambda: disturbed.run.results["algo-2"].exit_code == 137)
    disturbed.inject("return", "algo-2")
    disturbed.inject("slow", "algo-2")
    # Noticed after 5 s of silence; a line every 5 s tells of the search.
    disturbed.wait_for("algo-3", " of 60 s; ", times=2)
    disturbed.inject("heal", "algo-3")
    for host in ("algo-2", "algo-3"):
        disturbed.wait_for(host, "joined the head", times=2)
    disturbed.inject("fast", "algo-2")
    done = disturbed.end()
    assert done.codes == {"algo-1": 0, "algo-2": 0, "algo-3": 0}
    assert set(done.result["tasks_by_host"]) == {"algo-1", "algo-2", "algo-3"}
    for host in ("algo-2", "algo-3"):
        alive = [node["alive"] for node in done.result["hosts"] if node["host"] == host]
        assert sorted(alive) == [False, True], f"{host} has joined twice"
    notes = " ".join(done.run.results["algo-2"].notes).split()
    assert [word for word in notes if word.isalpha() and word not in ("at", "s")] == [
        *("kill", "return", "slow", "fast")
    ]


def test_a_taken_port_is_named(rehearse: Rehearse) -> None:
    done = rehearse(
        "rehearsal.entry=toolkit", "rehearsal.hosts=gpu=1", "rehearsal.faults=[occupy:algo-1@0s]"
    )
    assert done.code == done.codes["algo-1"] == 1
    cause = "AlgorithmError: cluster.port: port 6379 of the head (10.77.0.2) is taken"
    assert done.run.failure_reason.startswith(cause), "also through the toolkit"
    assert "Ray runtime started" not in done.log("algo-1")


def test_two_beside_each_other_one_without_root_and_a_stranger_one_with_limits(
    start: Start, monkeypatch: pytest.MonkeyPatch
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
    assert [rootless.wait(), limited.wait()] == [0, 0], (
        rootless.failure_reason + limited.failure_reason
    )
    said = Rehearsed(rootless, 0).result["refused_client"]
    host, code, *_ = said.split(" ")
    assert host == "algo-2" and code != "0"
    assert "IN [" not in said
    assert "auth" in said.lower()
    measured = Rehearsed(limited, 0).result["measured"]
    assert measured["fetch_s"] > 1.5, "84 Mbit at 40 Mbit/s"
