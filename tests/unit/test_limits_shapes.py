"""The twelve shapes of benchmarks/limits.py: each limit binds somewhere, and a wrong row shows as one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.limits import NETWORK, RECEIVER, SWEEP, Row, binding, measures
from stoker.sizing import model

SHAPES = [*SWEEP, *RECEIVER, *NETWORK]
WAITS = {"wait_production": 1.0, "wait_transfer": 1.0, "wait_collate": 0.5, "host_to_device": 0.4}
TERMS = WAITS | {"compute": 97.0}


def as_predicted() -> list[Row]:
    """A measurement that agrees with the model in everything."""
    rows = [Row(case, 1.0, "gpu") for case in SHAPES]
    return [replace(r, samples_per_s=r.predicted.samples_per_s, binds=r.predicted.binds) for r in rows]


def test_each_limit_binds_in_some_of_them() -> None:
    found = Counter(row.predicted.binds for row in as_predicted())
    assert found == {"cpu": 4, "gpu": 3, "receiver": 2, "network": 3}
    assert len(SHAPES) == 12


@pytest.mark.parametrize(
    ("waits", "term"),
    [
        ({}, "gpu"),
        ({"wait_production": 20}, "cpu"),
        ({"wait_transfer": 20, "wait_production": 12}, "network"),
        ({"wait_collate": 9, "host_to_device": 9, "wait_transfer": 12}, "receiver"),
    ],
)
def test_what_binds_is_what_steps_waited_for(waits: dict[str, float], term: str) -> None:
    assert binding(TERMS | waits) == term


def test_a_row_is_met_within_a_tenth_and_for_the_models_reason_only() -> None:
    rows = as_predicted()
    assert all(measure.met for measure in measures(rows))
    slower = replace(rows[0], samples_per_s=0.89 * rows[0].samples_per_s)
    faster = replace(rows[1], samples_per_s=1.11 * rows[1].samples_per_s)
    other = replace(rows[2], binds="network")
    met = [measure.met for measure in measures([slower, faster, other, *rows[3:]])]
    assert met[:4] == [False, False, False, True]


def test_the_chosen_number_of_hosts_is_judged_by_what_was_measured() -> None:
    rows = as_predicted()
    chosen = model.cheapest_count(SWEEP[0].work, SWEEP[0].shape)
    rows[chosen] = replace(rows[chosen], samples_per_s=0.9 * rows[chosen].samples_per_s)
    assert measures(rows)[-1].met is False
