"""Laptop: `--on ray`: run the job through Ray Jobs on an existing cluster.

    request = plan(job, address="http://head:8265")
    run = submit(request)
    for line in run.logs(follow=True): ...

The cluster's token is read from RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from launcher.job import COMMAND, Job
from launcher.places import Place
from launcher.places.ray import jobs as ray_jobs
from launcher.places.ray.jobs import JobServer
from launcher.places.remote import WatchedRun, collected, stamp
from launcher.source import measure
from stoker import figures
from stoker.config.redaction import redact
from stoker.errors import UsageError
from stoker.hosts import requirements
from stoker.place import PLACE_VARIABLE, RUN_DIR_VARIABLE

POLL_S = 2.0
STOP_WAIT_S = 120
"""Between SIGTERM and SIGKILL; Ray's default of 3 s leaves no time for a checkpoint."""
_WORDS = {
    "PENDING": "running: waiting for the cluster",
    "RUNNING": "running",
    "SUCCEEDED": "succeeded",
    "STOPPED": "interrupted",
}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class RayRequest:
    """The request to the job server."""

    job: Job
    server: JobServer
    submission_id: str
    run_dir: str
    environment: dict[str, str]
    pip: tuple[str, ...]
    code_files: int
    code_bytes: int
    versions: str
    warnings: tuple[str, ...]

    def body(self, working_dir: str) -> dict[str, Any]:
        """The body of the POST to `/api/jobs/`, given the URI of the uploaded source."""
        runtime_env: dict[str, Any] = {"working_dir": working_dir, "env_vars": self.environment}
        if self.pip:
            runtime_env["pip"] = list(self.pip)
        return {
            "entrypoint": shlex.join(COMMAND),
            "submission_id": self.submission_id,
            "runtime_env": runtime_env,
            "metadata": {"stoker_job": self.job.name},
        }

    def render(self) -> str:
        """The request as JSON, then its destination and uploads."""
        rows = [
            ("cluster", self.server.address),
            ("versions", self.versions),
            ("upload", f"{figures.count_of(self.code_files, 'file')}, {figures.size(self.code_bytes)}"),
            ("results", f"{self.run_dir} on the cluster"),
        ]
        lines = [f"{name:<9} {value}" for name, value in rows]
        lines += [f"note: {line}" for line in self.warnings]
        content = json.dumps(redact(self.body("<uploaded source>")), indent=2)
        return f"Ray job {self.submission_id}\n\n{content}\n\n" + "\n".join(lines)

    def package(self) -> bytes:
        """The staged source as the zip file that becomes the job's working directory."""
        with tempfile.TemporaryDirectory(prefix="stoker-") as scratch:
            folder = Path(scratch) / "code"
            self.job.stage(folder)
            return ray_jobs.package(folder)

    def write(self, path: Path) -> str:
        """Write the source as a zip file; returns the lines for a RayJob manifest."""
        path.write_bytes(self.package())
        variables = "".join(f"\n    {key}: {json.dumps(value)}" for key, value in self.environment.items())
        return (
            f"# publish {path} where the cluster can fetch it; for the RayJob (docs/ray-clusters.md):\n"
            f"entrypoint: {shlex.join(COMMAND)}\n"
            f"runtimeEnvYAML: |\n  working_dir: https://<address>/{path.name}\n  env_vars:{variables}"
        )


