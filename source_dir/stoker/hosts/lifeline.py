"""Head and worker hosts: a TCP connection from each worker host to the head's process.

Ray's daemons outlive the process that started them and take about a minute to notice a lost head. The
kernel closes this connection as soon as the head's process ends, for any reason, and keepalive probes
detect a lost head machine. Both sides prove that they hold the job's token.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import select
import socket
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 2, 1, 3
"""Together: a peer counts as lost after 5 s of silence."""
HELLO_TIMEOUT_S = 5.0
"""Deadline of a line of the handshake, however slowly the other side sends."""
MOST_GREETINGS = 128
"""Handshakes in progress at the same time; further connections wait until one of them ends."""
LINE_BYTES, MESSAGE_BYTES = 1024, 2**20
"""Longer handshakes, and longer messages of the head, are not part of the protocol."""


@dataclass(frozen=True)
class Ended:
    """Worker host: how the head ended; `code` is None if the connection was lost without an exit code."""

    code: int | None
    why: str
    cut_off: bool = False
    """Whether the network failed, so that the head may still be there."""


class LifelineServer:
    """Head: accepts worker hosts and signals when Ray is ready and when the job ends."""

    def __init__(self, address: str, port: int, token: str, versions: dict[str, str] | None = None) -> None:
        """Args: versions: the head's package versions; every host compares its own before joining."""
        self._token = token
        self._message: dict[str, object] = {"ready": True, "versions": versions or {}}
        self._lock = threading.Lock()
        self._connections: dict[str, socket.socket] = {}
        self._lost: dict[str, float] = {}
        self._ready = False
        self._greetings = threading.Semaphore(MOST_GREETINGS)
        self._socket = socket.create_server((address, port), backlog=64)
        threading.Thread(target=self._accept, name="lifeline", daemon=True).start()

    def connected(self) -> set[str]:
        """Head: names of the currently connected hosts."""
        with self._lock:
            return set(self._connections)

    def lost(self, for_s: float) -> set[str]:
        """Head: names of the hosts that were connected, and have not been for so long."""
        with self._lock:
            since = {host: time.monotonic() - at for host, at in self._lost.items()}
        return {host for host, lost_s in since.items() if lost_s >= for_s}

    def ready(self) -> None:
        """Head: announce that Ray is listening and hosts may join."""
        with self._lock:
            self._ready = True
            for connection in self._connections.values():
                _send(connection, self._message)

    def end(self, code: int, expected: Collection[str] = (), grace_s: float = 0) -> None:
        """Head: announce the end of the job, so that every worker host leaves.

        Args:
            code: the job's exit code.
            expected: hosts that may still be connecting.
            grace_s: how long to wait for them to connect and receive the message.
        """
        deadline = time.monotonic() + grace_s
        while set(expected) - self.connected() and time.monotonic() < deadline:
            time.sleep(0.1)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        with self._lock:
            for connection in self._connections.values():
                _send(connection, {"end": code})
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)
            self._connections.clear()

    def _accept(self) -> None:
        while True:
            self._greetings.acquire()
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                host = self._greet(connection)
            except (OSError, ValueError):
                return
            finally:
                self._greetings.release()
            with self._lock:
                self._connections[host] = connection
                self._lost.pop(host, None)
                if self._ready:
                    _send(connection, self._message)
            with contextlib.suppress(OSError):
                connection.settimeout(None)
                while connection.recv(1024):
                    pass
            with self._lock:
                if self._connections.get(host) is connection:
                    del self._connections[host]
                    self._lost[host] = time.monotonic()

    def _greet(self, connection: socket.socket) -> str:
        _keep_alive(connection)
        connection.settimeout(HELLO_TIMEOUT_S)
        nonce = secrets.token_hex(16)
        _send(connection, {"nonce": nonce})
        hello = _message(_read_line(connection))
        host, theirs = str(hello.get("host")), str(hello.get("nonce"))
        if not _equal(hello.get("proof"), _proof(self._token, "host", nonce, theirs, host)):
            raise ValueError("wrong token")
        _send(connection, {"proof": _proof(self._token, "head", theirs, nonce, host)})
        return host


