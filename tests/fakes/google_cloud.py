"""Google Cloud at the process boundary: an emulated Cloud Storage, and the job service's REST methods."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote

from tests.fakes.answers import Answer, answering

BUCKET = "stoker-test"


@contextlib.contextmanager
def cloud_storage(bucket: str = BUCKET) -> Iterator[dict[str, str]]:
    """Start an emulator with one bucket on a free loopback port; the environment variables of its clients.

    It is a process of its own: pyarrow holds the interpreter's lock while it opens an object.
    """
    command = [sys.executable, "-m", "tests.fakes.google_cloud", bucket]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            assert process.stdout is not None
            yield {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{int(process.stdout.readline())}"}
        finally:
            process.terminate()


def serve_cloud_storage(bucket: str) -> None:
    from gcp_storage_emulator import server as emulator

    class Threaded(ThreadingHTTPServer):
        """The emulator's own server answers one connection at a time, and clients keep several open."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            print(self.server_port, flush=True)

    # It would write all that it knows after every request, in memory, too.
    emulator.Storage._write_config_to_file = lambda storage: None
    one_at_a_time = threading.Lock()  # its storage is not meant for threads

    def locked(answer: Callable[[Any], None]) -> Callable[[Any], None]:
        def one(handler: Any) -> None:
            path = unquote(handler.path)
            if path.startswith(f"/{bucket}/"):  # the XML API, which obstore speaks
                name = quote(path.removeprefix(f"/{bucket}/"), safe="")
                handler.path = f"/download/storage/v1/b/{bucket}/o/{name}?alt=media"
            with one_at_a_time:
                answer(handler)

        return one

    class Dated(emulator.RequestHandler):
        def end_headers(self) -> None:
            self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
            self.send_header("ETag", '"0"')
            super().end_headers()

    handler = emulator.RequestHandler = Dated
    for name in [name for name in dir(handler) if name.startswith("do_")]:
        setattr(handler, name, locked(getattr(handler, name)))
    emulator.server.HTTPServer = Threaded
    emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket=bucket).run()


@dataclass
class JobService:
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    refusal: tuple[int, str, str] | None = None
    """Status, code and message of every answer."""
    entries: list[dict[str, Any]] = field(default_factory=list)
    """Of Cloud Logging."""
    loses_created: bool = False
    """Whether the answer to the creation of a job is lost."""
    on_get: Callable[[dict[str, Any]], None] = lambda job: None

    def answer(
        self, method: str, path: str, body: dict[str, Any]
    ) -> tuple[int, dict[str, Any]] | None:
        path, _, query = path.partition("?")
        self.requests.append((method, path))
        if self.refusal:
            status, code, message = self.refusal
            return status, {"error": {"code": status, "status": code, "message": message}}
        if method == "POST" and path == "/v2/entries:list":
            return 200, {"entries": self.entries}
        created = re.fullmatch(r"/v1/(projects/[^/]+/locations/[^/]+)/customJobs", path)
        if method == "POST" and created:
            name = f"{created[1]}/customJobs/{1000 + len(self.jobs)}"
            self.jobs[name] = {**body, "name": name, "state": "JOB_STATE_PENDING"}
            return None if self.loses_created else (200, self.jobs[name])
        if method == "GET" and created:
            (wanted,) = re.findall(r'display_name="(.*)"', parse_qs(query)["filter"][0])
            jobs = [job for job in self.jobs.values() if job["displayName"] == wanted]
            return 200, {"customJobs": jobs}
        named = re.fullmatch(r"/v1/(projects/[^/]+/locations/[^/]+/customJobs/\d+)(:cancel)?", path)
        job = self.jobs.get(named[1]) if named else None
        if job is None:
            return 404, {
                "error": {"code": 404, "status": "NOT_FOUND", "message": f"{path} is not found."}
            }
        if method == "POST" and named and named[2]:
            job["state"] = "JOB_STATE_CANCELLED"
            return 200, {}
        self.on_get(job)
        return 200, job


@contextlib.contextmanager
def job_service() -> Iterator[tuple[JobService, dict[str, str]]]:
    service = JobService()

    def answer(request: BaseHTTPRequestHandler) -> Answer | None:
        length = int(request.headers.get("Content-Length") or 0)
        body = json.loads(request.rfile.read(length) or b"{}")
        if (answer := service.answer(request.command, request.path, body)) is None:
            return None
        status, content = answer
        return status, "application/json", json.dumps(content).encode()

    with answering(answer) as address:
        names = ("AIPLATFORM", "LOGGING")
        yield service, {f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{name}": address for name in names}


if __name__ == "__main__":
    serve_cloud_storage(sys.argv[1])
