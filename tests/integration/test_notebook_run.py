"""`stoker.run` in a notebook's process, on a three-node Ray cluster with a token.

The nodes share this machine's disk. A folder of it stands in for a Unity Catalog volume, and a real MLflow
server for the workspace's: the client is told `databricks`, and its variables name that server as the host.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import deltalake
import pytest
import yaml
from pyarrow import parquet

import stoker
from stoker.checkpoints import format as checkpoint
from stoker.errors import UsageError
from stoker.hosts.raynode import free_port
from stoker.storage.checkpoint_store import open_store
from stoker_launcher import notebook as launched
from stoker_launcher.notebook import plan, submit
from tests.fakes.mlflow_server import MlflowServer, latest, pairs
from tests.fakes.ray_nodes import RayNodes
from tests.summaries import EVERYWHERE, fields

EXPERIMENT = "/Shared/digits"
RECIPES = Path(__file__).resolve().parents[1] / "recipes"


@pytest.fixture
def notebook(nodes: RayNodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)  # of the cluster that other tests start
    for name, value in nodes.environment.items():
        if name.startswith(("RAY_", "STOKER_")):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_ADDRESS", nodes.gcs)
    volume = tmp_path / "Volumes" / "main" / "default" / "vision"
    volume.mkdir(parents=True)
    monkeypatch.setattr(launched, "VOLUMES", f"{tmp_path}/Volumes/")
    monkeypatch.setattr(launched, "LOCAL_DISK", tmp_path / "local_disk")
    (tmp_path / "local_disk").mkdir()
    return volume


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path, served=False)
    server.start()
    monkeypatch.setenv("DATABRICKS_HOST", server.uri)
    monkeypatch.setenv("DATABRICKS_TOKEN", "dapi0123456789abcdef")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")
    yield server
    server.stop()


def delta_tables(digits: Path, folder: Path) -> Path:
    for split in ("train", "val"):
        table = parquet.read_table(digits / "parquet" / split)
        deltalake.write_deltalake(str(folder / split), table)
    return folder


@pytest.fixture
def counting(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(RECIPES)
    return {"name": "counting", "recipe": "rows:Counting", "output_dir": str(notebook / "runs")}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_run_from_a_delta_table_that_is_interrupted_goes_on_in_the_next_cell_and_stands_in_mlflow(
    notebook: Path, workspace: MlflowServer, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two starts on three nodes, whose processes all start anew for each, and an MLflow server."""
    job = [
        f"params.data={delta_tables(digits, notebook / 'digits')}",
        f"output_dir={notebook / 'runs'}",
        "train.workers=1",
        "tracking.tensorboard=false",
        "tracking.mlflow.uri=databricks",
        f"tracking.mlflow.experiment={EXPERIMENT}",
    ]
    interrupt = at_the_first("epoch", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(stoker.RunInterrupt) as caught:
        stoker.run("example:digits", *job, "train.epochs=500")
    interrupt.join()
    stopped = caught.value.result
    assert (stopped.code, stopped.status) == (130, "interrupted")
    kept = checkpoint.newest_valid(open_store(str(stopped.run_dir / "checkpoints"), False))
    assert kept is not None
    epochs = int(kept.meta["next_epoch"]) + 1

    # The next cell goes on there.
    capsys.readouterr()
    result = stoker.run(
        "example:digits", *job, f"train.epochs={epochs}", resume=str(stopped.run_dir)
    )
    shown = capsys.readouterr().out
    assert result.code == 0 and result.status == "succeeded" and result.run_dir != stopped.run_dir
    [resumed] = [event for event in result.summary["events"] if event["event"] == "resumed"]
    assert (Path(resumed["path"]).name, resumed["step"]) == (kept.name, kept.meta["step"])
    assert result.best["val/acc1"] > 0.2 and result.metrics["train/loss"] > 0
    assert f"epoch {epochs}/{epochs} done" in shown, "in the cell"

    # The run directory is in the volume, written as volumes allow: whole files.
    assert result.run_dir.parent == notebook / "runs"
    there = {path.name for path in result.run_dir.iterdir()}
    assert {"config.yaml", "summary.json", "events.jsonl", "report.html", "logs"} <= there
    assert {"checkpoints", "model"} <= there and not {"code", "process.id"} & there
    assert result.summary["model"] == str(result.run_dir / "model")
    assert (result.run_dir / "model" / "model.safetensors").is_file()
    assert not any((launched.LOCAL_DISK / "stoker-runs").iterdir()), (
        "nothing stays on the driver's disk"
    )

    summary = result.summary
    assert summary == json.loads((result.run_dir / "summary.json").read_text())
    assert (summary["place"], len(summary["cluster"]["hosts"])) == ("ray", 3)
    assert fields(summary) == EVERYWHERE
    assert (
        summary["records"]["read"]
        == summary["records"]["trained"] + summary["records"]["remainder"]
    )
    written = (result.run_dir / "config.yaml").read_text()
    assert '"train.epochs": "stoker.run"' in written
    assert yaml.safe_load(written)["tracking"]["mlflow"]["experiment"] == EXPERIMENT
    everything = shown + "".join(
        path.read_text(errors="replace") for path in result.run_dir.rglob("*") if path.is_file()
    )
    assert (
        "dapi0123456789abcdef" not in everything and os.environ["RAY_AUTH_TOKEN"] not in everything
    )

    [run] = [run for run in workspace.runs(EXPERIMENT) if run["info"]["status"] == "FINISHED"]
    assert latest(run)["val/acc1"] == pytest.approx(result.metrics["val/acc1"])
    assert pairs(run, "tags")["stoker.place"] == "ray"


def test_a_job_that_crashes_leaves_the_notebook_as_it_is(counting: dict[str, Any]) -> None:
    crash = at_the_first("", lambda: os.kill(job_process(), signal.SIGKILL))
    with pytest.raises(stoker.RunError, match="exit code 137"):
        stoker.run(counting)
    crash.join()


def test_a_cluster_that_is_gone_or_refuses_the_token_is_one_line(
    counting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"no Ray cluster at 127.0.0.1:\d+: Connection refused"):
        stoker.run(counting, address=f"127.0.0.1:{free_port()}")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    result = stoker.run(counting, check=False)
    assert result.code == 1 and "\n" not in result.error
    assert "cannot use the Ray cluster of" in result.error and "RAY_AUTH_TOKEN" in result.error


def test_data_that_does_not_fit_is_refused_and_leaves_no_run(notebook: Path) -> None:
    result = stoker.run(
        "example:digits",
        f"params.data={notebook / 'none'}",
        f"output_dir={notebook / 'runs'}",
        check=False,
    )
    assert (result.code, result.status) == (2, "refused")
    assert "none" in result.error and "\n" not in result.error
    assert not result.run_dir.exists()


def test_a_resumed_run_that_fails_at_once_has_no_result_of_the_start_before(notebook: Path) -> None:
    run_dir = notebook.parent / "made"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "summary.json").write_text(
        '{"status": "succeeded", "metrics": {"last": {"val/acc1": 1.0}}}'
    )
    request = plan("example:digits", (f"params.data={notebook / 'none'}",), "local")
    environment = {**request.environment, "STOKER_RUN_DIR": str(run_dir)}
    result = submit(replace(request, run_dir=run_dir, environment=environment)).wait()
    assert (result.code, result.metrics, result.status) == (2, {}, "refused")
    assert "val/acc1" in (run_dir / "summary.json").read_text(), (
        "the earlier start's stays as it was"
    )


def at_the_first(event: str, act: Callable[[], None]) -> threading.Thread:
    def work() -> None:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            files = (launched.LOCAL_DISK / "stoker-runs").glob("*/events.jsonl")
            if any(f'"event": "{event}' in path.read_text() for path in files):
                act()
                return
            time.sleep(0.1)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def job_process() -> int:
    import psutil

    (found,) = [c.pid for c in psutil.Process().children() if "train.py" in c.cmdline()]
    return found
