"""What a job is refused for before a cluster forms is told at once, each problem on a line of its own."""

from __future__ import annotations

import pytest

from stoker import driver
from stoker.config import load
from stoker.errors import Problems, UsageError

WRONG = {
    "checkpoint.resume=/nowhere/run": "--resume /nowhere/run: no checkpoint there",
    "train.optimizer=adamww": "train.optimizer: timm has no optimiser 'adamww'; did you mean adamw",
    "params.data=/nowhere/data": "/nowhere/data: no such file or folder",
}


def test_all_problems_of_a_recipe_and_its_data_are_told_at_once() -> None:
    job = load(None, ["recipe=recipes.digits:Digits", *WRONG])
    with pytest.raises(UsageError) as refused:
        driver.check(job)
    assert len(refused.value.problems) == len(WRONG)
    for said, begins in zip(refused.value.problems, WRONG.values(), strict=True):
        assert said.startswith(begins)


def test_a_problem_that_two_checks_find_is_told_once_and_its_consequences_are_not() -> None:
    problems = Problems()
    for error in (UsageError("a", "b"), UsageError("b", "c"), KeyError("a consequence")):
        with problems:
            raise error
    with pytest.raises(UsageError) as refused:
        problems.refuse()
    assert refused.value.problems == ("a", "b", "c")
    with pytest.raises(KeyError), Problems():
        raise KeyError("not a refusal")
    Problems().refuse()
