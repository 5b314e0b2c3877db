"""Laptop: compare finished runs, from their run directories.

from stoker import runs_dataframe
frame = runs_dataframe(["runs/digits-…", "runs/digits-…"])      # or ["runs"]: every run in it
frame[["config/train.lr", "best/val/acc1", "samples_per_s", "usd"]]
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from stoker.errors import UsageError
from stoker.events.summary import Summary, read_summary

if TYPE_CHECKING:
    import pandas

CONFIG = "config/"
UNINTERESTING = ("output_dir",)
"""Keys that differ without distinguishing runs."""


def find_runs(paths: Iterable[str | Path]) -> tuple[list[Path], list[str]]:
    """The run directories under the given paths, each once, in the order given.

    Args:
        paths: run directories, or folders that contain some, such as `runs`.

    Returns:
        (run directories, one line for each path that is not one).
    """
    found: dict[Path, None] = {}
    passed_over = []
    for path in map(Path, paths):
        if (path / "summary.json").is_file():
            found[path.resolve()] = None
            continue
        below = sorted(child.parent.resolve() for child in path.glob("*/summary.json"))
        found.update(dict.fromkeys(below))
        if not below:
            reason = "no summary.json in it" if path.exists() else "no such folder"
            passed_over.append(f"{path}: not a run directory ({reason})")
    return list(found), passed_over


def runs_dataframe(paths: Sequence[str | Path]) -> pandas.DataFrame:
    """One row per run, indexed by the run's name.

    Args:
        paths: run directories, or folders that contain some.

    Returns:
        Columns: status, backend, started, hosts, train_workers, seconds, epochs, steps, samples_per_s
        (without warm-up), input_wait_pct (% of training time; both None if not measured), bottleneck, usd,
        usd_per_million_samples (estimated, the second at samples_per_s; None where prices are not known),
        `last/<metric>`, `best/<metric>`, and `config/<section.key>` for every key of the configuration.

    Raises:
        UsageError: a path is not a run directory, or a run cannot be read.
    """
    import pandas

    runs, problems = find_runs(paths)
    if problems:
        raise UsageError(*problems)
    frame = pandas.DataFrame([row_of(run) for run in runs], index=[run.name for run in runs])
    frame.index.name = "run"
    return frame


def row_of(run_dir: Path) -> dict[str, Any]:
    """One run as a row; see `runs_dataframe`."""
    summary = read_summary(run_dir / "summary.json")
    cost = summary.cost or {}
    row: dict[str, Any] = {
        "status": summary.status,
        "backend": summary.backend,
        "started": summary.started,
        "hosts": shape_of(summary),
        "train_workers": summary.train_workers,
        "seconds": summary.seconds,
        "epochs": summary.epochs,
        "steps": summary.steps,
        "samples_per_s": summary.speed.steady_samples_per_s or None,
        "input_wait_pct": summary.speed.input_wait_pct if summary.speed.steady_samples_per_s else None,
        "bottleneck": summary.bottleneck,
        "usd": cost.get("usd"),
        "usd_per_million_samples": cost.get("usd_per_million_samples"),
    }
    row |= {f"last/{name}": value for name, value in summary.metrics.last.items()}
    row |= {f"best/{name}": value for name, value in summary.metrics.best.items()}
    return row | {CONFIG + key: value for key, value in flat_config(run_dir).items()}


def shape_of(summary: Summary) -> str:
    """A run's hosts in short form: `1 × gpu (ml.g5.xlarge) + 2 × cpu`."""
    kinds = Counter((host.group, host.model_dump().get("type") or "") for host in summary.cluster.at_once())
    return " + ".join(
        f"{count} × {group}" + (f" ({kind})" if kind else "") for (group, kind), count in kinds.items()
    )


def flat_config(run_dir: Path) -> dict[str, Any]:
    """A run's configuration as `section.key` → value; lists are JSON."""
    path = run_dir / "config.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise UsageError(f"{path}: cannot be read: {why}") from None
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, below in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), below)
        else:
            flat[prefix] = json.dumps(value) if isinstance(value, list | dict) else value

    walk("", content or {})
    return flat


def differing(frame: pandas.DataFrame) -> list[str]:
    """The columns of configuration keys whose values differ between runs."""
    return [
        column
        for column in frame.columns
        if column.startswith(CONFIG)
        and column.removeprefix(CONFIG) not in UNINTERESTING
        and len({repr(value) for value in frame[column]}) > 1
    ]
