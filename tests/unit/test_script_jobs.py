"""A script as a job: what is refused, what is staged, what its command line means."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stoker.config import redaction
from stoker.config.loading import Resolved, load, resolved_yaml
from stoker.errors import UsageError
from stoker.place import local_place
from stoker.scripts.rank import run_dir_on
from stoker.scripts.script_checks import refuse_foreign_keys, script_command_line
from stoker.scripts.supervisor import ScriptWork
from stoker_launcher.commands import run
from stoker_launcher.job import as_overrides, open_job
from stoker_launcher.places import Options
from tests.refusals import refused


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("import helper\n")
    (folder / "helper.py").write_text("")
    monkeypatch.chdir(folder)
    return folder


def job_of(script: str, *overrides: str, arguments: list[str] | None = None) -> Resolved:
    path, own = as_overrides(Path(script), arguments)
    return load(path, [*own, *overrides])


FOREIGN = [
    (["recipe=a:B", "train.lr=1", "seed=3"], ["train.lr", "seed", "recipe"]),
    (["data.order=exact", "export=[onnx]"], ["data.order", "export"]),
    (["checkpoint.resume=never"], ["checkpoint.resume"]),
    (["checkpoint.dir=s3://bucket/x"], ["checkpoint.dir"]),
    (["tracking.mlflow.registered_model=m"], ["tracking.mlflow.registered_model"]),
    (["train.early_stopping.monitor=val/loss"], ["train.early_stopping.monitor"]),
]


@pytest.mark.parametrize(("words", "keys"), FOREIGN)
def test_keys_of_a_recipe_are_refused_one_line_each(words: list[str], keys: list[str]) -> None:
    with refused(*keys, code=2):
        refuse_foreign_keys(job_of("train.py", *words))


def test_keys_that_a_script_job_honours_are_accepted() -> None:
    keys = [
        "train.workers=2",
        "train.max_failures=1",
        "train.threads=2",
        "checkpoint.dir=/shared/x",
    ]
    keys += ["tracking.tensorboard=false", "cluster.port=7000"]
    refuse_foreign_keys(job_of("train.py", *keys))


def test_the_configuration_that_a_run_wrote_can_be_run_again(tmp_path: Path) -> None:
    """It holds the defaults of what applies to scripts."""
    job = job_of("train.py", "train.workers=2")
    (tmp_path / "config.yaml").write_text(resolved_yaml(job))
    again = load(tmp_path / "config.yaml")
    assert again.config == job.config
    assert "train.threads" in again.origins
    assert not {"train.lr", "seed", "recipe", "export"} & again.origins.keys()
    refuse_foreign_keys(again)


@pytest.mark.parametrize("size", [7, 64])
def test_a_file_that_sets_a_foreign_key_is_refused_at_its_default_too(
    tmp_path: Path, size: int
) -> None:
    (tmp_path / "job.yaml").write_text(
        f"script: train.py\nseed: 0\ntrain: {{batch_size: {size}}}\n"
    )
    with pytest.raises(
        UsageError, match=r"^seed: has no effect.*\ntrain.batch_size: has no effect"
    ):
        refuse_foreign_keys(load(tmp_path / "job.yaml"))


def test_arguments_stay_the_words_that_were_typed_and_replace_the_files(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "script: train.py\nargs: [--lr, 1e-3, --tag, 007, --on, yes, --z, null]\n"
    )
    words = ["--lr", "1e-3", "--tag", "007", "--on", "yes", "--z", "null"]
    assert load(tmp_path / "job.yaml").config.args == words
    assert job_of(str(tmp_path / "job.yaml"), arguments=["--lr", "2"]).config.args == ["--lr", "2"]
    typed = job_of("train.py", arguments=[*words, "", "a b", "{x: 1}", "--key=a=b"])
    assert typed.config.args == [*words, "", "a b", "{x: 1}", "--key=a=b"]
    (tmp_path / "again.yaml").write_text(resolved_yaml(typed))
    assert load(tmp_path / "again.yaml").config == typed.config


def test_secret_arguments_reach_the_script_and_no_file(project: Path, tmp_path: Path) -> None:
    words = ["--hf-token", "hf_abc123defgh", "--api-key=k-12345678", "--epochs", "3"]
    resolved = job_of("train.py", arguments=words)
    shown = resolved_yaml(resolved) + script_command_line(resolved.config)
    assert "hf_abc123defgh" not in shown and "k-12345678" not in shown and "--epochs" in shown
    open_job(resolved).stage(tmp_path / "staged")
    assert "hf_abc123defgh" not in (tmp_path / "staged" / "job.yaml").read_text()
    assert load(tmp_path / "staged" / "job.yaml").config.args == words
    redaction.learn(resolved.config.model_dump(mode="json"))
    assert (
        redaction.scrub("token hf_abc123defgh, key k-12345678")
        == "token (redacted), key (redacted)"
    )


@pytest.mark.long
def test_a_dry_run_shows_script_and_arguments(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Path("train.py"), ["train.workers=2"], Options(dry_run=True), ["--lr", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert "script   train.py --lr 0.1" in shown and "python train.py --config job.yaml" in shown
    assert "recipe" not in shown
    assert not (project / "runs").exists()


@pytest.mark.long
def test_the_scripts_folder_is_staged_apart_from_the_containers_entry(
    project: Path, tmp_path: Path
) -> None:
    (project / "requirements.txt").write_text("einops\n")
    (project / "out" / "old-run").mkdir(parents=True)
    (project / "out" / "old-run" / "weights.bin").write_text("x")
    job = open_job(job_of("train.py", "output_dir=out"))
    staged = project / "out" / "new-run" / "code"
    job.stage(staged)
    assert "stoker.entry.main" in (staged / "train.py").read_text()
    assert (staged / "script" / "train.py").read_text() == "import helper\n"
    assert (staged / "script" / "helper.py").is_file()
    assert not (staged / "script" / "out").exists(), "what runs leave does not travel with the next"
    assert "einops" in (staged / "requirements.txt").read_text()
    assert load(staged / "job.yaml").config.script == "train.py"
    assert json.loads((staged / "job.origins.json").read_text())["script"] == "command line"


def test_a_script_below_the_source_folder_is_found_from_there(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "examples").mkdir()
    (project / "examples" / "gan.py").write_text("import helper\n")
    for named in ("examples/gan.py", str(project / "examples" / "gan.py")):
        job = open_job(job_of(named), project)
        assert job.resolved.config.script == "examples/gan.py" and job.source_dir == project
    monkeypatch.chdir(project.parent)
    assert open_job(job_of("examples/gan.py"), project).resolved.config.script == "examples/gan.py"
    (project.parent / "other.py").write_text("")
    with pytest.raises(UsageError, match="is not in --source-dir"):
        open_job(job_of("other.py"), project)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        # sparse
        (lambda: os.truncate("data.bin", 600_000_000), "but holds more than 500 MB"),
        (Path("stoker").mkdir, "stoker would shadow Stoker's own"),
    ],
)
def test_a_folder_that_cannot_travel_is_refused(project: Path, make: Any, text: str) -> None:
    (project / "data.bin").touch()
    make()
    with pytest.raises(UsageError, match=text):
        open_job(job_of("train.py"))


def test_params_of_a_script_name_its_data_and_nothing_else(project: Path) -> None:
    (project / "flowers").mkdir()
    job = open_job(job_of("train.py", "params.train=./flowers"))
    assert job.data == {"train": str(project / "flowers")}
    with pytest.raises(UsageError, match=r"params.lr: no such file or folder here \(got '0.1'\)"):
        open_job(job_of("train.py", "params.lr=0.1"))


def test_resuming_a_script_is_going_on_in_its_run_directory(project: Path) -> None:
    from stoker_launcher.places import place_named
    from stoker_launcher.run_directory import resolve_resume

    config, place = job_of("train.py").config, place_named("local")
    run_dir = project / "runs" / "train-20250101-000000"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "summary.json").write_text('{"status": "interrupted"}')
    with pytest.raises(UsageError, match="holds no checkpoint"):
        resolve_resume(str(run_dir), place, config)
    (run_dir / "checkpoints" / "last.pt").touch()
    for asked in ("auto", str(run_dir)):
        assert resolve_resume(asked, place, config).run_dir == run_dir
    copied = resolve_resume(str(run_dir), place_named("rehearsal"), config)
    assert copied.checkpoints == (run_dir / "checkpoints" / "last.pt",)
    with pytest.raises(UsageError, match="a script resumes from"):
        resolve_resume("never", place, config)


@pytest.fixture
def work(project: Path) -> ScriptWork:
    work = ScriptWork.__new__(ScriptWork)
    work.config, work.where = job_of("train.py").config, str(project)
    work.head, work.job, work.use_gpu = "the head's node", "a job", False
    return work


def test_a_run_directory_that_only_the_head_keeps_has_a_copy_for_the_other_hosts(
    project: Path, work: ScriptWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Databricks and Vertex AI the head copies its own disk's to a volume or bucket that all hosts see."""
    for lasting in ("", str(project / "volume")):
        monkeypatch.setenv("STOKER_RUN_DIR", str(project / "disk"))
        monkeypatch.setenv("STOKER_LASTING_DIR", lasting)
        work.place = local_place()
        settings = work.settings()
        assert run_dir_on("the head's node", settings) == str(project / "disk")
        assert run_dir_on("another node", settings) == (lasting or str(project / "disk"))


def test_the_opening_line_counts_in_proper_plurals(project: Path, work: ScriptWork) -> None:
    said = []
    for work.workers in (1, 2):
        said.append(work.opening_line().partition("; ")[2])
    assert said == ["starting it on 1 CPU train worker …", "starting it on 2 CPU train workers …"]
    assert work.notes()[0].startswith(f"{len(list(project.iterdir()))} files from before")
