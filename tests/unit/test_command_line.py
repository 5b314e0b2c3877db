"""What the command line offers before a job: its version, hints for mistyped words, completion in a shell."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from PIL import Image

import stoker
from stoker.events import console
from stoker.events.summary import Summary
from stoker_launcher.places.slurm import SlurmRun
from stoker_launcher.rehearsal.running import results
from tests.command_line import type_command

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_the_packages_and_follows_semver(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, out = type_command(["--version"], capsys)
    assert (code, out) == (0, f"stoker {stoker.__version__}\n")
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?", stoker.__version__)
    assert metadata.version("stoker") == stoker.__version__, "install again: pip install -e ."


COMPLETED = {
    "sta": "status",
    "status --": "--help",
    "job.yaml train.ep": "train.epochs=",
    "job.yaml --on ra": "ray",
}
"""What is typed → the one word that a shell offers."""


@pytest.mark.long
def test_a_shell_completes_commands_keys_and_places(tmp_path: Path) -> None:
    """Through the script that `stoker --show-completion` gives bash to read."""
    program = tmp_path / "stoker"
    program.write_text(
        f"#!{sys.executable}\nfrom stoker_launcher.command_line import main\nmain()\n"
    )
    program.chmod(0o755)
    script = """
        eval "$(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION=1 stoker --show-completion bash)"
        for typed in "$@"; do
            COMP_WORDS=(stoker $typed); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _stoker_completion stoker
            echo "${COMPREPLY[@]}"
        done
    """
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script, "bash", *COMPLETED],
        env=os.environ | {"PYTHONPATH": str(ROOT / "launcher"), "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == [*COMPLETED.values()], done.stderr


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"]])
def test_help_fits_a_screen_and_names_every_command(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from stoker_launcher.command_line import app

    code, _, out = type_command(words, capsys)
    assert code == 0
    assert len(out.splitlines()) <= 40 and "source_dir/configs/digits.yaml" in out
    commands = [
        command.callback.__name__ for command in app.registered_commands if command.callback
    ]
    assert words != ["--help"] or all(f"\n  {name} " in out for name in commands)


WRONG = {
    "a parameter": (
        ["params.augment=flop"],
        ["params.augment: input should be 'none', 'flip' or 'crop'"],
    ),
    "a folder and a metric": (
        [
            "params.data=./nowhere",
            "checkpoint.monitor=val/acc5",
            "params.model=resnet19",
            "train.strategy=a:b",
        ],
        [
            "the job's source; available: ",
            "nowhere: no such file",
            "checkpoint.monitor: no metric 'val/acc5'",
            "timm has no model 'resnet19'",
        ],
    ),
    "a schedule without an end": (
        ["recipe=uncertain:Unknown", "params={}", "train.scheduler=cosine"],
        ["train.scheduler: cosine needs the number of records", "set train.max_steps, or use none"],
    ),
    "nothing": (
        [
            "recipe=uncertain:Unknown",
            "params={}",
            "train.scheduler=cosine",
            "train.max_steps=9",
            "train.batch_size=4",
        ],
        [],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", WRONG)
def test_a_dry_run_checks_what_a_run_checks_and_leaves_nothing(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, expected = WRONG[case]
    monkeypatch.chdir(tmp_path)
    for number in range(8):
        file = Path(f"data/train/{number % 2}/{number}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (number, 0, 0)).save(file)
    Path("job.yaml").write_text("params: {data: ./data}\ntrain: {batch_size: 4}\n")
    before = sorted(tmp_path.rglob("*"))
    source = ["--source-dir", str(ROOT / "tests" / "recipes")] if "uncertain" in str(words) else []
    code, lines, shown = type_command(["job.yaml", *words, *source, "--dry-run"], capsys)
    assert code == (2 if expected else 0), lines
    assert [part for part in expected if not any(part in line for line in lines)] == []
    assert not [line for line in lines if "/tmp/stoker-" in line], "a folder that is gone"
    assert ("python train.py --config job.yaml" in shown) == (not expected)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_interpreter_without_the_packages_is_told_in_one_line() -> None:
    command = [sys.executable, "-S", str(ROOT / "launcher/submit.py"), "job.yaml"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PATH": os.environ["PATH"]}, check=False
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "lacks typer, " in done.stderr and "make setup" in done.stderr


def test_printed_commands_can_be_pasted_whatever_the_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "my runs" / "it's one"
    quoted = shlex.quote(f"{run_dir}/tensorboard")
    rows = dict(console.closing_rows(Summary(name="x", place="local"), str(run_dir)))
    assert shlex.split(rows["next"]) == ["tensorboard", "--logdir", f"{run_dir}/tensorboard"]
    (run_dir / "tensorboard").mkdir(parents=True)
    assert f"next: tensorboard --logdir {quoted}" in results(run_dir, succeeded=True)
    slurm = SlurmRun("7", run_dir)
    assert f"stoker logs -f {shlex.quote(str(run_dir))};" in slurm.detached()
    monkeypatch.chdir(tmp_path)
    code, _, shown = type_command(["init", "my project", "--kind", "tabular"], capsys)
    assert code == 0
    assert "stoker 'my project/job.yaml'" in shown and "pytest 'my project/test_recipe.py'" in shown


def test_shown_parameters_are_what_the_recipe_gets(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "params.image_size=032",
        "params.num_classes=null",
        "params.augment=none",
        "params.data=a #1",
    ]
    code, _, shown = type_command(
        ["example:digits", "recipe=ImageClassification", *words, "--show-config"], capsys
    )
    assert code == 0
    rows = dict(
        re.findall(r"^params\.(\w+) +\S.*? {2,}(.+?) \(command line\)", shown, re.MULTILINE)
    )
    assert rows["image_size"] == "32" and rows["augment"] == '"none"' and rows["data"] == '"a #1"'


def test_keys_of_mappings_are_shown_as_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("recipe: ImageClassification\nsagemaker: {prices: {ml.g5.xlarge: 9.9}}\n")
    code, _, shown = type_command([str(job), "sagemaker.prices.gpu=5", "--show-config"], capsys)
    rows = {line.split()[0]: line for line in shown.splitlines()}
    assert code == 0
    assert f'{{"ml.g5.xlarge": 9.9, "gpu": 5.0}} ({job}, command line)' in rows["sagemaker.prices"]
    assert " {} " in rows["vertex.prices"]


@pytest.mark.parametrize(
    ("status", "code"), [("succeeded", 0), ("failed", 1), ("interrupted", 143)]
)
def test_following_the_log_of_a_run_ends_with_the_runs_code(
    status: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/console.log").write_text("step 1\n")
    (tmp_path / "summary.json").write_text(json.dumps({"status": status}))
    assert type_command(["logs", "-f", str(tmp_path)], capsys) == (code, [], "step 1\n")
    assert type_command(["logs", str(tmp_path)], capsys)[0] == 0
