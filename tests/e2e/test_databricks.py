"""The notebook for Databricks, on a real Spark cluster of this machine: Ray on Spark and a Delta table.

Spark's `local-cluster` mode starts a master and workers as processes of their own. It needs Java and pyspark,
which is large: `make soak` installs it into a folder beside the environment.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from commands import ROOT
from nbclient import NotebookClient

NOTEBOOK = ROOT / "docs/notebooks/databricks.ipynb"
SPARK = ROOT / ".places/spark"
"""Where scripts/places.sh installs pyspark."""
BEFORE = """
import os
import deltalake
from pyspark.sql import SparkSession

# On Databricks, `spark` is there, and the cluster's settings give each machine its variables.
settings = SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.ui.enabled", "false")
for name in [name for name in os.environ if name.startswith("RAY_")]:
    settings = settings.config(f"spark.executorEnv.{name}", os.environ[name])
spark = settings.config("spark.driver.host", "127.0.0.1").getOrCreate()
for split in ("train", "val"):
    rows = spark.read.parquet(f"{DIGITS}/parquet/{split}").repartition(4)
    deltalake.write_deltalake(f"{VOLUME}/digits/{split}", rows.toArrow())
"""
GB = 2**30


def missing() -> str:
    """What this machine lacks."""
    if shutil.which("java") is None:
        return "java is not installed: apt-get install default-jre-headless"
    if not (SPARK / "pyspark").is_dir() and importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed: bash scripts/places.sh"
    return ""


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of the cluster's machines, with what Ray on Spark may use of their memory."""
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
        "PYTHONPATH": f"{SPARK}:{os.environ['PYTHONPATH']}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.soak
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.usefixtures("machines")
def test_its_cells_train_digits_from_a_delta_table_on_ray_on_spark(digits: Path, tmp_path: Path) -> None:
    """Ray on Spark waits 20 s for its head, whether that is up or not."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = {cell.id: cell for cell in notebook.cells}
    cells["places"].source = f"VOLUME, DIGITS = {str(tmp_path)!r}, {str(digits)!r}\n{BEFORE}"
    cells["end"].source += "\nspark.stop()"
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=560, startup_timeout=300, resources=resources).execute()

    shown = "".join(out.text for out in cells["train"].outputs if out.get("name") == "stdout")
    assert "epoch 2/2 done" in shown, "progress in the cell"
    assert "no token" not in shown
    (run_dir,) = (tmp_path / "runs").glob("digits-*")
    assert str(run_dir) in str(cells["shown"].outputs)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["backend"]) == ("succeeded", "ray")
    assert summary["metrics"]["best"]["val/acc1"] > 0.2
    groups = [host["group"] for host in summary["cluster"]["hosts"]]
    assert sorted(groups) == ["cpu", "cpu", "gpu"]
    cpu_hosts = {host["host"] for host in summary["cluster"]["hosts"] if host["group"] == "cpu"}
    assert summary["chain_tasks_by_host"].keys() <= cpu_hosts, "only Spark's workers preprocess"
    records = summary["records"]
    assert records["read"] == records["trained"] + records["quarantined"] + records["remainder"]
