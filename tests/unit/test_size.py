"""`submit.py size`: the table, the recommendation and its reasons, from given measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded import record
from typer.testing import CliRunner

from stoker.events.prices import price_list
from stoker.events.summary import Summary, read_summary
from stoker.hosts.run_lock import PROCESS_FILE
from stoker_launcher.advise.advice import Advice, Candidate, Measured, Wanted, advise, table_name
from stoker_launcher.command_line import app

POST = Measured(
    cpu_s=0.105,
    bytes_per_sample=150_528,
    gpu_samples_per_s={"A10G": 78.0},
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


def test_the_published_job_gains_by_cpu_hosts_and_smaller_ones_are_the_better_buy() -> None:
    advice = advise(POST, ITS_HOSTS, price_list())
    alone, best = named(advice, "1 × ml.g5.xlarge"), advice.best
    theirs = named(advice, "1 × ml.g5.xlarge + 1 × ml.c5.4xlarge")
    assert alone.binds in ("cpu", "gpu_host_cpu") and theirs.binds == "gpu"
    assert theirs.samples_per_s > 2 * alone.samples_per_s
    saved = 1 - theirs.usd_per_million_samples / alone.usd_per_million_samples
    assert saved > 0.23, "what they found"
    assert best is not None and best.cpu_hosts and best.cpu_type != "ml.c5.4xlarge"
    assert best.samples_per_s == theirs.samples_per_s == 78
    assert best.usd_per_million_samples < 0.82 * theirs.usd_per_million_samples
    assert alone.usd == pytest.approx(alone.usd_per_million_samples)
    assert advice.notes[0].startswith("estimated, prices of 2026-11")
    half = advise(POST, replace(ITS_HOSTS, speed=0.5), price_list())
    slower = named(half, "1 × ml.g5.xlarge").samples_per_s
    assert slower == pytest.approx(alone.samples_per_s / 2), "a vCPU slower than a core here"


@pytest.mark.parametrize(
    ("change", "hosts", "said"),
    [
        (
            {},
            {},
            ": 55 % less than 1 × ml.g5.xlarge alone and 2.9 times as fast; then limited by the",
        ),
        (
            {"cpu_s": 0.0035},
            {},
            "no CPU hosts: limited by the GPU; 1 × ml.g5.xlarge + 1 × ml.c5.xlarge",
        ),
        ({}, {"max_cpu_hosts": 0}, "no CPU hosts were considered; limited by the CPUs"),
        ({"gpu_samples_per_s": {}}, {}, "no recommendation: how fast a GPU trains this model"),
    ],
)
def test_what_the_recommendation_says(
    change: dict[str, Any], hosts: dict[str, Any], said: str
) -> None:
    advice = advise(replace(POST, **change), replace(ITS_HOSTS, **hosts), price_list())
    assert said in advice.lines[0]
    assert (advice.best is None) == (not advice.table)


@pytest.mark.parametrize(
    ("times", "said"),
    [(1.005, "as much as"), (0.8, "20 % less than"), (1.2, "costs 20 % more than")],
)
def test_a_cost_that_is_alike_is_not_called_less_or_more(times: float, said: str) -> None:
    """With a CPU host, a sample costs so many times what it costs without."""
    hosts = Wanted(("ml.g5.xlarge",), ("ml.c5.xlarge",), max_cpu_hosts=1)
    measured, known = replace(POST, gpu_samples_per_s={"A10G": 1000.0}), price_list()
    table = advise(measured, hosts, known)
    alone = named(table, "1 × ml.g5.xlarge")
    both = named(table, "1 × ml.g5.xlarge + 1 × ml.c5.xlarge")
    price, gain = alone.usd_per_hour, both.samples_per_s / alone.samples_per_s
    own = dict.fromkeys(known.prices, 100.0) | {"ml.g5.xlarge": price}
    own["ml.c5.xlarge"] = price * gain * times - price
    assert said in advise(measured, hosts, replace(known, prices=own)).lines[0]


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


@pytest.fixture
def run(job: Path) -> tuple[Path, Summary]:
    return job.parent / "run", read_summary(job.parent / "run" / "summary.json")


def test_notes_name_a_failed_run_and_a_dataset_of_ray_data(
    job: Path, run: tuple[Path, Summary]
) -> None:
    folder, summary = run

    def notes() -> str:
        summary.write(folder)
        return "; ".join(figures(job)["notes"])

    assert not any(text in notes() for text in ("the run failed", "Dataset"))
    summary.status, summary.error = "failed", "disk full"
    plan = {"event": "attempt", "workers": 1, "start": {"plan": {"fingerprint": "MapDataset"}}}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(plan) + "\n")
    told = notes()
    assert "the run failed: disk full" in told and "the ray.data.Dataset's own operators" in told
    summary.status, summary.error = "running", None
    (folder / PROCESS_FILE).write_text("1")  # whose lock nobody holds
    assert "the run failed: it ended without a result" in notes(), "it was killed"


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
    job: Path, run: tuple[Path, Summary], host: str | None, rated: list[str]
) -> None:
    folder, summary = run
    summary.cluster.hosts[0].type = host
    summary.write(folder)
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


def test_a_run_too_short_to_tell_is_refused(job: Path) -> None:
    short = record(job.parent / "short", 4)
    for earlier in (0, 200):
        summary = read_summary(short / "summary.json")
        summary.steps += earlier
        summary.write(short)
        shown = size(job, "--from", str(short))
        assert "too short to judge (4 steps; at least 10 are needed)" in str(shown.exception)


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
