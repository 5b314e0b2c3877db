"""Rows of Parquet files with NULLs: batches are what a loop over the table gives, or the run is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from whole_way import Way

from stoker.data import read_parquet
from stoker.errors import UsageError
from stoker.read.sources import record_id

pytestmark = pytest.mark.long

EXAMPLES = int(os.environ.get("STOKER_SCHEMA_EXAMPLES", "1000")) // 10

KINDS: dict[str, Any] = {
    "int": (pa.int32(), lambda i: i - 3, [7, "keep"], 0),
    "float": (pa.float32(), lambda i: i / 4, [0.5, "keep"], None),
    "bool": (pa.bool_(), lambda i: i % 2 == 0, [True, "keep"], False),
    "text": (pa.string(), lambda i: f"t{i}", ["none", "keep"], ""),
    "list": (pa.list_(pa.float32(), 2), lambda i: [i, i / 2], [], None),
}
"""Column → its type, its values, what may stand for a NULL, and what "keep" puts there."""


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data(), direct=st.booleans(), statistics=st.booleans())
def test_a_batch_is_what_the_table_holds(
    way: Way, tmp_path: Path, data: st.DataObject, direct: bool, statistics: bool
) -> None:
    kinds = data.draw(st.lists(st.sampled_from(list(KINDS)), min_size=1, unique=True))
    count = data.draw(st.integers(2, 14))
    holes = {kind: data.draw(st.sets(st.integers(0, count - 1), max_size=2)) for kind in kinds}
    options = {kind: st.sampled_from(["quarantine", *KINDS[kind][2]]) for kind in kinds}
    rules = {
        kind: data.draw(rule) for kind, rule in options.items() if data.draw(st.integers(0, 4))
    }
    table = [
        {kind: None if i in holes[kind] else KINDS[kind][1](i) for kind in kinds}
        for i in range(count)
    ]
    schema = pa.schema([(kind, KINDS[kind][0]) for kind in kinds])
    parquet.write_table(
        pa.Table.from_pylist(table, schema),
        tmp_path / "train-0.parquet",
        row_group_size=data.draw(st.integers(1, 6)),
        write_statistics=statistics,
    )
    expected, lost = [], set()
    for i, row in enumerate(table):
        key = f"train-0.parquet:{i}"
        values: dict[str, Any] = {"__id": record_id(key)}
        for kind, value in row.items():
            rule = rules.get(kind)
            if value is None and rule == "quarantine":
                lost.add(key)
            stands_in = KINDS[kind][3] if rule == "keep" else rule
            values[kind] = stands_in if value is None else value
            if rule == "keep" and kind != "float":
                values[f"{kind}__valid"] = value is not None
        if key not in lost:
            expected.append(values)
    source = read_parquet(str(tmp_path), "train", nulls=rules)
    assert source is not None
    block_records, batch_size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    sizes = {"block_records": block_records, "batch_size": batch_size}
    unruled = [kind for kind in kinds if holes[kind] and kind not in rules]
    if unruled or not expected:
        with pytest.raises(UsageError if unruled else Exception) as caught:
            way.batches(source, [], workers=1, direct=direct, **sizes)
        for kind in unruled:
            assert f"column {kind} holds {len(holes[kind])} NULL" in str(caught.value)
        return
    steps, bad = way.batches(source, [], workers=1, direct=direct, **sizes)
    assert {one.key for one in bad} == lost
    found = []
    for (batch,) in steps:
        columns = {name: c if isinstance(c, list) else c.tolist() for name, c in batch.items()}
        rows = zip(*columns.values(), strict=True)
        found += [dict(zip(columns, row, strict=True)) for row in rows]
    for row in found:
        if "float" in row and row["float"] != row["float"]:
            row["float"] = None  # NaN, which "keep" puts there
    assert found == expected
