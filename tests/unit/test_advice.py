"""The verdict on a run: what it says, what it advises, and where it says nothing."""

from __future__ import annotations

from typing import Any

from stoker.events.bottleneck import Verdict, bottleneck, verdict
from stoker.events.summary import Summary

GPU_HOST = {
    "host": "algo-1",
    "group": "gpu",
    "cpus": 3,
    "gpus": 1,
    "ip": "10.0.0.1",
    "type": "ml.g5.xlarge",
}
BLURS = [
    {"stage": f"blur {i}", "cpu_ms_per_sample": 4.0, "bytes_out": 150_528} for i in range(1, 6)
]


def cpu_host(number: int, type_: str = "ml.c5.4xlarge", cpus: int = 16) -> dict[str, Any]:
    return {
        "host": f"algo-{number}",
        "group": "cpu",
        "cpus": cpus,
        "gpus": 0,
        "ip": "",
        "type": type_,
    }


def judged(
    *,
    waits: dict[str, float] | None = None,
    compute: float = 60.0,
    rate: float = 700.0,
    hosts: tuple[dict[str, Any], ...] = (GPU_HOST, cpu_host(2)),
    chain: tuple[dict[str, Any], ...] = ({"stage": "read", "cpu_ms_per_sample": 5.0}, *BLURS),
    steps: int = 400,
    speed: dict[str, Any] | None = None,
    **more: Any,
) -> Verdict:
    terms = {"wait_production": 0.0, "wait_transfer": 0.0, "wait_collate": 0.0, "compute": compute}
    content = {
        "steps": steps,
        "cluster": {"hosts": list(hosts)},
        "train_workers_by_host": {"algo-1": 1},
        "chain": list(chain),
        "speed": {
            "steady_samples_per_s": rate,
            "bytes_per_sample": 150_528,
            "step_terms_ms": terms | (waits or {}),
            **(speed or {}),
        },
        **more,
    }
    summary = Summary.model_validate(content)
    if summary.bottleneck is None and summary.speed.step_terms_ms:
        times = dict.fromkeys(("host_to_device_s", "fetch_cpu_s", "fetch_s"), 0.0)
        times |= {f"{name}_s": ms for name, ms in (terms | (waits or {})).items()}
        summary.bottleneck = bottleneck(summary, times)
    return verdict(summary)


class TestInputBound:
    def test_says_how_much_waits_what_binds_and_how_many_hosts_would_help(self) -> None:
        # 19 CPUs fully in the chain at 25 ms give 760/s; 38 % of a step is lost.
        found = judged(waits={"wait_production": 38.0}, compute=62.0)
        assert found.binds == "cpu"
        assert found.headline == (
            "input-bound: 38 % of each step waits for data; the CPU hosts are the bottleneck;"
            " 1 more ml.c5.4xlarge would bring up to 1,129 samples/s instead of 700"
        )
        assert found.details == ["`stoker size JOB --from RUN` tells at what cost"]

    def test_without_cpu_hosts_it_proposes_small_ones_beside_a_known_gpu_host(self) -> None:
        found = judged(waits={"wait_production": 50.0}, compute=50, rate=115, hosts=(GPU_HOST,))
        assert (
            "this host's CPUs are the bottleneck; 1 ml.c5.xlarge would bring up to 230 samples/s"
            in found.headline
        )

    def test_on_machines_of_unknown_type_it_counts_vcpus_and_names_no_dollars(self) -> None:
        here = {"host": "algo-1", "group": "local", "cpus": 4, "gpus": 1, "ip": ""}
        found = judged(waits={"wait_production": 50.0}, compute=50, rate=150, hosts=(here,))
        assert "about 4 more vCPUs would bring up to 300 samples/s" in found.headline
        assert not any("$" in line for line in [found.headline, *found.details])

    def test_idle_cpus_are_not_answered_with_more_cpus(self) -> None:
        found = judged(waits={"wait_production": 40.0}, rate=300)
        assert found.binds == "late" and "bottleneck" not in found.headline
        assert "the CPUs spent only 39 % of their time in the chain" in found.details[0]
        assert "more CPU hosts would not help" in found.details[0]
        assert "more ml." not in found.headline

    def test_a_limit_far_from_the_rate_does_not_bind(self) -> None:
        tiny = ({"stage": "read", "cpu_ms_per_sample": 0.02},)
        found = judged(waits={"wait_production": 60.0}, chain=tiny)
        assert found.binds == "late" and "the CPUs spent only 0 % of their time" in found.details[0]
        # The network of an ml.g5.xlarge carries 2,076 of these samples a second.
        far = judged(waits={"wait_transfer": 60.0})
        assert far.binds == "late"
        assert judged(waits={"wait_transfer": 60.0}, rate=1900).binds == "network"

    def test_a_share_that_one_wait_explains_is_told_as_that_wait(self) -> None:
        waits = {"wait_production": 100.0}
        figures = {
            "input_wait_pct": 40.0,
            "steps": 400,
            "first_wait_s": 36.0,
            "longest_wait_s": 36.0,
        }
        first = judged(waits=waits, compute=150, speed=figures)
        assert first.binds == "one_wait"
        assert "36.0 s for the first batch of each epoch; without it, 6 % of" in first.headline
        one = judged(waits=waits, compute=150, speed=figures | {"first_wait_s": 0.1})
        assert "36.0 s for one batch" in one.headline
        assert (
            judged(waits=waits, compute=150, speed=figures | {"longest_wait_s": 1.0}).binds
            == "one_wait"
        )
        spread = judged(
            waits=waits, compute=150, speed=figures | {"first_wait_s": 1, "longest_wait_s": 1}
        )
        assert spread.binds == "cpu"

    def test_network(self) -> None:
        found = judged(
            waits={"wait_transfer": 30.0, "wait_production": 5.0},
            speed={"bytes_per_sample": 602_112},
        )
        assert found.binds == "network"
        assert found.headline.endswith("the network to the GPU hosts is the bottleneck")
        assert "602 kB" in found.details[0]
        assert found.details[1] == "send uint8 and convert on the GPU (on_device), or crop earlier"

    def test_slow_storage_is_not_taken_for_a_slow_network(self) -> None:
        found = judged(waits={"wait_production": 30.0, "wait_transfer": 5.0}, bottleneck="network")
        assert found.binds == "network"
        assert found.headline.endswith("preprocessing itself waits for the storage that it reads")
        assert "move the data closer" in found.details[0] and "uint8" not in "".join(found.details)

    def test_a_wait_for_a_lost_hosts_work_is_not_taken_for_a_slow_network(self) -> None:
        found = judged(waits={"wait_transfer": 300.0}, bottleneck="lost_hosts")
        assert found.binds == "lost_hosts"
        assert found.headline.endswith(
            "waits for data; a lost host's work had to be done elsewhere"
        )
        assert not any("network" in text or "uint8" in text for text in found.details)

    def test_cutting_batches(self) -> None:
        found = judged(waits={"wait_collate": 30.0})
        assert found.binds == "gpu_host_cpu"
        assert "more CPU hosts would not help" in found.details[0]


