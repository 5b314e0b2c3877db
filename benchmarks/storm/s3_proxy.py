"""Laptop: S3 for emulated hosts: a proxy on their bridge that forwards, refuses, delays or drops requests."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import http.server
import os
import random
import socket
import struct
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.storm.ground import run
from stoker_launcher.rehearsal.world import BRIDGE

ADDRESS, PORT = "10.77.0.1", 9000
ENDPOINT = f"http://{ADDRESS}:{PORT}"
MODES = {"well": 0.0, "errors": 0.5, "throttled": 0.3, "resets": 0.4}
"""Share of the requests that are not answered at once."""
SLOW_DOWN = (
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
BRIDGE_TIMEOUT_S = 60.0
NEW_NETWORK = 0x40000000
KEPT_OUT = ("connection", "transfer-encoding", "keep-alive", "content-length", "date", "server")


class S3Proxy:
    """Laptop: forwards to a server on loopback, in the network of a rehearsal.

    Args:
        server: `http://127.0.0.1:…`.
        seed: of what is refused.
    """

    def __init__(self, server: str, seed: int) -> None:
        where = urlsplit(server)
        self.server = (str(where.hostname), int(where.port or 80))
        self.mode = "well"
        self.counts: Counter[str] = Counter()
        self._draws = random.Random(seed)
        self._lock = threading.Lock()
        self._http: http.server.ThreadingHTTPServer | None = None

    def listen(self, world: int) -> None:
        """Laptop: answer the hosts of a rehearsal from now on.

        Args:
            world: a process in the network namespace of their bridge.
        """
        self.close()
        inside = ("nsenter", "--target", str(world), "--net", "ip")
        deadline = time.monotonic() + BRIDGE_TIMEOUT_S
        while BRIDGE not in run(*inside, "link", check=False):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the bridge of the hosts did not appear within {BRIDGE_TIMEOUT_S:.0f} s"
                )
            time.sleep(0.1)
        run(*inside, "address", "add", f"{ADDRESS}/16", "dev", BRIDGE)
        listener = _listener_in(Path(f"/proc/{world}/ns/net"))
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._http = http.server.ThreadingHTTPServer(
            (ADDRESS, PORT), handler, bind_and_activate=False
        )
        self._http.daemon_threads = True
        self._http.socket.close()
        self._http.socket = listener
        threading.Thread(target=self._http.serve_forever, name="s3", daemon=True).start()

    def close(self) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def fate(self) -> str:
        """What happens to the next request: a mode, or "well"."""
        with self._lock:
            fate = self.mode if self._draws.random() < MODES[self.mode] else "well"
            self.counts[fate] += 1
        return fate


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: S3Proxy

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fate = self.proxy.fate()
        if fate == "resets":
            # A linger of zero seconds makes close() send RST.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        if fate == "throttled":
            time.sleep(1.0)
        if fate in ("errors", "throttled"):
            self._send(503, [("Content-Type", "application/xml")], SLOW_DOWN)
            return
        backend = http.client.HTTPConnection(*self.proxy.server, timeout=60)
        with contextlib.closing(backend):
            backend.request(self.command, self.path, body, dict(self.headers))
            answer = backend.getresponse()
            content = answer.read()
            headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in KEPT_OUT]
            length = answer.getheader("Content-Length") if self.command == "HEAD" else None
            self._send(answer.status, headers, content, length)

    def _send(
        self, status: int, headers: list[tuple[str, str]], content: bytes, length: str | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815

    def handle(self) -> None:
        # Hosts that are killed or cut off leave their connections.
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, *args: Any) -> None:
        pass


def _listener_in(network: Path) -> socket.socket:
    """A listening socket in another network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    there = os.open(network, os.O_RDONLY)
    made: list[socket.socket] = []

    def create() -> None:
        if libc.setns(there, NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {network}")
        made.append(socket.create_server((ADDRESS, PORT), backlog=64))

    # Only this thread changes its namespace, and it ends here.
    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    os.close(there)
    return made[0]
