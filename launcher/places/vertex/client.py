"""Laptop: Google's client library for Vertex AI, and its errors as one-line messages."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from stoker.errors import UsageError, nearest

ABSENT = (
    "--on vertex: needs google-cloud-aiplatform, which is not installed here: pip install 'stoker[vertex]'"
)
NO_CREDENTIALS = (
    "Google Cloud: no credentials found; run `gcloud auth application-default login` or set"
    " GOOGLE_APPLICATION_CREDENTIALS (--dry-run --offline needs none, but vertex.project)"
)
ENDPOINT_VARIABLE = "CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM"
"""As for gcloud: another endpoint of the API. http:// takes no credentials, which are for Google alone."""
LOG_ENDPOINT_VARIABLE = "CLOUDSDK_API_ENDPOINT_OVERRIDES_LOGGING"
CALL_TIMEOUT_S = 60.0


def rejected(body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Laptop: what the library's own types reject in a CustomJob: (path, message). No network.

    Raises:
        UsageError: the library is not installed.
    """
    types = _types()
    try:
        types.CustomJob.from_json(json.dumps(body))
    except Exception as error:  # json_format.ParseError, which only the library's dependencies define
        text = " ".join(str(error).split())
        found = re.search(r"(?P<what>[^:]*(?::[^:]*)??) at CustomJob\.(?P<path>[\w.\[\]]+)", text)
        if found is None:
            yield "request", text
            return
        path = found["path"].rstrip(".")
        enum = re.search(r"Invalid enum value (\S+) for enum type", text)
        if enum:
            names = [name for name in types.AcceleratorType.__members__ if name.startswith("NVIDIA_")]
            yield path, f"not known to Vertex AI (got {enum[1]!r})" + nearest(enum[1], names, cutoff=0.5)
            return
        yield path, re.sub(r"^.*field: ", "", found["what"]).strip()


def project_of(configured: str | None, offline: bool) -> str:
    """Laptop: the project from the configuration, else that of the credentials; empty if there is none.

    Raises:
        UsageError: there are no credentials.
    """
    if configured or offline or _plain_endpoint():
        return configured or ""
    return credentials()[1] or ""


@cache
def credentials() -> tuple[Any, str | None]:
    """Laptop: (the application default credentials, their project).

    Raises:
        UsageError: there are none, or the library is not installed.
    """
    _types()
    import google.auth

    with readable_errors("credentials"):
        found: tuple[Any, str | None] = google.auth.default(
            scopes=["https://www.googleapis.com/auth/cloud-platform"]
        )
    return found


def jobs(region: str) -> Any:
    """Laptop: a client of the job service of a region."""
    return _service("JobServiceClient", region)


def create(parent: str, region: str, body: dict[str, Any]) -> str:
    """Laptop: create a custom job; returns its resource name.

    Raises:
        UsageError: the service rejected it, or cannot be reached.
    """
    job = _types().CustomJob.from_json(json.dumps(body))
    with readable_errors("job"):
        made = jobs(region).create_custom_job(parent=parent, custom_job=job, timeout=CALL_TIMEOUT_S)
    return str(made.name)


def log_entries(job: str, since: str) -> list[dict[str, str]]:
    """Laptop: a job's lines in Cloud Logging from a time on: id, at, host and text of each.

    Raises:
        UsageError: they cannot be read.
    """
    from google.auth.transport.requests import AuthorizedSession
    from requests import Session

    _, project, _, _, _, number = job.split("/")
    given = os.environ.get(LOG_ENDPOINT_VARIABLE, "").rstrip("/")
    with readable_errors("logs"):
        session = Session() if given.startswith("http://") else AuthorizedSession(credentials()[0])
    wanted = f'resource.type="ml_job" resource.labels.job_id="{number}"'
    query: dict[str, Any] = {
        "resourceNames": [f"projects/{project}"],
        "filter": f'{wanted} timestamp>="{since}"' if since else wanted,
        "orderBy": "timestamp asc",
        "pageSize": 1000,
    }
    found = []
    while True:
        with readable_errors("logs"):
            answer = session.post(
                f"{given or 'https://logging.googleapis.com'}/v2/entries:list",
                json=query,
                timeout=CALL_TIMEOUT_S,
            )
            page = answer.json()
        if not answer.ok:
            told = page.get("error", {}) if isinstance(page, dict) else {}
            remedy = (
                "; docs/iam/vertex-launcher.yaml lists the permissions" if answer.status_code == 403 else ""
            )
            raise UsageError(f"Cloud Logging: {told.get('status')}: {_line(told.get('message'))}{remedy}")
        found += [_entry(entry) for entry in page.get("entries", [])]
        if not (token := page.get("nextPageToken")):
            return found
        query["pageToken"] = token


def _entry(entry: dict[str, Any]) -> dict[str, str]:
    payload = entry.get("jsonPayload") or {}
    text = entry.get("textPayload") or payload.get("message") or json.dumps(payload)
    return {
        "id": str(entry.get("insertId")),
        "at": str(entry.get("timestamp")),
        "host": str(entry.get("resource", {}).get("labels", {}).get("task_name") or "service"),
        "text": str(text),
    }


@contextmanager
def readable_errors(what: str) -> Iterator[None]:
    """Laptop: convert the library's exceptions to a one-line `UsageError`."""
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
        name = getattr(status, "name", status)
        raise UsageError(f"Vertex AI {what}: {name}: {_line(error.message)}{_remedy(error)}") from None
    except (RetryError, RequestException) as error:
        raise UsageError(f"Vertex AI {what}: cannot be reached: {_line(error)}") from None


_HOW = " (`gcloud auth application-default login`)"


def _remedy(error: Any) -> str:
    code = int(error.code or 0)
    if code == 403:
        return "; docs/iam/vertex-launcher.yaml lists the permissions that the launcher needs"
    if code == 401:
        return f"; sign in again{_HOW}"
    if code == 429:
        return "; request the quota of the machine type, or choose another"
    return ""


def _line(text: Any) -> str:
    return " ".join(str(text).split())[:400]


def _plain_endpoint() -> str:
    """The configured endpoint if it is not encrypted, as only a stand-in on this machine is."""
    given = os.environ.get(ENDPOINT_VARIABLE, "").rstrip("/")
    return given if given.startswith("http://") else ""


@cache
def _service(name: str, region: str) -> Any:
    _types()
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import aiplatform_v1

    endpoint = os.environ.get(ENDPOINT_VARIABLE, "").rstrip("/") or f"{region}-aiplatform.googleapis.com"
    account: Any = credentials()[0] if not _plain_endpoint() else AnonymousCredentials()
    kind: Any = getattr(aiplatform_v1, name)
    # REST passes proxies that gRPC does not.
    return kind(credentials=account, transport="rest", client_options={"api_endpoint": endpoint})


@cache
def _types() -> Any:
    try:
        from google.cloud.aiplatform_v1 import types
    except ImportError:
        raise UsageError(ABSENT) from None
    return types
