"""Laptop: an HTTP client for Ray's job server with token authentication; does not import ray.

Ray's own `JobSubmissionClient` needs `ray[default]` on the laptop, imports ray (a second or more) and
honours the package's `.gitignore` when uploading. The requests below are the same.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.source import files_below
from stoker.errors import UsageError

PACKAGE_LIMIT_BYTES = 100 * 2**20
"""Ray stores packages in the head's memory and refuses larger ones."""
TIMEOUT_S = 30
_TOKEN_HINT = "set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file that contains it"  # noqa: S105 - a hint


class UnreachableError(UsageError):
    """The server did not answer, or failed itself; it may do so later."""


@dataclass(frozen=True)
class JobServer:
    """The dashboard's address and token."""

    address: str
    token: str | None = field(repr=False)

    def get(self, path: str) -> Any:
        return self._ask("GET", path).json()

    def post(self, path: str, content: dict[str, Any] | None = None) -> Any:
        return self._ask("POST", path, json=content).json()

    def upload(self, package: bytes) -> str:
        """Upload a zip file unless the cluster has it; return its URI for `runtime_env`."""
        name = f"_ray_pkg_{hashlib.sha256(package).hexdigest()[:32]}.zip"
        path = f"/api/packages/gcs/{name}"
        if self._ask("GET", path, missing_ok=True).status_code == 404:
            self._ask("PUT", path, data=package)
        return f"gcs://{name}"

    def versions(self) -> tuple[str, str | None]:
        """The versions of Ray and, if the cluster reports it, of Python."""
        ray = str(self.get("/api/version")["ray_version"])
        answer = self._ask("GET", "/api/v0/cluster_metadata", missing_ok=True)
        if answer.status_code == 404:
            return ray, None
        return ray, answer.json().get("data", {}).get("pythonVersion")

    def _ask(self, method: str, path: str, missing_ok: bool = False, **content: Any) -> Any:
        import requests

        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            answer = requests.request(
                method, self.address + path, headers=headers, timeout=TIMEOUT_S, **content
            )
        except requests.exceptions.SSLError as error:
            raise UsageError(f"--address {self.address}: certificate verification failed: {error}") from None
        except requests.exceptions.ConnectionError as error:
            raise UnreachableError(
                f"--address {self.address}: cannot connect ({_root_cause(error)});"
                " the dashboard's default port is 8265, and it may need a port-forward"
            ) from None
        except requests.exceptions.Timeout:
            raise UnreachableError(f"--address {self.address}: no answer within {TIMEOUT_S} s") from None
        except requests.exceptions.RequestException as error:
            raise UnreachableError(f"--address {self.address}: {error}") from None
        if answer.status_code == 401:
            raise UsageError(f"--address {self.address}: the cluster requires a token; {_TOKEN_HINT}")
        if answer.status_code == 403:
            raise UsageError(f"--address {self.address}: the cluster rejected the token; {_TOKEN_HINT}")
        if answer.status_code == 404 and missing_ok:
            return answer
        if not answer.ok:
            last = (answer.text.strip().splitlines() or [answer.reason])[-1]
            kind = UnreachableError if answer.status_code >= 500 or answer.status_code == 429 else UsageError
            raise kind(f"--address {self.address}: {method} {path}: {answer.status_code}: {last}")
        if "json" not in answer.headers.get("content-type", "json") and method == "GET" and not missing_ok:
            raise UnreachableError(f"--address {self.address}: not a Ray dashboard: the answer is not JSON")
        return answer


def job_server(address: str | None) -> JobServer:
    """The server at `--address`, or at the address in Ray's environment variables."""
    found = address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
    if not found:
        raise UsageError("--address: needed with --on ray; name the dashboard: http://<head>:8265")
    if not found.startswith(("http://", "https://")):
        raise UsageError(
            f"--address {found}: jobs go to the dashboard; use http://<head>:8265, not the"
            " address of Ray Client or GCS"
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


def _root_cause(error: BaseException) -> str:
    """Unwrap requests and urllib3 errors down to the operating system's reason."""
    reason: Any = error
    while True:
        inner = getattr(reason, "reason", None) or next(
            (item for item in getattr(reason, "args", ()) if isinstance(item, BaseException)), None
        )
        if not isinstance(inner, BaseException) or inner is reason:
            break
        reason = inner
    text = str(reason).rpartition(": ")[2]
    return text.removeprefix("[Errno ").partition("] ")[2] or text
