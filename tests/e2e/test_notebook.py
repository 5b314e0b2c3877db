"""The quick-start notebook runs from its first cell to its last."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs/notebooks/quickstart.ipynb"


@pytest.fixture
def tensorboards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """TensorBoard goes on after the notebook: end those that noted themselves in the test's folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("STOKER_NOTEBOOK_RUNS", str(tmp_path / "runs"))
    yield
    for note in (tmp_path / ".tensorboard-info").glob("pid-*.info"):
        os.kill(int(note.stem.removeprefix("pid-")), signal.SIGTERM)


@pytest.mark.usefixtures("tensorboards")
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=560, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    client.execute()
    shown = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    kinds = [kind for outputs in shown.values() for out in outputs for kind in out.get("data", {})]
    assert "image/png" in kinds, "the curves"
    assert any("tensorboard-frame" in str(outputs) for outputs in shown.values())
    assert any("did you mean epochs" in str(outputs) for outputs in shown.values())
    frame = next(str(outputs) for outputs in shown.values() if "config/train.lr" in str(outputs))
    assert "0.003" in frame and "0.001" in frame
    assert len(list((tmp_path / "runs").glob("digits-*"))) == 2
