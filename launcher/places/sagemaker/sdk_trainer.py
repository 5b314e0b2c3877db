"""Laptop: convert a planned job to the SageMaker SDK's `ModelTrainer`; needs the extra `sagemaker`."""

from __future__ import annotations

import atexit
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.job import COMMAND
from launcher.places.remote import upload_data
from launcher.places.sagemaker import aws
from launcher.places.sagemaker.aws import split_uri
from launcher.places.sagemaker.training_job import CODE_CHANNEL, SageMakerRequest
from launcher.source import stage
from stoker.errors import UsageError

if TYPE_CHECKING:
    from sagemaker.train import ModelTrainer

CONVERTED = (
    *("AlgorithmSpecification", "InputDataConfig", "OutputDataConfig", "CheckpointConfig"),
    *("ResourceConfig", "StoppingCondition"),
)
"""Members of the request whose additions by `sagemaker.request` reach a ModelTrainer."""


def model_trainer(request: SageMakerRequest, **options: Any) -> ModelTrainer:
    """Convert a checked request to a `ModelTrainer` whose `train()` starts the same job.

    Uploads local data immediately, once, and stages the source; `train()` uploads the source below
    `sagemaker.s3_uri`. All jobs of one trainer share a Ray token.

    Args:
        request: the request, from `launcher.places.sagemaker.plan(job)`.
        options: arguments of `ModelTrainer` that override the derived ones.

    Raises:
        UsageError: the SDK is not installed, has no place for a part of the request, or an upload failed.
    """
    body, settings = request.body, request.settings
    of_image = settings.request.get("AlgorithmSpecification", {})
    lost = [name for name in settings.request if name not in CONVERTED]
    lost += [f"AlgorithmSpecification.{name}" for name in of_image if name != "TrainingImageConfig"]
    if lost:
        raise UsageError(
            f"ModelTrainer: it has no place for sagemaker.request.{', '.join(lost)}; use --on sagemaker"
        )
    try:
        from sagemaker.core import shapes
        from sagemaker.core.helper.session_helper import Session
        from sagemaker.core.training import configs
        from sagemaker.train import ModelTrainer
    except ImportError as error:
        raise UsageError(
            f"ModelTrainer: {error}; install the SDK, 3.18 or newer: pip install -c constraints.txt"
            " 'stoker[sagemaker]'"
        ) from None

    folder = Path(tempfile.mkdtemp(prefix="stoker-")) / "code"
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    stage(request.job, folder, request.data_at)

    # The SDK can upload local data, but its channels lack instance groups, which all channels need or none.
    with aws.readable_errors("upload"):
        for item in request.data:
            upload_data(aws.store_of(request), item)
    inputs = [
        shapes.Channel(**_snake(channel))
        for channel in body.get("InputDataConfig", [])
        if channel["ChannelName"] != CODE_CHANNEL
    ]
    vpc = body.get("VpcConfig", {})
    arguments: dict[str, Any] = {
        "base_job_name": request.name.rsplit("-", 3)[0],
        "role": body["RoleArn"],
        "training_image": body["AlgorithmSpecification"]["TrainingImage"],
        "source_code": configs.SourceCode(
            source_dir=str(folder), command=f"exec {shlex.join(COMMAND)}", ignore_patterns=[]
        ),
        "hyperparameters": dict(body["HyperParameters"]),
        "environment": dict(body.get("Environment", {})),
        "input_data_config": inputs or None,
        "compute": configs.Compute(
            **_snake(body["ResourceConfig"]), enable_managed_spot_training=settings.spot
        ),
        "networking": configs.Networking(
            subnets=vpc.get("Subnets"),
            security_group_ids=vpc.get("SecurityGroupIds"),
            enable_network_isolation=settings.network_isolation,
            enable_inter_container_traffic_encryption=settings.encrypt_traffic,
        ),
        "stopping_condition": shapes.StoppingCondition(**_snake(body["StoppingCondition"])),
        "output_data_config": shapes.OutputDataConfig(**_snake(body["OutputDataConfig"])),
        "checkpoint_config": shapes.CheckpointConfig(**_snake(body["CheckpointConfig"])),
        "tags": [shapes.Tag(**_snake(tag)) for tag in body["Tags"]],
    }
    if of_image:
        arguments["training_image_config"] = shapes.TrainingImageConfig(
            **_snake(of_image["TrainingImageConfig"])
        )
    if "sagemaker_session" not in options:
        import boto3

        bucket, prefix = split_uri(request.root_uri)
        arguments["sagemaker_session"] = Session(
            boto_session=boto3.session.Session(region_name=request.region),
            default_bucket=bucket,
            default_bucket_prefix=prefix or None,
        )
    trainer = ModelTrainer(**(arguments | options))
    trainer.with_metric_definitions(
        [
            shapes.MetricDefinition(**_snake(definition))
            for definition in body["AlgorithmSpecification"]["MetricDefinitions"]
        ]
    )
    if retry := body.get("RetryStrategy"):
        trainer.with_retry_strategy(shapes.RetryStrategy(**_snake(retry)))
    return trainer


def _snake(value: Any) -> Any:
    """Convert the API's field names to the SDK's: VolumeSizeInGB → volume_size_in_gb."""
    from sagemaker.core.utils.utils import pascal_to_snake

    if isinstance(value, dict):
        return {pascal_to_snake(key): _snake(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_snake(item) for item in value]
    return value
