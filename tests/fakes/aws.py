"""AWS at the process boundary: a moto server on loopback, and the environment that points to it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from unittest import mock

REGION = "us-east-1"
ROLE = "arn:aws:iam::123456789012:role/StokerJob"


@contextlib.contextmanager
def service_quotas(values: dict[str, float], per_page: int = 2) -> Iterator[None]:
    """What moto's server lacks: `ListServiceQuotas`, page by page."""
    from moto.servicequotas.responses import ServiceQuotasResponse

    def list_service_quotas(self: ServiceQuotasResponse) -> str:
        asked = json.loads(self.body)
        assert asked["ServiceCode"] == "sagemaker"
        start = int(asked.get("NextToken", 0))
        rows = [{"QuotaName": name, "Value": value} for name, value in values.items()]
        more = {"NextToken": str(start + per_page)} if start + per_page < len(rows) else {}
        return json.dumps({"Quotas": rows[start : start + per_page], **more})

    with mock.patch.object(ServiceQuotasResponse, "list_service_quotas", list_service_quotas, create=True):
        yield


@contextlib.contextmanager
def moto_server() -> Iterator[dict[str, str]]:
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
