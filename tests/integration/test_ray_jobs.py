"""`--on ray` against a real three-node cluster with token authentication on loopback."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from launcher import ray_jobs, runs
from launcher.backends import ray_cluster
from launcher.job import Job, open_job
from stoker.config import UsageError, load
from tests.fakes.ray_nodes import RayNodes, free_port, ray_nodes

PROBE = """
import os, signal, sys, time
import ray
ray.init(log_to_driver=False)
assert os.path.isfile("job.yaml") and sys.argv[1:] == ["--config", "job.yaml"], sys.argv

@ray.remote(num_cpus=0.1)
def where():
    return ray.get_runtime_context().get_node_id()

def labelled(group):
    return where.options(label_selector={"stoker.group": group}).remote()

groups = {node["NodeID"]: node["Labels"].get("stoker.group") for node in ray.nodes()}
print("hosts", len(groups), flush=True)
print("cpu task on", groups[ray.get(labelled("cpu"))], flush=True)
print("gpu task on", groups[ray.get(labelled("gpu"))], flush=True)
print("backend", os.environ["STOKER_BACKEND"], os.environ["STOKER_RUN_DIR"], flush=True)
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
    time.sleep(120)
"""


class Probe(Job):
    """A job whose entry shows what it finds instead of training."""

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


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    with ray_nodes() as nodes:
        yield nodes


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def entered(cluster: RayNodes, monkeypatch: pytest.MonkeyPatch) -> RayNodes:
    monkeypatch.setenv("RAY_AUTH_TOKEN", cluster.token)
    deadline = time.monotonic() + 60
    server = ray_jobs.job_server(cluster.dashboard)
    while time.monotonic() < deadline:
        alive = server.get("/nodes?view=summary")["data"]["summary"]
        if len([node for node in alive if node["raylet"].get("state") == "ALIVE"]) == 3:
            return cluster
        time.sleep(0.5)
    raise AssertionError("the three nodes did not come up")


def job_of(kind: type[Probe], output: Path) -> Job:
    job = open_job(load(None, ["name=probe", f"output_dir={output}"]))
    return kind(job.resolved, job.source_dir, job.data)


def test_a_job_runs_on_labelled_nodes_and_is_followed(entered: RayNodes, tmp_path: Path) -> None:
    request = ray_cluster.plan(job_of(Probe, tmp_path), address=entered.dashboard)
    shown = request.render()
    assert "python train.py --config job.yaml" in shown and "Python 3." in shown
    assert entered.token not in shown
    run = ray_cluster.submit(request)
    lines: list[str] = []
    code = runs.follow(run, lines.append)
    assert code == 0, "\n".join(lines)
    assert entered.token not in repr(run)
    assert "hosts 3" in lines
    assert "cpu task on cpu" in lines and "gpu task on gpu" in lines
    assert f"backend ray {request.run_dir}" in lines
    assert lines[-1].endswith("succeeded")
    again = runs.attach(run.id)
    assert again is not None and again.status() == "succeeded"
    assert entered.token not in json.dumps(run.details())


def test_a_failure_keeps_its_exit_code(entered: RayNodes, tmp_path: Path) -> None:
    run = ray_cluster.submit(ray_cluster.plan(job_of(Failing, tmp_path), address=entered.dashboard))
    assert run.wait() == 3
    assert run.status().startswith("failed: ")


def test_stop_leaves_time_for_a_checkpoint(entered: RayNodes, tmp_path: Path) -> None:
    run = ray_cluster.submit(ray_cluster.plan(job_of(Waiting, tmp_path), address=entered.dashboard))
    for line in run.logs(follow=True):
        if line == "waiting":
            run.stop()
            break
    assert run.wait() == 143
    assert run.status() == "interrupted"
    assert {"checkpoint written", "stopped in peace"} <= set(run.logs())


def refused(address: str | None, output: Path, job: Job | None = None) -> tuple[str, ...]:
    with pytest.raises(UsageError) as caught:
        ray_cluster.plan(job or job_of(Probe, output), address=address)
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


def test_no_token_and_a_wrong_token(
    cluster: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (problem,) = refused(cluster.dashboard, tmp_path)
    assert "wants a token; set RAY_AUTH_TOKEN" in problem
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    (problem,) = refused(cluster.dashboard, tmp_path)
    assert "refuses this token" in problem
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    (problem,) = refused(cluster.dashboard, tmp_path)
    assert "RAY_AUTH_TOKEN_PATH" in problem and "No such file" in problem


def test_wrong_addresses(tmp_path: Path) -> None:
    (problem,) = refused(None, tmp_path)
    assert problem.startswith("--address: needed")
    (problem,) = refused(f"http://127.0.0.1:{free_port()}", tmp_path)
    assert "nobody answers" in problem and "refused" in problem
    (problem,) = refused("http://no-such-host.invalid:8265", tmp_path)
    assert "nobody answers" in problem
    (problem,) = refused("ray://127.0.0.1:10001", tmp_path)
    assert "jobs go to the dashboard" in problem


def test_a_relative_output_folder_is_refused(entered: RayNodes, tmp_path: Path) -> None:
    job = open_job(load(None, ["name=probe"]))
    (problem,) = refused(entered.dashboard, tmp_path, Probe(job.resolved))
    assert problem.startswith("output_dir:") and "share" in problem


class OtherVersion(http.server.BaseHTTPRequestHandler):
    """A dashboard of another Ray, and of a Python that Stoker does not support."""

    answers: ClassVar = {
        "/api/version": {
            "version": "4",
            "ray_version": "2.40.0",
            "ray_commit": "x",
            "session_name": "s",
        },
        "/api/v0/cluster_metadata": {"result": True, "data": {"pythonVersion": "3.9.18"}},
    }

    def do_GET(self) -> None:
        body = json.dumps(self.answers.get(self.path, {})).encode()
        self.send_response(200 if self.path in self.answers else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def test_version_mismatch_is_said_before_submission(tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OtherVersion) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        problems = refused(f"http://127.0.0.1:{server.server_port}", tmp_path)
        server.shutdown()
    assert any("Ray 2.40.0 there and" in line for line in problems)
    assert any("Python 3.9.18 there" in line for line in problems)
