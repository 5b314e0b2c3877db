"""Where a step's time went: the parts of a wait, on the host and as a GPU felt them, and the verdict."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.events.bottleneck import bottleneck
from stoker.events.summary import Host, Summary
from stoker.train.device import TERMS, HostClock, Stamps, StepTimes, exposed, on_device

moments = st.floats(0, 100, allow_nan=False)


def test_a_wait_is_put_down_to_what_happened_to_the_batch_meanwhile() -> None:
    stamps = Stamps(produced=3.0, arrived=5.0, collated=6.0)
    assert exposed(1.0, 7.0, stamps) == [2.0, 2.0, 1.0, 1.0]
    assert exposed(4.0, 6.0, stamps) == [0.0, 1.0, 1.0, 0.0]
    assert exposed(6.5, 7.0, stamps) == [0.0, 0.0, 0.0, 0.5]


@given(st.lists(moments, min_size=3, max_size=3), moments, moments)
def test_the_parts_add_up_to_the_wait(points: list[float], one: float, other: float) -> None:
    since, until = sorted((one, other))
    parts = exposed(since, until, Stamps(*sorted(points)))
    assert sum(parts) == pytest.approx(until - since) and min(parts) >= 0


def test_a_gpu_that_still_computed_did_not_feel_the_wait() -> None:
    waits = [0.4, 0.1, 0.0, 0.0]
    assert on_device(waits, idle=0.0, copy=0.0, step=1.0) == pytest.approx([0, 0, 0, 0, 1.0])
    # Half of the loop's wait lay behind the end of the device's work; the copy made it wait once more.
    assert on_device(waits, idle=0.25, copy=0.05, step=1.0) == pytest.approx(
        [0.2, 0.05, 0, 0.05, 0.7]
    )
    # Idle beyond the loop's wait was the loop's own work.
    assert on_device(waits, idle=0.8, copy=0.0, step=1.0) == pytest.approx([0.4, 0.1, 0, 0, 0.5])


def test_the_terms_of_steps_add_up_to_their_time() -> None:
    times = StepTimes()
    clock = HostClock(times)
    began = time.perf_counter()
    for _ in range(5):
        asked = time.perf_counter()
        time.sleep(0.004)
        now = time.perf_counter()
        clock.waited(asked, now, Stamps(asked + 0.001, asked + 0.003, now))
        time.sleep(0.002)
        clock.finished()
    elapsed = time.perf_counter() - began
    assert 5 * 0.006 <= sum(times.terms.values()) <= elapsed
    told = times.since_told()
    assert list(told) == list(TERMS)
    assert told["wait_production"] == pytest.approx(1.0, abs=0.01)
    assert told["wait_transfer"] == pytest.approx(2.0, abs=0.01)
    assert told["compute"] >= 2.0
    assert sum(times.since_told().values()) == 0


HOSTS = [
    Host(host="g", group="gpu", cpus=4, gpus=1, ip=""),
    Host(host="c", group="cpu", cpus=8, gpus=0, ip=""),
]


def used(**percent: float) -> list[dict[str, Any]]:
    return [{"host": host, "mean_pct": mean} for host, mean in percent.items()]


@pytest.mark.parametrize(
    ("waits", "gpu_pct", "cpu_pct", "fetch_cpu_s", "expected"),
    [
        ({"wait_production_s": 1}, 30, 95, 0, "cpu"),
        ({"wait_production_s": 50}, 30, 95, 0, "cpu"),
        ({"wait_production_s": 50}, 30, 20, 0, "network"),
        ({"wait_transfer_s": 50}, 30, 95, 1, "network"),
        ({"wait_transfer_s": 50}, 97, 50, 1, "gpu_host_cpu"),
        ({"wait_transfer_s": 50}, 30, 50, 9, "gpu_host_cpu"),
        (
            {"wait_collate_s": 20, "host_to_device_s": 15, "wait_transfer_s": 30},
            30,
            50,
            1,
            "gpu_host_cpu",
        ),
    ],
)
def test_what_binds(
    waits: dict[str, float], gpu_pct: float, cpu_pct: float, fetch_cpu_s: float, expected: str
) -> None:
    summary = Summary(chain_tasks_by_host={"c": 9}, train_workers_by_host={"g": 1})
    summary.host_cpu = used(g=gpu_pct, c=cpu_pct)
    times: dict[str, Any] = {f"{name}_s": 0.0 for name in TERMS} | waits
    summary.speed.input_wait_pct = sum(waits.values())
    times |= {"fetch_s": 10, "fetch_cpu_s": fetch_cpu_s}
    assert bottleneck(summary, times) == ("gpu" if sum(waits.values()) < 10 else expected)


@pytest.mark.parametrize(
    ("chain_ms", "gpu_pct", "expected"),
    [(90, 60, "cpu"), (0.1, 60, "late"), (0.1, 97, "gpu_host_cpu"), (90, 97, "cpu")],
)
def test_busy_cpus_bind_only_if_the_chain_keeps_them_busy(
    chain_ms: float, gpu_pct: float, expected: str
) -> None:
    """100 samples/s on 12 CPUs of two hosts, of which one trains, too."""
    summary = Summary(
        chain_tasks_by_host={"g": 1, "c": 9},
        train_workers_by_host={"g": 1},
        host_cpu=used(g=gpu_pct, c=99),
        chain=[{"stage": "read", "cpu_ms_per_sample": chain_ms}],
    )
    summary.cluster.hosts = HOSTS
    summary.speed.input_wait_pct, summary.speed.steady_samples_per_s = 50, 100
    times: dict[str, Any] = {f"{name}_s": 0.0 for name in TERMS} | {"fetch_s": 10, "fetch_cpu_s": 1}
    assert bottleneck(summary, times | {"wait_production_s": 50}) == expected


def test_lost_hosts_explain_a_wait_of_a_minute_each_and_no_more() -> None:
    lost = {"event": "host_lost", "node": "c"}
    before = lost | {"node": "of the start before"}
    summary = Summary(chain_tasks_by_host={"c": 9}, train_workers_by_host={"g": 1})
    summary.cluster.hosts = [host.model_copy(update={"node_id": host.host}) for host in HOSTS]
    summary.speed.input_wait_pct = 80
    times: dict[str, Any] = {f"{name}_s": 0.0 for name in TERMS} | {"fetch_s": 10, "fetch_cpu_s": 1}
    for events, waited, expected in (
        ([lost], 50, "lost_hosts"),
        ([lost], 70, "network"),
        ([lost, lost], 70, "lost_hosts"),
        ([before, lost], 50, "lost_hosts"),
        ([before, before], 50, "network"),
        ([], 50, "network"),
    ):
        summary.events = events
        assert bottleneck(summary, times | {"wait_transfer_s": waited}) == expected
