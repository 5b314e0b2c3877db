"""What a storm shows at its end is really looked at: see benchmarks/storm."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.storm import verdict
from benchmarks.storm.faults import FAULTS
from benchmarks.storm.job import BATCH, RECORDS, STEPS
from benchmarks.storm.watch import Sample

EPOCHS = 3


def undisturbed() -> list[str]:
    lines = []
    for epoch in range(EPOCHS):
        order = random.Random(epoch).sample(range(RECORDS), RECORDS)
        for step in range(STEPS):
            ids = order[step * BATCH : (step + 1) * BATCH]
            lines.append(f"{1 / (epoch * STEPS + step + 1):.17g} {' '.join(map(str, ids))}")
    return lines


def write(folder: Path, *parts: list[str]) -> None:
    for number, lines in enumerate(parts):
        (folder / f"start-{number:020d}").write_text("".join(f"{line}\n" for line in lines))


def test_starts_that_begin_at_a_checkpoint_are_one_undisturbed_run(tmp_path: Path) -> None:
    whole = undisturbed()
    write(tmp_path, whole[:70], whole[60:65], whole[60:140], [], whole[140:])
    with (tmp_path / f"start-{2:020d}").open("a") as file:
        file.write(whole[140][:20])  # killed while it wrote
    assert verdict.compare_traces(tmp_path, whole) == ([], {}, {})


def test_a_gap_is_lost_records(tmp_path: Path) -> None:
    whole = undisturbed()
    write(tmp_path, whole[:70], whole[72:])
    problems, lost, repeated = verdict.compare_traces(tmp_path, whole)
    assert problems == [f"start-{1:020d} begins at step 72, but only 70 were trained"]
    assert (lost, repeated) == ({1: 2 * BATCH}, {})


def test_an_end_before_the_last_step_is_lost_records(tmp_path: Path) -> None:
    whole = undisturbed()
    write(tmp_path, whole[:-1])
    assert verdict.compare_traces(tmp_path, whole) == ([], {EPOCHS - 1: BATCH}, {})


def test_another_loss_or_order_is_a_difference(tmp_path: Path) -> None:
    whole = undisturbed()
    loss, ids = whole[100].split(" ", 1)
    write(tmp_path, [*whole[:100], f"{float(loss) * (1 + 1e-15):.17g} {ids}", *whole[101:]])
    problems, lost, repeated = verdict.compare_traces(tmp_path, whole)
    assert len(problems) == 1 and "step 100" in problems[0]
    assert (lost, repeated) == ({}, {})


def test_a_step_that_is_trained_in_place_of_another_loses_one_and_repeats_one(tmp_path: Path) -> None:
    whole = undisturbed()
    write(tmp_path, [*whole[:10], whole[9], *whole[11:]])
    problems, lost, repeated = verdict.compare_traces(tmp_path, whole)
    assert len(problems) == 1
    assert (lost, repeated) == ({0: BATCH}, {0: BATCH})


@pytest.mark.parametrize(
    ("mb_per_min", "step_mb", "flat"), [(0.5, 0, True), (20.0, 0, False), (0.5, 40, True), (20.0, 40, False)]
)
def test_memory_that_grows_is_a_problem_that_names_the_process(
    mb_per_min: float, step_mb: float, flat: bool
) -> None:
    noise = random.Random(1)
    samples = []
    for at in range(0, 900, 5):
        grown = mb_per_min * at / 60 if at > 200 else 3.0 * (at - 200)  # it loads first
        grown += step_mb * (at > 380)  # once, and it stays
        used = {7: 900 + grown + noise.uniform(-5, 5)}
        if at > 400:
            used[8] = 300.0  # a process that came later is no growth
        if at > 880:
            del used[7]  # the launch ends, one process after the other
        samples.append(Sample(at, 1, max(at, 200), {"algo-1": used}))
    problems = verdict.memory_problems(verdict.growth(samples, {7: "raylet --port", 8: "ray::Chain"}))
    assert (problems == []) is flat
    assert flat or "{'raylet --port (7)': " in problems[0]


def test_every_fault_says_how_long_it_lasts_or_how_the_job_ends() -> None:
    assert len(FAULTS) >= 20
    for fault in FAULTS.values():
        assert not (fault.ends and fault.lasts[1]), fault.name
        assert fault.ends or not fault.says, fault.name
