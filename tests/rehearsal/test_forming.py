"""The cluster forms, whatever the groups are called and whenever the hosts come."""

from __future__ import annotations

import pytest
from rehearsals import Rehearse

FORMED_LIMIT_S = 40
"""Five to seven seconds are usual, some thirty beside other heavy work: hosts share this machine's cores."""


@pytest.mark.parametrize("entry", ["toolkit", "container"])
def test_three_hosts_form_work_and_leave(rehearse: Rehearse, entry: str) -> None:
    done = rehearse(
        f"rehearsal.entry={entry}",
        "sagemaker.hyperparameters={train.lr: 0.25}",
        "train.epochs=3",
        task_s=0.3,
        tasks=24,
    )
    assert done.code == 0, done.run.failure_reason
    assert done.codes == {"algo-1": 0, "algo-2": 0, "algo-3": 0}
    result = done.result
    assert result["numbers"] == list(range(24))
    assert set(result["tasks_by_host"]) == {"algo-1", "algo-2", "algo-3"}
    groups = {host["host"]: host["group"] for host in result["hosts"]}
    assert groups == {"algo-1": "gpu", "algo-2": "cpu", "algo-3": "cpu"}
    assert all(host["cpus"] == 2 for host in result["hosts"])
    assert result["expected_hosts"] == ["algo-1", "algo-2", "algo-3"]
    assert result["backend"] == "rehearsal"
    # A hyperparameter arrives under either starter, and origins survive the upload.
    assert result["learning_rate"] == 0.25
    assert result["origins"]["train.lr"] == "arguments"
    assert result["origins"]["train.epochs"] == "command line"
    assert (done.run.run_dir / "model" / "weights").read_bytes() == b"w"
    formed_s = done.run.formed_after_last_host_s
    print(f"cluster formed {formed_s} s after the last host's start")
    assert formed_s is not None and formed_s <= FORMED_LIMIT_S
    assert done.run.workers_gone_s is not None and done.run.workers_gone_s <= 10
    lines = [line for line in done.log("algo-2").splitlines() if line.startswith("[cpu algo-2 worker] ")]
    assert any("joined the head algo-1" in line for line in lines)
    assert any("leaving: the head has ended with exit code 0" in line for line in lines)


def test_a_single_host(rehearse: Rehearse) -> None:
    done = rehearse("rehearsal.hosts=gpu=1", "rehearsal.entry=container")
    assert done.code == 0
    assert set(done.result["tasks_by_host"]) == {"algo-1"}


def test_odd_names_two_gpu_hosts_and_a_cpu_host_first(rehearse: Rehearse) -> None:
    done = rehearse(
        "rehearsal.hosts=Feed er/01=3,my.trainers=2:ml.g5.2xlarge",
        "rehearsal.entry=container",
        "rehearsal.cpus=1",
        task_s=0.3,
        tasks=20,
    )
    assert done.code == 0, done.run.failure_reason
    assert len(done.codes) == 5 and set(done.codes.values()) == {0}
    result = done.result
    assert result["expected_hosts"] == ["algo-4", "algo-5", "algo-1", "algo-2", "algo-3"]
    assert set(result["tasks_by_host"]) == set(result["expected_hosts"])
    groups = {host["host"]: host["group"] for host in result["hosts"]}
    assert groups["algo-4"] == groups["algo-5"] == "my.trainers"
    assert groups["algo-1"].startswith("Feed-er-01-")
    assert "[my.trainers algo-4 head] cluster formed" in done.log("algo-4")


def test_a_host_half_a_minute_late_is_waited_for(rehearse: Rehearse) -> None:
    done = rehearse("rehearsal.entry=container", "rehearsal.join_delay={algo-3: 30}", tasks=24, task_s=0.5)
    assert done.code == 0
    assert "algo-3" in done.result["tasks_by_host"]
    assert "missing: cpu: algo-3; here: gpu: algo-1; cpu: algo-2" in done.log("algo-1")
    formed_s = done.run.formed_after_last_host_s
    print(f"cluster formed {formed_s} s after the last host's start")
    assert formed_s is not None and formed_s <= FORMED_LIMIT_S


def test_absent_hosts_end_the_job_and_are_named(rehearse: Rehearse) -> None:
    done = rehearse(
        "rehearsal.entry=container",
        "rehearsal.hosts=gpu=1,cpu=3",
        "rehearsal.join_delay={algo-3: never, algo-4: never}",
        "cluster.join_timeout_s=25",
    )
    assert done.code == 1
    assert "hosts that did not join within 25 s: cpu: algo-3, algo-4" in done.run.failure_reason
    assert done.codes == {"algo-1": 1, "algo-2": 0, "algo-3": None, "algo-4": None}
    assert done.run.workers_gone_s is not None and done.run.workers_gone_s <= 10


def test_min_cpu_hosts_goes_on_and_takes_who_comes_later(rehearse: Rehearse) -> None:
    done = rehearse(
        "rehearsal.entry=container",
        "rehearsal.hosts=gpu=1,cpu=3",
        "rehearsal.join_delay={algo-3: 36, algo-4: never}",
        "cluster.join_timeout_s=25",
        "cluster.min_cpu_hosts=1",
        tasks=100,
        task_s=1.0,
    )
    assert done.code == 0, done.run.failure_reason
    assert "going on without cpu: algo-3, algo-4" in done.log("algo-1")
    result = done.result
    assert result["numbers"] == list(range(100))
    assert set(result["tasks_by_host"]) == {"algo-1", "algo-2", "algo-3"}
    assert done.codes == {"algo-1": 0, "algo-2": 0, "algo-3": 0, "algo-4": None}
