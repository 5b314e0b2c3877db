"""What a user gets for each way of getting the configuration wrong: one clear line, exit code 2."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest

from stoker.config.loading import load
from stoker.errors import UsageError
from stoker.recipe import load_recipe
from stoker_launcher.job import open_job
from stoker_launcher.notebook import plan
from tests.command_line import type_command

GOOD = "name: job\nrecipe: rows:Counting\n"

FILES = {
    "trian: {epochs: 3}": "job.yaml: trian: unknown key; did you mean train?",
    "train: {epoch: 3}": "train.epoch: unknown key; did you mean epochs?",
    "batch_size: 3": "batch_size: unknown key; did you mean train.batch_size?",
    "train: {epochs: many}": "train.epochs: input should be a valid integer",
    "data: {order: exakt}": "data.order: input should be 'any' or 'exact' (got 'exakt')",
    "data: {bad_record_budget: 2}": "should be less than or equal to 1 (got 2)",
    "name: 'two words'": "job.yaml: name: ",
    "seed: 1\nseed: 2": "the key 'seed' stands twice",
    "train: [1, 2": "job.yaml: not valid YAML: line ",
    "args: &a [*a]": "job.yaml: not valid YAML: an alias refers to itself",
    "train: &t {epochs: 3, early_stopping: *t}": "an alias refers to itself",
    "params: {a: &a {b: {<<: *a}}}": "an alias refers to itself",
    "params: {a: &a {b: *a}}": "an alias refers to itself",
    "params: {a: *b}": "not valid YAML: line 1, column 13: found undefined alias",
    "params: {day: 2024-02-30}": "job.yaml: not valid YAML: ",
    "params: {x: !!int ''}": "job.yaml: not valid YAML: ",
    "params: {x: !!python/object:os.system {}}": "could not determine a constructor for the tag",
    "1: x": "job.yaml: ",
    "output_dir: $NO_SUCH/x": "output_dir: $NO_SUCH is not set",
    "params: {data: ~nobody-here/x}": "params.data: ~nobody-here is no user's home",
    "- train": "holds a list, not keys and values",
    "train:\n\tepochs: 3": "not valid YAML: line 2, column 1: found character '\\t'",
    "output_dir: /proc/x": "output_dir: /proc/x cannot be written",
    "output_dir: /etc/passwd": "output_dir: /etc/passwd cannot be written",
    "data: {prepare: 'recipes.none:write'}": "no module recipes.none",
    "name: 3": "name: input should be a valid string (got 3)",
    "name: a/b": "up to 63 letters, digits, - _ and ., beginning with",
    "seed: -1": "seed: input should be greater than or equal to 0",
    "seed: 1.5": "got a number with a fractional part (got 1.5)",
    "recipe: ''": "recipe: must not be empty (got '')",
    "tracking: {mlflow: {uri: ''}}": "tracking.mlflow.uri: must not be empty; null for none (got '')",
    "recipe: stoker.train.lightning_recipe:LightningRecipe": "--kind lightning",
    "script: ''": "script: must not be empty",
    "args: 3": "args: must be a list, such as [a, b] (got 3)",
    "params: [1]": "params: input should be a valid dictionary",
    "train: 3": "train: has keys of its own: epochs, max_steps, batch_size",
    "sagemaker: {gpu: ml.g5.xlarge}": "gpu: has keys of its own: type, count",
    "sagemaker: {prices: {ml.g5.xlarge: -1}}": "ml.g5.xlarge: input should be greater than or equal to 0",
    "train: {lr: inf}": "train.lr: input should be a finite number",
    "train: {lr: 0}": "train.lr: input should be greater than 0",
    "train: {epochs: true}": "train.epochs: must be a number (got True)",
    "train: {epochs: 010}": "line 1, column 17: 010 is 8 in YAML; quote it if it is text, or write the plain",
    "train: {max_steps: 1:30}": "line 1, column 20: 1:30 is 90 in YAML",
    "params: {rate: 1:30.5}": "1:30.5 is 90.5 in YAML",
    "sagemaker: {prices: {ml.g5.xlarge: yes}}": "sagemaker.prices: must be a number",
    "rehearsal: {join_delay: {algo-3: true}}": "rehearsal.join_delay: must be a number",
    "rehearsal: {join_delay: {algo-3: -5}}": "algo-3: must be a number of seconds from 0, or never",
    "data: {remainder: true}": "data.remainder: must be a number (got True)",
    "train: {precision: bfloat16}": "input should be 'fp32', 'bf16' or 'fp16'",
    "train: {ema_decay: 2}": "train.ema_decay: input should be less than 1",
    "train: {early_stopping: {patience: 5}}": "monitor is required",
    "data: {cache: disk, cache_folder: x}": "cache_folder requires cache: disk and an",
    "data: {cache_gb: 1}": "cache_gb requires cache: memory or cache: disk",
    "data: {cache_share: 0.5}": "cache_share requires cache: memory or cache: disk",
    "data: {preprocess_on: cpu}": "must be a list, such as [a, b] (got 'cpu')",
    "data: {remainder: keep}": "data.remainder: must be drop, pad or a number",
    "data: {remainder: 0}": "data.remainder: must be drop, pad or a number",
    "data: {remainder: 2.5}": "data.remainder: must be drop, pad or a number",
    "cluster: {port: 99999}": "cluster.port: input should be less than or equal",
    "cluster: {cpu_hosts: {min: 3, max: 2}}": "cluster.cpu_hosts: min (3) is larger than max (2)",
    "cluster: {cpu_hosts: {max: 2, usd_per_hour: 1}}": "set both usd_per_hour and rest_usd_per_hour",
    "cluster: {cpu_hosts: {max: 2}}": "cluster.cpu_hosts: with --on local hosts cannot be added",
    "tracking: {mlflow: {uri: 'http://me:secret@host'}}": "mlflow.uri: contains a user name or password",
    "tracking: {mlflow: {uri: 'host:5000'}}": "tracking.mlflow.uri: must be an address: http://host:5000",
    "tracking: {mlflow: true}": "tracking.mlflow: has keys of its own: uri, ",
    "tracking: {sinks: [nope]}": "has the wrong form: additional event sinks",
    "export: onnx": "export: must be a list, such as [a, b] (got 'onnx')",
    "export: [onxx]": "input should be 'safetensors', 'torch_export', 'onnx' or",
    "? [a]\n: b": "not valid YAML: line 1, column 3: a key must be text",
    "!!python/object:os.system x": "could not determine a constructor for the tag",
    "params:\n  a: &a [x,x,x,x,x,x,x,x,x,x]\n"
    + "".join(
        f"  {n}: &{n} [{','.join(['*' + p] * 10)}]\n"
        for p, n in ("ab", "bc", "cd", "de", "ef", "fg")
    ): "or it holds more than 1,000,000 values",
    "params: " + "[" * 3000 + "]" * 3000: "not valid YAML: it is nested too deeply",
}
"""What is in the job's file → the end of the line."""

