"""`submit.py init`: what it writes is sound, found where it lies, and never in the place of another file.

That such projects train: tests/e2e/test_wheel.py, tests/e2e/test_lightning_project.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.config.loading import load
from stoker.errors import UsageError
from stoker.recipe import load_recipe
from stoker_launcher.commands import KINDS
from stoker_launcher.job import open_job
from tests.command_line import type_command

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_a_project_is_checked_planned_and_staged_as_it_is(
    kind: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, errors, out = type_command(["init", f"my {kind}", "--kind", kind], capsys)
    assert (code, errors) == (0, [])
    assert f"stoker 'my {kind}/job.yaml'" in out
    names = {path.name for path in (here / f"my {kind}").iterdir()}
    assert {"job.yaml", ".gitignore"} < names and any(name.startswith("test_") for name in names)
    for name in ("recipe", "train"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    # From outside and from inside; a run inside must not travel in its own copy.
    for folder, file in ((here, f"my {kind}/job.yaml"), (here / f"my {kind}", "job.yaml")):
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(here))
        if folder == here or kind == "tabular":  # it takes seconds, and what it checks is the same
            code, errors, out = type_command([file, "--dry-run"], capsys)
            assert (code, errors) == (0, []), errors
        job = open_job(load(file, ["output_dir=results"]))
        assert job.name == f"my-{kind}" and job.source_dir == here / f"my {kind}"
        job.stage(Path("results/code"))
        staged = {path.name for path in Path("results/code").rglob("*")}
        assert names - {".gitignore"} <= staged and "results" not in staged
    if kind not in ("script", "lightning", "ray"):
        config = job.resolved.config
        assert load_recipe(config.recipe, config.params, here / f"my {kind}")


TESTS = """
import sys, pytest
for folder in sys.argv[1:]:
    for name in [name for name in sys.modules if name in ("recipe", "train", "test_recipe", "test_train")]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    assert pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", folder, folder]) == 0, folder
"""


@pytest.mark.long
def test_what_is_written_passes_its_own_tests_lint_and_types(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [f"my-{kind}" for kind in KINDS]
    for kind, folder in zip(KINDS, folders, strict=True):
        assert type_command(["init", folder, "--kind", kind], capsys)[0] == 0
    project = str(ROOT / "pyproject.toml")
    typed = [
        "--config-file",
        project,
        "--exclude",
        "none",
        "--cache-dir",
        str(ROOT / ".mypy_cache"),
    ]
    commands = [
        (["-m", "ruff", "check", "--config", project, "--ignore", "S101", *folders], here),
        (["-m", "ruff", "format", "--check", "--config", project, *folders], here),
        *(
            (["-m", "mypy", *typed, str(here / f"my-{kind}")], ROOT)
            for kind in ("images", "script")
        ),
        (["-c", TESTS, *(str(here / folder) for folder in folders)], here),
    ]
    for command, cwd in commands:
        project_folder = here / Path(command[-1]).name
        done = subprocess.run(
            [sys.executable, *command],
            cwd=cwd,
            env=os.environ | {"MYPYPATH": f"{ROOT / 'source_dir'}{os.pathsep}{project_folder}"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)


def test_no_file_is_overwritten_and_nothing_half_written(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "recipe.py").write_text("mine")
    (here / ".gitignore").symlink_to("nowhere")
    code, lines, _ = type_command(["init", "--kind", "text"], capsys)
    assert code == 2
    assert lines == [
        "error: recipe.py: already exists; nothing was written",
        "error: .gitignore: already exists; nothing was written",
    ]
    assert {path.name for path in here.iterdir()} == {"recipe.py", ".gitignore"}
    assert (here / "recipe.py").read_text() == "mine"


def test_the_help_names_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert type_command(["init", "--help"], capsys)[0] == 0
    shown = type_command(["init", "--help"], capsys)[2]
    assert all(kind in shown for kind in KINDS)


def test_the_project_is_the_readmes(here: Path) -> None:
    command = [sys.executable, str(ROOT / "launcher/submit.py"), "init", "my_project"]
    done = subprocess.run(command, cwd=here, stdin=subprocess.DEVNULL, capture_output=True)
    assert done.returncode == 0 and b"--kind images" in done.stdout
    assert (here / "my_project/recipe.py").is_file()


def test_a_recipe_is_found_beside_the_jobs_file(here: Path) -> None:
    (here / "jobs").mkdir()
    (here / "jobs/mine.yaml").write_text("recipe: rows:Counting\n")
    job = here / "jobs/mine.yaml"
    assert open_job(load(job)).source_dir is None
    (here / "jobs/rows.py").touch()
    assert open_job(load(job)).source_dir == here / "jobs"
    (here / "other").mkdir()
    assert open_job(load(job), here / "other").source_dir == here / "other"
    assert (
        open_job(load(ROOT / "source_dir/configs/audio.yaml", ["data.prepare=null"])).source_dir
        is None
    )


MODULES = {
    "job.yaml": "recipe: recipes:Mine\n",
    "train.py": "class Base: pass\nif __name__ == '__main__':\n    raise SystemExit('not this one')\n",
    "recipes.py": "from stoker.recipe import Recipe\nfrom train import Base\nclass Mine(Recipe):\n"
    "    def read(self, split): raise ValueError(Base.__module__)\n",
}


@pytest.mark.parametrize("words", [["job.yaml"], ["peek", "job.yaml"]])
def test_a_recipe_may_have_modules_named_train_and_recipes(here: Path, words: list[str]) -> None:
    """As Stoker's own folder has; in the staged copy of a run, and on the laptop."""
    for name, text in MODULES.items():
        (here / name).write_text(text)
    command = [sys.executable, str(ROOT / "launcher/submit.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Mine.read('train') failed: ValueError: train" in done.stderr


def test_two_scripts_of_one_name_are_not_guessed_between(here: Path) -> None:
    (here / "jobs").mkdir()
    (here / "jobs/job.yaml").write_text("script: train.py\n")
    (here / "jobs/train.py").touch()
    assert open_job(load("jobs/job.yaml")).source_dir == here / "jobs"
    (here / "train.py").touch()
    with pytest.raises(
        UsageError, match=r"train\.py could be .* choose the folder with --source-dir"
    ):
        open_job(load("jobs/job.yaml"))
    assert open_job(load("jobs/job.yaml"), Path("jobs")).source_dir == here / "jobs"