class TestFedWell:
    def test_the_gpus_bind(self) -> None:
        found = judged(waits={"wait_production": 3.0}, compute=97)
        assert found.binds == "gpu"
        assert (
            found.headline
            == "well fed: the GPUs are the bottleneck; only 3 % of each step waits for data"
        )
        never = judged(waits={"wait_production": 0.2}, compute=99.8)
        assert never.headline.endswith("; less than 1 % of each step waits for data")

    def test_fewer_hosts_where_they_idle(self) -> None:
        hosts = (GPU_HOST, *(cpu_host(n) for n in (2, 3, 4, 5)))
        used = [
            {"host": f"algo-{n}", "group": "cpu", "mean_pct": 20.0, "max_pct": 60.0}
            for n in (2, 3, 4, 5)
        ]
        found = judged(hosts=hosts, host_cpu=used)
        assert found.details == ["the CPU hosts were only 20 % busy: 1 instead of 4 would do"]

    def test_no_word_of_fewer_where_all_are_needed(self) -> None:
        used = [{"host": "algo-2", "group": "cpu", "mean_pct": 92.0, "max_pct": 99.0}]
        assert judged(host_cpu=used).details == []

    def test_without_gpus_it_does_not_speak_of_gpus(self) -> None:
        here = {"host": "algo-1", "group": "local", "cpus": 2, "gpus": 0, "ip": ""}
        assert "training itself is the bottleneck" in judged(hosts=(here,)).headline


class TestTooLittleKnown:
    def test_one_step(self) -> None:
        found = judged(steps=1, waits={"wait_production": 90.0})
        assert (found.binds, found.details) == (None, [])
        assert found.headline == "too short to judge: 1 step; at least 10 are needed"

    def test_nothing_measured(self) -> None:
        assert verdict(Summary(steps=100)).binds is None
        assert judged(speed={"step_terms_ms": {}}).headline.startswith(
            "no step times were measured"
        )

    def test_runs_without_terms_of_a_step_are_judged_by_input_wait_and_bottleneck(self) -> None:
        speed = {"step_terms_ms": {}, "input_wait_pct": 25.0}
        found = judged(speed=speed, bottleneck="cpu", chain=())
        assert (
            found.headline
            == "input-bound: 25 % of each step waits for data; the CPU hosts are the bottleneck"
        )
        assert found.details == []


def test_gpus_that_nobody_used_come_first() -> None:
    """As the hosts' own counters say, for every kind of job; too few samples say nothing."""

    def gpus(*most_pct: float, samples: int = 100) -> list[dict[str, Any]]:
        return [{"host": "algo-1", "group": "gpu", "samples": samples, "max_pct": most_pct}]

    fed = judged().headline
    assert judged(host_gpus=gpus(0.0)).headline.startswith("GPUs used: 0 of 1: ")
    script = judged(host_gpus=gpus(0.0, 0.0), script="train.py", rate=0.0)
    assert script.headline.startswith("GPUs used: 0 of 2: ") and script.binds is None
    half = judged(host_gpus=gpus(97.0, 0.0))
    assert (half.headline, half.details[0]) == (fed, "GPUs used: 1 of 2")
    for unknown in (gpus(99.0), gpus(0.0, samples=3), []):
        assert judged(host_gpus=unknown).headline == fed
