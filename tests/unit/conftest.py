"""What several files of unit tests stand on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from whole_way import Way

# Read when torch is imported. Its threads wait for each other busily, and the models here are small.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Way]:
    from whole_way import OtherHost, Store, Way

    store = Store(tmp_path_factory.mktemp("blocks"))
    other = OtherHost(store)
    yield Way(store, other)
    other.server.close()


@pytest.fixture
def loader_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a `stoker.DataLoader` are made as on a cluster, several at a time, but without Ray."""
    from stoker.loader.makers import ProcessMaker

    monkeypatch.setenv("STOKER_LOADER", "process")
    monkeypatch.setattr(ProcessMaker, "pace", lambda _, least: (3, least))
