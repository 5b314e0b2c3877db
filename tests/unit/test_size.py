"""`submit.py size`: the table, the recommendation and its reasons, from given measurements."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded import record
from typer.testing import CliRunner

from stoker.config.loading import load
from stoker.errors import UsageError
from stoker.events.prices import price_list
from stoker.events.summary import read_summary
from stoker.hosts.run_lock import PROCESS_FILE
from stoker_launcher.advise.advice import Advice, Candidate, Measured, Wanted, advise, table_name
from stoker_launcher.advise.sizing import job_samples
from stoker_launcher.command_line import app

BLURS = [
    {"stage": f"blur {i + 1}", "cpu_ms_per_sample": 10.4, "bytes_out": 150_528} for i in range(10)
]
POST = Measured(
    cpu_s=0.105,
    cpu_spread=0.06,
    bytes_per_sample=150_528,
    receive_s=0.00002,
    other_s=0.0003,
    serial_s=0.0001,
    receive_spread=0.5,
    gpu_samples_per_s={"A10G": 78.0},
    stages=[{"stage": "RandomImage", "cpu_ms_per_sample": 1.0, "bytes_out": 150_528}, *BLURS],
    samples=1_000_000,
)
"""Ten torchvision blurs at about 0.1 s per image, and a ViT whose GPU trains 2.05 times what 4 vCPUs feed
(towardsdatascience.com, "Effective Load Balancing with Ray on Amazon SageMaker")."""
ITS_HOSTS = Wanted(
    ("ml.g5.xlarge",),
    ("ml.c5.xlarge", "ml.c5.2xlarge", "ml.c5.4xlarge"),
    configured=("ml.g5.xlarge", "ml.c5.4xlarge", 1),
)


def named(advice: Advice, hosts: str) -> Candidate:
    return next(one for one in advice.table if one.hosts == hosts)


class TestSyntheticVit:
    advice = advise(POST, ITS_HOSTS, price_list())
    composed = advise(replace(POST, cpu_s=POST.cpu_s / 30), ITS_HOSTS, price_list())

    def test_offloading_pays_as_they_found(self) -> None:
        alone = named(self.advice, "1 × ml.g5.xlarge")
        theirs = named(self.advice, "1 × ml.g5.xlarge + 1 × ml.c5.4xlarge")
        assert alone.binds == "cpu" or alone.binds == "gpu_host_cpu"
        assert theirs.samples_per_s > 2 * alone.samples_per_s
        assert theirs.usd_per_million_samples < 0.77 * alone.usd_per_million_samples, (
            "at least their 23 %"
        )
        assert theirs.binds == "gpu", "its 16 vCPUs are more than needed"

    def test_a_smaller_cpu_host_is_the_better_buy(self) -> None:
        best = self.advice.best
        assert best is not None and best.cpu_hosts and best.cpu_type != "ml.c5.4xlarge"
        theirs = named(self.advice, "1 × ml.g5.xlarge + 1 × ml.c5.4xlarge")
        assert best.samples_per_s == theirs.samples_per_s == 78
        assert best.usd_per_million_samples < 0.82 * theirs.usd_per_million_samples
        (now,) = [line for line in self.advice.lines if line.startswith("configured now")]
        assert "larger or more than needed" in now

    def test_and_a_faster_chain_a_better_one_still(self) -> None:
        dear = [
            {"stage": "read", "cpu_ms_per_sample": 1.0},
            {"stage": "blur", "cpu_ms_per_sample": 3.0},
        ]
        advice = advise(replace(POST, stages=dear), ITS_HOSTS, price_list())
        assert advice.lines[-1] == "blur takes 75 % of the chain, 3.0 ms per sample"
        best = self.composed.best
        assert best is not None and best.hosts == "1 × ml.g5.xlarge"
        assert self.composed.lines[0].endswith("costs 14 % more per sample")
        assert self.advice.best is not None
        assert best.usd_per_million_samples < 0.8 * self.advice.best.usd_per_million_samples

    def test_a_bigger_gpu_host_is_weighed_against_cpu_hosts(self) -> None:
        advice = advise(replace(POST, cpu_s=0.098), ITS_HOSTS, price_list())
        assert advice.best is not None and advice.best.hosts == "1 × ml.g5.2xlarge"
        assert "a bigger GPU host instead of CPU hosts; the best with them, 1 × " in advice.lines[0]

    def test_every_figure_says_how_sure_it_is_and_of_when_its_price_is(self) -> None:
        alone = named(self.advice, "1 × ml.g5.xlarge")
        assert alone.low == pytest.approx(alone.samples_per_s / 1.06)
        assert alone.high == pytest.approx(alone.samples_per_s * 1.06)
        assert alone.usd == pytest.approx(alone.usd_per_million_samples)
        assert self.advice.notes[0].startswith("estimated, prices of 2026-11")

    def test_a_figure_that_may_be_off_by_all_of_itself_still_has_two_ends(self) -> None:
        vague = replace(POST, cpu_spread=1.5, receive_spread=2.0, gpu_spread=3.0)
        advice = advise(vague, ITS_HOSTS, price_list())
        assert all(0 < one.low < one.samples_per_s < one.high < math.inf for one in advice.table)

    def test_a_vcpu_slower_than_a_core_here_needs_more_of_them(self) -> None:
        half = advise(POST, replace(ITS_HOSTS, speed=0.5), price_list())
        assert named(half, "1 × ml.g5.xlarge").samples_per_s == pytest.approx(
            named(self.advice, "1 × ml.g5.xlarge").samples_per_s / 2
        )


def test_hosts_that_are_as_cheap_and_as_fast_are_not_called_dearer() -> None:
    alone = Wanted(("ml.g5.xlarge",), ("ml.c5.xlarge",), configured=("ml.g5.xlarge", None, 0))
    known = dict(price_list().prices)
    for factor, told in ((0.994, 0), (1.0, 0), (1.3, 1)):
        known["ml.g5.xlarge"] = factor * known["ml.g5.2xlarge"]
        # Slightly faster with the bigger host's CPUs, while the GPU is all but the limit.
        measured = replace(POST, cpu_s=2.86 / 78)
        advice = advise(measured, alone, replace(price_list(), prices=known))
        lines = [line for line in advice.lines if line.startswith("configured now")]
        assert len(lines) == told, advice.lines
    assert "% more expensive per sample" in lines[0]


@pytest.mark.parametrize(
    ("times", "said"),
    [(1.005, "as cheap as"), (0.8, "20 % less than"), (1.2, "costs 20 % more per sample")],
)
def test_a_cost_that_is_alike_is_not_called_less_or_more(times: float, said: str) -> None:
    """With a CPU host, a sample costs so many times what it costs without."""
    hosts = Wanted(("ml.g5.xlarge",), ("ml.c5.xlarge",), max_cpu_hosts=1)
    measured, known = replace(POST, gpu_samples_per_s={"A10G": 1000.0}), price_list()
    table = advise(measured, hosts, known)
    alone, both = (
        named(table, "1 × ml.g5.xlarge"),
        named(table, "1 × ml.g5.xlarge + 1 × ml.c5.xlarge"),
    )
    price, gain = alone.usd_per_hour, both.samples_per_s / alone.samples_per_s
    own = dict.fromkeys(known.prices, 100.0) | {"ml.g5.xlarge": price}
    own["ml.c5.xlarge"] = price * gain * times - price
    assert said in advise(measured, hosts, replace(known, prices=own)).lines[0]


def test_without_a_gpus_rate_capacities_and_no_recommendation() -> None:
    advice = advise(replace(POST, gpu_samples_per_s={}), ITS_HOSTS, price_list())
    assert advice.best is None and advice.lines[0].startswith("no recommendation")
    rates = [one.samples_per_s for one in advice.table if one.cpu_type in (None, "ml.c5.xlarge")]
    assert rates == sorted(rates) and len(rates) >= 4


JOB = """\
# Flowers, at night.
name: flowers  # the run's name
train:
  epochs: 4
