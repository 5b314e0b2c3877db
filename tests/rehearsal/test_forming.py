"""The cluster forms, whatever the groups are called and whenever the hosts come."""

from __future__ import annotations

from rehearsals import Rehearse


def test_three_hosts_form_work_and_leave_under_the_toolkit(rehearse: Rehearse) -> None:
    done = rehearse(
        "rehearsal.entry=toolkit",
        "sagemaker.hyperparameters={train.lr: 0.25}",
        "train.epochs=3",
        task_s=0.3,
        tasks=24,
        until_hosts=3,
    )
    assert done.code == 0, done.run.failure_reason
    assert done.codes == {"algo-1": 0, "algo-2": 0, "algo-3": 0}
    result = done.result
    assert result["numbers"] == list(range(len(result["numbers"])))
    assert set(result["tasks_by_host"]) == {"algo-1", "algo-2", "algo-3"}
    groups = {host["host"]: host["group"] for host in result["hosts"]}
    assert groups == {"algo-1": "gpu", "algo-2": "cpu", "algo-3": "cpu"}
    assert all(host["cpus"] == 2 for host in result["hosts"])
    assert result["expected_hosts"] == ["algo-1", "algo-2", "algo-3"]
    assert result["place"] == "rehearsal"
    # Hyperparameters arrive, and origins survive the upload.
    assert result["learning_rate"] == 0.25
    assert result["origins"]["train.lr"] == "arguments"
    assert result["origins"]["train.epochs"] == "command line"
    assert (done.run.run_dir / "model" / "weights").read_bytes() == b"w"
    print(f"cluster formed {done.run.formed_after_last_host_s} s after the last host started")
    assert "sagemaker-training-toolkit" in done.log("algo-1")
    lines = [line for line in done.log("algo-2").splitlines() if line.startswith("[cpu algo-2 worker] ")]
    assert any("joined the head algo-1" in line for line in lines)
    assert any("leaving: the head has ended with exit code 0" in line for line in lines)


def test_odd_names_two_gpu_hosts_a_cpu_host_first_and_one_that_comes_late(rehearse: Rehearse) -> None:
    """Long: five hosts start on two cores."""
    done = rehearse(
        "rehearsal.hosts=Feed er/01=3,my.trainers=2:ml.g5.2xlarge",
        "rehearsal.cpus=1",
        "rehearsal.join_delay={algo-3: never}",
        # The late one comes when it is the only one that is missing.
        "rehearsal.faults=['start:algo-3@/missing: Feed er.01: algo-3; joined/']",
        "sagemaker.hyperparameters={train.lr: 0.25}",
        task_s=0.3,
        tasks=20,
        until_hosts=5,
    )
    assert done.code == 0, done.run.failure_reason
    assert len(done.codes) == 5 and set(done.codes.values()) == {0}
    result = done.result
    assert result["learning_rate"] == 0.25
    assert result["expected_hosts"] == ["algo-4", "algo-5", "algo-1", "algo-2", "algo-3"]
    assert set(result["tasks_by_host"]) == set(result["expected_hosts"])
    groups = {host["host"]: host["group"] for host in result["hosts"]}
    assert groups["algo-4"] == groups["algo-5"] == "my.trainers"
    assert groups["algo-1"].startswith("Feed-er-01-")
    assert "[my.trainers algo-4 head] cluster formed" in done.log("algo-4")


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
        "cluster.join_timeout_s=25",
        "cluster.min_cpu_hosts=0",
        tasks=12,
        task_s=0.3,
        until_hosts=2,
    )
    assert done.code == 0, done.run.failure_reason
    assert "continuing without cpu: algo-2, algo-3" in done.log("algo-1")
    assert set(done.result["tasks_by_host"]) == {"algo-1", "algo-2"}
    assert done.codes == {"algo-1": 0, "algo-2": 0, "algo-3": None}
