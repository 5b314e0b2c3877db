"""Laptop: `--on sagemaker`: one CreateTrainingJob request, fully checked before anything is uploaded.

request = plan(job)              # asks STS and S3 only for the account and whether buckets exist
print(request.render())          # as shown by --dry-run
run = submit(request)
for line in run.logs(follow=True): ...
"""

from __future__ import annotations

import datetime
import json
import secrets
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import files
from launcher.job import Job
from launcher.places import Backend
from launcher.places.sagemaker import aws, sagemaker_rules, training_run
from launcher.places.sagemaker.training_job import Draft, draft, job_name
from launcher.places.sagemaker.training_run import SageMakerRun
from launcher.source import measure, pack, stage
from stoker import figures
from stoker.config.loading import Resolved
from stoker.errors import UsageError
from stoker.events.prices import price_list

if TYPE_CHECKING:
    from sagemaker.train import ModelTrainer

OFFLINE_ACCOUNT = "000000000000"


@dataclass(frozen=True)
class SageMakerRequest:
    """Laptop: the request, its uploads, and warnings."""

    draft: Draft
    code_files: int
    code_bytes: int
    warnings: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.draft.name

    @property
    def body(self) -> dict[str, Any]:
        """The arguments of CreateTrainingJob."""
        return self.draft.body

    def to_json(self) -> str:
        """The request in the form of `aws sagemaker create-training-job --cli-input-json`."""
        return json.dumps(self.body, indent=2)

    def render(self) -> str:
        """The request as JSON, then groups and cost, uploads and notes."""
        settings = self.draft.settings
        uploads = [
            ("code", str(self.code_files), figures.size(self.code_bytes), self.draft.code_uri + "/"),
            *(
                (item.parameter, str(item.files), figures.size(item.bytes), item.uri)
                for item in self.draft.data
            ),
        ]
        parts = [
            f"SageMaker training job {self.name} in {self.draft.region}, entry {settings.entry}",
            self.to_json(),
            training_run.cost_table(
                self.draft.groups,
                settings.max_runtime_s,
                settings.spot,
                price_list(self.draft.region, settings.prices),
            ),
            files.table(("upload", "files", "size", "to"), uploads),
            "\n".join(f"note: {line}" for line in self.warnings),
        ]
        return "\n\n".join(part for part in parts if part)

    def write(self, path: Path) -> str:
        """Write the request and the source to upload; returns the commands that submit it.

        Args:
            path: `job.json`; the source is written to `job-code/` or `job-sourcedir.tar.gz` next to it.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        code = path.with_name(f"{path.stem}-code")
        if code.exists():
            raise UsageError(f"--request: {code} exists; remove it or choose another name")
        path.write_text(self.to_json() + "\n", encoding="utf-8")
        self.stage(code)
        kms_key = self.draft.settings.kms_key
        encrypted = ["--sse", "aws:kms", "--sse-kms-key-id", kms_key] if kms_key else []

        def copy(source: Path, target: str) -> list[str]:
            folder = ["--recursive"] if source.is_dir() else []
            return ["aws", "s3", "cp", *folder, *encrypted, str(source), target]

        commands = [copy(item.source, item.uri) for item in self.draft.data]
        if self.draft.settings.entry == "script-mode":
            archive = path.with_name(f"{path.stem}-{aws.ARCHIVE}")
            archive.unlink(missing_ok=True)
            pack(code, archive)
            commands.append(copy(archive, f"{self.draft.code_uri}/{aws.ARCHIVE}"))
        else:
            commands.append(copy(code, f"{self.draft.code_uri}/"))
        create = ["aws", "sagemaker", "create-training-job", "--region", self.draft.region]
        commands.append([*create, "--cli-input-json", f"file://{path}"])
        return "\n".join(shlex.join(command) for command in commands)

    def stage(self, folder: Path) -> None:
        """Write the source as the hosts will see it, with a new Ray token."""
        stage(self.draft.job, folder, self.draft.data_at)


def plan(job: Job, *, offline: bool = False) -> SageMakerRequest:
    """Laptop: build and check the request; uploads nothing.

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
            account = _collected(problems, lambda: aws.account_id(region), OFFLINE_ACCOUNT)
        s3_uri = f"s3://sagemaker-{region or 'us-east-1'}-{account}/stoker"
    if not (offline or known):
        _collected(problems, aws.refuse_without_credentials, None)
    stamp = f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    wanted = draft(job, job_name(job.name, stamp), region, s3_uri)
    problems += sagemaker_rules.problems(wanted)
    count, size, refused = measure(job, wanted.data_at, "params or sagemaker.channels")
    problems += refused
    if not offline and not any(problem.startswith("AWS") for problem in problems) and known:
        problems += _collected(problems, lambda: list(aws.existence_problems(wanted)), [])
    if problems:
        raise UsageError(*dict.fromkeys(problems))
    # The hosts' token comes with the source when it is staged to be sent.
    return SageMakerRequest(wanted, count + 1, size, tuple(sagemaker_rules.warnings(wanted)))


def submit(request: SageMakerRequest, tell: Callable[[str], None] | None = None) -> SageMakerRun:
    """Laptop: upload code and data, then create the training job.

    Args:
        request: the result of `plan`.
        tell: receives progress lines; the default prints to standard error.

    Raises:
        UsageError: AWS rejected a call; one line with its reason.
    """
    tell = tell or (lambda line: print(line, file=sys.stderr, flush=True))
    wanted = request.draft
    settings = wanted.settings
    s3, options = aws.client("s3", wanted.region), aws.protection(wanted)
    with aws.readable_errors("upload"):
        for item in wanted.data:
            sent = aws.upload_data(s3, item, options)
            tell(f"{item.parameter}: {figures.size(item.bytes)} {'uploaded' if sent else 'already there'}")
        with tempfile.TemporaryDirectory(prefix="stoker-") as scratch:
            folder = Path(scratch) / "code"
            request.stage(folder)
            archive = settings.entry == "script-mode"
            aws.upload_code(s3, folder, wanted.code_uri, archive, options)
        tell(f"code: {figures.size(request.code_bytes)} uploaded to {wanted.code_uri}/")
    with aws.readable_errors("SageMaker"):
        aws.client("sagemaker", wanted.region).create_training_job(**request.body)
    return SageMakerRun(wanted.region, wanted.name, submitted=True)


def attach(run_id: str) -> SageMakerRun:
    """Laptop: find a run by `sagemaker:region/name`, training job name or ARN.

    Raises:
        UsageError: only a name is given, and no region is configured.
    """
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


BACKEND = Backend(
    name="sagemaker",
    plan=lambda job, options, resume: plan(job, offline=options.offline),
    submit=submit,
    attach=attach,
    ids=("sagemaker:", "arn:"),
    options=("offline", "request"),
    checkpoints="s3",
)


def model_trainer(job: Job, **options: Any) -> ModelTrainer:
    """Laptop: convert a job to a `sagemaker.train.ModelTrainer`, for notebooks and pipelines.

    Args:
        job: the result of `launcher.job.open_job`.
        options: passed to `ModelTrainer`, for example `sagemaker_session`.
    """
    from launcher.places.sagemaker.model_trainer import model_trainer as build

    config = job.resolved.config
    settings = config.sagemaker.model_copy(update={"entry": "container"})
    resolved = Resolved(config.model_copy(update={"sagemaker": settings}), job.resolved.origins)
    return build(plan(replace(job, resolved=resolved)).draft, **options)


def _collected(problems: list[str], ask: Callable[[], Any], default: Any) -> Any:
    try:
        return ask()
    except UsageError as error:
        problems += error.problems
        return default
