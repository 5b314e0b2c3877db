"""What `--on ray` would send, without a cluster."""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import pytest

from stoker.config.loading import SECRETS_FILE, load
from stoker.errors import UsageError
from stoker_launcher.job import open_job
from stoker_launcher.places import attach, remote
from stoker_launcher.places import ray as ray_jobs
from stoker_launcher.places import ray as ray_place
from stoker_launcher.places.ray import RayRun
from tests.command_line import type_command
from tests.fakes import ray_plugin
from tests.fakes.answers import Answer, answering
from tests.refusals import refused

ADDRESS = "http://head.example.com:8265"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def plan(**options: bool) -> ray_place.RayRequest:
    job = open_job(load(None, ["name=probe", "output_dir=/mnt/shared/runs"]))
    return ray_place.plan(job, address=ADDRESS, offline=True, **options)


def test_a_written_source_with_secrets_is_private_and_says_so(tmp_path: Path) -> None:
    own = [
        "tracking.mlflow.tags={api_key: s3cr3t-value, hf_token: another-one}",
        "output_dir=/mnt/runs",
    ]
    request = ray_place.plan(open_job(load(None, own)), address=ADDRESS, offline=True)
    path = tmp_path / "job.zip"
    path.touch(0o644)
    line, *_ = request.write(path).splitlines()
    names = {"train.py", "job.yaml", "stoker/config/loading.py", SECRETS_FILE}
    assert path.stat().st_mode & 0o777 == 0o600 and names <= {*zipfile.ZipFile(path).namelist()}
    keys = "tracking.mlflow.tags.api_key, tracking.mlflow.tags.hf_token"
    assert f"; it contains secrets: {keys}; for the RayJob" in line
    assert "secrets" not in plan().write(path)


@pytest.mark.long
def test_same_source_is_the_same_package() -> None:
    first, second = (plan().package() for _ in range(2))
    assert first == second and len(first) < ray_jobs.PACKAGE_LIMIT_BYTES
    assert zipfile.ZipFile(io.BytesIO(first)).testzip() is None


def test_install_lets_ray_install_all_but_itself(tmp_path: Path) -> None:
    pip = plan(install=True).body("gcs://x")["runtime_env"]["pip"]
    assert any(line.startswith("timm") for line in pip)
    assert not any(line.startswith("ray") for line in pip)
    (tmp_path / "rows.py").touch()
    own = ["ray-lightning==0.3", "raydp"]
    (tmp_path / "requirements.txt").write_text(
        "\n".join(["ray>=2.9", "Ray", "ray [train]", "ray @ x", *own])
    )
    job = open_job(load({"recipe": "rows:Counting", "output_dir": "/mnt/runs"}), tmp_path)
    body = ray_place.plan(job, address=ADDRESS, offline=True, install=True).body("gcs://x")
    assert [line for line in body["runtime_env"]["pip"] if "ray" in line.lower()] == own
    assert "pip" not in plan().body("gcs://x")["runtime_env"]


def test_an_open_cluster_and_an_open_token_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "anyone who can reach this cluster" in plan().render()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 64)
    shown = plan().render()
    assert "travels unencrypted" in shown and "t" * 64 not in shown + repr(plan())


@pytest.mark.parametrize("away", [False, True])
def test_the_token_goes_to_the_cluster_and_no_proxy_that_a_port_forward_need_not_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, away: bool
) -> None:
    """Away from loopback the proxy is the way there, and `.netrc` replaces no token."""
    seen: dict[str, list[str | None]] = {"dashboard": [], "proxy": []}

    def heard(by: str) -> Callable[[BaseHTTPRequestHandler], Answer]:
        def answer(request: BaseHTTPRequestHandler) -> Answer:
            seen[by].append(request.headers["Authorization"])
            return 200, "application/json", b"{}"

        return answer

    (tmp_path / ".netrc").write_text("default login me password pw\n")
    with answering(heard("dashboard")) as dashboard, answering(heard("proxy")) as proxy:
        for name in ("http_proxy", "all_proxy", "no_proxy"):
            monkeypatch.delenv(name.upper(), raising=False)
            monkeypatch.setenv(name, proxy if name != "no_proxy" else "")
        ray_jobs.JobServer(ADDRESS if away else dashboard, "secret").get("/api/version")
    assert seen == {"dashboard": ["Bearer secret"] * (not away), "proxy": ["Bearer secret"] * away}