class RayRun(WatchedRun):
    """One job on a Ray cluster."""

    def __init__(
        self, server: JobServer, submission_id: str, poll_s: float = POLL_S, submitted: bool = False
    ) -> None:
        run_id = f"ray:{server.address}/{submission_id}"
        super().__init__(run_id, poll_s, submitted, ray_jobs.UnreachableError)
        self.server, self.submission_id = server, submission_id
        self._path = f"/api/jobs/{submission_id}"

    @property
    def label(self) -> str:
        return self.submission_id

    def ask(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.get(self._path)
        return found

    def status_in(self, description: dict[str, Any]) -> str:
        state = str(description.get("status"))
        if state == "FAILED":
            # Cut off the end of the log, which Ray appends; `logs` shows it better.
            message = str(description.get("message") or "no reason given").partition(", last available")[0]
            return f"failed: {' '.join(message.split())}"
        return _WORDS.get(state, f"unknown: {state}")

    def logs(self, follow: bool = False) -> Iterator[str]:
        """The driver's output, line by line; with `follow` until the job ends."""
        shown = 0
        while True:
            ended = not self.status().startswith("running")
            text = self.patiently(lambda: self.server.get(f"{self._path}/logs")).get("logs", "")
            # Hold back an incomplete last line.
            upto = len(text) if ended or not follow else text.rfind("\n") + 1
            yield from text[shown:upto].splitlines()
            shown = max(shown, upto)
            if ended or not follow:
                return
            # The server sends the whole log each time, so poll less often as it grows.
            time.sleep(self.poll_s + len(text) / 2e6)

    def wait(self) -> int:
        """Block until the end; returns the driver's exit code."""
        code = super().wait()
        return int(self.describe().get("driver_exit_code") or 1) if code == 1 else code

    def stop(self) -> None:
        """Send SIGTERM to the driver, which has `STOP_WAIT_S` for a checkpoint."""
        self.server.post(f"{self._path}/stop")

    def closing(self) -> str:
        return f"{self.submission_id}: {self.status()}"


def plan(job: Job, *, address: str | None = None, offline: bool = False, install: bool = False) -> RayRequest:
    """Plan the request and check the cluster's versions; uploads nothing."""
    problems: list[str] = []
    name = f"{job.name}-{stamp()}"
    output = job.resolved.config.output_dir
    if not PurePosixPath(output).is_absolute():
        problems.append(
            f"output_dir: must be an absolute folder that all hosts of the cluster share (got {output!r});"
            " a relative one is deleted with the job's working directory"
        )
    count, size, refused = measure(
        job, {}, "params, on storage that the hosts share", ray_jobs.PACKAGE_LIMIT_BYTES
    )
    problems += refused
    pip = _pip(job) if install else ()
    found = collected(problems, lambda: _cluster(address, offline), None)
    if problems:
        raise UsageError(*problems)
    server, versions, warnings = found
    warnings += [
        f"params.{parameter} = {path} must exist on the cluster's hosts too"
        for parameter, path in job.data.items()
    ]
    run_dir = f"{output.rstrip('/')}/{name}"
    environment = {
        PLACE_VARIABLE: "ray",
        RUN_DIR_VARIABLE: run_dir,
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S),
    }
    return RayRequest(job, server, name, run_dir, environment, pip, count, size, versions, tuple(warnings))


def submit(request: RayRequest) -> RayRun:
    """Upload the staged source and start the job; UsageError if the cluster rejects it."""
    uri = request.server.upload(request.package())
    request.server.post("/api/jobs/", request.body(uri))
    return RayRun(request.server, request.submission_id, submitted=True)


def attach(run_id: str) -> RayRun:
    """Find a run by `ray:http://head:8265/name`."""
    address, _, name = run_id.removeprefix("ray:").rpartition("/")
    if not address or not name:
        raise UsageError(f"{run_id}: write ray:http://<head>:8265/<job>")
    return RayRun(ray_jobs.job_server(address), name)


PLACE = Place(
    name="ray",
    plan=lambda job, options, resume: plan(
        job, address=options.address, offline=options.offline, install=options.install
    ),
    submit=submit,
    attach=attach,
    ids=("ray:",),
    options=("address", "offline", "request", "install"),
    scales=True,
    checkpoints="shared",
)


def _cluster(address: str | None, offline: bool) -> tuple[JobServer, str, list[str]]:
    """The server, its versions, and warnings; UsageError if the cluster cannot run the job."""
    server, warnings = ray_jobs.job_server(address), []
    place = urlsplit(server.address)
    if server.token and place.scheme == "http" and place.hostname not in _LOOPBACK:
        warnings.append("the token travels unencrypted: use https or a port-forward to localhost")
    if not server.token:
        warnings.append("no token: anyone who can reach this cluster can run code on it")
    if offline:
        return server, "not checked (--offline)", warnings
    ray, python = server.versions()
    ours, here = importlib.metadata.version("ray"), platform.python_version()
    problems = []
    if not requirements.at_least(ray, requirements.OLDEST_RAY):
        problems.append(
            f"--address {server.address}: Ray {ray} there; Stoker needs {requirements.OLDEST_RAY} or newer;"
            f" use a newer cluster (image rayproject/ray:{ours})"
        )
    elif ray != ours:
        warnings.append(f"Ray {ray} there and {ours} here: the job uses the cluster's")
    if python and _minor(python) not in requirements.PYTHONS:
        problems.append(
            f"--address {server.address}: Python {python} there; Stoker needs"
            f" {requirements.SUPPORTED_PYTHONS}; choose another image"
        )
    if problems:
        raise UsageError(*problems)
    if python and _minor(python) != _minor(here):
        warnings.append(f"Python {python} there and {here} here: test your recipe with {python}")
    return server, f"Ray {ray}, Python {python or 'unknown'}", warnings


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _pip(job: Job) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory(prefix="stoker-") as scratch:
        folder = Path(scratch) / "code"
        job.stage(folder)
        lines = (folder / "requirements.txt").read_text().splitlines()
    return tuple(
        line.strip()
        for line in lines
        # Keep the cluster's Ray: another version could not join it.
        if line.strip() and not line.lstrip().startswith(("#", "ray[", "ray="))
    )
