"""The limits model replays published measurements, and holds its own laws for any job and cluster."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.sizing.model import (
    ClusterShape,
    Workload,
    cheapest_count,
    predict,
    usd_per_million_samples,
)


class TestPublished:
    def test_aws_p4d_with_two_c5_18xlarge(self) -> None:
        """amazon-sagemaker-examples, heterogeneous-clusters/tf.data.service.sagemaker: one step is a global
        batch; alone 192 ms; GPU use 74 % of 86 ms; $37.688 and $3.672 an hour; distributing costs 11 %."""
        alone_s, gpu_s = 0.192, 0.74 * 0.086
        work = Workload(cpu_s=96 * alone_s, gpu_samples_per_s=1 / gpu_s)
        alone = ClusterShape(
            gpu_host_cpus=96, gpu_host_usd_per_hour=37.688, cpu_host_usd_per_hour=3.672
        )
        shared = replace(alone, cpu_host_cpus=72, efficiency=0.893, gpu_host_efficiency=0.893)
        two, three = shared.with_cpu_hosts(2), shared.with_cpu_hosts(3)

        def saved(shape: ClusterShape) -> float:
            before = usd_per_million_samples(predict(work, alone), alone)
            return 1 - usd_per_million_samples(predict(work, shape), shape) / before

        assert 1 / predict(work, alone).samples_per_s == pytest.approx(alone_s)
        assert 1 / predict(work, two).samples_per_s == pytest.approx(0.086, abs=0.0005)
        assert saved(two) == pytest.approx(0.465, abs=0.002)
        assert predict(work, two).binds == "cpu"
        assert 1 / predict(work, three).samples_per_s == pytest.approx(0.066, abs=0.0005)
        assert saved(three) == pytest.approx(0.555, abs=0.002)
        assert cheapest_count(work, shared) == 3
        assert predict(work, shared.with_cpu_hosts(4)).binds == "gpu"

    @pytest.mark.parametrize(("hosts", "measured"), [(0, 753), (1, 1233), (5, 1711), (10, 1764)])
    def test_ray_issue_42318(self, hosts: int, measured: float) -> None:
        """github.com/ray-project/ray/issues/42318: one GPU host, an empty model, growing CPU hosts."""
        work = Workload(cpu_s=1 / 753, gpu_samples_per_s=math.inf, serial_s=1 / 1764)
        shape = ClusterShape(gpu_host_cpus=1, cpu_host_cpus=480 / 753)
        prediction = predict(work, shape.with_cpu_hosts(hosts))
        assert prediction.samples_per_s == pytest.approx(measured, rel=0.05)
        assert prediction.binds == ("cpu" if hosts < 3 else "receiver")


always_the_same = settings(deadline=None, derandomize=True)


def none_or(least: float, most: float) -> st.SearchStrategy[float]:
    """A cost that is absent, or large enough that a share of it is a number above zero."""
    return st.just(0.0) | st.floats(least, most)


works = st.builds(
    Workload,
    cpu_s=st.floats(1e-4, 0.2),
    gpu_samples_per_s=st.floats(10, 1e5),
    receive_s=none_or(1e-9, 2e-3),
    other_s=none_or(1e-9, 2e-3),
    serial_s=none_or(1e-9, 1e-3),
    bytes_per_sample=none_or(1.0, 1e6),
)
shapes = st.builds(
    ClusterShape,
    gpu_host_cpus=st.integers(2, 96),
    cpu_host_cpus=st.integers(2, 96),
    cpu_hosts=st.integers(0, 12),
    gpu_hosts=st.integers(1, 4),
    gpus_per_host=st.integers(1, 8),
    reserved_cpus=st.floats(0, 1.9),
    gpu_host_bytes_per_s=st.floats(1e7, 1e10),
    cpu_host_bytes_per_s=st.floats(1e7, 1e10),
    efficiency=st.floats(0.5, 1),
    gpu_host_efficiency=st.floats(0.5, 1),
    gpu_host_usd_per_hour=st.floats(0.5, 60),
    cpu_host_usd_per_hour=st.floats(0.05, 10),
)


def best_by_grid(work: Workload, shape: ClusterShape) -> float:
    """Brute force over the remote share, in 2000 parts."""
    m = shape.gpu_hosts
    own = m * shape.gpu_host_cpus
    slots = m * (shape.gpu_host_cpus - shape.reserved_cpus) * shape.gpu_host_efficiency
    away = shape.efficiency * shape.cpu_hosts * shape.cpu_host_cpus
    link = min(m * shape.gpu_host_bytes_per_s, shape.cpu_hosts * shape.cpu_host_bytes_per_s)
    workers = m * shape.gpus_per_host
    best = 0.0
    for i in range(2001):
        x = i / 2000
        terms = [
            workers * work.gpu_samples_per_s,
            own / ((1 - x) * work.cpu_s + x * work.receive_s + work.other_s or 1e-30),
        ]
        if work.serial_s:
            terms.append(workers / work.serial_s)
        if x < 1:
            terms.append(slots / ((1 - x) * work.cpu_s))
        if x > 0:
            terms.append(away / (x * work.cpu_s))
            if work.bytes_per_sample:
                terms.append(link / (x * work.bytes_per_sample))
        best = max(best, min(terms))
    return best


class TestLaws:
    @always_the_same
    @given(works, shapes)
    @pytest.mark.long
    def test_the_solution_is_as_good_as_any_split_on_a_fine_grid(
        self, work: Workload, shape: ClusterShape
    ) -> None:
        found, grid = predict(work, shape).samples_per_s, best_by_grid(work, shape)
        assert grid * (1 - 1e-9) <= found <= grid * 1.02 + 1e-9

    @always_the_same
    @given(works, shapes)
    def test_the_binding_limit_is_reached_and_raising_another_does_not_help(
        self, work: Workload, shape: ClusterShape
    ) -> None:
        now, workers = predict(work, shape), shape.gpu_hosts * shape.gpus_per_host
        links = ("gpu_host_bytes_per_s", "cpu_host_bytes_per_s")
        faster = replace(shape, **{name: getattr(shape, name) * 1.1 for name in links})
        raised = {
            "gpu": (replace(work, gpu_samples_per_s=work.gpu_samples_per_s * 1.1), shape),
            "receiver": (replace(work, serial_s=work.serial_s / 1.1), shape),
            "network": (work, faster),
        }
        caps = {
            "gpu": workers * work.gpu_samples_per_s,
            "receiver": workers / (work.serial_s or 1e-30),
        }
        assert now.samples_per_s == pytest.approx(caps.get(now.binds, now.samples_per_s))
        for better in [predict(*more) for term, more in raised.items() if term != now.binds]:
            assert better.samples_per_s == pytest.approx(now.samples_per_s, rel=1e-6)