@pytest.mark.parametrize("created", [True, False])
def test_a_lost_answer_costs_no_second_job(created: bool) -> None:
    posted: list[str] = []

    def answer(request: BaseHTTPRequestHandler) -> Answer | None:
        if request.command == "POST":
            posted.append(request.path)
            return None
        there = created or not request.path.startswith("/api/jobs/")
        return 200 if there else 404, "application/json", b"{}"

    with answering(answer) as address:
        request = replace(plan(), server=ray_jobs.JobServer(address, None))
        if created:
            assert ray_place.submit(request).submission_id == request.submission_id
        else:
            with pytest.raises(UsageError, match="cannot connect"):
                ray_place.submit(request)
    assert posted == ["/api/jobs/"]


class Dashboard:
    """Of a cluster with one job, which `stop` ends."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.sent: dict[str, object] = {}
        self.state = "RUNNING"

    def answer(self, request: BaseHTTPRequestHandler) -> Answer:
        self.requests.append((request.command, request.path))
        body = request.rfile.read(int(request.headers["Content-Length"] or 0))
        found: dict[str, object] = {"status": self.state, "ray_version": "2.99.1"}
        if request.path == "/api/jobs/":
            self.sent = json.loads(body)
        elif request.path.endswith("/stop"):
            self.state, found = "STOPPED", {"stopped": True}
        elif request.path.endswith("/logs"):
            found = {"logs": "step 1\n"}
        return 200, "application/json", json.dumps(found).encode()


def test_no_copy_of_the_source_stays_behind_while_a_job_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dashboard, left = Dashboard(), list[Path]()

    def answer(request: BaseHTTPRequestHandler) -> Answer:
        if request.path.endswith("/logs"):
            left.extend(tmp_path.glob("stoker-*/code"))
            dashboard.state = "SUCCEEDED"
        return dashboard.answer(request)

    (tmp_path / "job.yaml").write_text("name: probe\noutput_dir: /mnt/shared/runs\n")
    with answering(answer) as address:
        words = [str(tmp_path / "job.yaml"), "recipe=rows:Counting", "--on", "ray"]
        words += ["--address", address, "--source-dir", str(Path(__file__).parents[1] / "recipes")]
        code, lines, shown = type_command(words, capsys)
    assert (code, lines) == (0, []) and "step 1" in shown
    assert dashboard.sent and not left


def test_a_laptop_without_ray_submits_to_any_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = "importlib.metadata.MetadataPathFinder.find_distributions"
    monkeypatch.setattr(finder, lambda *_, **__: iter(()))
    job = open_job(load(None, ["name=probe", "output_dir=/mnt/shared/runs"]))
    with answering(Dashboard().answer) as address:
        assert "Ray 2.99.1" in ray_place.plan(job, address=address).render()


def plugged_job() -> ray_place.RayRequest:
    job = open_job(load(None, ["name=probe", "output_dir=/mnt/shared/runs"]))
    return ray_place.plan(job, address=ray_plugin.ADDRESS)


@pytest.mark.parametrize("uses", [1, 10**9])
def test_a_plug_in_leads_to_the_cluster_and_is_asked_again_when_its_credentials_end(
    tmp_path: Path, uses: int
) -> None:
    dashboard = Dashboard()
    with ray_plugin.plugged(tmp_path, dashboard.answer, uses) as plugin:
        request = plugged_job()
        run = ray_place.submit(request)
        assert run.id == f"ray:{ray_plugin.ADDRESS}/{request.submission_id}"
        again = attach(run.id)
        assert again.status() == "running"
        again.stop()
        assert again.status() == "interrupted" and list(again.logs()) == ["step 1"]
        address, options = plugin.asked[0]
        assert address == "cluster/namespace" and not options["create_cluster_if_needed"]
        assert len(plugin.asked) == (2 if uses > 1 else len(dashboard.requests))
    assert dashboard.sent["metadata"] == {"team": "a", "stoker_job": "probe"}
    assert dashboard.requests.count(("POST", "/api/jobs/")) == 1
    assert "session-" not in request.render() + repr(request) + repr(run)


def test_a_plug_in_that_fails_while_a_run_is_watched_is_asked_again(tmp_path: Path) -> None:
    dashboard = Dashboard()
    with ray_plugin.plugged(tmp_path, dashboard.answer, uses=1) as plugin:
        server = ray_jobs.job_server(ray_plugin.ADDRESS)
        run = RayRun(server, "job", poll_s=0.01)
        assert run.status() == "running"
        plugin.problem = "token service unavailable"
        asked = len(plugin.asked)
        with pytest.raises(remote.UnansweredError):
            run.ask()
        plugin.problem = ""
        assert run.status() == "running" and len(plugin.asked) == asked + 2


def test_addresses_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    with ray_plugin.plugged(tmp_path, Dashboard().answer, uses=0) as plugin:
        with refused("--address", code=2):  # refused twice, with new credentials
            plugged_job()
        assert len(plugin.asked) == 2
        plugin.problem = "no such cluster"
        with refused("--address", code=2):
            plugged_job()
    for address in ("no_module_of_ray://x", "no-module://x", "://x", "json://x", "ray://x:10001"):
        with refused("--address", code=2):
            ray_jobs.job_server(address).endpoint()


def test_offline_asks_no_plug_in(tmp_path: Path) -> None:
    job = open_job(load(None, ["name=probe", "output_dir=/mnt/shared/runs"]))
    with ray_plugin.plugged(tmp_path, Dashboard().answer) as plugin:
        shown = ray_place.plan(job, address=ray_plugin.ADDRESS, offline=True).render()
        assert not plugin.asked and ray_plugin.ADDRESS in shown


class Flaky:
    """A job server that answers as `plan` says: a status, or None for a connection that breaks."""

    plan: ClassVar[list[int | None]] = []
    state = "RUNNING"

    @staticmethod
    def answer(request: BaseHTTPRequestHandler) -> Answer | None:
        status = Flaky.plan.pop(0) if Flaky.plan else 200
        if status is None:
            return None
        logs = {"logs": "step 1\nstep 2\n"}
        found = (
            logs
            if request.path.endswith("/logs")
            else {"status": Flaky.state, "driver_exit_code": 0}
        )
        if request.path.endswith("/stop"):
            return (
                200,
                "application/json",
                json.dumps({"stopped": Flaky.state == "RUNNING"}).encode(),
            )
        if not Flaky.plan:
            Flaky.state = "SUCCEEDED"
        if status != 200:
            return status, "text/html", b"<html>bad gateway</html>"
        return status, "application/json", json.dumps(found).encode()


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("stoker_launcher.places.ray.POLL_S", 0.01)
    Flaky.state = "RUNNING"
    with answering(Flaky.answer) as address:
        yield address


def watched(address: str, submitted: bool = True) -> RayRun:
    return RayRun(ray_jobs.JobServer(address, None), "job", poll_s=0.01, submitted=submitted)


def test_a_server_that_fails_for_a_while_does_not_end_watching(
    flaky: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Flaky.plan = [None, 502, 200, 200, 503, None, 200, 200, 500, 200]
    lines: list[str] = []
    assert remote.follow(watched(flaky), lines.append) == 0
    assert lines[1:] == ["step 1", "step 2", "job: succeeded"]
    said = capsys.readouterr().err.splitlines()
    assert 1 <= len(said) <= 4 and all("asking again for up to 600 s" in line for line in said)


def test_a_server_that_stays_away_ends_watching_with_the_truth(
    flaky: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote, "UNREACHABLE_S", 0.2)
    Flaky.plan = [200, 200, *[502] * 1000]
    lines: list[str] = []
    assert remote.follow(watched(flaky, submitted=False), lines.append) == 1
    assert "502" in lines[-1] and "may still be running" in lines[-1]
    assert f"stoker logs -f ray:{flaky}/job" in lines[-1]
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("status", [401, 404])
def test_an_answer_that_does_not_pass_is_not_waited_for(flaky: str, status: int) -> None:
    Flaky.plan = [status] * 3
    lines: list[str] = []
    assert remote.follow(watched(flaky), lines.append) == 1
    assert len(Flaky.plan) == 2 and "may still be running" in lines[-1]
    with pytest.raises(UsageError):  # a run that nobody has seen is a wrong id
        remote.follow(watched(flaky, submitted=False), lines.append)


def test_a_run_that_has_ended_cannot_be_stopped(flaky: str) -> None:
    run = watched(flaky)
    run.stop()
    assert run.wait() == 0
    with pytest.raises(UsageError, match=r"this run has already ended: succeeded"):
        run.stop()
