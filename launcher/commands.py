"""Laptop: what each verb of the command line does."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from stoker.config import Resolved, UsageError, load, schema_rows, type_name
from stoker.schema import Config

PLACES = ("local", "ray", "rehearsal", "sagemaker")


def run(
    config: Path | None,
    overrides: list[str],
    on: str,
    source_dir: Path | None,
    dry_run: bool,
    show_config: bool,
) -> int:
    """Laptop: resolve, plan, and unless it is a dry run, submit and wait.

    Returns:
        The job's exit code.

    Raises:
        UsageError: whatever is wrong with the request.
    """
    if on not in PLACES:
        close = difflib.get_close_matches(on, PLACES, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(f"--on {on}: no such place (known: {', '.join(PLACES)}){hint}")
    if config is None:
        if show_config:
            print("\n".join(config_lines(None, source_dir)))
            return 0
        raise UsageError("no configuration file given; try source_dir/configs/digits.yaml")
    resolved = load(config, overrides)
    if show_config:
        print("\n".join(config_lines(resolved, source_dir)))
        return 0
    from launcher.job import open_job

    job = open_job(resolved, source_dir)
    backend = _backend(on)
    request = backend.plan(job)
    if dry_run:
        print(request.render())
        return 0
    return int(backend.submit(request).wait())


def _backend(on: str) -> Any:
    import importlib

    module = {"ray": "ray_cluster"}.get(on, on)
    return importlib.import_module(f"launcher.backends.{module}")


def config_lines(resolved: Resolved | None, source_dir: Path | None) -> list[str]:
    """Laptop: every key with type, default (or this job's value and its origin) and meaning."""
    rows: list[tuple[str, str, str, str]] = []
    values = resolved.config.model_dump() if resolved else {}
    for key, kind, info in schema_rows(Config):
        default = repr(info.get_default(call_default_factory=True))
        if resolved and key in resolved.origins:
            value: Any = values
            for part in key.split("."):
                value = value[part]
            default = f"{value!r} ({resolved.origins[key]})"
        rows.append((key, kind, default, info.description or ""))
    if resolved:
        from launcher.job import source_root
        from stoker.recipe import ALIASES, Recipe, load_object

        path = ALIASES.get(resolved.config.recipe, resolved.config.recipe)
        recipe = load_object(path, source_dir or source_root(), "recipe", offers=Recipe)
        for name, info in recipe.model_fields.items():
            key = f"params.{info.alias or name}"
            default = "required" if info.is_required() else repr(info.default)
            given = resolved.config.params.get(info.alias or name)
            if given is not None:
                default = f"{given!r} ({resolved.origins.get(key, 'file')})"
            rows.append((key, type_name(info.annotation), default, info.description or ""))
    widths = [min(max(len(row[i]) for row in rows), limit) for i, limit in enumerate((34, 24, 40))]
    return [
        f"{key:<{widths[0]}}  {kind:<{widths[1]}}  {default:<{widths[2]}}  {meaning}".rstrip()
        for key, kind, default, meaning in rows
    ]
