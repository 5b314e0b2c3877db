"""AWS at the process boundary: a moto server on loopback, and the environment that points to it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

REGION = "us-east-1"
ROLE = "arn:aws:iam::123456789012:role/StokerJob"


@contextlib.contextmanager
def moto_server() -> Iterator[dict[str, str]]:
    """Start a server on a free loopback port; the environment variables of its clients."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # one line per request otherwise
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }
    finally:
        server.stop()
