"""CPU host and train worker: the protocol of a block connection.

A handshake proves to each side that the other holds the run's key. Then the train worker requests rows of
blocks, one request at a time, and gets for each a JSON header and the bytes of the columns:

    request   length, {"take": [block, first row, row after the last], "done": [blocks that may go]}
    answer    length, {"rows": of the whole block, "columns": [[name, dtype, shape of a row], …],
                       "ragged": [[name, dtype, shape of a value, number of values], …],
                       "text": {name: [strings]}}, bytes; of "ragged" offsets (int64) before values
              length, {"error": why}

Every function raises WireError if the peer does not keep to it, ends, or stays silent.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

NONCE_BYTES = 32
PROOF_BYTES = 32
MESSAGE_BYTES, REQUEST_BYTES = 64 * 2**20, 2**20
"""Longer headers, and longer requests, are not part of the protocol."""
MOST_GREETINGS = 128
"""Handshakes in progress at the same time; further connections wait until one of them ends."""
GREETING_TIMEOUT_S = 5.0
"""Deadline of a handshake, however slowly the peer sends."""
ACCEPT_AGAIN_S = 0.1
PROBE_IDLE_S = 60
"""The kernel probes a connection that is idle for this long. Firewalls and address translation forget those
without traffic, mostly after some minutes, and tell nobody."""


class WireError(OSError):
    """The peer ended, is silent, or does not speak the protocol."""


class EndedError(WireError):
    """The peer has closed the connection."""


ENDED = EndedError, ConnectionError, TimeoutError
"""So calls fail at once on a connection that is over: closed, reset, or without an answer to probes."""


def cluster_token() -> str:
    """The Ray token that this process was started with; empty without one."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    try:
        return Path(path).expanduser().read_text().strip()
    except OSError:
        return ""


def run_key(secret: bytes) -> bytes:
    """The key of a run's connections.

    The service generates `secret` for each run and sends it over Ray. Ray's token is mixed in, so the secret
    alone, if seen on the network, does not yield the key.
    """
    return hmac.new(cluster_token().encode(), b"stoker blocks" + secret, hashlib.sha256).digest()


class Listener:
    """Accepts connections of processes that hold the key; one thread for each."""

    def __init__(self, address: str, port: int, secret: bytes) -> None:
        self._key = run_key(secret)
        self._greetings = threading.Semaphore(MOST_GREETINGS)
        self._socket = socket.create_server((address, port), backlog=128)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name=type(self).__name__, daemon=True).start()

    def talk(self, connection: socket.socket) -> None:
        """Serve a connection until it ends; OSError if it does."""
        raise NotImplementedError

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    def _accept(self) -> None:
        while True:
            self._greetings.acquire()
            try:
                connection, _ = self._socket.accept()
                threading.Thread(
                    target=self._serve, args=(connection,), name="connection", daemon=True
                ).start()
            except (
                OSError,
                RuntimeError,
            ):  # closed, or short of descriptors, memory or threads for a while
                if self._socket.fileno() < 0:
                    return
                self._greetings.release()
                time.sleep(ACCEPT_AGAIN_S)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            try:
                greet_client(connection, self._key)
            finally:
                self._greetings.release()
            self.talk(connection)


def greet_client(connection: socket.socket, key: bytes) -> None:
    """Authenticate a client, and prove to it that this server holds the key."""
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ours)
    answer = receive_soon(connection, NONCE_BYTES + PROOF_BYTES)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"train worker", ours, theirs)):
        raise WireError("does not hold the key of this run")
    connection.sendall(_proof(key, b"host", theirs, ours))


def greet_server(connection: socket.socket, key: bytes) -> None:
    """Authenticate to the server, and check that it holds the key."""
    theirs = receive_soon(connection, NONCE_BYTES)
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ours + _proof(key, b"train worker", theirs, ours))
    proof = receive_soon(connection, PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(key, b"host", ours, theirs)):
        raise WireError("the server does not hold the key of this run")


def _proof(key: bytes, role: bytes, *parts: bytes) -> bytes:
    # Each side's role is part of its proof, so a proof cannot be reflected to its sender.
    return hmac.new(key, b"|".join((role, *parts)), hashlib.sha256).digest()


def send_message(connection: socket.socket, message: dict[str, Any], more: bool = False) -> None:
    """Send a header; with `more`, bytes follow it in the same packet."""
    content = json.dumps(message).encode()
    flags = socket.MSG_MORE if more else 0
    connection.sendall(struct.pack(">I", len(content)) + content, flags)


def receive_message(connection: socket.socket, most: int = MESSAGE_BYTES) -> dict[str, Any]:
    (length,) = struct.unpack(">I", receive(connection, 4))
    if length > most:
        raise WireError(f"sent an invalid header of {length} bytes")
    try:
        message = json.loads(receive(connection, length))
    except (ValueError, RecursionError) as error:
        raise WireError(f"sent a header that is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise WireError("sent a header that is not an object")
    return message


def receive_soon(connection: socket.socket, length: int) -> bytes:
    """Receive exactly `length` bytes of a handshake before its deadline."""
    content, deadline = b"", time.monotonic() + GREETING_TIMEOUT_S
    while len(content) < length:
        left = deadline - time.monotonic()
        if left <= 0:
            raise WireError("stopped responding")
        connection.settimeout(left)
        try:
            part = connection.recv(length - len(content))
        except TimeoutError:
            raise WireError("stopped responding") from None
        if not part:
            raise WireError("closed the connection")
        content += part
    return content


def receive(connection: socket.socket, length: int) -> bytes:
    content = bytearray(length)
    receive_into(connection, memoryview(content))
    return bytes(content)


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill `target` from the connection.

    The kernel fills it in one call, without the GIL, so the training loop is not disturbed.
    """
    at = 0
    while at < len(target):
        try:
            count = connection.recv_into(target[at:], 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise WireError("stopped responding") from None
        if count == 0:
            raise EndedError("closed the connection")
        at += count


def set_timeouts(connection: socket.socket, seconds: float) -> None:
    """How long one call may take without progress; the kernel probes the connection while it is idle.

    Uses the kernel's timeouts: Python's `settimeout` would poll before each read and split one large read
    into dozens.
    """
    connection.settimeout(None)
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
