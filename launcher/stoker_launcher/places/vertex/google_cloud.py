"""Laptop: Google's client library for Vertex AI, and its errors as one-line messages."""

from __future__ import annotations

import datetime
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from stoker.errors import UsageError
from stoker.storage.filesystems import filesystem_of, is_file
from stoker_launcher.places.remote import LogEntry, UnansweredError, created_once

ABSENT = "--on vertex: needs google-cloud-aiplatform, which is not installed here: pip install 'stoker[vertex]'"
NO_CREDENTIALS = (
    "Google Cloud: no credentials found; run `gcloud auth application-default login` or set"
    " GOOGLE_APPLICATION_CREDENTIALS (--dry-run --offline needs none, but vertex.project)"
)
ENDPOINT_VARIABLE = "CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM"
"""As for gcloud: another endpoint of the API. http:// takes no credentials, which are for Google alone."""
LOG_ENDPOINT_VARIABLE = "CLOUDSDK_API_ENDPOINT_OVERRIDES_LOGGING"
CALL_TIMEOUT_S = 60.0


def rejected(body: dict[str, Any]) -> Iterator[str]:
    """What the library's own types reject in a CustomJob. No network."""
    types = _types()
    try:
        types.CustomJob.from_json(json.dumps(body))
    except (
        Exception
    ) as error:  # json_format.ParseError, which only the library's dependencies define
        yield f"vertex: {_line(error)}"


def project_of(configured: str | None, offline: bool) -> str:
    if configured or offline or _plain_endpoint():
        return configured or ""
    return credentials()[1] or ""


@cache
def credentials() -> tuple[Any, str | None]:
    _types()
    import google.auth

    with readable_errors("credentials"):
        found: tuple[Any, str | None] = google.auth.default(
            scopes=["https://www.googleapis.com/auth/cloud-platform"]
        )
    return found


@cache
def jobs(region: str) -> Any:
    _types()
    from google.auth.credentials import AnonymousCredentials
    from google.cloud.aiplatform_v1 import JobServiceClient

    endpoint = (
        os.environ.get(ENDPOINT_VARIABLE, "").rstrip("/") or f"{region}-aiplatform.googleapis.com"
    )
    account: Any = credentials()[0] if not _plain_endpoint() else AnonymousCredentials()
    kind: Any = JobServiceClient
    # REST passes proxies that gRPC does not.
    return kind(credentials=account, transport="rest", client_options={"api_endpoint": endpoint})


def create(parent: str, region: str, body: dict[str, Any]) -> str:
    name, job = body["displayName"], _types().CustomJob.from_json(json.dumps(body))

    def create() -> str:
        with readable_errors("job"):
            service = jobs(region)
            made = service.create_custom_job(parent=parent, custom_job=job, timeout=CALL_TIMEOUT_S)
        return str(made.name)

    def find() -> str:
        wanted = {"parent": parent, "filter": f'display_name="{name}"'}
        with readable_errors("jobs"):
            listed = jobs(region).list_custom_jobs(request=wanted, timeout=CALL_TIMEOUT_S)
            names = [str(one.name) for one in listed]
        if not names:
            raise UsageError(f"Vertex AI lists no job {name}")
        return names[0]

    doubt = f"the job may have been created all the same; look for {name} in the console"
    return created_once(create, find, doubt)


def log_entries(job: str, since_s: float) -> list[LogEntry]:
    from google.auth.transport.requests import AuthorizedSession
    from requests import Session

    _, project, _, _, _, number = job.split("/")
    given = os.environ.get(LOG_ENDPOINT_VARIABLE, "").rstrip("/")
    with readable_errors("logs"):
        session = Session() if given.startswith("http://") else AuthorizedSession(credentials()[0])
    since = datetime.datetime.fromtimestamp(since_s, datetime.UTC).isoformat()
    wanted = f'resource.type="ml_job" resource.labels.job_id="{number}"'
    query: dict[str, Any] = {
        "resourceNames": [f"projects/{project}"],
        "filter": f'{wanted} timestamp>="{since}"' if since_s else wanted,
        "orderBy": "timestamp asc",
        "pageSize": 1000,
    }
    found = []
    while True:
        with readable_errors("logs"):
            url = f"{given or 'https://logging.googleapis.com'}/v2/entries:list"
            answer = session.post(url, json=query, timeout=CALL_TIMEOUT_S)
            page = answer.json()
        if not answer.ok:
            told = page.get("error", {}) if isinstance(page, dict) else {}
            why = f"{told.get('status')}: {_line(told.get('message'))}"
            raise UsageError(f"Cloud Logging: {why}{_REMEDIES.get(answer.status_code, '')}")
        for entry in page.get("entries", []):
            payload = entry.get("jsonPayload") or {}
            text = entry.get("textPayload") or payload.get("message") or json.dumps(payload)
            host = entry.get("resource", {}).get("labels", {}).get("task_name") or "service"
            at = datetime.datetime.fromisoformat(entry["timestamp"])
            found.append(LogEntry(str(entry.get("insertId")), at.timestamp(), str(host), str(text)))
        if not (token := page.get("nextPageToken")):
            return found
        query["pageToken"] = token


@contextmanager
def readable_errors(what: str) -> Iterator[None]:
    from google.api_core.exceptions import GoogleAPICallError, RetryError
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
    from requests.exceptions import RequestException

    try:
        yield
    except DefaultCredentialsError:
        raise UsageError(NO_CREDENTIALS) from None
    except GoogleAuthError as error:
        raise UsageError(f"Google Cloud {what}: {_line(error)}; sign in again{_HOW}") from None
    except GoogleAPICallError as error:
        status = getattr(error, "reason", None) or error.code
        code = int(error.code or 0)
        kind = UnansweredError if code >= 500 else UsageError
        name, remedy = getattr(status, "name", status), _REMEDIES.get(code, "")
        raise kind(f"Vertex AI {what}: {name}: {_line(error.message)}{remedy}") from None
    except (RetryError, RequestException) as error:
        raise UnansweredError(f"Vertex AI {what}: cannot be reached: {_line(error)}") from None


_HOW = " (`gcloud auth application-default login`)"
_REMEDIES = {
    401: f"; sign in again{_HOW}",
    403: "; docs/iam/vertex-launcher.yaml lists the permissions that the launcher needs",
    429: "; request the quota of the machine type, or choose another",
}


def _line(text: Any) -> str:
    return " ".join(str(text).split())[:400]


def _plain_endpoint() -> str:
    """The configured endpoint if it is not encrypted, as only a stand-in on this machine is."""
    given = os.environ.get(ENDPOINT_VARIABLE, "").rstrip("/")
    return given if given.startswith("http://") else ""


@cache
def _types() -> Any:
    try:
        from google.cloud.aiplatform_v1 import types
    except ImportError:
        raise UsageError(ABSENT) from None
    return types


class CloudStorage:
    def exists(self, uri: str) -> bool:
        return is_file(uri)

    def send(self, file: Path, uri: str) -> None:
        filesystem, path = filesystem_of(uri)
        with file.open("rb") as source, filesystem.open_output_stream(path) as target:
            shutil.copyfileobj(source, target, 16 * 2**20)

    def put(self, content: bytes, uri: str) -> None:
        filesystem, path = filesystem_of(uri)
        with filesystem.open_output_stream(path) as stream:
            stream.write(content)


def reason_of(error: OSError) -> str:
    return " ".join(str(error.strerror or error).split())[:300]
