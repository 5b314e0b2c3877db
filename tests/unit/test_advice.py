"""The verdict on a run: what it says, what it advises, and where it says nothing."""

from __future__ import annotations

from typing import Any

import pytest

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
    fetch_cpu_s: float = 0.0,
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
        times = {"host_to_device_s": 0.0, "fetch_cpu_s": fetch_cpu_s, "fetch_s": 10.0}
        times |= {f"{name}_s": ms for name, ms in (terms | (waits or {})).items()}
        summary.bottleneck = bottleneck(summary, times)
    return verdict(summary)


LOCAL = {"host": "algo-1", "group": "local", "cpus": 4, "gpus": 1, "ip": ""}
TINY = ({"stage": "read", "cpu_ms_per_sample": 0.02},)
FOUR = (GPU_HOST, *(cpu_host(number) for number in (2, 3, 4, 5)))


def used(pct: float, *numbers: int) -> list[dict[str, Any]]:
    return [{"host": f"algo-{n}", "group": "cpu", "mean_pct": pct, "max_pct": pct} for n in numbers]


def production(ms: float, **more: Any) -> dict[str, Any]:
    return {"waits": {"wait_production": ms}, **more}


def transfer(ms: float, **more: Any) -> dict[str, Any]:
    return {"waits": {"wait_transfer": ms}, **more}


ON_BOTH = {"chain_tasks_by_host": {"algo-1": 1, "algo-2": 9}}
NODES = tuple({**host, "node_id": host["host"]} for host in (GPU_HOST, cpu_host(2)))
LOST = {"event": "host_lost", "node": "algo-2"}
EARLIER = {"event": "host_lost", "node": "of the start before"}
NETWORK, LOSS = (
    "; the network to the GPU hosts is the bottleneck",
    "a lost host's work had to be done",
)
OWN_CPU = "the GPU host's own CPU is the bottleneck"
INPUT = "input-bound: 38 % of each step waits for data; the CPU hosts are the bottleneck"
ONE = {"input_wait_pct": 40.0, "steps": 400, "first_wait_s": 36.0, "longest_wait_s": 36.0}
OFTEN = {"first_wait_s": 1.0, "longest_wait_s": 1.0}
UNTIMED = {"step_terms_ms": {}, "input_wait_pct": 25.0}


@pytest.mark.parametrize(
    ("run", "binds", "headline", "detail"),
    [
        # 19 CPUs fully in the chain at 25 ms give 760/s; 38 % of a step is lost.
        (production(38, compute=62), "cpu",
         f"{INPUT}; about 12 more vCPUs would bring up to 1,129 samples/s instead of 700",
         "`stoker size JOB --from RUN` tells which hosts would do, and at what cost"),
        (production(50, compute=50, rate=115, hosts=(GPU_HOST,)), "cpu",
         "this host's CPUs are the bottleneck; about 3 more vCPUs would bring up to 230 samples/s", ""),
        (production(50, compute=50, rate=150, hosts=(LOCAL,)), "cpu",
         "about 4 more vCPUs would bring up to 300 samples/s", ""),
        (production(40, rate=300), "late", "preprocessed data comes late",
         "the CPUs spent only 39 % of their time in the chain: more CPU hosts would not help"),
        (production(60, chain=TINY), "late", "preprocessed data comes late",
         "the CPUs spent only 0 % of their time"),
        # The network of an ml.g5.xlarge carries 2,076 of these samples a second.
        (transfer(60), "late", "preprocessed data comes late", ""),
        (transfer(60, chain=()), "late", "preprocessed data comes late",
         "more CPU hosts would not help; look for"),
        (transfer(60, rate=1900), "network", NETWORK,
         "each sample sends 151 kB over the network; more CPU hosts would not help: send uint8"),
        (production(30, host_cpu=used(20, 2), chain_tasks_by_host={"algo-2": 9}), "network",
         "; preprocessing itself waits for the storage that it reads", "move the data closer"),
        # CPUs that preprocess and train are busy, but not with the chain.
        (production(50, **ON_BOTH, host_cpu=used(97, 1, 2), chain=TINY), "gpu_host_cpu", OWN_CPU,
         "preprocessing takes 0 % of the CPUs"),
        (production(50, **ON_BOTH, host_cpu=[*used(60, 1), *used(99, 2)], chain=TINY), "late",
         "preprocessed data comes late", ""),
        (transfer(50, host_cpu=used(97, 1), rate=1900), "gpu_host_cpu", OWN_CPU, "assembling batches"),
        (transfer(50, fetch_cpu_s=9, rate=1900), "gpu_host_cpu", OWN_CPU, "assembling batches"),
        # A lost host explains a wait of a minute, and no more.
        (transfer(50, events=[LOST], hosts=NODES), "lost_hosts", LOSS, "that is over"),
        (transfer(70, events=[LOST, LOST], hosts=NODES), "lost_hosts", LOSS, "that is over"),
        (transfer(70, events=[LOST], hosts=NODES, rate=1900), "network", NETWORK, ""),
        (transfer(50, events=[EARLIER], hosts=NODES, rate=1900), "network", NETWORK, ""),
        (production(30, bottleneck="gpu_host_cpu", rate=200), "gpu_host_cpu",
         OWN_CPU, "preprocessing takes 26 % of the CPUs"),
        ({"waits": {"wait_collate": 30.0}}, "gpu_host_cpu", OWN_CPU, "more CPU hosts would not help"),
        (production(100, compute=150, speed=ONE), "one_wait",
         "one wait explains the input wait of 40 %: 36 s for the first batch of each epoch; without it, 6 % of",
         "longer epochs"),
        (production(100, compute=150, speed=ONE | {"first_wait_s": 0.1}), "one_wait",
         "36 s for one batch; without it", None),
        (production(100, compute=150, speed=ONE | {"longest_wait_s": 1.0}), "one_wait",
         "36 s for the first batch", ""),
        (production(100, compute=150, speed=ONE | OFTEN), "cpu", "input-bound: 40 % of each step", ""),
        (production(3, compute=97), "gpu",
         "well fed: the GPUs are the bottleneck; only 3 % of each step waits for data", None),
        (production(0.2, compute=99.8), "gpu", "; less than 1 % of each step waits for data", None),
        ({"hosts": FOUR, "host_cpu": used(20, 2, 3, 4, 5)}, "gpu", "well fed",
         "the CPU hosts were only 20 % busy: fewer may do"),
        ({"host_cpu": used(92, 2)}, "gpu", "well fed", None),
        ({"hosts": ({**LOCAL, "gpus": 0},)}, "gpu", "training itself is the bottleneck", None),
        (production(90, steps=1), None, "too short to judge: 1 step; at least 10 are needed", None),
        ({"speed": {"step_terms_ms": {}}}, None, "no step times were measured", None),
        ({"speed": UNTIMED, "bottleneck": "cpu", "chain": ()}, "cpu", INPUT.replace("38", "25"), None),
    ],
)  # fmt: skip
def test_the_verdict_names_what_binds_and_what_would_help(
    run: dict[str, Any], binds: str | None, headline: str, detail: str | None
) -> None:
    """`detail` None: there is none."""
    found = judged(**run)
    assert found.binds == binds and headline in found.headline
    assert bool(found.details) == (detail is not None)
    assert detail is None or detail in found.details[0]
    assert "$" not in found.headline and ("bottleneck" in found.headline) <= (binds != "late")
    assert verdict(Summary(steps=100)).binds is None, "nothing measured"


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
