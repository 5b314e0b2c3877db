"""Train worker (rank 0): checkpoints that are whole or not there.

A checkpoint is a folder `step-00000123/` with `model.safetensors`, `state.pt` (optimiser, scheduler),
`meta.json` (epoch, step, metrics) and, written last, `manifest.json` with the SHA-256 of each file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
BEST = "best.json"


@dataclass(frozen=True)
class Checkpoint:
    """Train worker: a whole checkpoint on disk."""

    path: Path
    meta: dict[str, Any]


def save(
    folder: Path, step: int, weights: dict[str, Any], state: dict[str, Any], meta: dict[str, Any]
) -> Checkpoint:
    """Train worker: write a checkpoint; it appears under its name only when it is whole.

    Raises:
        OSError: naming the folder, e.g. when its disk is full; earlier checkpoints stay as they are.
    """
    import torch
    from safetensors.torch import save_file

    final = folder / f"step-{step:08d}"
    draft = folder / f".draft-{step:08d}-{os.getpid()}"
    try:
        draft.mkdir(parents=True)
        save_file(weights, draft / "model.safetensors")
        torch.save(state, draft / "state.pt")
        (draft / "meta.json").write_text(json.dumps(meta, indent=1))
        sums = {path.name: _sha256(path) for path in sorted(draft.iterdir())}
        (draft / MANIFEST).write_text(json.dumps(sums, indent=1))
        for path in draft.iterdir():
            _sync(path)
        if final.exists():
            shutil.rmtree(final)
        draft.rename(final)
        _sync(folder)
    except Exception as error:
        # safetensors reports a full disk as an error of its own, so the type says little.
        shutil.rmtree(draft, ignore_errors=True)
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        raise OSError(
            f"cannot write the checkpoint {final}: {error} ({free / 2**20:.0f} MB free on that disk)"
        ) from error
    return Checkpoint(final, meta)


def newest_valid(folder: Path, log: Any = None) -> Checkpoint | None:
    """Every host: the newest checkpoint whose files are whole; says why others were passed over."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        problem = verify(path)
        if problem is None:
            return Checkpoint(path, json.loads((path / "meta.json").read_text()))
        if log:
            log(f"checkpoint {path.name} is passed over: {problem}")
    return None


def verify(path: Path) -> str | None:
    """Every host: what is wrong with a checkpoint, None where nothing is."""
    try:
        sums = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return "it was not finished (no readable manifest)"
    for name, expected in sums.items():
        if not (path / name).is_file():
            return f"{name} is absent"
        if _sha256(path / name) != expected:
            return f"{name} is damaged (its SHA-256 differs from the manifest)"
    return None


def load(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train worker: (weights, state) of a checkpoint, on the CPU."""
    import torch
    from safetensors.torch import load_file

    weights = load_file(checkpoint.path / "model.safetensors")
    state = torch.load(checkpoint.path / "state.pt", weights_only=True, map_location="cpu")
    return weights, state


def mark_best(folder: Path, checkpoint: Checkpoint, metric: str, value: float) -> None:
    """Train worker: note which checkpoint is the best so far."""
    draft = folder / f".{BEST}"
    draft.write_text(json.dumps({"checkpoint": checkpoint.path.name, "metric": metric, "value": value}))
    draft.replace(folder / BEST)


def best(folder: Path) -> dict[str, Any] | None:
    """Every host: the note of `mark_best`, if there is one."""
    try:
        note: dict[str, Any] = json.loads((folder / BEST).read_text())
    except (OSError, ValueError):
        return None
    return note


def prune(folder: Path, keep: int) -> None:
    """Train worker: remove all but the newest `keep` checkpoints and the best one."""
    note = best(folder)
    for path in sorted(folder.glob("step-*"), reverse=True)[keep:]:
        if not note or path.name != note["checkpoint"]:
            shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
