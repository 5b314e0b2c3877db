"""`--on ray` against a real three-node cluster with token authentication on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stoker.config.loading import load
from stoker.errors import UsageError
from stoker.hosts.raynode import free_port
from stoker_launcher.job import Job, open_job
from stoker_launcher.places import attach, remote
from stoker_launcher.places import ray as ray_jobs
from stoker_launcher.places import ray as ray_place
from tests.fakes import ray_plugin
from tests.fakes.answers import Answer, answering
from tests.fakes.ray_nodes import RayNodes
from tests.summaries import EVERYWHERE, fields
from tests.waiting import until

PROBE = """
import os, signal, sys, time
import ray
ray.init(log_to_driver=False)
assert os.path.isfile("job.yaml") and sys.argv[1:] == ["--config", "job.yaml"], sys.argv

@ray.remote(num_cpus=0.1)
def where():
    return ray.get_runtime_context().get_node_id()

def labelled(group):
    return where.options(label_selector={"stoker-group": group}).remote()

groups = {node["NodeID"]: node["Labels"].get("stoker-group") for node in ray.nodes()}
print("hosts", len(groups), flush=True)
print("cpu task on", groups[ray.get(labelled("cpu"))], flush=True)
print("gpu task on", groups[ray.get(labelled("gpu"))], flush=True)
print("place", os.environ["STOKER_PLACE"], os.environ["STOKER_RUN_DIR"], flush=True)
mode = open("mode").read()
if mode == "fail":
    sys.exit(3)
if mode == "wait":
    def term(*_):
        print("checkpoint written", flush=True)
        time.sleep(4)  # longer than the three seconds that Ray leaves by default
        print("stopped in peace", flush=True)
        sys.exit(143)
    signal.signal(signal.SIGTERM, term)
    print("waiting", flush=True)
    time.sleep(600)
