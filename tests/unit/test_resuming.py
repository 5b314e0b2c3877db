"""From which checkpoint a run goes on, whether it is still the same run, and in which run directory."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rows import Counting

from stoker.checkpoints import format as checkpoint
from stoker.checkpoints.format import Content
from stoker.config.loading import load
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.events.summary import Metrics, Summary
from stoker.place import RunPlace
from stoker.storage.checkpoint_store import open_store
from stoker.train import resume as resuming
from stoker_launcher import run_directory as launcher
from stoker_launcher.places import place_named


def resolve(asked: str | None, on: str, config: Config) -> launcher.Resume:
    return launcher.resolve_resume(asked, place_named(on), config)


def save(folder: Path, step: int, config: Config | None = None, **meta: Any) -> Path:
    about = {
        "step": step,
        "next_epoch": 0,
        "monitored": None,
        "global_batch": 64,
        "workers": 1,
        **meta,
    }
    about["config"] = (config or load(None).config).model_dump(mode="json")
    saved = checkpoint.save(open_store(str(folder)), Content({"w": torch.zeros(9)}, {}, about))
    return folder / saved.name


def plan(
    run_dir: Path, *overrides: str, where: str = "local", job: str = ""
) -> tuple[resuming.Start, list[str]]:
    synced = where == "sagemaker"
    folders = (run_dir, run_dir / "run", run_dir / "model")
    place = RunPlace(where, *folders, synced, job=job)
    said: list[str] = []
    return resuming.plan_resume(load(None, overrides).config, place, said.append), said


class Tables(Counting):
    table: Path


SPOILT = {
    "unfinished": lambda folder: (folder / "manifest.json").unlink(),
    "damaged": lambda folder: (folder / "manifest.json").write_text("{}"),
    "absent": lambda folder: (folder / "model.safetensors").unlink(),
}
STARTS = """
# checkpoints (folder/step) | dir, resume | where | the run starts from, or is refused | what it says
| | local | nothing |
run/5 run/10 | | local | run/10 |
run/5 run/10=damaged | | local | run/5 | skipping checkpoint step-00000010: its manifest is damaged
run/5=unfinished | | sagemaker | nothing | run has no valid checkpoint; starting from scratch
run/10=unfinished | | local | nothing | run has no valid checkpoint; starting from scratch
run/10=unfinished run/5=damaged | | local | refused | /run has no valid checkpoint (step-00000005: its man
ck/10=unfinished | dir=ck | local | nothing | ck has no valid checkpoint; starting from scratch
ck/10=unfinished ck/5=damaged | dir=ck | local | refused | /ck has no valid checkpoint (step-00000005: its
old/9 run/5=unfinished | resume=old/9 | sagemaker | old/9 | skipping checkpoint step-00000005: it is incom
run/5 | dir=new | local | refused | new has no checkpoint, but TMP/run has those of this run (step-00000005)
new/5 | dir=new | local | new/5 |
old/checkpoints/5 old/checkpoints/10 | resume=old | local | old/checkpoints/10 |
old/checkpoints/5 old/checkpoints/10 | resume=old/checkpoints | local | old/checkpoints/10 |
old/checkpoints/5 old/checkpoints/10 | resume=old/checkpoints/5 | local | old/checkpoints/5 |
old/5 run/7 | resume=old/5 | local | run/7 | run has checkpoints of this job: resuming from them
ck/5 ck/10=unfinished | dir=ck resume=ck/5 | local | ck/5 | skipping checkpoint step-00000010: it is inc
ck/5=unfinished ck/10=unfinished | dir=ck resume=never | local | nothing | skipping checkpoint
| resume=nowhere | local | refused | checkpoint.resume: TMP/nowhere: no checkpoint there
ck/5 | resume=ck/99 | local | refused | checkpoint.resume: TMP/ck/step-00000099: no such checkpoint
ck/3=absent | resume=ck/3 | local | refused | step-00000003: model.safetensors is absent
ck/3=absent | resume=ck | local | refused | no complete checkpoint in TMP/ck
ck/10 | dir=ck resume=never | local | refused | dir: TMP/ck has checkpoints of an earlier run (step-00000010)
ck/5 ck/10 | dir=ck resume=ck/5 | local | refused | also has the later step-00000010
| resume=ftp://host/x | local | refused | cannot read ftp:// addresses
| resume=gs:// | local | refused | gs://: names no bucket; write gs://<bucket>/…
"""


@pytest.mark.parametrize("row", STARTS.strip().splitlines()[1:])
def test_which_checkpoint_a_run_starts_from(tmp_path: Path, row: str) -> None:
    saved, given, where, starts, said = (part.strip() for part in row.split("|"))

    def path(word: str) -> Path:
        folder, _, step = word.rpartition("/")
        return tmp_path / (f"{folder}/step-{int(step):08d}" if step.isdigit() else word)

    for word in saved.split():
        name, _, damage = word.partition("=")
        made = save(path(name).parent, int(name.rpartition("/")[2]))
        SPOILT.get(damage, Path)(made)
    words = []
    for key, value in (word.split("=") for word in given.split()):
        plain = value == "never" or "://" in value
        words.append(f"checkpoint.{key}={value if plain else path(value)}")
    own = path(next((w[4:] for w in given.split() if w.startswith("dir=")), "run"))
    with pytest.raises(UsageError) if starts == "refused" else contextlib.nullcontext() as caught:
        (store, start), lines = plan(tmp_path, *words, where=where)
        assert store.where == str(own), "new ones go to the run"
        assert (start.path if start else "nothing") == str(path(starts) if start else starts)
    if caught is not None:
        assert len(caught.value.problems) == 1
        lines = caught.value.problems
    assert said.replace("TMP", str(tmp_path)) in " ".join(lines) and bool(said) == bool(lines)


def test_only_the_runs_own_epochs_are_among_the_best(tmp_path: Path) -> None:
    def best(folder: Path) -> dict[str, float]:
        place = RunPlace("local", folder, folder / "checkpoints", folder / "model", False)
        config, summary = (
            load(None, [f"checkpoint.resume={old}"]).config,
            Summary(metrics=Metrics(modes={"val/acc1": "max"})),
        )
        data = SimpleNamespace(recipe=Counting(), sources={})
        resuming.find_start(config, place, data, 1, summary, print)
        assert summary.epochs == 2 and summary.metrics.last["val/acc1"] == 0.5
        return {name: value for name, value in summary.metrics.best.items() if name == "val/acc1"}

    values = [1.0, 0.5]
    history = [
        {"epoch": n, "metrics": {"val/acc1": value}, "books": []} for n, value in enumerate(values)
    ]
    old = save(tmp_path / "old/checkpoints", 5, history=history, pending=None)
    assert best(tmp_path / "old") == {"val/acc1": 1.0}
    assert best(tmp_path / "new") == {}
    history[0]["elsewhere"] = True
    save(tmp_path / "new/checkpoints", 7, history=history, pending=None)
    assert best(tmp_path / "new") == {"val/acc1": 0.5}


def test_only_the_runs_own_starts_count_in_its_time_and_cost(tmp_path: Path) -> None:
    def seconds(folder: Path) -> float:
        place = RunPlace("local", folder, folder / "checkpoints", folder / "model", False)
        config, summary = load(None, [f"checkpoint.resume={old}"]).config, Summary(started="now")
        data = SimpleNamespace(recipe=Counting(), sources={})
        resuming.find_start(config, place, data, 1, summary, print)
        assert summary.started == ("earlier" if summary.earlier_s else "now")
        return summary.earlier_s

    old = save(tmp_path / "old/checkpoints", 5, started="earlier", seconds=7200.0)
    assert seconds(tmp_path / "new") == 0, "those are another run's hours"
    assert seconds(tmp_path / "old") == 7200, (
        "as a restart on a service finds them, without a summary"
    )


OTHER = {"job": "other", "service_job": "other-1"}
OWN = {"job": "job", "service_job": "job-1"}


@pytest.mark.parametrize(
    ("resume", "job", "written_by", "starts_from"),
    [
        ("", "job-1", OWN, "run"),
        ("", "job-1", OTHER, None),
        ("", "job-1", {"job": "job", "service_job": "job-0"}, None),
        ("", "job-1", {}, None),  # by an earlier version
        ("auto", "job-1", OTHER, "run"),
        ("{shared}/run", "job-1", OTHER, "run"),
        ("{shared}/run/step-00000005", "job-1", OTHER, "run"),
        ("{shared}/else", "job-1", OTHER, "else"),
        ("{shared}/else", "job-1", OWN, "run"),
        ("never", "job-1", OWN, "run"),
        ("never", "job-1", OTHER, ""),
        ("", "", {}, "run"),
        ("", "", {"job": "job"}, "run"),
        ("", "", {"job": "other"}, None),
        ("", "", OWN, None),
        ("{shared}/else", "", {"job": "other"}, None),
        ("auto", "", OTHER, "run"),
    ],
)
def test_checkpoints_of_another_job_are_continued_only_on_request(
    tmp_path: Path, resume: str, job: str, written_by: dict[str, str], starts_from: str | None
) -> None:
    save(tmp_path / "run", 5, **written_by)
    save(tmp_path / "else", 3)
    words = ["name=job", *([f"checkpoint.resume={resume.format(shared=tmp_path)}"] * bool(resume))]
    where = "sagemaker" if job else "ray"
    if starts_from is None:
        with pytest.raises(UsageError, match=r"^checkpoint.resume: .*another job, .*set auto"):
            plan(tmp_path, *words, where=where, job=job)
        return
    (store, start), _ = plan(tmp_path, *words, where=where, job=job)
    assert (start.path if start else "").startswith(str(tmp_path / starts_from) * bool(starts_from))
    assert (start is None) == (starts_from == "")
    apart = bool(job) and store.where == str(tmp_path / "run" / job)
    assert apart == (written_by == OTHER and starts_from != "run")
    if apart:  # after a restart of the same job
        save(Path(store.where), 7, **OWN)
        assert plan(tmp_path, *words, where=where, job=job)[0][1].path.endswith(
            f"{job}/step-00000007"
        )


@pytest.mark.parametrize(
    ("override", "refused", "said"),
    [
        ("seed=1", "seed: 1 here, 0 in step-00000005", ""),
        ("params.width=8", "params.width: '8' here, '4' in step-00000005", ""),
        ("params.depth=2", "params.depth: '2' here, None in step-00000005", ""),
        ("train.optimizer=adamw", "train.optimizer: 'adamw' here, 'sgd' in", ""),
        ("recipe=a:B", "recipe: 'a:B' here", ""),
        ("train.layer_decay=0.5", "train.layer_decay: 0.5 here, None in step-00000005", ""),
        ("params.tokenizer=org/gpt-b", "params.tokenizer: 'org/gpt-b' here, 'org/bert-a' in", ""),
        ("params.weights=s3://b/w", "params.weights: 's3://b/w' here, 's3://a/w' in step-", ""),
        ("params.table=s3://b/t", "", "params.table: 's3://b/t' here, '/t' in step-00000005"),
        ("train.precision=bf16", "", "train.precision: bf16 here, fp32 in step-00000005"),
        (
            "params.data=/mnt/b",
            "",
            "params.data: '/mnt/b' here, '/mnt/a' in step-00000005; the records are",
        ),
        ("train.batch_size=32", "", "a step takes 32 records here"),
        (
            "train.lr=1",
            "",
            "train.lr: 1.0 here, 0.01 in step-00000005: the learning rate continues",
        ),
        ("train.momentum=0.5", "", "train.momentum: 0.5 here, 0.9 in step-00000005: no effect"),
        ("train.epochs=20", "", ""),
        ("train.threads=1", "", ""),
        ("params.class_names=[a, b]", "", ""),
    ],
)
def test_another_run_is_refused_and_a_different_one_is_said(
    tmp_path: Path, override: str, refused: str, said: str
) -> None:
    base = [
        "params.width=4",
        "params.data=/mnt/a",
        "params.tokenizer=org/bert-a",
        "params.weights=s3://a/w",
        "params.table=/t",
    ]
    save(tmp_path / "run", 5, load(None, base).config)
    start = plan(tmp_path)[0][1]
    assert start is not None
    lines: list[str] = []
    config = load(None, [*base, override]).config
    if refused:
        with pytest.raises(UsageError) as caught:
            resuming.check_same_run(config, 1, start, lines.append, Tables.model_construct())
        assert len(caught.value.problems) == 1
        assert refused in caught.value.problems[0]
        assert "checkpoint.resume=never" in caught.value.problems[0]
    else:
        resuming.check_same_run(config, 1, start, lines.append, Tables.model_construct())
        assert [line for line in lines if said not in line] == []
        assert len(lines) == bool(said)


# ---- on the laptop ----


def a_run(root: Path, name: str, status: str, steps: tuple[int, ...] = (5,)) -> Path:
    folder = root / name
    (folder / "code").mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"schema": 1, "status": status}))
    for step in steps:
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Config:
    a_run(tmp_path, "digits-20260101-000000", "failed")
    a_run(tmp_path, "digits-20260102-000000", "interrupted")
    a_run(tmp_path, "digits-20260103-000000", "succeeded")
    a_run(tmp_path, "digits-20260104-000000", "failed", steps=())
    a_run(tmp_path, "digits-large-20260105-000000", "failed")
    (tmp_path / "latest").symlink_to("digits-20260103-000000")
    return load(None, ["name=digits", f"output_dir={tmp_path}"]).config


def test_typed_auto_goes_on_with_the_newest_unfinished_run_of_the_name(
    runs: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    found = resolve("auto", "local", runs)
    assert found.run_dir == Path(runs.output_dir) / "digits-20260102-000000"
    assert found.value == "auto"
    other = runs.model_copy(update={"name": "new"})
    assert resolve("auto", "local", other) == launcher.Resume("auto")
    assert (
        "no unfinished run of new in" in (said := capsys.readouterr().out)
        and "has a checkpoint" in said
    )
    assert resolve(None, "local", runs) == launcher.Resume()


def test_a_named_run_goes_on_where_it_lies_and_one_checkpoint_begins_a_new_run(
    runs: Config,
) -> None:
    root = Path(runs.output_dir)
    for asked in ("latest", "digits-20260103-000000", "digits-20260103-000000/checkpoints"):
        found = resolve(str(root / asked), "local", runs)
        assert found.run_dir == root / "digits-20260103-000000"
    step = root / "digits-20260101-000000/checkpoints/step-00000005"
    assert resolve(str(step), "local", runs) == launcher.Resume(str(step))


def test_a_run_with_checkpoints_nowhere_is_not_begun_again_in_its_directory(
    runs: Config, tmp_path: Path
) -> None:
    ended, unfinished = (tmp_path / f"digits-{day}-000000" for day in ("20260104", "20260102"))
    outside = load(
        None, ["name=digits", f"output_dir={tmp_path}", f"checkpoint.dir={tmp_path}/ck"]
    ).config
    with pytest.raises(
        UsageError, match=f"{ended} holds no checkpoint, nor does checkpoint.dir: {tmp_path}"
    ):
        resolve(str(ended), "local", outside)
    assert resolve("auto", "local", outside).run_dir == unfinished
    save(tmp_path / "ck", 5)
    assert resolve(str(ended), "local", outside).run_dir == ended
    assert resolve("auto", "local", outside).run_dir == ended
    assert launcher.continuation(ended, outside).endswith(f"--resume {ended}")
    (tmp_path / "ck/step-00000005/manifest.json").unlink()
    assert resolve(None, "local", outside) == launcher.Resume()
    with pytest.raises(UsageError, match=f"{ended} holds no checkpoint, nor does"):
        resolve(str(ended), "local", outside)


@pytest.mark.parametrize("where", ["gs://", "s3:///x", "s3://", "ftp://x/y"])
def test_a_folder_that_cannot_be_read_is_left_to_the_run_to_say(runs: Config, where: str) -> None:
    given = load(None, ["name=digits", f"checkpoint.dir={where}"]).config
    assert resolve(None, "local", given) == launcher.Resume()


@pytest.mark.parametrize(
    ("where", "refused"), [("local", 1), ("rehearsal", 0), ("slurm", 0), ("ray", 0)]
)
def test_a_new_run_does_not_take_over_another_ones_checkpoints_unless_a_service_starts_it(
    tmp_path: Path, where: str, refused: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def given(*more: str) -> Config:
        return load(
            None, [f"output_dir={tmp_path}/runs", f"checkpoint.dir={tmp_path}/ck", *more]
        ).config

    assert resolve(None, where, given()) == launcher.Resume()
    save(tmp_path / "ck", 5)
    says = r"ck has checkpoints of another run \(step-00000005\), .* --resume auto or --resume RUN"
    with pytest.raises(UsageError, match=says) if refused else contextlib.nullcontext():
        resolve(None, where, given("train.lr=0.001"))
    assert resolve(None, where, given(f"checkpoint.resume={tmp_path}/ck")) == launcher.Resume()
    assert resolve("auto", where, given()) == launcher.Resume(
        "auto"
    )  # a rehearsal's hosts have another folder
    said = capsys.readouterr().out
    assert said.endswith(f"starting a new one, from {tmp_path}/ck/step-00000005\n") or not refused


def test_a_rehearsal_takes_over_from_a_bucket_only_what_it_is_told_to(
    runs: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(runs.output_dir)
    run = str(a_run(root, "digits-20260106-000000", "failed", steps=()))
    save(root / "ck", 5)
    monkeypatch.setattr(
        launcher, "open_store", lambda where: open_store(where.replace("s3:/", str(root)))
    )

    def given(where: str) -> Config:
        return load(None, ["name=digits", f"output_dir={root}", f"checkpoint.dir={where}"]).config

    with pytest.raises(UsageError, match=r"has checkpoints of another run \(step-00000005\)"):
        resolve(None, "rehearsal", given("s3://ck"))
    for asked in ("auto", run):
        assert resolve(asked, "rehearsal", given("s3://ck")) == launcher.Resume("auto")
    with pytest.raises(
        UsageError, match=r"holds no checkpoint, nor does checkpoint\.dir on its hosts: "
    ):
        resolve(run, "rehearsal", given(f"{root}/ck"))


@pytest.mark.parametrize(
    ("asked", "on", "says"),
    [
        ("{root}/nowhere", "local", r"no such folder \({root} exists\)"),
        ("{root}/digits-20260104-000000", "local", "holds no checkpoint"),
        ("{root}", "local", "neither a run directory nor a folder with step-"),
        ("{root}/latest", "sagemaker", "name s3://"),
        ("{root}/latest", "vertex", "name gs://"),
        ("runs/latest", "ray", "an absolute folder shared by the cluster's hosts"),
        ("auto", "sagemaker", "each launch writes its own checkpoints"),
    ],
)
def test_a_wrong_path_is_one_line(runs: Config, asked: str, on: str, says: str) -> None:
    root = runs.output_dir
    with pytest.raises(UsageError, match=says.format(root=root)) as caught:
        resolve(asked.format(root=root), on, runs)
    assert len(caught.value.problems) == 1


def test_a_rehearsals_hosts_are_given_the_checkpoints(runs: Config) -> None:
    run = Path(runs.output_dir) / "digits-20260102-000000"
    found = resolve("auto", "rehearsal", runs)
    assert found.checkpoints == (run / "checkpoints/step-00000005",)
    assert found.run_dir is None
    assert resolve("s3://b/run/checkpoints", "sagemaker", runs).value == "s3://b/run/checkpoints"


def test_a_run_that_stopped_with_a_checkpoint_says_how_it_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, config = tmp_path / "my runs" / "job-1", load(None).config
    assert launcher.continuation(run, config) == "", "there is no checkpoint"
    save(run / "checkpoints", 3)
    assert launcher.continuation(run, config).endswith(" --resume 'my runs/job-1'")
    monkeypatch.chdir(Path(__file__).parent)
    assert launcher.continuation(run, config).endswith(f" --resume '{run}'")