REMOTE = "output_dir: /shared\nparams: {data: s3://b/x}"
COMMANDS = {
    "'export=[&a [*a]]'": "export: must be a list",
    "--source-dir=$NO_SUCH": "--source-dir=$NO_SUCH: $NO_SUCH is not",
    "train.epochs": "'train.epochs' is not of the form key=value",
    "seed.x=1": "seed is a value, not a section",
    "train.lr=fast": "command line: train.lr: ",
    "--on sagemakr": "--on sagemakr: no such place",
    "--source-dir nowhere": "nowhere: no such folder",
    "train.strategy=fdsp": "train.strategy: has the wrong form: ddp: replicate the model",
    "train.epochs=-1": "train.epochs: input should be greater than or equal",
    "=3": "command line: '=3': the key has an empty part",
    "-- --lr 3": "args: requires a script",
    "train.py --lr 3": "; a script's own arguments go after --",
    "--dryrun": "No such option: --dryrun (Possible options: --driver, --dry-run)",
    "--address http://h:1": "--address: is not supported with --on",
    "--on ray": "--address: needed with --on ray",
    "--dashboard --on rehearsal": "--dashboard: is not supported with --on rehearsal",
    "--dashboard --on vertex": "--dashboard: is not supported with --on vertex",
    "--on rehearsal cluster.dashboard=true": "cluster.dashboard: only for local runs",
    "--on ray --address head:8265": "jobs go to the dashboard, http://<head>:8265",
    "--on rehearsal rehearsal.hosts=gpu": "'gpu' is not group=count",
    "--on rehearsal rehearsal.faults=explode:algo-1": "'explode:algo-1' is not action:host@20s",
    "--resume nowhere": "--resume nowhere: no such folder",
    "--resume /proc/sys": "neither a run directory nor a folder",
    "data.prepare=recipes.digits:wirte": "has no wirte; did you mean write?",
}
"""What stands behind the job's file → the line."""

