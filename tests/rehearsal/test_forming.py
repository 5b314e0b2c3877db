"""The cluster forms, whatever the groups are called and whenever the hosts come."""

from __future__ import annotations

import pytest
from rehearsals import CHEAP, Rehearse


@pytest.mark.soak
def test_hosts_of_odd_names_form_work_and_leave_under_the_toolkit_also_one_that_comes_late(
    rehearse: Rehearse,
) -> None:
    """Two GPU hosts, and a CPU host first. Long: four hosts start on two cores."""
    done = rehearse(
        "rehearsal.entry=toolkit",
        "rehearsal.hosts=Feed er/01=2,my.trainers=2:ml.g5.2xlarge",
        "rehearsal.join_delay={algo-2: never}",
        # The late one comes when it is the only one that is missing.
        "rehearsal.faults=['start:algo-2@/missing: Feed er.01: algo-2; joined/']",
        "sagemaker.hyperparameters={train.lr: 0.25}",
        "train.epochs=3",
        task_s=0.3,
        tasks=24,
        until_hosts=4,
    )
    assert done.code == 0, done.run.failure_reason
    assert done.codes == {"algo-1": 0, "algo-2": 0, "algo-3": 0, "algo-4": 0}
    result = done.result
    assert result["numbers"] == list(range(len(result["numbers"])))
    assert result["expected_hosts"] == ["algo-3", "algo-4", "algo-1", "algo-2"]
    assert set(result["tasks_by_host"]) == set(result["expected_hosts"])
    groups = {host["host"]: host["group"] for host in result["hosts"]}
    assert groups["algo-3"] == groups["algo-4"] == "my.trainers"
    assert groups["algo-1"] == groups["algo-2"] and groups["algo-1"].startswith("Feed-er-01-")
    assert all(host["cpus"] == 2 for host in result["hosts"])
    assert result["place"] == "rehearsal"
    # Hyperparameters arrive, and origins survive the upload.
    assert result["learning_rate"] == 0.25
    assert result["origins"]["train.lr"] == "arguments"
    assert result["origins"]["train.epochs"] == "command line"
    assert (done.run.run_dir / "model" / "weights").read_bytes() == b"w"
    print(f"cluster formed {done.run.formed_after_last_host_s} s after the last host started")
    assert "sagemaker-training-toolkit" in done.log("algo-3")
    assert "[my.trainers algo-3 head] cluster formed" in done.log("algo-3")
    lines = [line for line in done.log("algo-2").splitlines() if " algo-2 worker] " in line]
    assert any("joined the head algo-3" in line for line in lines)
    assert any("leaving: the head has ended with exit code 0" in line for line in lines)


def test_absent_hosts_end_the_job_and_are_named(rehearse: Rehearse) -> None:
    done = rehearse(
        "rehearsal.join_delay={algo-2: never, algo-3: never}",
        "cluster.join_timeout_s=3",
    )
    assert done.code == 1
    assert "hosts that did not join within 3 s: cpu: algo-2, algo-3" in done.run.failure_reason
    assert done.codes == {"algo-1": 1, "algo-2": None, "algo-3": None}


def test_min_cpu_hosts_goes_on_and_takes_who_comes_later(rehearse: Rehearse) -> None:
    done = rehearse(
        "rehearsal.hosts=gpu=1,cpu=2",
        "rehearsal.join_delay={algo-2: never, algo-3: never}",
        "rehearsal.faults=['start:algo-2@/continuing without/']",
        "cluster.join_timeout_s=3",
        "cluster.min_cpu_hosts=0",
        tasks=12,
        task_s=0.3,
        until_hosts=2,
    )
    assert done.code == 0, done.run.failure_reason
    assert "continuing without cpu: algo-2, algo-3" in done.log("algo-1")
    assert set(done.result["tasks_by_host"]) == {"algo-1", "algo-2"}
    assert done.codes == {"algo-1": 0, "algo-2": 0, "algo-3": None}


@pytest.mark.long
def test_the_dashboard_is_on_the_heads_loopback_interface_and_asks_for_the_token(
    rehearse: Rehearse,
) -> None:
    done = rehearse(*CHEAP, "rehearsal.hosts=gpu=1,cpu=1", "cluster.dashboard=true", until_hosts=2)
    assert done.code == 0, done.run.failure_reason
    assert done.result["dashboard"] == {"token": 200, "none": 401, "own address": "refused"}
    assert "dashboard: http://127.0.0.1:8265 on this host alone" in done.log("algo-1")