sagemaker:
  # Chosen by hand.
  gpu: {type: ml.g5.xlarge, count: 1}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    record(tmp_path / "run", 200)
    file = tmp_path / "flowers.yaml"
    file.write_text(JOB)
    return file


def size(job: Path, *arguments: str) -> Any:
    given = ["size", str(job), "--from", str(job.parent / "run"), *arguments]
    return CliRunner().invoke(app, given)


def figures(job: Path, *arguments: str) -> dict[str, Any]:
    """What programs get, for a GPU of 900 samples/s."""
    shown = size(job, "--gpu-samples-per-s", "900", "--json", *arguments)
    assert shown.exit_code == 0, shown.output
    found: dict[str, Any] = json.loads(shown.stdout)
    return found


def test_from_a_run_the_recommendation_leads_the_table(job: Path) -> None:
    shown = size(job, "--gpu-samples-per-s", "A10G=3000", "--cpu", "ml.c5.xlarge")
    assert shown.exit_code == 0, shown.output
    (best,) = [line for line in shown.output.splitlines() if line.startswith("recommended: ")]
    assert f"▶ {best.removeprefix('recommended: ').partition(',')[0]} " in " ".join(
        shown.output.split()
    )
    assert "estimated, prices of" in shown.output and job.read_text() == JOB


