"""docs/guarantees.md and docs/reliability.md promise nothing that no test holds."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/guarantees.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


RELIABILITY = ROOT / "docs/reliability.md"
STORM = re.compile(r"storm: `([\w-]+)`")


def test_every_fault_is_shown_by_a_test_or_the_storm() -> None:
    from benchmarks.storm.faults import FAULTS

    page = RELIABILITY.read_text().split("## The storm")[0]
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    rows = [line for line in lines if not line.startswith(("| Fault", "|---"))]
    assert len(rows) >= 24
    assert [row for row in rows if not NAMED.search(row) and not STORM.search(row)] == []
    assert set(STORM.findall(page)) == set(FAULTS), "each fault of the storm has its row"


@pytest.mark.parametrize("page", [PAGE, RELIABILITY])
def test_every_named_test_exists(page: Path) -> None:
    named = NAMED.findall(page.read_text())
    assert len(named) > 20
    for file, name in named:
        assert name in functions_of(file), f"{file} has no {name}"


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_promise_names_a_test() -> None:
    promises = [
        line
        for line in PAGE.read_text().split("## Not promised")[0].splitlines()
        if line.startswith("| ")
    ]
    rows = [line for line in promises if not line.startswith(("| Guarantee", "|---"))]
    assert rows
    assert [line for line in rows if not NAMED.search(line)] == []
