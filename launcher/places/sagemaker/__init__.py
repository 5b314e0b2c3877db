"""Laptop: `--on sagemaker`: one CreateTrainingJob request, fully checked before anything is uploaded.

request = plan(job)              # asks STS and S3 only for the account and whether buckets exist
print(request.render())          # as shown by --dry-run
run = submit(request)
for line in run.logs(follow=True): ...
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.job import Job
from launcher.places import Place, remote
from launcher.places.remote import collected
from launcher.places.sagemaker import aws, sagemaker_rules
from launcher.places.sagemaker.training_job import TrainingJobDraft, draft
from launcher.places.sagemaker.training_run import SageMakerRun
from launcher.source import measure
from stoker.config.loading import Resolved
from stoker.errors import UsageError
from stoker.events.prices import price_list

if TYPE_CHECKING:
    from sagemaker.train import ModelTrainer

OFFLINE_ACCOUNT = "000000000000"


@dataclass(frozen=True)
class SageMakerRequest(remote.CloudRequest):
    """The arguments of CreateTrainingJob, their uploads, and warnings."""

    draft: TrainingJobDraft

    def title(self) -> str:
        entry = self.draft.settings.entry
        return f"SageMaker training job {self.name} in {self.draft.region}, entry {entry}"

    def costs(self) -> str:
        settings, groups = self.draft.settings, self.draft.groups
        prices = price_list(settings.prices)
        return remote.cost_table(groups, "sagemaker", settings.max_runtime_s, settings.spot, prices)

    def copy_command(self, source: Path, target: str) -> list[str]:
        kms_key = self.draft.settings.kms_key
        encrypted = ["--sse", "aws:kms", "--sse-kms-key-id", kms_key] if kms_key else []
        folder = ["--recursive"] if source.is_dir() else []
        return ["aws", "s3", "cp", *folder, *encrypted, str(source), target]

    def create_command(self, file: Path) -> list[str]:
        create = ["aws", "sagemaker", "create-training-job", "--region", self.draft.region]
        return [*create, "--cli-input-json", f"file://{file}"]


def plan(job: Job, *, offline: bool = False) -> SageMakerRequest:
    """Build and check the request; uploads nothing.

    Args:
        job: what to run.
        offline: make no calls to AWS; requires `sagemaker.s3_uri`.

    Raises:
        UsageError: lists every problem, one line each.
    """
    settings = job.resolved.config.sagemaker
    problems: list[str] = []
    region = aws.region_of(settings.region) or ""
    known = region in aws.regions()
    if not region:
        problems.append("sagemaker.region: not set, and the AWS profile has none; for example us-east-1")
    elif not known:
        problems.append(f"sagemaker.region: AWS has no such region (got {region!r})")
    s3_uri = settings.s3_uri
    if s3_uri is None:
        account = OFFLINE_ACCOUNT
        if offline:
            problems.append("sagemaker.s3_uri: needed with --offline; set it to s3://bucket/prefix")
        elif known:
            account = collected(problems, lambda: aws.account_id(region), OFFLINE_ACCOUNT)
        s3_uri = f"s3://sagemaker-{region or 'us-east-1'}-{account}/stoker"
    if not (offline or known):
        collected(problems, aws.refuse_without_credentials, None)
    wanted = draft(job, remote.job_name(job.name, remote.stamp()), region, s3_uri)
    problems += sagemaker_rules.problems(wanted)
    count, size, refused = measure(job, wanted.data_at, "params or sagemaker.channels")
    problems += refused
    if not offline and not any(problem.startswith("AWS") for problem in problems) and known:
        problems += collected(problems, lambda: list(aws.existence_problems(wanted)), [])
    if problems:
        raise UsageError(*dict.fromkeys(problems))
    # The hosts' token comes with the source when it is staged to be sent.
    return SageMakerRequest(wanted, count + 1, size, tuple(sagemaker_rules.warnings(wanted)))


def submit(request: SageMakerRequest, tell: remote.Tell | None = None) -> SageMakerRun:
    """Upload code and data, then create the training job; UsageError if AWS rejects a call."""
    region = request.draft.region
    with aws.readable_errors("upload"):
        request.upload(aws.store_of(request.draft), tell)
    with aws.readable_errors("SageMaker"):
        aws.client("sagemaker", region).create_training_job(**request.body)
    return SageMakerRun(region, request.name, submitted=True)


def attach(run_id: str) -> SageMakerRun:
    """Find a run by `sagemaker:region/name`, training job name or ARN; UsageError without a region."""
    text = run_id.removeprefix("sagemaker:")
    if text.startswith("arn:"):
        region, name = text.split(":")[3], text.rpartition("/")[2]
    elif "/" in text:
        region, _, name = text.partition("/")
    else:
        name, region = text, aws.region_of(None) or ""
    if not region:
        raise UsageError(f"{run_id}: the region is unknown; write sagemaker:<region>/{name}")
    return SageMakerRun(region, name)


PLACE = Place(
    name="sagemaker",
    plan=lambda job, options, resume: plan(job, offline=options.offline),
    submit=submit,
    attach=attach,
    ids=("sagemaker:", "arn:"),
    options=("offline", "request"),
    checkpoints="s3",
)


def model_trainer(job: Job, **options: Any) -> ModelTrainer:
    """Convert a job to a `sagemaker.train.ModelTrainer`, for notebooks and pipelines.

    Args:
        job: the result of `launcher.job.open_job`.
        options: passed to `ModelTrainer`, for example `sagemaker_session`.
    """
    from launcher.places.sagemaker.sdk_trainer import model_trainer as build

    config = job.resolved.config
    settings = config.sagemaker.model_copy(update={"entry": "container"})
    resolved = Resolved(config.model_copy(update={"sagemaker": settings}), job.resolved.origins)
    return build(plan(replace(job, resolved=resolved)).draft, **options)