class Lifeline:
    """Worker host: the connection to the head.

    Raises:
        OSError: the head cannot be reached.
        PermissionError: the other side does not hold this job's token.
    """

    def __init__(self, address: str, port: int, host: str, token: str, timeout_s: float = 5.0) -> None:
        self._socket = socket.create_connection((address, port), timeout=timeout_s)
        self._buffer = b""
        self.head_versions: dict[str, str] = {}
        """The head's package versions, once it is ready."""
        try:
            _keep_alive(self._socket)
            self._socket.settimeout(HELLO_TIMEOUT_S)
            theirs, ours = str(_message(_read_line(self._socket)).get("nonce")), secrets.token_hex(16)
            proof = _proof(token, "host", theirs, ours, host)
            _send(self._socket, {"host": host, "nonce": ours, "proof": proof})
            answer = _read_line(self._socket)
            if not answer:
                raise PermissionError("the head refused this host's token")
            if not _equal(_message(answer).get("proof"), _proof(token, "head", ours, theirs, host)):
                raise PermissionError("the head does not hold this job's token")
        except ValueError as error:
            self._socket.close()
            raise ConnectionError(f"not a Stoker head: {error}") from None
        except OSError:
            self._socket.close()
            raise

    def wait_ready(self, timeout_s: float) -> bool | Ended:
        """Worker host: True once Ray on the head listens, False after the timeout, `Ended` if it ended."""
        deadline = time.monotonic() + timeout_s
        while True:
            message = self._next(max(0.0, deadline - time.monotonic()))
            if isinstance(message, Ended):
                return message
            if message is None:
                return False
            if message.get("ready"):
                sent = message.get("versions")
                self.head_versions = dict(sent) if isinstance(sent, dict) else {}
                return True

    def poll(self, timeout_s: float) -> Ended | None:
        """Worker host: wait up to `timeout_s` for the head's end; None if it is still running."""
        message = self._next(timeout_s)
        return message if isinstance(message, Ended) else None

    def close(self) -> None:
        self._socket.close()

    def _next(self, timeout_s: float) -> dict[str, object] | Ended | None:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                return None
            try:
                data = self._socket.recv(4096)
            except OSError as error:
                return Ended(None, f"the head is gone: {error.strerror or error}", cut_off=True)
            if not data:
                return Ended(None, "the head's process ended without an exit code")
            self._buffer += data
            if len(self._buffer) > MESSAGE_BYTES:
                return Ended(None, "the head sent an invalid message")
        line, self._buffer = self._buffer.split(b"\n", 1)
        try:
            message = _message(line)
            code = int(str(message["end"])) if "end" in message else None
        except ValueError:
            return Ended(None, "the head sent an invalid message")
        return message if code is None else Ended(code, f"the head has ended with exit code {code}")


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; elsewhere only tests run this
        tcp = socket.IPPROTO_TCP
        connection.setsockopt(tcp, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        connection.setsockopt(tcp, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
        connection.setsockopt(tcp, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
        silent_s = KEEPALIVE_IDLE_S + KEEPALIVE_INTERVAL_S * KEEPALIVE_PROBES
        connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, silent_s * 1000)


def _proof(token: str, role: str, *parts: str) -> str:
    # The role and the other side's nonce are part of it, so it can neither be reflected nor replayed.
    content = json.dumps(["stoker lifeline", role, *parts]).encode()
    return hmac.new(token.encode(), content, hashlib.sha256).hexdigest()


def _equal(given: object, proof: str) -> bool:
    return hmac.compare_digest(str(given).encode(), proof.encode())


def _message(line: bytes) -> dict[str, object]:
    """A message of the protocol.

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def _send(connection: socket.socket, message: dict[str, object]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _read_line(connection: socket.socket) -> bytes:
    line, deadline = b"", time.monotonic() + HELLO_TIMEOUT_S
    while not line.endswith(b"\n"):
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        byte = connection.recv(1)
        if not byte or len(line) > LINE_BYTES:
            break
        line += byte
    return line
