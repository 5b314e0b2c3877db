"""A web server on loopback that answers as a function says."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = tuple[int, str, bytes]
"""Status, content type and body."""


@contextlib.contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler], Answer | None]) -> Iterator[str]:
    """Its address; without an answer the connection breaks."""

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            if (given := answer(self)) is None:
                self.close_connection = True
                return
            status, kind, body = given
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = handle_any  # noqa: N815 - the base class's names

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
