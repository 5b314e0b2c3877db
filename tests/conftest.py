"""Shared by all tests: paths, a clean environment, one Ray cluster per session."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECIPES = Path(__file__).resolve().parent / "recipes"

# Ray's worker processes import the tests' recipes too.
os.environ["PYTHONPATH"] = os.pathsep.join([str(RECIPES), os.environ.get("PYTHONPATH", "")])
sys.path[:0] = [str(RECIPES), str(Path(__file__).resolve().parent)]
for name in ("STOKER_RUN_DIR", "STOKER_BACKEND", "RAY_ADDRESS", "AWS_PROFILE"):
    os.environ.pop(name, None)
# Prices that this machine's user has fetched must not change what tests expect.
os.environ["STOKER_PRICES_FILE"] = os.devnull


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test belongs to the group whose folder it lies in."""
    for item in items:
        group = item.path.relative_to(ROOT / "tests").parts[0]
        item.add_marker(getattr(pytest.mark, group))


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits in all three forms."""
    from recipes.digits_data import write

    folder = tmp_path_factory.mktemp("data") / "digits"
    write(folder)
    return folder


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One real Ray cluster of this machine with token authentication, shared by the session."""
    from stoker.bootstrap.cluster import set_environment

    set_environment(secrets.token_hex(32))
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
