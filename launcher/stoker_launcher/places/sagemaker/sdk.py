"""Laptop: a job as a `ModelTrainer` of the SageMaker SDK, for its pipelines, notebooks and log view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.errors import UsageError
from stoker_launcher.job import COMMAND, Job
from stoker_launcher.places.remote import nearest_of
from stoker_launcher.places.sagemaker import aws, plan
from stoker_launcher.places.sagemaker.training_job import CODE_CHANNEL

if TYPE_CHECKING:
    from sagemaker.train import ModelTrainer

INSTALL = "pip install 'stoker[sagemaker]'"
OF_THE_SDK = ("TrainingJobName", "EnableSageMakerMetricsTimeSeries", "ContainerEntrypoint")
"""Members that every ModelTrainer sets itself: it names the job and starts the source's command."""
SHAPES = {
    "OutputDataConfig": "output_data_config",
    "StoppingCondition": "stopping_condition",
    "CheckpointConfig": "checkpoint_config",
    "ModelPackageConfig": "model_package_config",
}
METHODS = {
    "RetryStrategy": "with_retry_strategy",
    "RemoteDebugConfig": "with_remote_debug_config",
    "InfraCheckConfig": "with_infra_check_config",
    "SessionChainingConfig": "with_session_chaining_config",
    "TensorBoardOutputConfig": "with_tensorboard_output_config",
}
"""Member of CreateTrainingJob → argument or method of ModelTrainer that takes the shape of that name."""


