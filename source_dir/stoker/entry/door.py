"""The head's door: there, the other hosts make sure that it is their head, and see how it ends.

    host    the handshake of block connections: both sides prove that they hold the job's token
    head    {"ready": {package: version}}   when Ray takes hosts; they compare, and join
    head    {"end": exit code}              when the job ends; they leave

A host joins no Ray whose head has not proved itself, because Ray gives its token to whoever listens. The
kernel closes the connection as soon as the head's process ends, for any reason, and keepalive probes detect a
lost machine; Ray's daemons outlive their process and take about a minute to notice a lost head.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from stoker.hosts.output import say
from stoker.hosts.raynode import ClusterError
from stoker.serve.blocks import wire

REPORT_EVERY_S, CONNECT_S = 5.0, 5.0
SECRET = b"door"


def keep_alive(connection: socket.socket) -> None:
    """A head counts as gone after 5 s of silence."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000)  # ms


class HeadLost(Exception):  # noqa: N818 - not an error: every job ends like this
    """The head has ended with an exit code; or, without one, it may have been killed or be cut off."""

    def __init__(self, why: str, code: int | None = None) -> None:
        super().__init__(why)
        self.code = code


class Door(wire.Listener):
    """Sends every host that connects what it has sent the others."""

    def __init__(self, address: str, port: int) -> None:
        self._lock = threading.Lock()
        self._told: list[dict[str, Any]] = []
        self._lines: dict[str, socket.socket] = {}
        """By host, its last connection: a host may come again."""
        super().__init__(address, port, SECRET)

    def talk(self, connection: socket.socket) -> None:
        keep_alive(connection)
        host = str(wire.receive_message(connection, 1024).get("host"))
        connection.settimeout(None)
        with self._lock:
            for message in self._told:
                wire.send_message(connection, message)
            self._lines[host] = connection
        with contextlib.suppress(OSError):
            while connection.recv(1024):
                pass

    def tell(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._told.append(message)
            for connection in self._lines.values():
                with contextlib.suppress(OSError):
                    wire.send_message(connection, message)

    def end(self, code: int, hosts: int, grace_s: float) -> None:
        """Tell how the job ends, once so many hosts have come or some seconds have passed."""
        deadline = time.monotonic() + grace_s
        while len(self._lines) < hosts and time.monotonic() < deadline:
            time.sleep(0.1)
        self.close()
        self.tell({"end": code})


class Head:
    def __init__(self, name: str, port: int, own: str) -> None:
        self.name, self.port, self.own, self.address = name, port, own, ""
        self._line = socket.socket()

    def reach(self, deadline: float, check: Callable[[], None], again: bool = False) -> None:
        """Connect to the head; `again`: its process has listened before, so a refusal means that it ended."""
        started = reported = time.monotonic()
        pause = 0.2
        while True:
            check()
            try:
                return self._connect(min(CONNECT_S, max(deadline - time.monotonic(), 0.5)))
            except socket.gaierror:
                problem = f"the name {self.name} does not resolve yet"
            except OSError as error:
                problem = f"port {self.port} of {self.name}: {error.strerror or error}"
                if again and isinstance(error, ConnectionRefusedError):
                    raise HeadLost(f"the head's process has ended: {problem}") from None
            now = time.monotonic()
            if now > deadline:
                raise ClusterError(f"cannot reach the head after {now - started:.0f} s: {problem}")
            if now - reported > REPORT_EVERY_S:
                reported = now
                say(
                    f"waiting for the head, {now - started:.0f} of {deadline - started:.0f} s; {problem}"
                )
            time.sleep(min(pause, max(deadline - now, 0)))
            pause = min(2.0, pause * 1.5)

    def ready(self, deadline: float, check: Callable[[], None]) -> dict[str, str]:
        """Wait until Ray on the head takes hosts; returns the head's package versions."""
        while time.monotonic() < deadline:
            check()
            if (message := self._next(0.2)) is not None:
                return dict(message["ready"])
        raise ClusterError(f"Ray on the head {self.name} was not ready before the timeout")

    def check(self) -> None:
        """Raise HeadLost if the head is no longer there; does not wait."""
        self._next(0)

    def close(self) -> None:
        self._line.close()

    def _connect(self, timeout_s: float) -> None:
        self._line.close()
        self.address = socket.gethostbyname(self.name)
        self._line = socket.create_connection((self.address, self.port), timeout_s)
        keep_alive(self._line)
        try:
            wire.greet_server(self._line, wire.run_key(SECRET))
        except (ConnectionResetError, wire.WireError) as error:
            raise PermissionError(f"{error}: is its token that of this host?") from None
        self._line.settimeout(None)
        wire.send_message(self._line, {"host": self.own})

    def _next(self, timeout_s: float) -> dict[str, Any] | None:
        if not select.select([self._line], [], [], timeout_s)[0]:
            return None
        try:
            message = wire.receive_message(self._line)
            code = int(message["end"]) if "end" in message else None
        except wire.WireError:
            raise HeadLost("the head's process ended without an exit code") from None
        except OSError as error:
            raise HeadLost(f"the head is gone: {error.strerror or error}") from None
        if code is not None:
            raise HeadLost(f"the head has ended with exit code {code}", code)
        return message
