"""CPUs and memory are those that this process may use, never the machine's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest

from stoker.config.schema import Config
from stoker.hosts import cluster, machine, raynode
from stoker.serve.blocks.agents import Meter


@pytest.fixture
def one_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """This process may use one CPU, as under taskset or in a Slurm job of one CPU."""
    monkeypatch.delenv(machine.HOST_CPUS_VARIABLE, raising=False)
    before = os.sched_getaffinity(0)
    chosen = min(before)
    os.sched_setaffinity(0, {chosen})
    yield chosen
    os.sched_setaffinity(0, before)


def own_cgroup(top: Path, controller: str) -> Path:
    """The folder below `top` of this process's cgroup of version 1, or its root."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((path for _, names, path in lines if controller in names.split(",")), "/")
    folder = top / controller / own.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_the_quota_of_a_container_counts(tmp_path: Path) -> None:
    cpus_here = machine.cpus(tmp_path)
    assert machine.quota(tmp_path) is None
    (tmp_path / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.quota(tmp_path) is None and machine.cpus(tmp_path) == cpus_here
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert machine.cpus(tmp_path) == 0.5
    busy, whole = machine.cpu_times(tmp_path)
    assert busy == 2.5
    assert machine.cpu_times(tmp_path)[1] - whole < 5, "half of the seconds that went by"


def test_the_smallest_quota_around_a_process_counts(tmp_path: Path) -> None:
    own, root = own_cgroup(tmp_path, "cpu"), tmp_path / "cpu"
    (tmp_path / "cpuacct" / own.relative_to(root)).mkdir(parents=True)
    for folder, quota in ((root, 25_000), (own, -1 if own != root else 25_000)):
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cpuacct" / "cpuacct.usage").write_text("3000000000\n")
    assert machine.cpus(tmp_path) == 0.25
    assert machine.cpu_times(tmp_path)[0] == 3.0


def test_memory_is_that_of_the_smallest_limit_without_files_that_were_read(tmp_path: Path) -> None:
    total, _ = machine.memory(tmp_path)
    assert total == psutil.virtual_memory().total
    own, root = own_cgroup(tmp_path, "memory"), tmp_path / "memory"
    for folder, limit in ((own, 2**63 - 4096), (root, 100 * 2**20)):
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{80 * 2**20}\n")
        (folder / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {50 * 2**20}\n")
    assert machine.memory(tmp_path) == (100 * 2**20, 70 * 2**20)
    (tmp_path / "memory.max").write_text(f"{60 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{70 * 2**20}\n")
    (tmp_path / "memory.stat").write_text("inactive_file 0\n")
    assert machine.memory(tmp_path) == (60 * 2**20, 0)


def test_a_cluster_of_this_machine_takes_no_more_than_the_process_may_use(one_cpu: int) -> None:
    with (
        mock.patch.object(machine, "memory", return_value=(1000 * 2**20, 2**20)),
        mock.patch.object(cluster, "RayNode") as node,
        mock.patch.object(cluster.forks, "started"),
    ):
        cluster.LocalCluster(Config(), cluster.forks.FOR_CHAINS)
    arguments = node.call_args.args[0]
    assert "--num-cpus=1" in arguments
    assert f"--object-store-memory={int(1000 * 2**20 * raynode.STORE_SHARE_OF_MEMORY)}" in arguments
    assert raynode.cpus_to_declare(0) == machine.cores() == 1


def test_what_a_scheduler_declares_counts_before_what_is_found(
    one_cpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(machine.HOST_CPUS_VARIABLE, "48")
    assert (machine.cores(), raynode.cpus_to_declare(4)) == (48, 44)
    assert raynode.cpus_to_declare(64) == 1


def test_other_cpus_of_the_machine_do_not_count_as_busy(one_cpu: int) -> None:
    """The chosen CPU works all the time, the others not at all."""
    now = psutil.cpu_times()
    busy = [type(now)(*[0.0] * len(now))] * (os.cpu_count() or 1)
    after = [
        times._replace(user=10.0) if number == one_cpu else times._replace(idle=10.0)
        for number, times in enumerate(busy)
    ]
    with (
        mock.patch("psutil.cpu_times", side_effect=[busy, after]),
        mock.patch.object(machine, "quota", return_value=None),
    ):
        assert Meter().sample() == (100.0, [])