def test_prices_by_group_hold_for_the_groups_machines(job: Path) -> None:
    def alone(*given: str) -> tuple[float, str]:
        found, host = figures(job, *given), ("ml.g5.xlarge", 0)
        (row,) = [n for n in found["candidates"] if (n["gpu_type"], n["cpu_hosts"]) == host]
        return row["usd_per_hour"], found["notes"][0]

    price, label = alone("sagemaker.prices={gpu: 9, office: 1}")
    assert price == 9 and "own prices for ml.g5.xlarge)" in label
    assert alone("sagemaker.prices={ml.g5.xlarge: 7, gpu: 9}")[0] == 7


def test_a_vertex_job_is_told_that_the_table_is_of_sagemakers_machines(job: Path) -> None:
    none, google = "sagemaker.gpu.type=null", "vertex.gpu.machine_type=g2-standard-8"
    for words, says in (([none, google], True), ([none], False), ([google], False)):
        notes = figures(job, *words)["notes"]
        assert any("not those of vertex" in note for note in notes) == says


def test_the_run_of_another_job_and_a_failed_run_are_named(job: Path) -> None:
    run = job.parent / "run"

    def notes(params: str) -> list[str]:
        found = figures(job, f"params={params}")["notes"]
        return [note for note in found if note.startswith("the run")]

    text = (
        "recipe: recipes.digits:Digits\nparams: {data: /there/rows, size: 64, token: (redacted)}\n"
    )
    recipe = json.loads(json.dumps(load(job).config.recipe))
    (run / "config.yaml").write_text(text.replace("recipes.digits:Digits", recipe))
    assert notes("{data: rows, size: 64, token: hf_abc}") == []
    assert notes("{data: rows, size: 32, labels: [a, b]}") == [
        'the run\'s job differs: params.labels is not set there, ["a", "b"] here',
        "the run's job differs: params.size is 64 there, 32 here",
        "the run's job differs: params.token is (redacted) there, not set here",
    ]
    same = "{lr: 0.001, flag: true, sizes: [1, 2], most: .inf, at: {x: 5.0}, text: '1e-3', day: 2024-01-01"
    same += ", raw: !!binary /w==}"
    (run / "config.yaml").write_text(f"recipe: {recipe}\nparams: {same}\n")
    words = "lr=1e-3, flag=True, sizes=[1,2], most=.inf, at={x: 5}, text=1e-3, day=2024-01-01, raw=!!binary /w=="
    found = figures(job, *(f"params.{word}" for word in words.split(", ")))
    assert "differs" not in str(found["notes"]), "the same job in other words"
    summary = read_summary(run / "summary.json")
    summary.status, summary.error = "failed", "disk full"
    summary.write(run)
    (run / "config.yaml").unlink()
    assert notes("{size: 32}") == ["the run failed: disk full"]
    summary.status, summary.error = "running", None
    summary.write(run)
    (run / PROCESS_FILE).write_text("1")  # whose lock nobody holds
    assert notes("{size: 32}") == ["the run failed: it ended without a result"], "it was killed"


def test_as_json_for_programs(job: Path) -> None:
    told = figures(job)
    assert told["measured"]["cpu_s"] == pytest.approx(0.0021), (
        "the run's own chain: 0.2 + 1.1 + 0.8 ms"
    )
    assert told["measured"]["bytes_per_sample"] == 150_528
    assert told["recommended"] in told["candidates"] and told["estimated"] is True
    costs = [one["usd_per_million_samples"] for one in told["candidates"]]
    assert costs == sorted(costs)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "ml.g5.xlarg"], "--gpu ml.g5.xlarg: unknown instance type; did you"),
        (["--cpu", "ml.g5.xlarge"], "--cpu ml.g5.xlarge: has a GPU"),
        (["--gpu", "ml.c5.xlarge"], "--gpu ml.c5.xlarge: has no GPU"),
        (["--gpu-samples-per-s", "many"], "--gpu-samples-per-s many: give samples per second"),
        (
            ["--gpu-samples-per-s", "B7=4"],
            "--gpu-samples-per-s B7=4: no GPU 'B7'; known: A100-40GB, ",
        ),
        (["--gpu-samples-per-s", "-1"], "--gpu-samples-per-s -1: give samples per second"),
        (["--max-cpu-hosts", "-1"], "--max-cpu-hosts: must be at least 0 (got -1)"),
        (["--cpu-speed", "0"], "--cpu-speed: must be between 0 and 10 (got 0.0)"),
        (["--from", "nowhere"], "--from nowhere: no run there"),
        (["train.epochs=0"], "train.epochs"),
        (
            ["sagemaker.prices={ml.g5.xlarge: -1}"],
            "ml.g5.xlarge: input should be greater than or equal to 0",
        ),
    ],
)
def test_wrong_requests_are_one_line_each(job: Path, arguments: list[str], said: str) -> None:
    shown = size(job, *arguments)
    assert isinstance(shown.exception, UsageError), shown.output
    assert len(shown.exception.problems) == 1 and said in shown.exception.problems[0]


