"""Laptop: `--on ray`: run the job through Ray Jobs on an existing cluster.

The cluster's token is read from RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token. An address
such as `sagemaker_ray://cluster/namespace` is resolved by Ray's own plug-ins: the module named by the scheme.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import json
import os
import platform
import re
import shlex
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from stoker import figures
from stoker.config.loading import leaves, secrets_json
from stoker.config.redaction import redact
from stoker.errors import Problems, UsageError
from stoker.hosts import requirements
from stoker.place import PLACE_VARIABLE, RUN_DIR_VARIABLE
from stoker_launcher.job import COMMAND, Job, Staged, files_below, write_private
from stoker_launcher.places import Place
from stoker_launcher.places.remote import (
    UnansweredError,
    WatchedRun,
    created_once,
    stamp,
)

POLL_S = 2.0
STOP_WAIT_S = 7200
"""Between SIGTERM and SIGKILL, for a run that hangs: others end by themselves. Ray's default of 3 s leaves no
time for a checkpoint."""
_WORDS = {
    "PENDING": "running: waiting for the cluster",
    "RUNNING": "running",
    "SUCCEEDED": "succeeded",
    "STOPPED": "interrupted",
}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class RayRequest:
    job: Job
    server: JobServer
    submission_id: str
    run_dir: str
    environment: dict[str, str]
    pip: tuple[str, ...]
    staged: Staged
    versions: str
    warnings: tuple[str, ...]

    def body(self, working_dir: str) -> dict[str, Any]:
        runtime_env: dict[str, Any] = {"working_dir": working_dir, "env_vars": self.environment}
        runtime_env |= {"pip": list(self.pip)} if self.pip else {}
        return {
            "entrypoint": shlex.join(COMMAND),
            "submission_id": self.submission_id,
            "runtime_env": runtime_env,
            "metadata": {**self.server.metadata, "stoker_job": self.job.name},
        }

    def render(self) -> str:
        files = figures.count_of(len(self.staged.found), "file")
        lines = [
            f"cluster   {self.server.address}",
            f"versions  {self.versions}",
            f"upload    {files}, {figures.size(self.staged.bytes)}",
            f"results   {self.run_dir} on the cluster",
            *(f"note: {line}" for line in self.warnings),
        ]
        content = json.dumps(redact(self.body("<uploaded source>")), indent=2)
        return f"Ray job {self.submission_id}\n\n{content}\n\n" + "\n".join(lines)

    def package(self) -> bytes:
        return package(self.staged.folder)

    def write(self, path: Path) -> str:
        """Write the source as a zip file; returns the lines for a RayJob manifest."""
        write_private(path, self.package())
        keys = [
            key for key, _ in leaves(json.loads(secrets_json(self.job.resolved.config) or "{}"))
        ]
        note = f"; it contains secrets: {', '.join(keys)}" if keys else ""
        import yaml

        body = self.body(f"https://<address>/{path.name}")
        lines = yaml.safe_dump(body["runtime_env"], sort_keys=False).splitlines()
        return "\n".join(
            [
                f"# publish {path} where the cluster can fetch it{note}; for the RayJob (docs/ray-clusters.md):",
                f"entrypoint: {body['entrypoint']}",
                "runtimeEnvYAML: |",
                *(f"  {line}" for line in lines),
            ]
        )


class RayRun(WatchedRun):
    def __init__(
        self, server: JobServer, submission_id: str, poll_s: float = POLL_S, submitted: bool = False
    ) -> None:
        run_id = f"ray:{server.address}/{submission_id}"
        super().__init__(run_id, submission_id, poll_s, submitted, UnansweredError)
        self.server, self.submission_id = server, submission_id
        self._path = f"/api/jobs/{submission_id}"

    def ask(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.get(self._path)
        return found

    def status_in(self, description: dict[str, Any]) -> str:
        state = str(description.get("status"))
        if state == "FAILED":
            # Cut off the end of the log, which Ray appends; `logs` shows it better.
            message = str(description.get("message") or "no reason given")
            return f"failed: {' '.join(message.partition(', last available')[0].split())}"
        return _WORDS.get(state, f"unknown: {state}")

    def logs(self, follow: bool = False) -> Iterator[str]:
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
        code = super().wait()
        return int(self.describe().get("driver_exit_code") or 1) if code == 1 else code

    def stop(self) -> None:
        if not self.server.post(f"{self._path}/stop").get("stopped"):
            raise UsageError(f"{self.id}: this run has already ended: {self.status()}")

    def closing(self) -> str:
        return f"{self.submission_id}: {self.status()}"


def plan(
    job: Job, *, address: str | None = None, offline: bool = False, install: bool = False
) -> RayRequest:
    problems = Problems()
    name = f"{job.name}-{stamp()}"
    output = job.resolved.config.output_dir
    if not PurePosixPath(output).is_absolute():
        problems.add(
            f"output_dir: must be an absolute folder that all hosts of the cluster share (got {output!r});"
            " a relative one is deleted with the job's working directory"
        )
    staged = Staged(job, {})
    problems.add(*staged.problems())
    if staged.bytes > PACKAGE_LIMIT_BYTES:
        problems.add(
            f"--source-dir: {figures.size(staged.bytes)} of source, more than Ray's"
            f" {figures.size(PACKAGE_LIMIT_BYTES)}; move data to storage that the hosts share"
        )
    pip = _pip(staged.folder) if install else ()
    with problems:
        server, versions, warnings = _cluster(address, offline)
    problems.refuse()
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
    return RayRequest(
        job, server, name, run_dir, environment, pip, staged, versions, tuple(warnings)
    )


def submit(request: RayRequest) -> RayRun:
    uri = request.server.upload(request.package())
    run = RayRun(request.server, request.submission_id, submitted=True)
    doubt = f"the job may have been created all the same: stoker status {run.id}"
    create = functools.partial(request.server.post, "/api/jobs/", request.body(uri))
    created_once(create, run.ask, doubt)
    return run


def attach(run_id: str) -> RayRun:
    """Find a run by `ray:http://head:8265/name`."""
    address, _, name = run_id.removeprefix("ray:").rpartition("/")
    if not address or not name:
        raise UsageError(
            f"{run_id}: write ray:<address>/<job>, such as ray:http://<head>:8265/<job>"
        )
    return RayRun(job_server(address), name)


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
    server, warnings = job_server(address), list[str]()
    unchecked = "not checked (--offline)"
    if offline and server.plugin:
        return server, unchecked, warnings
    endpoint = server.endpoint()
    place = urlsplit(endpoint.url)
    secret = bool(endpoint.headers or endpoint.cookies)
    if secret and place.scheme == "http" and place.hostname not in _LOOPBACK:
        warnings.append("the token travels unencrypted: use https or a port-forward to localhost")
    if not secret:
        warnings.append("no token: anyone who can reach this cluster can run code on it")
    if offline:
        return server, unchecked, warnings
    ray, python = server.versions()
    ours, here = requirements.installed("ray"), platform.python_version()
    minor, our_minor = (version.rpartition(".")[0] for version in (python or here, here))
    old = not requirements.at_least(ray, requirements.OLDEST_RAY)
    if old or minor not in requirements.PYTHONS:
        raise UsageError(
            f"--address {server.address}: Ray {ray} and Python {python} there; Stoker needs Ray"
            f" {requirements.OLDEST_RAY} or newer and Python {requirements.SUPPORTED_PYTHONS}; use another"
            f" cluster, such as one of the image rayproject/ray:{ours or requirements.OLDEST_RAY}"
        )
    if ours and ray != ours:
        warnings.append(f"Ray {ray} there and {ours} here: the job uses the cluster's")
    if minor != our_minor:
        warnings.append(f"Python {python} there and {here} here: test your recipe with {python}")
    return server, f"Ray {ray}, Python {python or 'unknown'}", warnings


_RAY = re.compile(r"#|ray(?![\w.-])", re.I)
"""Lines of comments, and of Ray itself, whatever follows its name."""


def _pip(folder: Path) -> tuple[str, ...]:
    lines = (folder / "requirements.txt").read_text().splitlines()
    # Keep the cluster's Ray: another version could not join it.
    return tuple(found for line in lines if (found := line.strip()) and not _RAY.match(found))


PACKAGE_LIMIT_BYTES = 100 * 2**20
"""Ray stores packages in the head's memory and refuses larger ones."""
TIMEOUT_S = 30
_RESOLVER = "get_job_submission_client_cluster_info"
"""What Ray calls in the module that an address names."""


