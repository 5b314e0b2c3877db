"""Rules of the project that a program can hold: dependencies, imports, sizes, links, one command."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from stoker.hosts import requirements
from stoker.hosts.requirements import canonical

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER_ONLY = {"typer", "rich", "boto3", "requests"}
FROM_THE_IMAGE = {"torch", "torchvision"}


def requirement_names(lines: list[str]) -> dict[str, str]:
    rows = [line.split("#")[0].strip() for line in lines]
    return {canonical(re.split(r"[\[<>=!~]", row)[0].strip()): row for row in rows if row}


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, EXTRAS = PYPROJECT["project"], PYPROJECT["project"]["optional-dependencies"]


def test_the_container_and_the_laptop_agree_on_dependencies() -> None:
    laptop = requirement_names([*PROJECT["dependencies"], *EXTRAS["train"]])
    container = requirement_names((ROOT / "source_dir/requirements.txt").read_text().splitlines())
    assert {k: v for k, v in laptop.items() if k not in LAUNCHER_ONLY | FROM_THE_IMAGE} == container


def test_the_supported_versions_are_those_of_the_dependencies() -> None:
    needs = requirement_names(EXTRAS["train"])
    assert needs["ray"] == f"ray[data,train]>={requirements.OLDEST_RAY}"
    assert needs["torch"] == f"torch>={requirements.OLDEST_TORCH}"
    oldest, newest = requirements.PYTHONS[0], requirements.PYTHONS[-1]
    assert PROJECT["requires-python"] == f">={oldest},<3.{int(newest.split('.')[1]) + 1}"


def test_every_dependency_is_pinned_by_name_and_version_alone() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = requirement_names(lines)
    assert all(re.fullmatch(r"[a-z0-9._-]+==[A-Za-z0-9.!+_-]+", row) for row in pins.values())
    groups = [*EXTRAS.values(), *PYPROJECT["dependency-groups"].values()]
    wanted = [*PROJECT["dependencies"], *itertools.chain(*groups)]
    assert set(requirement_names(wanted)) <= set(pins)


@pytest.mark.soak
def test_all_extras_and_the_pins_resolve_together(tmp_path: Path) -> None:
    """In one go and without trying version after version; needs a package index."""
    report = tmp_path / "report.json"
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-input", "--quiet"]
    options = [
        "-c",
        "constraints.txt",
        "--group",
        "dev",
        "--report",
        str(report),
        f".[{','.join(EXTRAS)}]",
    ]
    done = subprocess.run([*pip, *options], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {each["metadata"]["name"]: each for each in json.loads(report.read_text())["install"]}
    assert "stoker" in found
    pins = requirement_names((ROOT / "constraints.txt").read_text().splitlines())
    unpinned = set(requirement_names(list(found))) - set(pins)
    assert unpinned <= {"stoker"}, "each has its version"


LOADED: dict[str, tuple[str, str]] = {
    "a script's session": (
        "import stoker; stoker.log, stoker.checkpoint_dir",
        "ray torch pydantic numpy yaml",
    ),
    "the configuration and the command": (
        "import stoker.config.loading, stoker.config.schema, stoker.recipe, stoker_launcher.command_line",
        "ray torch boto3 numpy",
    ),
    "a local run": (
        "from pathlib import Path; from stoker_launcher import commands, run_directory\n"
        "from stoker_launcher.places import Options, place_named\n"
        "options = Options(source_dir=Path('x'), dry_run=True, resume='auto')\n"
        "commands.refuse_meaningless(options, place_named('local'))",
        "stoker.events "
        + " ".join(
            f"stoker_launcher.places.{place}" for place in ("ray", "sagemaker", "slurm", "vertex")
        ),
    ),
    "a dry run": (
        "from stoker_launcher.places import sagemaker; from tests.clouds import SAGEMAKER, job_of\n"
        "assert 'ml.c5.4xlarge' in sagemaker.plan(job_of(SAGEMAKER), offline=True).render()",
        "ray torch boto3 numpy",
    ),
    "the driver, which plans the train workers": (
        "from pathlib import Path; import stoker.entry.driver, stoker.scripts.supervisor\n"
        "from stoker.config.schema import Config; from stoker.train.recipe_work import count_workers\n"
        "config = Config(recipe='none:None'); stoker.entry.driver.optional_sinks(config, Path('x'))\n"
        "assert count_workers(config, {'CPU': 2.0}) == (1, False)",
        "ray torch tensorboard",
    ),
}


@pytest.mark.parametrize("what", LOADED)
def test_what_has_no_use_for_a_large_package_does_not_load_it(what: str) -> None:
    code, without = LOADED[what]
    assert not loaded_by(code) & {*without.split()}


def test_entering_loads_only_the_standard_library() -> None:
    """What requirements.txt would install cannot be imported before it is installed."""
    names = {
        name.split(".")[0]
        for name in loaded_by("import stoker.entry.main, stoker.hosts.requirements")
    }
    assert names - {*sys.stdlib_module_names} == {"stoker"}


def loaded_by(code: str) -> set[str]:
    code = f"import sys; before = {{*sys.modules}}\n{code}\nprint(*({{*sys.modules}} - before))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {*done.stdout.split()}


def test_links_in_the_documentation_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_names_of_hosts_and_folders_of_a_machine_stay_out() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in tracked.stdout.split():
        path = ROOT / name
        if path.is_file() and path.suffix in (".py", ".md", ".txt", ".toml", ".yaml", ".sh"):
            assert "files.pythonhosted" not in path.read_text() or path == Path(__file__), name


def test_no_two_files_of_tests_have_one_name() -> None:
    """Pytest would not collect them together."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py")]
    assert {name for name in names if names.count(name) > 1} <= {"conftest.py", "__init__.py"}
