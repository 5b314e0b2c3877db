"""The notebook for Databricks, on a real Spark cluster of this machine: Ray on Spark and a Delta table.

Spark's `local-cluster` mode starts a master and workers as processes of their own. The volume is a FUSE file
system that refuses what volumes refuse. `make soak` installs what this needs (scripts/places.sh).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from commands import ROOT
from nbclient import NotebookClient

from tests.fakes import ray_on_spark
from tests.fakes.volume import volume

NOTEBOOK = ROOT / "docs/notebooks/databricks.ipynb"
SPARK, FUSE = ROOT / ".places/spark", ROOT / ".places/fuse"
"""Where scripts/places.sh installs pyspark and fusepy."""
BEFORE = """
import os
import deltalake
from pyspark.sql import SparkSession

from stoker_launcher import notebook

notebook.VOLUMES = VOLUME  # there: /Volumes/

# On Databricks, `spark` is there, and the cluster's settings give each machine its variables.
settings = SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.ui.enabled", "false")
for name in [name for name in os.environ if name.startswith("RAY_")]:
    settings = settings.config(f"spark.executorEnv.{name}", os.environ[name])
spark = settings.config("spark.driver.host", "127.0.0.1").getOrCreate()
for split in ("train", "val"):
    rows = spark.read.parquet(f"{DIGITS}/parquet/{split}").repartition(4)
    deltalake.write_deltalake(f"{FILES}/digits/{split}", rows.toArrow())
"""
GB = 2**30


def missing() -> str:
    if shutil.which("java") is None:
        return "java is not installed: apt-get install default-jre-headless"
    if not (SPARK / "pyspark").is_dir() or not FUSE.is_dir():
        return "pyspark or fusepy is not installed: bash scripts/places.sh"
    if shutil.which("fusermount") is None or not Path("/dev/fuse").exists():
        return "this machine cannot mount file systems: apt-get install fuse libfuse2"
    return ""


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = Path(tempfile.mkdtemp(prefix="rs", dir="/tmp"))  # socket paths must stay short
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "5" * 64,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ON_SPARK_RAY_WORKER_NODE_STARTUP_INTERVAL": "2",
        "RAY_ON_SPARK_WORKER_PHYSICAL_MEMORY_BYTES": str(4 * GB),
        "RAY_ON_SPARK_WORKER_SHARED_MEMORY_BYTES": str(GB // 2),
        "RAY_ON_SPARK_DRIVER_PHYSICAL_MEMORY_BYTES": str(4 * GB),
        "RAY_ON_SPARK_DRIVER_SHARED_MEMORY_BYTES": str(GB // 2),
        "PYTHONPATH": f"{SPARK}:{ROOT}:{ROOT / 'launcher'}:{os.environ['PYTHONPATH']}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYSPARK_PYTHON": ray_on_spark.apart(folder, tmp_path / "python"),
        "RAY_ON_SPARK_START_HOOK": "tests.fakes.ray_on_spark.Hook",
        ray_on_spark.FOLDER_VARIABLE: str(folder),
        "RAY_ON_SPARK_WORKER_CPU_CORES": "1",
        "RAY_ON_SPARK_WORKER_GPU_NUM": "0",
        "SPARK_LOCAL_IP": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.soak
@pytest.mark.timeout(2000)
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.usefixtures("machines")
def test_its_cells_train_digits_from_a_delta_table_on_ray_on_spark(
    digits: Path, tmp_path: Path
) -> None:
    """Ray on Spark waits 20 s for its head, whether that is up or not."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = {cell.id: cell for cell in notebook.cells}
    cells["end"].source += "\nspark.stop()"
    with volume(tmp_path, FUSE) as mounted:
        paths = f"VOLUME, FILES, DIGITS = {str(mounted.mount)!r}, {str(mounted.below)!r}, {str(digits)!r}"
        cells["places"].source = paths + BEFORE
        resources = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(notebook, timeout=1800, startup_timeout=300, resources=resources).execute()
        assert mounted.refused() == []

    shown = "".join(out.text for out in cells["train"].outputs if out.get("name") == "stdout")
    assert "epoch 2/2 done" in shown, "progress in the cell"
    assert "no token" not in shown
    (run_dir,) = (mounted.below / "runs").glob("digits-*")
    assert f"run            {mounted.mount / 'runs' / run_dir.name}" in shown
    assert str(mounted.mount / "runs" / run_dir.name) in str(cells["shown"].outputs)
    assert {"model.safetensors", "model.pt2"} <= {
        path.name for path in (run_dir / "model").iterdir()
    }
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["place"]) == ("succeeded", "ray")
    assert summary["metrics"]["best"]["val/acc1"] > 0.2
    groups = [host["group"] for host in summary["cluster"]["hosts"]]
    assert sorted(groups) == ["cpu", "cpu", "gpu"]
    cpu_hosts = {host["host"] for host in summary["cluster"]["hosts"] if host["group"] == "cpu"}
    assert summary["chain_tasks_by_host"].keys() <= cpu_hosts, "only Spark's workers preprocess"
    records = summary["records"]
    assert records["read"] == records["trained"] + records["quarantined"] + records["remainder"]
