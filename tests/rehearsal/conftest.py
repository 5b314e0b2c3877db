"""Fixtures of the rehearsal tests; every rehearsal is checked to leave nothing behind."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rehearsals import CHEAP, LINGER_S, Rehearse, Rehearsed, new_name, processes_left, stand_in

from stoker.config.loading import load
from stoker_launcher.places import rehearsal
from stoker_launcher.rehearsal.running import RehearsalRun


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RehearsalRun]:
    """Start a rehearsal of the stand-in: `start("rehearsal.hosts=gpu=1", behaviour="fail")`."""

    def begin(*overrides: str, data: dict[str, str] | None = None, **params: Any) -> RehearsalRun:
        folder = tmp_path_factory.mktemp("rehearsal")
        given = [f"params.{key}={json.dumps(value)}" for key, value in params.items()]
        resolved = load(
            None, [*CHEAP, f"output_dir={folder}", f"name={new_name()}", *given, *overrides]
        )
        request = rehearsal.plan(stand_in(resolved, data))
        return rehearsal.submit(request, show=False)

    return begin


@pytest.fixture(scope="session")
def rehearse(start: Callable[..., RehearsalRun]) -> Rehearse:
    def whole(*overrides: str, data: dict[str, str] | None = None, **params: Any) -> Rehearsed:
        run = start("rehearsal.timeout_s=500", *overrides, data=data, **params)
        code = run.wait()
        for name in run.results:
            print(f"----- {name}\n{(run.run_dir / 'logs' / f'{name}.log').read_text()[-6000:]}")
        print(json.dumps(run.report(), indent=1))
        return Rehearsed(run, code)

    return whole


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts leave within seconds, but on a busy machine."""
    monkeypatch.setattr(rehearsal, "LINGER_S", LINGER_S)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    left = processes_left()
    assert not left, left
    assert "/hosts/algo-" not in Path("/proc/self/mountinfo").read_text()
    links = subprocess.run(["ip", "link"], capture_output=True, text=True).stdout
    assert "stoker0" not in links
