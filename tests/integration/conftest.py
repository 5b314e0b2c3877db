"""Shared by the tests that need a cluster or several processes; each is started once."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import two_ranks

from stoker.hosts.cluster import set_environment
from tests.fakes.ray_nodes import RayNodes, ray_nodes

# Before any test module is imported: Ray reads its authentication mode when it is.
set_environment(secrets.token_hex(32))


@pytest.fixture(scope="session")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the cases of each module of `two_ranks.MODULES` found, by module: [of rank 0, of rank 1]."""
    return two_ranks.run(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, on_two_ranks: dict[str, list[Any]]
) -> list[dict[Any, Any]]:
    found = on_two_ranks[request.module.__name__]
    for rank, part in enumerate(found):
        assert isinstance(part, dict), f"rank {rank}: {part}"
    return found


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[None]:
    from running import one_cluster

    with one_cluster():
        yield


@pytest.fixture(scope="package")
def nodes() -> Iterator[RayNodes]:
    """A Ray cluster of three nodes, groups gpu, cpu, cpu, with a job server; other processes enter it."""
    with ray_nodes(store_mb=150) as started:
        yield started
