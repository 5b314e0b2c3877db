"""The twelve shapes of benchmarks/limits.py: each limit binds somewhere, and a wrong row shows as one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from benchmarks.limits import NETWORK, RECEIVER, SWEEP, Row, measures

SHAPES = [*SWEEP, *RECEIVER, *NETWORK]


def as_predicted() -> list[Row]:
    rows = [Row(case, 1.0, "gpu") for case in SHAPES]
    return [replace(r, samples_per_s=r.predicted.samples_per_s, binds=r.predicted.binds) for r in rows]


def test_each_limit_binds_in_some_of_them() -> None:
    found = Counter(row.predicted.binds for row in as_predicted())
    assert found == {"cpu": 4, "gpu": 3, "receiver": 2, "network": 3}
    assert len(SHAPES) == 12


def test_a_row_is_met_within_a_tenth_and_for_the_models_reason_only() -> None:
    rows = as_predicted()
    assert all(measure.met for measure in measures(rows))
    slower = replace(rows[0], samples_per_s=0.89 * rows[0].samples_per_s)
    faster = replace(rows[1], samples_per_s=1.11 * rows[1].samples_per_s)
    other = replace(rows[2], binds="network")
    met = [measure.met for measure in measures([slower, faster, other, *rows[3:]])]
    assert met[:4] == [False, False, False, True]