BEYOND = """
    seed=x output_dir= train.batch_size=0 train.batch_size=1.5 train.workers=0 train.workers=auto
    train.scheduler=consine train.warmup_epochs=-1 train.label_smoothing=1.0 train.mixup=-0.1
    train.accumulate_steps=0 train.clip_grad_norm=0 train.max_steps=0 data.block_records=0 data.prefetch_s=-1
    data.cache=ram data.cache_gb=0 data.cache_share=1.5 data.transport=rdma data.stall_timeout_s=0
    data.remainder=-1 cluster.port=80 cluster.cpus=0 cluster.min_cpu_hosts=-2 checkpoint.keep=0
    checkpoint.every_steps=0 checkpoint.dir= checkpoint.mode=lower tracking.log_every_steps=0
    vertex.boot_disk_gb=5 slurm.gpu.nodes=0 slurm.cpu.nodes=-1 slurm.max_runtime_s=-5 slurm.max_runtime_s=4h
    slurm.stop_before_s=-1 slurm.gpu.gpus=-1
    recipe= data.prepare= data.bucket_by= train.optimizer= train.early_stopping.monitor= cluster.gpu_group=
    checkpoint.monitor= sagemaker.gpu.type= sagemaker.region= sagemaker.role= sagemaker.image=
    sagemaker.kms_key= sagemaker.volume_kms_key= vertex.gpu.machine_type= vertex.kms_key= vertex.image=
    rehearsal.hosts= slurm.account= slurm.gpu.partition= slurm.gpu.qos= slurm.gpu.gpu_type=
"""


@pytest.mark.parametrize("word", BEYOND.split())
def test_a_value_beyond_the_bounds_of_its_key_is_refused_by_the_keys_name(word: str) -> None:
    with pytest.raises(UsageError) as refused:
        load(None, [word])
    (problem,) = refused.value.problems
    key = word.partition("=")[0]
    assert f"{key}: input should be" in problem or f"{key}: must" in problem


