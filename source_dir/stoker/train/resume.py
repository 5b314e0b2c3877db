"""Head: whether a run resumes, from which checkpoint, and whether it is still the same run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.checkpoints.format import (
    Checkpoint,
    awaiting,
    load_meta,
    newest_valid,
    other_job,
)
from stoker.config.loading import leaves
from stoker.config.redaction import REDACTED, redact
from stoker.config.schema import Config
from stoker.config.values import is_path
from stoker.errors import UsageError
from stoker.events.summary import Summary
from stoker.figures import count_of
from stoker.place import RunPlace
from stoker.storage.checkpoint_store import CheckpointStore, complete, open_store, step_of, verify
from stoker.storage.filesystems import filesystem_of
from stoker.train.stopping import check_monitors

FIXED = (
    "recipe",
    "seed",
    "train.optimizer",
    "train.layer_decay",
    "train.scheduler",
    "data.shuffle",
)
"""Keys that must not change: the saved state would not fit, or the result would be another run's."""


Start = tuple[CheckpointStore, Checkpoint | None]
"""Where this run writes its checkpoints, and the one that it resumes from."""


def check_path(config: Config) -> None:
    if config.checkpoint.resume not in (None, "auto", "never"):
        locate(config.checkpoint.resume)


def find_start(
    config: Config,
    place: RunPlace,
    data: Any,
    workers: int,
    summary: Summary,
    log: Callable[[str], Any],
) -> Start:
    check_monitors(config, data.recipe, "val" in data.sources)
    store, start = plan_resume(config, place, log)
    if start is not None:
        start = awaiting(start, config.train.max_steps)
        check_same_run(config, workers, start, log, data.recipe)
        fill_summary(summary, start, own=start.store.where == store.where)
    return store, start


def plan_resume(config: Config, place: RunPlace, log: Callable[[str], Any]) -> Start:
    """Find the checkpoint to resume from.

    A job's own checkpoints take precedence over the key, so a job restarted on new hosts with the same
    configuration continues from its latest checkpoint, not from the one it first started with. Those of
    another job count only if the key asks for them.
    """
    where, synced = own_place(config, place)
    own, resume = open_store(where, synced), config.checkpoint.resume
    asked = None if resume in (None, "auto", "never") else locate(str(resume))
    within = asked is not None and Path(asked[0].where) == Path(own.where)
    found = newest_valid(own, log)
    if found and resume != "auto" and not within:
        writer = other_job(found, config.name, place.job)
        if writer and (resume is None or (asked and not place.job)):
            otherwise = (
                "never starts from scratch" if place.job else "or set another checkpoint.dir"
            )
            raise UsageError(
                f"checkpoint.resume: {where} has checkpoints of another job, {writer}; set auto (as a"
                f" hyperparameter, checkpoint__resume=auto) to continue it; {otherwise}"
            )
        if writer and place.job:
            own = open_store(f"{where.rstrip('/')}/{place.job}", synced)
            found = newest_valid(own, log)
    names, newest = own.names(), next(complete(own), "")
    if resume == "never":
        if newest and not (found and place.job):
            raise UsageError(
                f"checkpoint.dir: {where} has checkpoints of an earlier run ({newest}), and"
                " checkpoint.resume is never; choose another folder, or remove them"
            )
        return own, found
    if not names and config.checkpoint.dir:
        left = newest_valid(open_store(str(place.checkpoint_dir), place.synced))
        if left and not other_job(left, config.name, place.job):
            raise UsageError(
                f"checkpoint.dir: {where} has no checkpoint, but {left.store.where} has those of this run"
                f" ({left.name}); leave checkpoint.dir out, or move them there"
            )
    if asked is not None:
        other, name = asked
        if name and newest and within and step_of(name) < step_of(newest):
            raise UsageError(
                f"checkpoint.resume: {resume}: {where} also has the later {newest}, which resuming here"
                " would overwrite; set checkpoint.dir to another folder"
            )
        if found is None:
            return own, chosen(other, name, str(resume), log)
        if not within:
            log(f"{own.where} has checkpoints of this job: resuming from them, not from {resume}")
    if names and found is None:
        if place.name == "local" and newest:  # someone asked for it
            raise UsageError(
                f"checkpoint.resume: {where} has no valid checkpoint ({newest}: {verify(own, newest)});"
                " start a new run, in another checkpoint.dir if you have set it"
            )
        log(f"{where} has no valid checkpoint; starting from scratch")
    return own, found


def own_place(config: Config, place: RunPlace) -> tuple[str, bool]:
    """(folder or URI of this run's checkpoints, whether the service copies it elsewhere)."""
    given = config.checkpoint.dir
    if given is None:
        return str(place.checkpoint_dir), place.synced
    if "://" not in given and place.name == "ray" and not Path(given).is_absolute():
        raise UsageError(
            f"checkpoint.dir: use an absolute path that all hosts share (got {given!r})"
        )
    return open_store(given).where, False


