"""One benchmark's results do not erase those of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import Measure


def row(name: str, ours: float) -> Measure:
    return Measure(name, ours, 2.0, "peer", ours / 2, None, None, "s")


def test_results_are_kept_by_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results" / "latest.json")
    harness.publish([row("a", 1.0), row("b", 2.0)])
    harness.publish([row("b", 3.0), row("c", 4.0)])
    rows = json.loads(harness.RESULTS.read_text())
    assert {r["measure"]: r["ours"] for r in rows} == {"a": 1.0, "b": 3.0, "c": 4.0}
    assert all(r["date"] and r["cores"] for r in rows)


def test_measures_that_share_a_name_are_refused() -> None:
    with pytest.raises(ValueError, match="share a name: a"):
        harness.merged([], [{"measure": "a"}, {"measure": "a"}])
