"""docs/guarantees.md promises nothing that no test holds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/guarantees.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_named_test_exists() -> None:
    named = NAMED.findall(PAGE.read_text())
    assert len(named) > 40
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text())
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in found, f"{file} has no {name}"


def test_every_promise_names_a_test() -> None:
    promises = [
        line for line in PAGE.read_text().split("## Not promised")[0].splitlines() if line.startswith("| ")
    ]
    rows = [line for line in promises if not line.startswith(("| Guarantee", "|---"))]
    assert rows
    assert [line for line in rows if not NAMED.search(line)] == []