class Endpoint(NamedTuple):
    url: str
    headers: dict[str, str]
    cookies: dict[str, str]
    metadata: dict[str, str]
    """For every job."""


@dataclass
class JobServer:
    """The dashboard, with the token or whatever else the way to it needs.

    Ray's own `JobSubmissionClient` needs `ray[default]` on the laptop, waits for answers without a limit,
    reports a status code as text alone and honours the package's `.gitignore`. The requests are the same.
    """

    address: str
    """As the user names it, also in ids of runs."""
    token: str | None = field(repr=False)
    _endpoint: Endpoint | None = field(default=None, repr=False)

    @property
    def plugin(self) -> str | None:
        scheme = self.address.partition("://")[0]
        return None if scheme in ("http", "https") else scheme

    @property
    def metadata(self) -> dict[str, str]:
        return self._endpoint.metadata if self._endpoint else {}

    def endpoint(self, renew: bool = False) -> Endpoint:
        """Where requests go and what they carry; with `renew`, the address's plug-in is asked again."""
        if self._endpoint is None or renew:
            answer = self._resolved() if self.plugin else None
            found = [dict(getattr(answer, name, None) or {}) for name in Endpoint._fields[1:]]
            headers, cookies, metadata = found
            if self.token and "authorization" not in map(str.lower, headers):
                headers["Authorization"] = f"Bearer {self.token}"
            url = answer.address.rstrip("/") if answer else self.address
            self._endpoint = Endpoint(url, headers, cookies, metadata)
        return self._endpoint

    def _resolved(self) -> Any:
        scheme, _, inner = self.address.partition("://")
        kind = UnansweredError if self._endpoint else UsageError
        try:
            return getattr(importlib.import_module(scheme), _RESOLVER)(
                inner, create_cluster_if_needed=False, cookies=None, metadata=None, headers=None
            )
        except Exception as error:  # whatever a plug-in raises
            told = redact(" ".join(f"{type(error).__name__}: {error}".split()))
            raise kind(f"--address {self.address}: module {scheme}: {told}") from None

    def get(self, path: str) -> Any:
        return self.ask("GET", path).json()

    def post(self, path: str, content: dict[str, Any] | None = None) -> Any:
        return self.ask("POST", path, json=content).json()

    def upload(self, package: bytes) -> str:
        name = f"_ray_pkg_{hashlib.sha256(package).hexdigest()[:32]}.zip"
        path = f"/api/packages/gcs/{name}"
        if self.ask("GET", path, missing_ok=True).status_code == 404:
            self.ask("PUT", path, data=package)
        return f"gcs://{name}"

    def versions(self) -> tuple[str, str | None]:
        ray = str(self.get("/api/version")["ray_version"])
        answer = self.ask("GET", "/api/v0/cluster_metadata", missing_ok=True)
        if answer.status_code == 404:
            return ray, None
        return ray, answer.json().get("data", {}).get("pythonVersion")

    def ask(self, method: str, path: str, missing_ok: bool = False, **content: Any) -> Any:
        for renew in (False, True):  # a plug-in's credentials are short-lived
            answer = self._sent(method, path, self.endpoint(renew), **content)
            if answer.status_code != 401 or not self.plugin:
                break
        if answer.status_code in (401, 403):
            what = "requires a token" if answer.status_code == 401 else "rejected the token"
            hint = "set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file that contains it"
            if self.plugin:
                hint = f"module {self.plugin} gave no valid one"
            raise UsageError(f"--address {self.address}: the cluster {what}; {hint}")
        if answer.status_code == 404 and missing_ok:
            return answer
        code, page = answer.status_code, "json" not in answer.headers.get("content-type", "json")
        if not answer.ok:
            last = (answer.text.strip().splitlines() or [answer.reason])[-1]
            kind = UnansweredError if code >= 500 or code == 429 else UsageError
            raise kind(f"--address {self.address}: {method} {path}: {code}: {last}")
        if page and method == "GET" and not missing_ok:
            raise UnansweredError(
                f"--address {self.address}: not a Ray dashboard: the answer is not JSON"
            )
        return answer

    def _sent(self, method: str, path: str, endpoint: Endpoint, **content: Any) -> Any:
        import requests

        def signed(request: requests.PreparedRequest) -> requests.PreparedRequest:
            request.headers.update(endpoint.headers)
            return request

        host = urlsplit(endpoint.url).hostname
        content |= {"proxies": {"no_proxy": host}} if host in _LOOPBACK else {}
        # As a header alone, `.netrc` would replace the token.
        content |= {"auth": signed} if endpoint.headers else {}
        content["cookies"] = endpoint.cookies
        try:
            return requests.request(method, endpoint.url + path, timeout=TIMEOUT_S, **content)
        except requests.exceptions.RequestException as error:
            kind: type[UsageError] = UnansweredError
            if isinstance(error, requests.exceptions.SSLError):  # no answer comes later, either
                kind = UsageError
            hint = "the dashboard's default port is 8265, and it may need a port-forward"
            # requests and urllib3 put the operating system's reason last.
            why = str(error).rpartition(": ")[2].rstrip("')\"")
            raise kind(f"--address {self.address}: cannot connect ({why}); {hint}") from None


