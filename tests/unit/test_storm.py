"""What a storm shows at its end is really looked at: see benchmarks/storm."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.storm import verdict
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


WHOLE = undisturbed()
LOSS, _, IDS = WHOLE[100].partition(" ")
OTHER_LOSS = f"{float(LOSS) * (1 + 1e-15):.17g} {IDS}"


@pytest.mark.parametrize(
    ("starts", "problem", "lost", "repeated"),
    [
        ([WHOLE[:70], WHOLE[60:65], WHOLE[60:140], [], WHOLE[140:]], "", {}, {}),
        (
            [WHOLE[:70], WHOLE[72:]],
            f"start-{1:020d} begins at step 72, but only 70 were trained",
            {1: 2 * BATCH},
            {},
        ),
        ([WHOLE[:-1]], "", {EPOCHS - 1: BATCH}, {}),
        ([[*WHOLE[:100], OTHER_LOSS, *WHOLE[101:]]], "step 100", {}, {}),
        ([[*WHOLE[:10], WHOLE[9], *WHOLE[11:]]], "step 10", {0: BATCH}, {0: BATCH}),
    ],
    ids=[
        "begin at checkpoints",
        "a gap",
        "an early end",
        "another loss",
        "a step in place of another",
    ],
)
def test_starts_are_compared_with_one_undisturbed_run(
    starts: list[list[str]],
    problem: str,
    lost: dict[int, int],
    repeated: dict[int, int],
    tmp_path: Path,
) -> None:
    write(tmp_path, *starts)
    if [] in starts:
        with (tmp_path / f"start-{2:020d}").open("a") as file:
            file.write(WHOLE[140][:20])  # killed while it wrote
    problems, *counts = verdict.compare_traces(tmp_path, WHOLE)
    assert counts == [lost, repeated]
    assert len(problems) == bool(problem) and all(problem in each for each in problems)


@pytest.mark.parametrize(
    ("mb_per_min", "step_mb", "flat"),
    [(0.5, 0, True), (20.0, 0, False), (0.5, 40, True), (20.0, 40, False)],
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
    problems = verdict.memory_problems(
        verdict.growth(samples, {7: "raylet --port", 8: "ray::Chain"})
    )
    assert (problems == []) is flat
    assert flat or "{'raylet --port (7)': " in problems[0]