def model_trainer(job: Job, *, pipeline: bool = False) -> ModelTrainer:
    """Upload the source and local data, and return a trainer whose `train()` starts this job.

    Args:
        job: the job, as `open_job` returns it.
        pipeline: whether `train()` returns the arguments of a `TrainingStep` instead. Executions of the
            pipeline share one copy of the source; each has its own checkpoints.

    Raises:
        UsageError: the SDK is missing, the job is wrong, or the SDK has no place for a part of its request.
    """
    try:
        import boto3
        from sagemaker.core import shapes
        from sagemaker.core.helper.session_helper import Session
        from sagemaker.core.training import configs
        from sagemaker.core.workflow.execution_variables import ExecutionVariables
        from sagemaker.core.workflow.functions import Join
        from sagemaker.core.workflow.pipeline_context import PipelineSession
        from sagemaker.train import ModelTrainer
    except ImportError as error:
        raise UsageError(f"model_trainer: {error}; install the SageMaker SDK: {INSTALL}") from None

    class OneJob(ModelTrainer):  # type: ignore[misc, unused-ignore]
        """Refuses a second job, which would resume from the checkpoints of the first."""

        def train(self, *arguments: Any, **options: Any) -> Any:
            if self._latest_training_job is not None:
                raise UsageError(
                    "train: this trainer has started its job, whose checkpoints a second one would"
                    " read; call model_trainer(job) for each job"
                )
            return super().train(*arguments, **options)

    request = plan(job)
    one_job = {"gpu.type": bool(request.alternatives), "queue": request.settings.queue is not None}
    if more := [key for key, given in one_job.items() if given]:
        use = "name one GPU type, and submit it to a queue through the SDK, or use --on sagemaker"
        raise UsageError(*(f"sagemaker.{key}: a ModelTrainer is one job; {use}" for key in more))
    body, keys = dict(request.body), request.keys
    algorithm = dict(body.pop("AlgorithmSpecification"))
    for name in OF_THE_SDK:
        body.pop(name, None)
        algorithm.pop(name, None)

    def shape(name: str, value: Any, path: str, kind: Any = None) -> Any:
        return _built(kind or getattr(shapes, name), value, path, keys)

    def shapes_of(name: str, values: list[Any], path: str) -> list[Any]:
        return [shape(name, value, f"{path}[{at}]") for at, value in enumerate(values)]

    metrics = algorithm.pop("MetricDefinitions")
    channels = body.pop("InputDataConfig", [])
    vpc = body.pop("VpcConfig", {}) | {
        name: body.pop(name)
        for name in ("EnableNetworkIsolation", "EnableInterContainerTrafficEncryption")
    }
    compute = body.pop("ResourceConfig")
    arguments = {
        "base_job_name": request.name.rsplit("-", 3)[0],
        "role": body.pop("RoleArn"),
        "training_image": algorithm.pop("TrainingImage"),
        "training_input_mode": algorithm.pop("TrainingInputMode"),
        "hyperparameters": body.pop("HyperParameters"),
        "environment": body.pop("Environment", {}),
        "compute": shape("", compute, "ResourceConfig", configs.Compute),
        "networking": shape("", vpc, "VpcConfig", configs.Networking),
        "input_data_config": [
            shape("Channel", channel, f"InputDataConfig[{at}]")
            for at, channel in enumerate(channels)
            if channel["ChannelName"] != CODE_CHANNEL
        ]
        or None,
        "tags": shapes_of("Tag", body.pop("Tags"), "Tags"),
    }
    arguments["compute"].enable_managed_spot_training = body.pop("EnableManagedSpotTraining")
    if image := algorithm.pop("TrainingImageConfig", None):
        path = "AlgorithmSpecification.TrainingImageConfig"
        arguments["training_image_config"] = shape("TrainingImageConfig", image, path)
    for name in SHAPES.keys() & body:
        arguments[SHAPES[name]] = shape(name, body.pop(name), name)
    later = {
        METHODS[name]: shape(name, body.pop(name), name) for name in sorted(METHODS.keys() & body)
    }
    definitions = "AlgorithmSpecification.MetricDefinitions"
    later["with_metric_definitions"] = shapes_of("MetricDefinition", metrics, definitions)
    if lost := [*body, *(f"AlgorithmSpecification.{name}" for name in algorithm)]:
        raise UsageError(*(_no_place(path, keys) for path in sorted(lost)))

    if request.settings.entry == "container":
        command = f"exec {' '.join(COMMAND)}"  # the SDK's script becomes Python: SIGTERM arrives
        arguments["source_code"] = configs.SourceCode(source_dir=request.code_uri, command=command)
    if pipeline:  # the same request for each execution, whose checkpoints must be its own
        execution = ExecutionVariables.PIPELINE_EXECUTION_ID
        arguments["checkpoint_config"].s3_uri = Join(
            "/", [arguments["checkpoint_config"].s3_uri, execution]
        )
    with aws.readable_errors("upload"):
        request.upload(aws.S3Store(request), None)
    bucket, prefix = aws.split_uri(request.root_uri)
    session = (PipelineSession if pipeline else Session)(
        boto_session=boto3.session.Session(region_name=request.region),
        default_bucket=bucket,
        default_bucket_prefix=prefix or None,
    )
    trainer = OneJob(sagemaker_session=session, **arguments)
    for method, value in later.items():
        getattr(trainer, method)(value)
    return trainer


def _built(kind: Any, value: dict[str, Any], path: str, keys: dict[str, str]) -> Any:
    """A member of the request as the SDK's class for it."""
    from pydantic import ValidationError

    try:
        return kind(**_snake(value))
    except ValidationError as error:
        raise UsageError(
            *(
                _no_place(".".join([path, *map(_pascal, problem["loc"])]), keys)
                if problem["type"] == "extra_forbidden"
                else f"model_trainer: {path}: {problem['msg']} (got {problem['input']!r})"
                for problem in error.errors()
            )
        ) from None


def _no_place(path: str, keys: dict[str, str]) -> str:
    key = nearest_of(path, keys) or f"sagemaker.request.{path}"  # all else has a key of its own
    return f"{key}: a ModelTrainer has no place for {path}; remove it or use --on sagemaker"


def _snake(value: Any) -> Any:
    """The API's names as the SDK's: VolumeSizeInGB → volume_size_in_gb."""
    from sagemaker.core.utils.utils import pascal_to_snake

    if isinstance(value, dict):
        return {pascal_to_snake(key): _snake(item) for key, item in value.items()}
    return [_snake(item) for item in value] if isinstance(value, list) else value


def _pascal(part: Any) -> str:
    return "".join(word.title() for word in str(part).split("_"))