def job_server(address: str | None) -> JobServer:
    found = address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
    if not found:
        raise UsageError("--address: needed with --on ray; name the dashboard: http://<head>:8265")
    scheme, separator, _ = found.partition("://")
    plugin = scheme.isidentifier() and scheme != "ray" and importlib.util.find_spec(scheme)
    if not separator or not (scheme in ("http", "https") or plugin):
        package = "; pip install toolkit-for-ray-on-sagemaker-ai" * (scheme == "sagemaker_ray")
        raise UsageError(
            f"--address {found}: jobs go to the dashboard, http://<head>:8265, not to Ray Client or GCS, or to"
            f" a plug-in of Ray's, whose module {scheme!r} is not installed{package}"
        )
    return JobServer(found.rstrip("/"), find_token())


def package(folder: Path) -> bytes:
    """Zip a staged folder, with the same bytes for the same content."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path, _ in files_below(folder):
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (path.stat().st_mode & 0xFFFF) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
    return buffer.getvalue()


def find_token() -> str | None:
    """The cluster's token as Ray finds it: in a variable or a file; None without one."""
    if text := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return text
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    try:
        return path.read_text().strip() or None
    except OSError as error:
        if named:
            raise UsageError(f"RAY_AUTH_TOKEN_PATH {named}: {error.strerror}") from None
        return None
