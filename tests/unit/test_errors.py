"""An error keeps its key, exit code, place and text through pickling, Ray and Ray Train."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
from ray.exceptions import RayTaskError
from ray.train import ControllerError, WorkerGroupError

import stoker
from stoker.errors import CheckpointError, Failure, FlakyReadError, StokerError
from stoker.serve.shards import retries
from stoker.train.recipe_work import check_optimizer
from stoker.train.trainer import failure_of
from tests.refusals import refused


def by_ray(error: Exception) -> BaseException:
    """As `ray.get` raises what a task or an actor has raised."""
    return RayTaskError("work", "a traceback", error, "ray::work", 1, "").as_instanceof_cause()


def by_train(error: Exception) -> Exception:
    """As Ray Train reports what two train workers have raised."""
    failed = Failure.of(error).error()
    return WorkerGroupError("failed", {1: RuntimeError("its consequence"), 0: failed})


def pickled(error: Exception) -> Exception:
    return pickle.loads(pickle.dumps(error))  # noqa: S301 - its own


def raised() -> Exception:
    try:
        raise KeyError("x")
    except KeyError as error:
        return error


@pytest.mark.parametrize("travels", [pickled, by_ray, by_train, ControllerError])
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (stoker.UsageError("train.lr: too high", "seed: absent"), "train.lr", "too high; seed: ab"),
        (stoker.DataError("3 lost", key="account.counts"), "account.counts", "3 lost"),
        (CheckpointError("/x: full"), "/x", "/x: full"),
        (FlakyReadError("reset", record="7"), "FlakyReadError", "reset (record 7)"),
        (raised(), "KeyError", "KeyError: 'x'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_failure_is_the_same_wherever_it_is_shown(
    travels: Callable[[Exception], BaseException], error: Exception, kind: str, text: str
) -> None:
    failure = failure_of(travels(error))
    assert failure.kind == kind and text in str(failure)
    assert "\n" not in str(failure) and "a traceback" not in str(failure)
    stated = isinstance(error, StokerError)
    assert ("train worker 0: " in str(failure)) == (travels is by_train and not stated)
    if travels is by_train:
        assert ("(test_errors.py:" in str(failure)) == (not stated), "the place in the user's code"


@pytest.mark.parametrize(
    ("error", "key", "code"),
    [
        (stoker.UsageError("--resume runs/a: no such folder"), "--resume", 2),
        (stoker.UsageError("train.mixup, train.cutmix: no classes"), "train.mixup", 2),
        (stoker.DataError("train.parquet: changed"), "train.parquet", 1),
        (stoker.UsageError("nothing to do"), "", 2),
    ],
)
def test_an_error_has_the_key_that_its_text_begins_with(
    error: StokerError, key: str, code: int
) -> None:
    assert isinstance(error, stoker.StokerError)
    assert (error.key, pickled(error).problems[0].key, error.exit_code) == (key, key, code)


@pytest.mark.parametrize(
    ("error", "most"),
    [
        (FlakyReadError("reset", record="7"), 3),
        (by_ray(OSError(5, "Input/output error")), 3),
        (FileNotFoundError(2, "No such file"), 1),
        (ValueError("no such class"), 0),
        (stoker.UsageError("data: absent"), 0),
    ],
)
def test_only_what_reads_may_be_tried_again(error: BaseException, most: int) -> None:
    assert retries(error) == most


def test_an_optimiser_that_timm_does_not_have_is_refused() -> None:
    check_optimizer("lamb")
    with refused("train.optimizer", code=2):
        check_optimizer("lambb")