@pytest.mark.parametrize(
    ("host", "rated"),
    [
        ("ml.g5.2xlarge", ["A10G"]),
        ("a3-highgpu-1g", ["H100"]),
        ("a2-highgpu-1g", []),  # an A100, but not told which
        ("n1-standard-8", []),
        (None, []),
    ],
)
def test_a_rate_holds_for_the_runs_own_kind_of_gpu_alone(
    job: Path, host: str | None, rated: list[str]
) -> None:
    summary = read_summary(job.parent / "run" / "summary.json")
    summary.cluster.hosts[0].type = host
    summary.write(job.parent / "run")
    shown = size(job, "--json")
    told = json.loads(shown.stdout)
    assert list(told["measured"]["gpu_samples_per_s"]) == rated
    assert shown.exit_code == (0 if rated == ["A10G"] else 1), "the job's hosts have A10Gs"
    assert rated or any("samples/s on a GPU of" in note for note in told["notes"])


def test_gpus_that_no_train_worker_uses_count_neither_for_the_runs_rate_nor_for_the_job(
    job: Path,
) -> None:
    run = job.parent / "run"
    summary = read_summary(run / "summary.json")
    summary.cluster.hosts[0].type = "ml.g5.xlarge"
    summary.write(run)
    rate = json.loads(size(job, "--json").stdout)["measured"]["gpu_samples_per_s"]["A10G"]
    summary.cluster.hosts[0].type, summary.cluster.hosts[0].gpus = "ml.g5.12xlarge", 4
    summary.write(run)
    told = json.loads(size(job, "--gpu", "ml.g5.12xlarge", "train.workers=1", "--json").stdout)
    assert told["measured"]["gpu_samples_per_s"]["A10G"] == pytest.approx(rate), (
        "its one train worker's"
    )
    assert max(one["samples_per_s"] for one in told["candidates"]) <= rate * 1.001
    summary.train_workers = 4
    summary.write(run)
    each = json.loads(size(job, "--json").stdout)["measured"]["gpu_samples_per_s"]["A10G"]
    assert each == pytest.approx(rate / 4)


def test_gpu_hosts_that_do_not_preprocess_get_cpu_hosts_that_feed_them_alone(job: Path) -> None:
    assert figures(job)["recommended"]["cpu_hosts"] == 0
    words = ["sagemaker.cpu={type: ml.c5.xlarge, count: 1}", "data.preprocess_on=[cpu]"]
    told = figures(job, *words)
    for one in told["candidates"]:
        assert one["cpu_hosts"] and one["remote_share"] == pytest.approx(1), (
            "else the run would be refused"
        )
    assert told["recommended"]["samples_per_s"] == pytest.approx(900)
    assert "the GPU hosts do not preprocess" in told["reasons"][0]
    (problem,) = size(job, *words, "--max-cpu-hosts", "0").exception.problems
    assert problem.startswith("data.preprocess_on: ")
    both = figures(job, *words, "data.preprocess_on=[cpu, gpu]")
    assert both["recommended"]["cpu_hosts"] == 0
    assert any(one["cpu_hosts"] for one in both["candidates"])
    alone = figures(job, *words, "data.preprocess_on=[gpu]")
    assert not any(one["cpu_hosts"] for one in alone["candidates"]), "they would be idle"