def marks(text: str) -> list[pytest.MarkDecorator]:
    """YAML that its reader must go through at length to refuse it."""
    return [pytest.mark.long] if "&" in text or "[[[" in text else []


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        *(pytest.param(text, "", expected, marks=marks(text)) for text, expected in FILES.items()),
        *(
            ("seed: 1" if "--on r" not in words else REMOTE, words, said)
            for words, said in COMMANDS.items()
        ),
    ],
    ids=range(len(FILES) + len(COMMANDS)),
)
def test_one_clear_line_and_exit_code_2(
    text: str, words: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    code, lines, _ = type_command([str(path), "--dry-run", *shlex.split(words)], capsys)
    assert (code, len(lines)) == (2, 1), lines
    assert expected in lines[0]


RECIPES = {
    "no such module": ("", "price:Prices", "no module price in "),
    "a module with a typing error": ("", "prces:Prices", "did you mean prices?"),
    "no such class": ("", "prices:Price", "has no Price; did you mean Prices?"),
    "no path": ("", "prices.Prices", "'prices.Prices' is not of the form package.module:name"),
    "no such short name": ("", "ImageClassificaton", "did you mean ImageClassification?"),
    "a syntax error": ("def broken(:\n", "prices:Prices", "SyntaxError: "),
    "an absent package": (
        "import timmm\n",
        "prices:Prices",
        "needs the module 'timmm', which is not installed",
    ),
}


@pytest.mark.parametrize("case", RECIPES)
def test_a_wrong_recipe_is_refused_in_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, recipe, expected = RECIPES[case]
    (tmp_path / "prices.py").write_text(
        f"{first}from stoker.recipe import Recipe\n\n\nclass Prices(Recipe):\n    pass\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "prices", raising=False)
    with pytest.raises(UsageError) as caught:
        load_recipe(recipe, {}, tmp_path)
    (problem,) = caught.value.problems
    assert problem.startswith("recipe: ") and expected in problem
    assert "recipe.py" not in problem, "no file of ours is named"


@pytest.mark.parametrize(
    ("typed", "text", "lines", "parts"),
    [
        ("jobs.yaml", GOOD, 1, ["no such configuration file; did you mean", "job.yaml"]),
        ("job.yaml", "", 1, ["the file is empty"]),
        ("job.yaml data.order=no", "trian: 1\ntrain: {epochs: 0, lr: x}\n", 4, []),
    ],
    ids=["absent: the nearest is named", "empty", "all errors come at once"],
)
def test_a_file_that_gives_no_job_is_refused(
    typed: str,
    text: str,
    lines: int,
    parts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(text)
    code, told, _ = type_command(typed.split(), capsys)
    assert (code, len(told)) == (2, lines)
    assert [part for part in parts if part not in told[0]] == []


TYPED = {
    "an option without a value": (["jobs/job.yaml", "--on"], "Option '--on' requires an argument"),
    "a folder as the job": (["jobs"], "jobs: is a folder; did you mean jobs/job.yaml?"),
    "an empty folder as the job": (["empty"], "empty: is a folder; name a job's YAML file"),
    "an override in the job's place": (
        ["train.epochs=3"],
        "before overrides: JOB.yaml train.epochs=3",
    ),
    "no such script": (["fin.py"], "script: no file fin.py; did you mean fine.py?"),
    "no such script to check": (
        ["check", "./jobs/../fin.py"],
        "no such script; did you mean jobs/../fine.py?",
    ),
    "a script that is not Python": (
        ["broken.py"],
        "script: broken.py is not Python: invalid syntax (line 1)",
    ),
    "a key that a script ignores": (
        ["fine.py", "train.lr=3"],
        "train.lr: has no effect on a script",
    ),
    "a binary file": (["binary.yaml"], "binary.yaml: cannot be read as text"),
    "status before the first run": (["status"], "runs/latest: there is no run yet; start one"),
    "logs before the first run": (["logs"], "runs/latest: there is no run yet"),
    "report before the first run": (["report"], "no such folder; is there no run yet?"),
    "status of no run": (["status", "nowhere"], "nowhere: not a run directory, nor an id"),
    "logs of no run": (["logs", "nowhere"], "nowhere: not a run directory"),
    "stop of no run": (["stop", "nowhere"], "nowhere: not a run directory"),
    "status without a region": (["status", "sagemaker:x"], "write sagemaker:<region>/x"),
    "status of no Ray job": (["status", "ray:foo"], "ray:http://<head>:8265/<job>"),
    "report of no run": (["report", "nowhere"], "nowhere: not a run directory"),
    "report of another folder": (
        ["report", "jobs"],
        "jobs: not a run directory (no summary.json in it)",
    ),
    "comparing nothing": (["compare", "nowhere"], "nowhere: not a run directory"),
    "size of a script": (["size", "fine.py"], "size: needs a recipe"),
    "size of nothing": (["size", "jbos/job.yaml"], "jbos/job.yaml: no such configuration file"),
    "checking a job": (
        ["check", "jobs/job.yaml"],
        "is a job's configuration; measure it with `size jobs/job.yaml`",
    ),
    "checking nothing": (["check"], "SCRIPT: none given"),
    "too few steps": (["check", "fine.py", "--steps", "0"], "--steps: must be at least 10 (got 0)"),
    "a GPU host without one": (
        ["check", "fine.py", "--gpu", "ml.c5.xlarge"],
        "--gpu ml.c5.xlarge: has no GPU",
    ),
    "no time": (
        ["check", "fine.py", "--timeout", "-5"],
        "--timeout: must be more than 0 seconds (got -5)",
    ),
    "too many words": (["status", "a", "b"], "Got unexpected extra argument(s) (b)"),
    "a word for a number": (["check", "fine.py", "--steps", "x"], "Invalid value for '--steps'"),
}


@pytest.mark.parametrize("case", TYPED)
def test_a_mistyped_command_is_one_line_and_leaves_nothing(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, expected = TYPED[case]
    monkeypatch.chdir(tmp_path)
    for folder in ("jobs", "empty"):
        Path(folder).mkdir()
    Path("jobs/job.yaml").write_text(GOOD)
    for name, content in (
        ("fine.py", b""),
        ("broken.py", b"def f(:\n"),
        ("binary.yaml", b"\xff\xfe\x00"),
    ):
        Path(name).write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    code, lines, _ = type_command(words, capsys)
    assert (code, len(lines)) == (2, 1), lines
    assert expected in lines[0]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_fails_while_the_source_is_staged_leaves_no_run(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/old").mkdir(parents=True)
    Path("runs/latest").symlink_to("old")
    Path("job.yaml").write_text(GOOD)
    failure = OSError(number, os.strerror(number), "x")
    with mock.patch("shutil.copytree", side_effect=shutil.Error([("a", "b", str(failure))])):
        code, lines, _ = type_command(["job.yaml"], capsys)
    assert (
        (code, len(lines)) == (2, 1)
        and os.strerror(number) in lines[0]
        and "cannot be written" in lines[0]
    )
    with mock.patch("shutil.copytree", side_effect=failure):
        code, lines, _ = type_command(["job.yaml"], capsys)
    assert (code, len(lines)) == (2, 1) and os.strerror(number) in lines[0]
    assert {path.name for path in Path("runs").iterdir()} == {"old", "latest"}
    assert str(Path("runs/latest").readlink()) == "old"


LONG = "word " * 100


def test_a_text_too_long_for_a_path_is_no_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOME_FOLDERS", "/" + LONG)
    Path("job.yaml").write_text(GOOD)
    Path("rows.py").write_text((Path(__file__).parents[1] / "recipes" / "rows.py").read_text())
    words = ["job.yaml", f"tracking.mlflow.tags={{note: {LONG}}}", "--dry-run"]
    assert type_command(words, capsys)[:2] == (0, [])
    assert open_job(load(None, [f"params.prompt={LONG}"])).data == {}
    planned = plan(
        f"{{name: made, recipe: 'rows:Counting', tracking: {{mlflow: {{tags: {{n: {LONG}}}}}}}}}",
        (),
        "local",
    )
    assert planned.job.name == "made"
    for words in (
        [f"params.prompt={LONG}"],
        ["x" * 300],
        ["status", LONG],
        ["job.yaml", "--resume", LONG],
    ):
        code, lines, _ = type_command(words, capsys)
        assert (code, len(lines)) == (2, 1), lines


def test_a_staging_folder_that_is_full_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(GOOD)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/staged")
    with mock.patch("stoker_launcher.commands.run", side_effect=full):
        code, lines, _ = type_command(["job.yaml"], capsys)
    assert code == 2
    assert lines == [
        "error: /tmp/staged: No space left on device; free up space, shorten a name or choose another folder"
        " (output_dir=…, TMPDIR)"
    ]