"""


ROOT = Path(__file__).resolve().parents[2]


class Probe(Job):
    mode = "end"

    def stage(self, folder: Path, data_at: dict[str, str] | None = None) -> None:
        super().stage(folder, data_at)
        (folder / "train.py").write_text(PROBE)
        (folder / "mode").write_text(self.mode)
        (folder / ".gitignore").write_text("mode\n")  # what is staged is what runs


class Failing(Probe):
    mode = "fail"


class Waiting(Probe):
    mode = "wait"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def entered(nodes: RayNodes, monkeypatch: pytest.MonkeyPatch) -> RayNodes:
    monkeypatch.setenv("RAY_AUTH_TOKEN", nodes.token)
    deadline = time.monotonic() + 240
    server = ray_jobs.job_server(nodes.dashboard)
    while time.monotonic() < deadline:
        alive: list[Any] = []
        with contextlib.suppress(UsageError):  # its dashboard is still loading
            alive = server.get("/nodes?view=summary")["data"]["summary"]
        if len([node for node in alive if node["raylet"].get("state") == "ALIVE"]) == 3:
            return nodes
        time.sleep(0.5)
    raise AssertionError("the three nodes did not come up")


def job_of(kind: type[Probe], output: Path) -> Job:
    job = open_job(load(None, ["name=probe", f"output_dir={output}"]))
    return kind(job.resolved, job.project, job.data)


class Followed(NamedTuple):
    run: Any
    request: Any
    lines: list[str]
    code: int


@pytest.fixture
def three_jobs(entered: RayNodes, tmp_path: Path) -> Iterator[dict[str, Followed]]:
    """One that ends well, one that fails and one that is stopped, beside each other: starts are slow.

    The last goes through an address plug-in, and a proxy that refuses requests without its credentials.
    """
    runs_of: dict[str, tuple[Any, Any]] = {}
    with ray_plugin.plugged(tmp_path, ray_plugin.forwarding(entered.dashboard), uses=5):
        for name, kind, address in (
            ("ends", Probe, entered.dashboard),
            ("fails", Failing, entered.dashboard),
            ("waits", Waiting, ray_plugin.ADDRESS),
        ):
            request = ray_place.plan(job_of(kind, tmp_path), address=address)
            runs_of[name] = ray_place.submit(request), request
        for line in runs_of["waits"][0].logs(follow=True):
            if line == "waiting":
                runs_of["waits"][0].stop()
                break
        found = {}
        for name, (run, request) in runs_of.items():
            lines: list[str] = []
            code = remote.follow(run, lines.append)
            found[name] = Followed(run, request, lines, code)
        yield found


def test_jobs_run_on_labelled_nodes_are_followed_fail_and_are_stopped(
    entered: RayNodes, three_jobs: dict[str, Followed]
) -> None:
    run, request, lines, code = three_jobs["ends"]
    shown = request.render()
    assert "python train.py --config job.yaml" in shown and "Python 3." in shown
    assert code == 0, "\n".join(lines)
    assert "hosts 3" in lines
    assert "cpu task on cpu" in lines and "gpu task on gpu" in lines
    assert f"place ray {request.run_dir}" in lines
    assert lines[-1].endswith("succeeded")
    again = attach(run.id)
    assert again is not None and again.status() == "succeeded"
    assert entered.token not in json.dumps(run.describe()) + repr(run) + shown

    failed = three_jobs["fails"]
    assert failed.code == 3, "a failure keeps its exit code"
    assert failed.run.status().startswith("failed: ")

    stopped = three_jobs["waits"]
    assert stopped.code == 143
    assert stopped.run.status() == "interrupted"
    # A stop leaves time for a checkpoint: more than the three seconds that Ray leaves by default.
    assert {"checkpoint written", "stopped in peace"} <= set(stopped.run.logs())


def refused(address: str | None, output: Path, job: Job | None = None) -> tuple[str, ...]:
    with pytest.raises(UsageError) as caught:
        ray_place.plan(job or job_of(Probe, output), address=address)
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


def test_no_token_and_a_wrong_token(
    nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (problem,) = refused(nodes.dashboard, tmp_path)
    assert "requires a token; set RAY_AUTH_TOKEN" in problem
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    (problem,) = refused(nodes.dashboard, tmp_path)
    assert "rejected the token" in problem
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    (problem,) = refused(nodes.dashboard, tmp_path)
    assert "RAY_AUTH_TOKEN_PATH" in problem and "No such file" in problem


def test_wrong_addresses_and_a_relative_output_folder_are_refused(tmp_path: Path) -> None:
    (problem,) = refused(f"http://127.0.0.1:{free_port()}", tmp_path)
    assert "cannot connect ([Errno 111] Connection refused)" in problem
    for address in (None, "http://no-such-host.invalid:8265", "ray://127.0.0.1:10001"):
        (problem,) = refused(address, tmp_path)
        assert problem.startswith("--address"), problem
    with dashboard_of("2.99.1", platform.python_version()) as address:
        job = open_job(load(None, ["name=probe"]))
        (problem,) = refused(address, tmp_path, Probe(job.resolved, job.project))
    assert problem.startswith("output_dir:")


def dashboard_of(ray: str, python: str) -> contextlib.AbstractContextManager[str]:
    answers: dict[str, Any] = {
        "/api/version": {
            "version": "4",
            "ray_version": ray,
            "ray_commit": "x",
            "session_name": "s",
        },
        "/api/v0/cluster_metadata": {"result": True, "data": {"pythonVersion": python}},
    }

    def answer(request: BaseHTTPRequestHandler) -> Answer:
        body = json.dumps(answers.get(request.path, {})).encode()
        return 200 if request.path in answers else 404, "application/json", body

    return answering(answer)


def test_a_cluster_that_is_too_old_is_refused_before_submission(tmp_path: Path) -> None:
    for ray, python in (("2.40.0", "3.12.9"), ("2.99.1", "3.9.18")):
        with dashboard_of(ray, python) as address:
            (problem,) = refused(address, tmp_path)
        assert f"Ray {ray} and Python {python} there" in problem


def test_a_cluster_of_other_supported_versions_is_used_and_the_differences_are_named(
    tmp_path: Path,
) -> None:
    python = "3.12.9" if sys.version_info[:2] != (3, 12) else "3.13.9"
    with dashboard_of("2.99.1", python) as address:
        request = ray_place.plan(job_of(Probe, tmp_path), address=address)
    assert request.versions == f"Ray 2.99.1, Python {python}"
    assert any(line.startswith("Ray 2.99.1 there and ") for line in request.warnings)
    assert any(line.startswith(f"Python {python} there and ") for line in request.warnings)


def submit(*words: str, token: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "launcher/submit.py", *words],
        cwd=ROOT,
        env={**os.environ, "RAY_AUTH_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=560,
    )


def test_digits_train_through_ray_jobs_as_a_user_types_it(
    entered: RayNodes, digits: Path, tmp_path: Path
) -> None:
    """A job on three nodes, whose processes all start anew for it."""
    job = [
        "source_dir/configs/digits.yaml",
        "--on=ray",
        f"--address={entered.dashboard}",
        f"output_dir={tmp_path}",
        f"params.data={digits / 'webdataset'}",
        "train.epochs=1",
        "train.workers=1",
        "data.preprocess_on=[cpu]",
    ]
    done = submit(*job, token=entered.token)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    run_id = done.stdout.split(": Ctrl-C")[0]
    assert run_id.startswith(f"ray:{entered.dashboard}/digits-")
    status = submit("status", run_id, token=entered.token)
    state, *figures = status.stdout.splitlines()
    assert state == "succeeded"
    assert any("samples/s" in line for line in figures), "what the job's log told last"
    (path,) = tmp_path.glob("digits-*/summary.json")
    summary = json.loads(path.read_text())
    assert (summary["status"], summary["place"]) == ("succeeded", "ray")
    assert fields(summary) == EVERYWHERE
    assert len(summary["cluster"]["hosts"]) == 3
    assert {host["group"] for host in summary["cluster"]["hosts"]} == {"gpu", "cpu"}
    assert summary["records"]["read"] == summary["records"]["trained"] == 1437
    cpu_hosts = {host["host"] for host in summary["cluster"]["hosts"] if host["group"] == "cpu"}
    assert summary["chain_tasks_by_host"].keys() <= cpu_hosts
    assert (path.parent / "model").is_dir()


SCRIPT = """
import os
import time

