"""The site builds without a broken link, and what its pages tell people to type exists."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from stoker.config.loading import load, schema_rows
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.events.kinds import KINDS
from stoker_launcher.command_line import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
KEYS = {key for key, _, _ in schema_rows(Config)}


def build(folder: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-d", str(target)],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=550,
    )


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_site_builds_with_every_reference_and_a_broken_link_fails(tmp_path: Path) -> None:
    """One build, with a link to nowhere: it is the only fault."""
    copy = tmp_path / "copy"
    for name in ("docs", "scripts", "source_dir", "launcher"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, copy)
    with (copy / "docs/start.md").open("a") as page:
        page.write("\n[nothing](nowhere.md)\n")
    done = build(copy, tmp_path / "site")
    [fault] = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert "start.md" in fault and "nowhere.md" in fault, done.stderr
    assert done.returncode != 0
    settings = (tmp_path / "site/reference/configuration.html").read_text()
    assert all(f"<code>{key}</code>" in settings for key in KEYS)
    commands = (tmp_path / "site/reference/commands.html").read_text()
    group: Any = typer.main.get_command(app)
    assert all(f'id="{name}"' in commands for name in group.commands)
    assert "read_webdataset" in (tmp_path / "site/reference/api.html").read_text()
    errors = (tmp_path / "site/reference/errors.html").read_text()
    assert "nothing was written" in errors and "choose another cluster.port" in errors


def commands_of(page: Path) -> Iterator[str]:
    for block in re.findall(r"^```(?:bash)?\n(.*?)^```", page.read_text(), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"(python launcher/submit\.py|stoker) ", line):
                yield line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_has_the_options_and_keys_that_a_page_gives_it(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    for line in commands_of(page):
        words = shlex.split(line, comments=True)
        words = [
            word for word in words[2 if words[0] == "python" else 1 :] if word not in ("…", "...")
        ]
        if words[0].startswith("--"):
            continue  # an option of all commands, as --version
        name = words.pop(0) if words[0] in group.commands else "run"
        given = words[: words.index("--")] if "--" in words else words
        typed = group.commands[name].make_context(name, given)
        for key in [word.partition("=")[0] for word in typed.params.get("overrides") or []]:
            known = key in KEYS or any(key.startswith(f"{each}.") for each in KEYS)
            assert known, f"{line}: {key}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_and_keys_within_sentences_exist(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    sections, below = {key.partition(".")[0] for key in KEYS}, {"params", *Config.model_fields}
    known = KEYS | {key.rpartition(".")[0] for key in KEYS} | below
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for span in re.findall(r"`([^`\n]+)`", prose):
        for key in re.findall(r"(?<![\w/.*-])([a-z_]+(?:\.[a-z_]\w*)+)", span):
            section, _, suffix = key.rpartition(".")
            if key.partition(".")[0] in sections - {"params"} and suffix not in (
                "json",
                "py",
                "sh",
                "yaml",
            ):
                assert key in known or section in KEYS or key.split(".")[0] == "slurm", (
                    f"{span}: {key}"
                )
        words = span.split(" -- ")[0].split() or [""]
        typed = words[1:] if words[0] in ("stoker", "submit.py") else words
        if typed is words and words[0] not in group.commands:
            continue
        verb = typed[0] if typed and typed[0] in group.commands else "run"
        options = {option for parameter in group.commands[verb].params for option in parameter.opts}
        for option in re.findall(r"(?<![\w-])--[a-z-]+", " ".join(typed)):
            assert option in options | {"--version", "--help", "--install-completion"}, (
                f"{span}: {option}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_configuration_of_a_page_is_valid(page: Path, tmp_path: Path) -> None:
    for text in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.M | re.S):
        if not re.search(
            r"^(recipe|script|train|data|sagemaker|tracking|checkpoint|cluster|params):", text, re.M
        ):
            continue  # of something else
        (tmp_path / "job.yaml").write_text(text.replace("…", ""))
        try:
            load(tmp_path / "job.yaml")
        except UsageError as error:
            raise AssertionError(f"{page.name}: {error}\n{text}") from None


def test_every_kind_of_event_is_documented_and_no_other() -> None:
    page = (ROOT / "docs/events.md").read_text()
    rows = re.findall(r"^\| (`[a-z_`, ]+) \|", page, re.MULTILINE)
    documented = {kind for row in rows for kind in re.findall(r"\w+", row)}
    assert documented == set(KINDS) - {"record_ids", "output"}, "these go to files of their own"


def test_the_gallery_shows_each_of_its_jobs_with_its_report() -> None:
    page = (ROOT / "docs/gallery.md").read_text()
    made = (ROOT / "scripts/gallery.py").read_text()
    jobs = re.findall(r'^    "(\w+)": \[', made, re.MULTILINE)
    assert len(jobs) == 8
    for job in jobs:
        assert f"(gallery/{job}.html)" in page
        report = (ROOT / "docs/gallery" / f"{job}.html").read_text()
        assert "Throughput" in report and "/tmp/" not in report and str(ROOT) not in report
