"""Head: whether a run goes on from a checkpoint, from which, and whether it is still the same run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.checkpoints.format import Checkpoint, awaiting, describe, newest_valid, problem_of
from stoker.errors import UsageError
from stoker.place import Place
from stoker.recipe import SOURCE_FOLDER, load_recipe
from stoker.redaction import redact, redacted_at
from stoker.schema import Config
from stoker.storage.checkpoint_store import Store, open_store, step_of
from stoker.tracking.recorder import notable_events
from stoker.tracking.summary import Summary
from stoker.training.stopping import check_monitors

FIXED = ("recipe", "seed", "train.optimizer", "train.scheduler", "data.shuffle")
"""Keys without which the rest of a run is another run, or the saved state does not fit."""
SYNCED_BACKENDS = ("sagemaker", "rehearsal")


@dataclass(frozen=True)
class Start:
    """Head: where this run keeps its checkpoints, and the one it goes on from."""

    where: str
    synced: bool
    start: Checkpoint | None = None
    start_synced: bool = False

    @property
    def chosen(self) -> tuple[str, bool, str] | None:
        """What train workers are told of it."""
        return (self.start.store.where, self.start_synced, self.start.name) if self.start else None

    @property
    def first_epoch(self) -> int:
        return int(self.start.meta["next_epoch"]) if self.start else 0

    @property
    def position(self) -> dict[str, Any] | None:
        return self.start.position if self.start else None


def check_path(config: Config) -> None:
    """Head, before any cluster forms: refuse a `checkpoint.resume` that names nothing.

    Raises:
        UsageError: no checkpoint lies there.
    """
    if config.checkpoint.resume not in ("auto", "never"):
        locate(config.checkpoint.resume)


def prepare(
    config: Config, place: Place, data: Any, workers: int, summary: Summary, log: Callable[[str], Any]
) -> Start:
    """Head: where the run starts, checked against the checkpoint it goes on from.

    Args:
        config: the job.
        place: its folders.
        data: the opened splits.
        workers: train workers.
        summary: gets the figures of the epochs before.
        log: takes what is worth saying.

    Raises:
        UsageError: nothing to go on from, or another run than the checkpoint's.
    """
    check_monitors(config, load_recipe(config.recipe, config.params, SOURCE_FOLDER), "val" in data.sources)
    start = plan(config, place, log)
    if start.start is not None:
        start = replace(start, start=awaiting(start.start, config.train.max_steps))
    if start.start is not None:
        check_same_run(config, workers, start.start, log)
        fill_summary(summary, start.start, place.run_dir)
    return start


def plan(config: Config, place: Place, log: Callable[[str], Any]) -> Start:
    """Head: find the checkpoint to go on from, as `checkpoint.resume` asks for.

    A run's own checkpoints come first, whatever the key names: so a job that is restarted on new hosts
    with the same configuration goes on from where it was, and not from where it once began.

    Args:
        config: the job.
        place: gives the folder where `checkpoint.dir` does not.
        log: takes what is worth saying.

    Raises:
        UsageError: the key names nothing to go on from, or would mix two runs.
    """
    where, synced = own_place(config, place)
    own, resume = open_store(where, synced), config.checkpoint.resume
    plain = Start(where, synced)
    names = own.names()
    if resume == "never":
        if names:
            raise UsageError(
                f"checkpoint.dir: {where} holds checkpoints of an earlier run ({names[0]}), and"
                " checkpoint.resume is never; name another folder, or remove them"
            )
        return plain
    if resume != "auto":
        other, name = locate(resume)
        if name and names and Path(other.where) == Path(own.where) and step_of(name) < step_of(names[0]):
            raise UsageError(
                f"--resume {resume}: {where} also holds the later {names[0]}, which a run from here would"
                " overwrite; set checkpoint.dir to another folder"
            )
        if not names:
            return Start(where, synced, chosen(other, name, resume, log))
        if Path(other.where) != Path(own.where):
            log(f"{where} holds checkpoints of this run: they are used, and not {resume}")
    found = newest_valid(own, log)
    if names and found is None:
        log(f"{where} holds no checkpoint to go on from; the run begins anew")
    return Start(where, synced, found, synced)


def own_place(config: Config, place: Place) -> tuple[str, bool]:
    """Head: (folder or URI of this run's checkpoints, whether SageMaker copies it to S3).

    Raises:
        UsageError: a relative folder where hosts have no common one.
    """
    given = config.checkpoint.dir
    if given is None:
        return str(place.checkpoint_dir), place.backend in SYNCED_BACKENDS
    if "://" not in given and place.backend == "ray" and not Path(given).is_absolute():
        raise UsageError(f"checkpoint.dir: name an absolute folder that all hosts share (got {given!r})")
    store = open_store(given)
    return store.where, False


def locate(path: str) -> tuple[Store, str]:
    """Head: what a path to go on from means: (store, checkpoint or "" for the newest).

    Args:
        path: a run directory, a folder of checkpoints or one checkpoint; a folder or `s3://`.

    Raises:
        UsageError: nothing of the kind lies there.
    """
    parent, _, last = path.rstrip("/").rpartition("/")
    if last.startswith("step-") and last[5:].isdigit():
        store = open_store(parent or ".")
        if last not in store.names():
            raise UsageError(f"--resume {path}: there is no such checkpoint in {store.where}")
        return store, last
    tried = [path, f"{path.rstrip('/')}/checkpoints"]
    for folder in tried:
        store = open_store(folder)
        if store.names():
            return store, ""
    raise UsageError(f"--resume {path}: no checkpoint there (looked for step-… in {' and '.join(tried)})")


def chosen(store: Store, name: str, path: str, log: Callable[[str], Any]) -> Checkpoint:
    """Head: the named checkpoint, or the newest whole one.

    Raises:
        UsageError: it is damaged, or none is whole.
    """
    if name:
        problem = problem_of(store, name)
        if problem:
            raise UsageError(f"--resume {path}: {problem}")
        return describe(store, name)
    found = newest_valid(store, log)
    if found is None:
        raise UsageError(f"--resume {path}: no checkpoint in {store.where} is whole")
    return found


def check_same_run(config: Config, workers: int, start: Checkpoint, log: Callable[[str], Any]) -> None:
    """Head: refuse to go on with what must not change, say what may but makes a difference.

    Args:
        config: of this start.
        workers: train workers of this start.
        start: the checkpoint, which holds the configuration it was made with.
        log: takes what is worth saying.

    Raises:
        UsageError: one line for each key that differs and must not.
    """
    before, now = redact(start.meta["config"]), redact(config.model_dump(mode="json"))
    problems = [
        f"{key}: {_at(now, key)!r} here, {_at(before, key)!r} in {start.name}; go on with the same, or start"
        " anew with --resume never"
        for key in FIXED
        if _at(now, key) != _at(before, key)
    ]
    for name in sorted({*before["params"], *now["params"]}):
        old, new = before["params"].get(name), now["params"].get(name)
        hidden = [".".join(keys) for keys in redacted_at({name: new})]
        if hidden:
            log(f"params.{', params.'.join(hidden)}: secret, so not compared with {start.name}")
        if old == new:
            continue
        text = f"params.{name}: {new!r} here, {old!r} in {start.name}"
        if _is_place(old) and _is_place(new):
            log(f"{text}; the records are compared")
        else:
            problems.append(f"{text}; go on with the same, or start anew with --resume never")
    if problems:
        raise UsageError(*problems)
    train = config.train
    batch, old_batch = train.batch_size * train.accumulate_steps * workers, start.meta["global_batch"]
    if batch != old_batch:
        log(
            f"a step takes {batch} records here (train.batch_size × accumulate_steps × train workers),"
            f" {old_batch} in {start.name}: the run goes on, but not as it would have without the"
            " interruption; the learning rate follows the records trained, and train.scale_lr the new size"
        )
    elif workers != start.meta["workers"]:
        log(
            f"{workers} train worker(s) here, {start.meta['workers']} in {start.name}: the same batches, but"
            " other random states"
        )
    for key in ("train.momentum", "train.weight_decay"):
        if _at(now, key) != _at(before, key):
            log(f"{key}: {_at(now, key)} has no effect; the optimiser goes on as in {start.name}")
    course = ["lr", "scale_lr"]
    if config.train.scheduler != "none":
        course += ["epochs", "max_steps", "warmup_epochs"]
    for key in (f"train.{name}" for name in course):
        if _at(now, key) != _at(before, key):
            log(
                f"{key}: {_at(now, key)} here, {_at(before, key)} in {start.name}: the learning rate goes on"
                " as it is at this point of a training so configured"
            )


def fill_summary(summary: Summary, start: Checkpoint, run_dir: Path) -> None:
    """Head: the figures of the epochs before, so that the summary is of the whole run.

    Args:
        summary: the new one.
        start: holds each finished epoch's metrics and books.
        run_dir: may hold the events of an earlier start.
    """
    for entry in start.meta["history"]:
        summary.epochs = entry["epoch"] + 1
        summary.metrics.take(entry["metrics"])
        for books in entry["books"]:
            summary.records.add(books)
    for books in start.pending["books"] if start.pending else []:
        summary.records.add(books)
    summary.steps = start.meta["step"]
    earlier = notable_events(run_dir)
    summary.events[:0] = [event for event in earlier if event not in summary.events]
    summary.write(run_dir)


def _at(tree: dict[str, Any], key: str) -> Any:
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _is_place(value: Any) -> bool:
    return isinstance(value, str) and "/" in value
