"""One schema per split: every batch is what a plain loop over the records gives, or the run is refused."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from whole_way import Listed, OtherHost, Store, Way

from stoker.data.ledger import STATED
from stoker.data.sources import record_id

EXAMPLES = int(os.environ.get("STOKER_SCHEMA_EXAMPLES", "2000"))

VALUES: dict[str, Any] = {
    "int": lambda i: 3 * i - 5,
    "big int": lambda i: 2**53 + i,
    "float": lambda i: i / 3 if i % 5 else float("nan"),
    "bool": lambda i: i % 3 == 0,
    "text": lambda i: ["", "ä", "None", "nul\0"][i % 4] + str(i),
    "uint8": lambda i: np.uint8(i),
    "vector": lambda i: np.arange(i, i + 3, dtype=np.int16),
    "matrix": lambda i: np.full((2, 3), i, np.float32),
    "big endian": lambda i: np.full(2, i, ">f8"),
    "empty": lambda i: np.zeros((0, 2), np.float32),
    "tensor": lambda i: torch.full((2,), i, dtype=torch.int32),
    "image": lambda i: np.full((6, 5, 3), i, np.uint8),
}
DEFECTS: dict[str, Any] = {
    "absent": None,
    "none": lambda value: None,
    "half": lambda value: 0.5,
    "number": lambda value: 7,
    "huge": lambda value: 2**63 + 1,
    "text": lambda value: "x",
    "dict": lambda value: {"a": 1},
    "bytes": lambda value: b"x",
    "list": lambda value: [1, 2],
    "longer": lambda value: np.zeros(5, np.int16),
    "wider": lambda value: np.arange(3, dtype=np.int64),
    "masked": lambda value: np.ma.masked_array(np.zeros(3, np.int16), [True, False, False]),
    "date": lambda value: np.datetime64("2020-01-01"),
    "objects": lambda value: np.array([1, None], dtype=object),
}


@pytest.fixture(scope="module")
def way() -> Iterator[Way]:
    store = Store()
    other = OtherHost(store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "get", store.get)
        yield Way(store, other)
    other.server.close()


OUTCOMES: Counter[str] = Counter()


def unchanged(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


def records_of(kinds: list[str], count: int, defects: list[tuple[int, int, str]]) -> list[dict[str, Any]]:
    rows = [{"key": f"r{i}", **{_name(k): VALUES[k](i) for k in kinds}} for i in range(count)]
    for at, column, defect in defects:
        row, name = rows[at % count], _name(kinds[column % len(kinds)])
        if defect == "extra":
            row["extra"] = 1
        elif defect == "absent":
            row.pop(name, None)
        elif name in row:
            row[name] = DEFECTS[defect](row[name])
    return rows


def _name(kind: str) -> str:
    return kind.replace(" ", "_")


def same(batched: Any, value: Any) -> bool:
    """Whether a row of a batch is the record's value, its type too."""
    if isinstance(batched, str):
        return isinstance(value, str) and batched == value
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    kinds = {bool: "bool", int: "int64", float: "float64"}
    expected = np.asarray(value)
    found = batched.numpy()
    name = kinds.get(type(value), expected.dtype.name)
    if expected.ndim == 3:  # images come channels first
        expected = expected.transpose(2, 0, 1)
    return found.dtype.name == name and np.array_equal(found, expected, equal_nan=name.startswith("float"))


def check(rows: list[dict[str, Any]], steps: Any, bad: Any, batch_size: int, workers: int) -> None:
    """Compare with the records themselves."""
    columns = {name for row in rows for name in row} - {"key"}
    holes = {row["key"] for row in rows if any(row.get(name) is None for name in columns)}
    assert {one.key for one in bad} == holes
    by_id = {record_id(row["key"]): row for row in rows}
    seen: Counter[int] = Counter()
    for number, step in enumerate(steps):
        sizes = {len(batch["__id"]) for batch in step}
        assert sizes == {batch_size} or (number == len(steps) - 1 and len(sizes) == 1)
        for batch in step:
            ids = batch.pop("__id").tolist()
            seen.update(ids)
            assert set(batch) == columns
            for name, column in batch.items():
                assert len(column) == len(ids)
                for i, one in enumerate(ids):
                    assert same(column[i], by_id[one][name]), (name, column[i], by_id[one][name])
    assert not seen or max(seen.values()) == 1
    assert len(rows) - len(holes) - len(seen) < workers


HOLES = ["absent", "none"]
AT = st.tuples(st.integers(0, 30), st.integers(0, 4))


def at_places(kinds: list[str]) -> st.SearchStrategy[list[tuple[int, int, str]]]:
    one = st.builds(lambda at, kind: (*at, kind), AT, st.sampled_from(kinds))
    return st.lists(one, max_size=3)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    kinds=st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=4, unique=True),
    count=st.integers(1, 24),
    defects=at_places(HOLES) | at_places([*DEFECTS, "extra"]),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(1, 3)),
    batch_stage=st.booleans(),
    turned=st.booleans(),
    direct=st.booleans(),
)
def test_a_batch_is_what_a_loop_over_the_records_gives_or_the_run_is_refused(
    way: Way,
    kinds: list[str],
    count: int,
    defects: list[tuple[int, int, str]],
    sizes: tuple[int, int, int, int],
    batch_stage: bool,
    turned: bool,
    direct: bool,
) -> None:
    rows = records_of(kinds, count, defects)
    piece, block_records, batch_size, workers = sizes
    try:
        steps, bad = way.batches(
            Listed(rows, piece),
            [unchanged] if batch_stage else [],
            block_records=block_records,
            batch_size=batch_size,
            workers=workers,
            direct=direct,
            delivery=lambda blocks: blocks[::-1] if turned else blocks,
        )
    except STATED as error:
        OUTCOMES["refused"] += 1
        assert defects, f"nothing is wrong with these records: {error}"
        assert len(str(error).splitlines()) == 1
        return
    OUTCOMES["quarantined" if bad else "whole"] += 1
    check(rows, steps, bad, batch_size, workers)


def test_the_examples_are_of_every_outcome() -> None:
    """Else the property above would say little: runs after it."""
    total = sum(OUTCOMES.values())
    if not total:
        pytest.skip("the examples did not run in this process")
    assert total >= EXAMPLES
    print(OUTCOMES)
    assert all(OUTCOMES[name] > 0.05 * total for name in ("whole", "quarantined", "refused"))
