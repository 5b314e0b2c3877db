"""An address plug-in of Ray's and the proxy that it leads to, which refuses requests without its credentials."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import requests

from tests.fakes.answers import Answer, answering

MODULE = "plugged_ray"
ADDRESS = f"{MODULE}://cluster/namespace"
SOURCE = """
from types import SimpleNamespace

url, asked, problem = "", [], ""

def get_job_submission_client_cluster_info(address, *args, **kwargs):
    asked.append((address, kwargs))
    if problem:
        raise RuntimeError(problem)
    return SimpleNamespace(
        address=url,
        headers={"X-Session": f"session-{len(asked)}"},
        cookies={"ray_session": f"cookie-{len(asked)}"},
        metadata={"team": "a"},
    )
"""


@contextlib.contextmanager
def plugged(
    folder: Path, answer: Callable[[BaseHTTPRequestHandler], Answer | None], uses: int = 10**9
) -> Iterator[Any]:
    """The plug-in's module, installed in `folder`; each of its credentials is good for so many requests."""
    (folder / f"{MODULE}.py").write_text(SOURCE)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    module: Any = importlib.import_module(MODULE)
    used: dict[str, int] = {}

    def proxy(request: BaseHTTPRequestHandler) -> Answer | None:
        newest = len(module.asked)
        session = request.headers["X-Session"]
        cookie = request.headers["Cookie"]
        if (session, cookie) != (f"session-{newest}", f"ray_session=cookie-{newest}"):
            return 401, "text/plain", b"no session"
        used[session] = used.get(session, 0) + 1
        if used[session] > uses:
            return 401, "text/plain", b"session expired"
        return answer(request)

    try:
        with answering(proxy) as module.url:
            yield module
    finally:
        sys.path.remove(str(folder))
        del sys.modules[MODULE]


def forwarding(to: str) -> Callable[[BaseHTTPRequestHandler], Answer]:
    """Ask this dashboard, with the request's own token."""

    def answer(request: BaseHTTPRequestHandler) -> Answer:
        length = int(request.headers["Content-Length"] or 0)
        passed = ("Authorization", "Content-Type")
        found = requests.request(
            request.command,
            to + request.path,
            data=request.rfile.read(length),
            headers={name: request.headers[name] for name in passed if request.headers[name]},
            timeout=60,
        )
        return found.status_code, found.headers.get("Content-Type", "text/plain"), found.content

    return answer
