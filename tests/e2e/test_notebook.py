"""The notebooks run from their first cell to their last."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from commands import Demo
from nbclient import NotebookClient
from traitlets.config import Config

NOTEBOOKS = Path(__file__).resolve().parents[2] / "docs/notebooks"


@pytest.fixture
def tensorboards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("STOKER_NOTEBOOK_RUNS", str(tmp_path / "runs"))
    yield
    for note in (tmp_path / ".tensorboard-info").glob("pid-*.info"):
        os.kill(int(note.stem.removeprefix("pid-")), signal.SIGTERM)


Shown = dict[str, list[Any]]
"""Outputs by cell."""


def execute(name: str = "quickstart", **replaced: str) -> Shown:
    """Run a notebook.

    Args:
        name: of its file.
        replaced: what stands in place of a call in its cells, by the name that it is assigned to.
    """
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        for given, value in replaced.items():
            cell.source = re.sub(rf"^{given} = .*", f"{given} = {value}", cell.source, flags=re.M)
    with tempfile.TemporaryDirectory() as sockets:
        # Somebody else may take the ports that it would choose before the kernel listens.
        ipc = {"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}}
        client = NotebookClient(
            notebook,
            timeout=560,
            iopub_timeout=120,
            startup_timeout=300,
            resources={"metadata": {"path": str(NOTEBOOKS)}},
            config=Config(ipc),
        )
        client.execute()
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def check(shown: Shown) -> str:
    kinds = [kind for outputs in shown.values() for out in outputs for kind in out.get("data", {})]
    assert "image/png" in kinds, "the curves"
    assert any("tensorboard-frame" in str(outputs) for outputs in shown.values())
    assert any("did you mean epochs" in str(outputs) for outputs in shown.values())
    frame = next(str(outputs) for outputs in shown.values() if "config/train.lr" in str(outputs))
    assert "0.003" in frame
    return frame


@pytest.mark.usefixtures("tensorboards")
def test_its_cells_show_a_finished_run(demo: Demo) -> None:
    """Every cell, with the demo's run in place of its two trainings."""
    run = f"Path({str((demo.folder / 'runs/latest').resolve())!r})"
    check(execute(first=run, second=run))


@pytest.mark.soak
@pytest.mark.usefixtures("tensorboards")
def test_the_notebook_runs(tmp_path: Path) -> None:
    assert "0.001" in check(execute())
    assert len(list((tmp_path / "runs").glob("digits-*"))) == 2


@pytest.mark.parametrize("where", ["process", pytest.param("", marks=pytest.mark.soak)])
def test_a_loop_of_ones_own_has_the_batches_of_torch_and_goes_on_within_a_pass(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the notebook's process; that a cluster makes the same batches, the loader's tests hold."""
    monkeypatch.setenv("STOKER_LOADER", where)
    shown = execute("dataloader")
    compared = [out["data"] for cell in ("equal", "resume") for out in shown[cell] if "data" in out]
    assert [values["text/plain"] for values in compared] == ["True", "True"]
    printed = "".join(out["text"] for out in shown["train"] if out.get("name") == "stdout")
    losses = [float(line.split()[-1]) for line in printed.splitlines()]
    assert len(losses) == 8 and losses[-1] < 0.5 * losses[0]
