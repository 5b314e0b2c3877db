"""`stoker.run` before a process is started: jobs, clusters, folders, MLflow, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker.errors import UsageError
from stoker.place import LASTING_DIR_VARIABLE, local_place
from stoker_launcher.notebook import RunInterrupt, RunResult, plan

JOB: dict[str, Any] = {"name": "made", "recipe": "rows:Counting", "train": {"epochs": 3}}
CLUSTER = "10.0.0.4:9123"


@pytest.fixture(autouse=True)
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.py").write_text(
        (Path(__file__).parents[1] / "recipes" / "rows.py").read_text()
    )


def refused(config: Any = JOB, *overrides: str, address: str = "local") -> str:
    with pytest.raises(UsageError) as caught:
        plan(config, overrides, address)
    (problem,) = caught.value.problems
    assert "\n" not in problem
    return problem


def test_a_job_is_a_file_its_text_or_a_dictionary(tmp_path: Path) -> None:
    text = "name: made\nrecipe: rows:Counting\ntrain:\n  epochs: 3\n"
    (tmp_path / "job.yaml").write_text(text)
    for config in (JOB, text, "job.yaml", Path("job.yaml")):
        request = plan(config, ("train.lr=0.5",), "local")
        resolved = request.job.resolved
        assert (resolved.config.train.epochs, resolved.config.train.lr) == (3, 0.5)
        assert resolved.origins["train.lr"] == "stoker.run"
        assert request.job.source_dir == tmp_path, "the recipe beside the notebook is staged"
    assert JOB == {"name": "made", "recipe": "rows:Counting", "train": {"epochs": 3}}, (
        "the caller's own"
    )


def test_wrong_jobs_are_refused_in_one_line_each() -> None:
    assert refused({**JOB, "trian": {}}) == "configuration: trian: unknown key; did you mean train?"
    assert "stoker.run: train.epoch: unknown key" in refused(JOB, "train.epoch=1")
    assert "config: not valid YAML" in refused("name: [made\n")
    assert "no such configuration file" in refused("jbo.yaml")
    assert "no such example; did you mean digits?" in refused("example:digit")


def test_auto_is_the_cluster_of_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "call ray.util.spark.setup_ray_cluster(…) first" in refused(address="auto")
    monkeypatch.setenv("RAY_ADDRESS", CLUSTER)
    request = plan(JOB, (f"output_dir={tmp_path}",))
    assert request.cluster == request.environment["RAY_ADDRESS"] == CLUSTER
    assert request.environment["STOKER_PLACE"] == "ray"
    assert "no token: anyone who can reach this cluster" in request.render()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 64)
    shown = plan(JOB, (f"output_dir={tmp_path}",)).render()
    assert "no token" not in shown and "t" * 64 not in shown


@pytest.mark.parametrize(
    "address", ["ray://10.0.0.4:10001", "http://10.0.0.4:8265", "10.0.0.4", ""]
)
def test_other_addresses_are_refused(address: str) -> None:
    assert "must be auto, local or host:port" in refused(address=address)


def test_on_a_cluster_the_output_folder_is_one_that_all_hosts_share(tmp_path: Path) -> None:
    assert "/Volumes/<catalog>/<schema>/<volume>/runs" in refused(address=CLUSTER)
    shared = f"output_dir={tmp_path}"
    assert "only for local runs" in refused(JOB, shared, "cluster.dashboard=true", address=CLUSTER)
    assert "hosts cannot be added" in refused(JOB, shared, "cluster.cpu_hosts.max=2")
    request = plan(JOB, (f"output_dir={tmp_path / 'runs'}",), CLUSTER)
    assert request.run_dir.parent == tmp_path / "runs" and request.lasting is None


def test_on_a_volume_files_that_grow_stay_on_the_drivers_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = tmp_path / "Volumes/main/default/runs"
    monkeypatch.setattr("stoker_launcher.notebook.VOLUMES", f"{tmp_path}/Volumes/")
    request = plan(JOB, (f"output_dir={volume}",), CLUSTER)
    assert request.lasting is not None and request.lasting.parent == volume
    assert request.run_dir.name == request.lasting.name and volume not in request.run_dir.parents
    for name in (LASTING_DIR_VARIABLE, "STOKER_RUN_DIR"):
        monkeypatch.setenv(name, request.environment[name])
    place = local_place()
    assert (place.checkpoint_dir, place.model_dir) == (
        request.lasting / "checkpoints",
        request.lasting / "model",
    )
    assert place.synced, "checkpoints are written file by file, not renamed into place"


@pytest.mark.long
def test_the_credentials_of_the_workspace_go_to_the_job_only_if_it_logs_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "databricks")
    monkeypatch.setenv("DATABRICKS_HOST", "http://127.0.0.1:9")
    monkeypatch.setenv("DATABRICKS_TOKEN", "dapi0123456789abcdef")
    for uri in ("null", "http://mlflow.example.com", "databricks"):
        request = plan(JOB, (f"tracking.mlflow.uri={uri}",), "local")
        assert ("DATABRICKS_TOKEN" in request.environment) == (uri == "databricks")
        assert "dapi" not in request.render() + repr(request)


def test_a_result_shows_what_counts(tmp_path: Path) -> None:
    metrics = {"last": {"val/loss": 0.5}, "best": {"val/loss": 0.4}}
    result = RunResult(130, tmp_path, {"status": "interrupted", "metrics": metrics})
    assert (result.status, result.metrics["val/loss"], result.best["val/loss"]) == (
        "interrupted",
        0.5,
        0.4,
    )
    assert RunResult(2, tmp_path, {}).status == "refused"
    assert isinstance(RunInterrupt(result), KeyboardInterrupt), "cells below do not run"
    assert stoker.RunResult is RunResult


def test_code_that_was_edited_since_the_last_run_is_checked_and_prepares_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a file that it imports; the notebook is left without modules of the job."""
    (tmp_path / "preparing.py").write_text(
        "from pathlib import Path\nimport installed, words\n"
        "def write():\n    Path('made').write_text(words.LABEL)\n"
    )
    packages = tmp_path / ".venv" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "installed.py").touch()
    monkeypatch.syspath_prepend(packages)
    for label in ("old", "newer"):
        (tmp_path / "words.py").write_text(f"LABEL = {label!r}\n")
        plan({**JOB, "data": {"prepare": "preparing:write"}}, (), "local")
        assert (tmp_path / "made").read_text() == label
        assert not {"words", "preparing"} & sys.modules.keys()
        assert "installed" in sys.modules, "torch loads only once per process"


def test_a_folder_too_large_to_stage_is_refused_before_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.setattr("stoker_launcher.job.MOST_FILES", 5)
    for number in range(6):
        (tmp_path / "data" / f"{number}.jpg").touch()
    assert "is staged with the job but holds more than" in refused()


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own() -> None:
    assert len({plan(JOB, (), "local").run_dir for _ in range(5)}) == 5
