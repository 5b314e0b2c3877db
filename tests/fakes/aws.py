"""AWS at the process boundary: a moto server on loopback, and the environment that points to it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
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

    with mock.patch.object(
        ServiceQuotasResponse, "list_service_quotas", list_service_quotas, create=True
    ):
        yield


def moto() -> Any:
    from moto.server import DomainDispatcherApplication, create_backend_app

    return DomainDispatcherApplication(create_backend_app)


@contextlib.contextmanager
def served(application: Callable[..., Any]) -> Iterator[dict[str, str]]:
    """Serves what may note, refuse or change what goes to `moto()`; the environment variables of clients."""
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # one line per request otherwise
    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }
    finally:
        server.shutdown()


def moto_server() -> contextlib.AbstractContextManager[dict[str, str]]:
    return served(moto())


def training_job(state: str, secondary: str, name: str = "j", **more: Any) -> dict[str, Any]:
    """A description of a training job, in the service's own shape."""
    return {
        "TrainingJobName": name,
        "TrainingJobArn": f"arn:aws:sagemaker:{REGION}:123456789012:training-job/{name}",
        "ModelArtifacts": {"S3ModelArtifacts": "s3://b/model.tar.gz"},
        "TrainingJobStatus": state,
        "SecondaryStatus": secondary,
        "AlgorithmSpecification": {"TrainingInputMode": "File"},
        "ResourceConfig": {
            "VolumeSizeInGB": 100,
            "InstanceGroups": [
                {"InstanceGroupName": "gpu", "InstanceType": "ml.g5.2xlarge", "InstanceCount": 1},
                {"InstanceGroupName": "cpu", "InstanceType": "ml.c5.4xlarge", "InstanceCount": 2},
            ],
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 60},
        "CreationTime": 1,
        **more,
    }