import torch
import torch.distributed as dist
from points import Points

import stoker


def until(true):
    deadline = time.monotonic() + 400
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


dist.init_process_group("gloo")
folder = stoker.checkpoint_dir()
begun, joined, ends = folder / "begun", folder / "joined", folder / "ends"
loader = stoker.DataLoader(Points(), batch_size=8, num_workers=2)
found = []
if dist.get_rank() == 1:  # starts the service of the loaders, and ends before the other
    found = [i for batch in loader for i in batch.tolist()]
    begun.touch()
    until(joined.exists)
    ends.write_text(str(os.getpid()))
else:
    until(begun.exists)
    for batch in loader:
        found += batch.tolist()
        joined.touch()
        until(lambda: ends.exists() and not os.path.exists("/proc/" + ends.read_text()))
    assert [i for batch in loader for i in batch.tolist()] == found
    stoker.log({"loss": torch.tensor(0.5)})
    (folder / "last.txt").write_text("saved")
assert found == list(range(200)), found
"""
POINTS = """
import torch
from torch.utils.data import Dataset


class Points(Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        return torch.tensor(index)
"""


@pytest.mark.long
def test_a_script_trains_through_ray_jobs_and_loads_on_the_clusters_cpus(
    entered: RayNodes, tmp_path: Path
) -> None:
    """As the job above, with a script of the user's own and its loader."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text(SCRIPT)
    (tmp_path / "mine" / "points.py").write_text(POINTS)
    words = [str(tmp_path / "mine" / "train.py"), "--on=ray", f"--address={entered.dashboard}"]
    done = submit(
        *words, f"output_dir={tmp_path}", "name=mine", "train.workers=2", token=entered.token
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    (path,) = tmp_path.glob("mine-*/summary.json")
    summary = json.loads(path.read_text())
    assert (summary["status"], summary["place"], summary["script"]) == (
        "succeeded",
        "ray",
        "train.py",
    )
    assert summary["metrics"]["last"]["loss"] == 0.5 and summary["steps"] > 0
    assert (path.parent / "checkpoints" / "last.txt").read_text() == "saved"
    until(lambda: states_of("LoaderService", entered) == {"DEAD"})  # with its job


def states_of(kind: str, nodes: RayNodes) -> set[str]:
    actors = ray_jobs.job_server(nodes.dashboard).get("/logical/actors")["data"]["actors"].values()
    return {actor["state"] for actor in actors if actor["actorClass"] == kind}
