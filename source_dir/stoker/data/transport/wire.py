"""CPU host and train worker: what both ends of a block connection say to each other.

A greeting proves to each side that the other holds the run's key. Then the train worker asks for rows of
blocks, one request after the other, and gets for each a JSON header and the bytes of the columns:

    request   length, {"take": [block, first row, row after the last], "done": [blocks that may go]}
    answer    length, {"rows": of the whole block, "columns": [[name, dtype, shape of a row], …],
                       "ragged": [[name, dtype, shape of a value, number of values], …],
                       "text": {name: [strings]}}, bytes; of "ragged" offsets (int64) before values
              length, {"error": why}
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
from pathlib import Path
from typing import Any

NONCE_BYTES = 32
PROOF_BYTES = 32
MESSAGE_BYTES = 64 * 2**20
"""A longer header is not one of ours."""
GREETING_TIMEOUT_S = 5.0


class WireError(OSError):
    """CPU host and train worker: the other side ended, is silent, or speaks something else."""


def cluster_token() -> str:
    """Any process of the cluster: Ray's token as this process was started with; empty without one."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    try:
        return Path(path).expanduser().read_text().strip()
    except OSError:
        return ""


def run_key(secret: bytes) -> bytes:
    """CPU host and train worker: the key of a run's connections.

    Args:
        secret: the coordinator's, new for each run, sent over Ray. Ray's own token goes in, too, so that
            whoever has only seen the secret on the network does not hold the key.
    """
    return hmac.new(cluster_token().encode(), b"stoker blocks" + secret, hashlib.sha256).digest()


def greet_client(connection: socket.socket, key: bytes) -> bytes:
    """CPU host: let in who holds the key; its name.

    Raises:
        WireError: it does not, or says nothing for some seconds.
    """
    set_timeouts(connection, GREETING_TIMEOUT_S)
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ours)
    answer = receive(connection, 2 * NONCE_BYTES + PROOF_BYTES)
    theirs, name, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:-PROOF_BYTES], answer[-PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"train worker", ours, theirs, name)):
        raise WireError("does not hold the key of this run")
    connection.sendall(_proof(key, b"host", theirs, ours, name))
    return name


def greet_server(connection: socket.socket, key: bytes, name: bytes) -> None:
    """Train worker: prove that we hold the key, and see that the other side does.

    Args:
        connection: fresh.
        key: of `run_key`.
        name: this train worker's, 32 bytes; its connections share one.

    Raises:
        WireError: the other side does not hold it, or says nothing for some seconds.
    """
    set_timeouts(connection, GREETING_TIMEOUT_S)
    theirs = receive(connection, NONCE_BYTES)
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ours + name + _proof(key, b"train worker", theirs, ours, name))
    if not hmac.compare_digest(receive(connection, PROOF_BYTES), _proof(key, b"host", ours, theirs, name)):
        raise WireError("the server does not hold the key of this run")


def _proof(key: bytes, role: bytes, *parts: bytes) -> bytes:
    # Each side's word stands in its proof, so that neither can be answered with its own.
    return hmac.new(key, b"|".join((role, *parts)), hashlib.sha256).digest()


def send_message(connection: socket.socket, message: dict[str, Any], more: bool = False) -> None:
    """CPU host and train worker: a header; with `more`, bytes follow it in the same packet."""
    content = json.dumps(message).encode()
    flags = socket.MSG_MORE if more else 0
    connection.sendall(struct.pack(">I", len(content)) + content, flags)


def receive_message(connection: socket.socket) -> dict[str, Any]:
    """CPU host and train worker: the next header.

    Raises:
        WireError: no such thing came.
    """
    (length,) = struct.unpack(">I", receive(connection, 4))
    if length > MESSAGE_BYTES:
        raise WireError(f"a header of {length} bytes")
    try:
        message = json.loads(receive(connection, length))
    except ValueError as error:
        raise WireError(f"a header that is no JSON: {error}") from None
    if not isinstance(message, dict):
        raise WireError("a header that is no object")
    return message


def receive(connection: socket.socket, length: int) -> bytes:
    """CPU host and train worker: exactly so many bytes."""
    content = bytearray(length)
    receive_into(connection, memoryview(content))
    return bytes(content)


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """CPU host and train worker: fill `target` from the connection.

    The kernel fills it in one call, without the interpreter's lock, so the training loop is not disturbed.

    Raises:
        WireError: the other side ended or fell silent.
    """
    at = 0
    while at < len(target):
        try:
            count = connection.recv_into(target[at:], 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise WireError("fell silent") from None
        if count == 0:
            raise WireError("ended the connection")
        at += count


def set_timeouts(connection: socket.socket, seconds: float) -> None:
    """CPU host and train worker: how long one call may take without any progress.

    The kernel's own time-outs: Python's `settimeout` would poll before each read and so cut one large read
    into dozens.
    """
    connection.settimeout(None)
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