@pytest.mark.parametrize(
    ("epochs", "hit_pct", "says"),
    [
        (
            4,
            98.0,
            "mean of 1 epoch of the run, of which the first fills the cache (98 % of the last",
        ),
        (4, None, "(0 % of the last whole one's records came from it)"),
        (4, None, "in the 4 epochs of the job, a sample costs less CPU time than counted here"),
        (1, 0.0, "in the 1 epoch of the job, a sample costs as counted here"),
    ],
)
def test_a_run_with_a_cache_says_what_its_cost_is_the_mean_of(
    job: Path, epochs: int, hit_pct: float | None, says: str
) -> None:
    def notes() -> list[str]:
        found = figures(job, f"train.epochs={epochs}")["notes"]
        return [note for note in found if note.startswith("data.cache: ")]

    summary = read_summary(job.parent / "run" / "summary.json")
    assert notes() == []
    if hit_pct is None:  # a short run in its first epoch
        summary.chain.insert(
            2, {"stage": "keep", "cpu_ms_per_sample": 0.1, "bytes_out": 0, "random": True}
        )
    else:
        summary.cache = {"kind": "memory", "hosts": [], "hit_pct": hit_pct}
    summary.write(job.parent / "run")
    (note,) = notes()
    assert says in note


OWN = "{name: g, type: ml.p4d.24xlarge, count: 4}, {name: c, type: ml.m5.4xlarge, count: 3}"


def test_your_own_groups_are_the_configured_hosts(job: Path) -> None:
    told = figures(job, "sagemaker.gpu.type=null", f"sagemaker.groups=[{OWN}]")["candidates"]
    assert {(one["gpu_type"], one["gpu_hosts"]) for one in told} == {("ml.p4d.24xlarge", 4)}
    assert ("ml.m5.4xlarge", 3) in {(one["cpu_type"], one["cpu_hosts"]) for one in told}


@pytest.mark.parametrize("key", ["gpu", "cpu"])
def test_a_configured_type_that_the_table_lacks_is_refused_unless_others_are_named(
    job: Path, key: str
) -> None:
    words = [f"sagemaker.{key}.type=ml.{'p6-b200' if key == 'gpu' else 'c99'}.48xlarge"]
    words += ["--gpu-samples-per-s", "4000"]
    (problem,) = size(job, *words).exception.problems
    assert problem.startswith(f"sagemaker.{key}.type: ") and f"--{key}" in problem
    assert (
        size(job, *words, f"--{key}", {"gpu": "ml.g5.xlarge", "cpu": "ml.c5.xlarge"}[key]).exit_code
        == 0
    )


def test_a_job_that_gets_no_cpu_hosts_is_not_advised_to_have_one() -> None:
    advice = advise(POST, replace(ITS_HOSTS, max_cpu_hosts=0), price_list())
    assert {one.cpu_hosts for one in advice.table} == {0}
    assert advice.lines[0].endswith("no CPU hosts were considered; limited by the CPUs")


def test_a_run_too_short_to_tell_is_refused(job: Path) -> None:
    short = record(job.parent / "short", 4)
    for earlier in (0, 200):
        summary = read_summary(short / "summary.json")
        summary.steps += earlier
        summary.write(short)
        shown = size(job, "--from", str(short))
        assert "too short to judge (4 steps; at least 10 are needed)" in str(shown.exception)


def test_a_job_of_limited_steps_is_sized_by_what_its_steps_take() -> None:
    given = [
        "train.max_steps=10",
        "train.batch_size=4",
        "train.accumulate_steps=3",
        "train.epochs=5",
    ]
    config = load(None, [*given, "train.workers=2"]).config
    found = [job_samples(config, records) for records in (1000, 20, None)]
    assert found == [{"samples": 240}, {"samples": 100}, {"samples": 240}]
    assert job_samples(load(None, given).config, 1000) == {"samples": 5000, "most_per_gpu": 120}


def test_by_default_each_gpu_takes_a_batch_per_step_so_more_gpus_take_more_samples() -> None:
    wanted = Wanted(("ml.g5.xlarge", "ml.g5.12xlarge"), ("ml.c5.xlarge",))
    table = advise(replace(POST, most_per_gpu=1000, samples=3000), wanted, price_list()).table
    taken = {one.gpu_type: round((one.hours or 0) * 3600 * one.samples_per_s) for one in table}
    assert (taken["ml.g5.xlarge"], taken["ml.g5.12xlarge"]) == (1000, 3000), "3000: all epochs"


@pytest.mark.parametrize(
    ("driver", "table"),
    [
        ("NVIDIA A10G", "A10G"),
        ("Tesla L4", "L4"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_drivers_name_of_a_gpu_is_found_in_the_table(driver: str, table: str | None) -> None:
    assert table_name(driver) == table