def locate(path: str) -> tuple[CheckpointStore, str]:
    """Resolve a path to resume from: (store, checkpoint name or "" for the newest)."""
    path = path if "://" in path else filesystem_of(path)[1]
    parent, _, last = path.rstrip("/").rpartition("/")
    if last.startswith("step-") and last[5:].isdigit():
        store = open_store(parent or ".")
        if last not in store.names():
            raise UsageError(f"checkpoint.resume: {path}: no such checkpoint in {store.where}")
        return store, last
    tried = [path, f"{path.rstrip('/')}/checkpoints"]
    for folder in tried:
        store = open_store(folder)
        if store.names():
            return store, ""
    raise UsageError(
        f"checkpoint.resume: {path}: no checkpoint there (looked for step-… in {' and '.join(tried)})"
    )


def chosen(store: CheckpointStore, name: str, path: str, log: Callable[[str], Any]) -> Checkpoint:
    if name:
        problem = verify(store, name)
        if problem:
            raise UsageError(f"checkpoint.resume: {path}: {problem}")
        return load_meta(store, name)
    found = newest_valid(store, log)
    if found is None:
        raise UsageError(f"checkpoint.resume: {path}: no complete checkpoint in {store.where}")
    return found


def check_same_run(
    config: Config, workers: int, start: Checkpoint, log: Callable[[str], Any], recipe: Any = None
) -> None:
    fields = getattr(type(recipe), "model_fields", {}).items()
    paths = {"data", *(info.alias or name for name, info in fields if is_path(info.annotation))}
    before, now = redact(start.meta["config"]), redact(config.model_dump(mode="json"))
    there, here = dict(leaves(before)), dict(leaves(now))
    problems = [
        f"{key}: {here.get(key)!r} here, {there.get(key)!r} in {start.name}; set it back, or start"
        " from scratch with checkpoint.resume=never"
        for key in FIXED
        if here.get(key) != there.get(key)
    ]
    for name in sorted({*before["params"], *now["params"]}):
        old, new = before["params"].get(name), now["params"].get(name)
        hidden = [key for key, value in leaves({name: new}) if REDACTED in str(value)]
        if hidden:
            log(f"params.{', params.'.join(hidden)}: secret, not compared with {start.name}")
        if old == new or (name == "class_names" and old is None):  # names alone change nothing
            continue
        text = f"params.{name}: {new!r} here, {old!r} in {start.name}"
        if name in paths:
            log(f"{text}; the records are compared")
        else:
            problems.append(
                f"{text}; set it back, or start from scratch with checkpoint.resume=never"
            )
    if problems:
        raise UsageError(*problems)
    train = config.train
    batch = train.batch_size * train.accumulate_steps * workers
    old_batch = start.meta["global_batch"]
    if batch != old_batch:
        log(
            f"a step takes {batch} records here (train.batch_size × accumulate_steps × train workers),"
            f" {old_batch} in {start.name}: the run continues, but its result differs from an"
            " uninterrupted run; the learning rate follows records trained, and train.scale_lr the new size"
        )
    elif workers != start.meta["workers"]:
        log(
            f"{count_of(workers, 'train worker')} here, {start.meta['workers']} in {start.name}: the same"
            " batches, but other random states"
        )
    course = ["lr", "scale_lr"]
    if train.scheduler != "none":
        course += ["epochs", "max_steps", "warmup_epochs"]
    effects = {
        **dict.fromkeys(("momentum", "weight_decay"), "no effect; the optimiser keeps the latter"),
        "precision": "the new one from here on",
        **dict.fromkeys(course, "the learning rate continues as the new setting has it here"),
    }
    for key, effect in ((f"train.{name}", effect) for name, effect in effects.items()):
        if here.get(key) != there.get(key):
            log(f"{key}: {here.get(key)} here, {there.get(key)} in {start.name}: {effect}")


def fill_summary(summary: Summary, start: Checkpoint, own: bool = True) -> None:
    """Add the figures of earlier epochs, so that the summary covers the whole run.

    `own`: whether the checkpoint is in this run's folder; only its own epochs compete for the model, and only
    its own starts count in time and cost.
    """
    for entry in start.meta["history"]:
        summary.epochs = entry["epoch"] + 1
        summary.metrics.take(entry["metrics"], competes=own and not entry.get("elsewhere"))
        for books in entry["books"]:
            summary.records.add(books)
    for books in start.pending["books"] if start.pending else []:
        summary.records.add(books)
    summary.steps = start.meta["step"]
    if own:  # started on another host; the summary of this one also has the time after the last checkpoint
        summary.started = start.meta.get("started") or summary.started
        summary.earlier_s = max(summary.earlier_s, start.meta.get("seconds", 0.0))
