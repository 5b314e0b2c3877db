"""Laptop: `--on vertex`: one Vertex AI CustomJob, fully checked before anything is uploaded.

request = plan(job)              # asks only whether the bucket exists
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import files
from launcher.job import Job
from launcher.places import Backend
from launcher.places.sagemaker.training_job import job_name
from launcher.places.vertex import google_cloud, vertex_rules, vertex_run
from launcher.places.vertex.custom_job import Draft, draft
from launcher.places.vertex.vertex_run import VertexRun, named
from launcher.source import measure, stage
from stoker import figures
from stoker.errors import UsageError
from stoker.events import google


@dataclass(frozen=True)
class VertexRequest:
    """Laptop: the CustomJob, its uploads, and warnings."""

    draft: Draft
    code_files: int
    code_bytes: int
    warnings: tuple[str, ...]

    @property
    def body(self) -> dict[str, Any]:
        """The CustomJob in the REST API's JSON form."""
        return self.draft.body

    def to_json(self) -> str:
        """The request in the form of `gcloud ai custom-jobs create --config` (its `jobSpec`) and of REST."""
        return json.dumps(self.body, indent=2)

    def render(self) -> str:
        """The request as JSON, then pools and cost, uploads and notes."""
        wanted, settings = self.draft, self.draft.settings
        uploads = [
            ("code", str(self.code_files), figures.size(self.code_bytes), wanted.code_uri),
            *((item.parameter, str(item.files), figures.size(item.bytes), item.uri) for item in wanted.data),
        ]
        prices = google.price_list(settings)
        parts = [
            f"Vertex AI custom job {wanted.name} in {wanted.parent}, entry {settings.entry}",
            self.to_json(),
            vertex_run.cost_table(wanted.pools, settings.max_runtime_s, settings.spot, prices),
            files.table(("upload", "files", "size", "to"), uploads),
            "\n".join(f"note: {line}" for line in self.warnings),
        ]
        return "\n\n".join(part for part in parts if part)

    def write(self, path: Path) -> str:
        """Write the request and the source to upload; returns the commands that submit it.

        Args:
            path: `job.json`; the source is written to `job-code/` and `job-code.tar.gz` next to it.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        code = path.with_name(f"{path.stem}-code")
        if code.exists():
            raise UsageError(f"--request: {code} exists; remove it or choose another name")
        path.write_text(json.dumps(self.body["jobSpec"], indent=2) + "\n", encoding="utf-8")
        self.stage(code)
        wanted = self.draft

        def copy(source: Path, target: str) -> list[str]:
            # It follows links to files when told so, and never those to folders.
            if link := next(
                (path for path in source.rglob("*") if path.is_symlink() and path.is_dir()), None
            ):
                raise UsageError(f"--request: {link} is a link to a folder, which gcloud leaves out; copy it")
            how = ["rsync", "-r", "--no-ignore-symlinks"] if source.is_dir() else ["cp"]
            return ["gcloud", "storage", *how, str(source), target]

        commands = [copy(item.source, item.uri) for item in wanted.data]
        archive = path.with_name(f"{path.stem}-{wanted.code_uri.rpartition('/')[2]}")
        archive.unlink(missing_ok=True)
        google_cloud.pack(code, archive)
        commands.append(copy(archive, wanted.code_uri))
        create = ["gcloud", "ai", "custom-jobs", "create", f"--project={wanted.project}"]
        create += [f"--region={wanted.region}", f"--display-name={wanted.name}", f"--config={path}"]
        create += [f"--labels={','.join(f'{k}={v}' for k, v in self.body['labels'].items())}"]
        if wanted.settings.kms_key:
            create.append(f"--kms-key={wanted.settings.kms_key}")
        commands.append(create)
        return "\n".join(shlex.join(command) for command in commands)

    def stage(self, folder: Path) -> None:
        """Write the source as the hosts will see it, with a new Ray token."""
        stage(self.draft.job, folder, self.draft.data_at)


def plan(job: Job, *, offline: bool = False) -> VertexRequest:
    """Laptop: build and check the request; uploads nothing.

    Args:
        job: what to run.
        offline: make no calls to Google Cloud; requires `vertex.project`.

    Raises:
        UsageError: lists every problem, one line each.
    """
    settings = job.resolved.config.vertex
    problems: list[str] = []
    project = ""
    try:
        project = google_cloud.project_of(settings.project, offline)
    except UsageError as error:
        problems += error.problems
    stamp = f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    uri = (settings.gcs_uri or "gs://bucket").rstrip("/")
    wanted = draft(job, job_name(job.name, stamp), project, uri)
    found: list[str] = []
    try:
        found += vertex_rules.problems(wanted)
    except UsageError as error:
        found += error.problems
    # Missing credentials also explain why no project is known.
    problems += [line for line in found if not (problems and line.startswith("vertex.project: not set"))]
    count, size, refused = measure(job, wanted.data_at, "params")
    problems += refused
    if not offline and not problems:
        problems += google_cloud.refuse_bucket(uri)
    if problems:
        raise UsageError(*dict.fromkeys(problems))
    # The hosts' token comes with the source when it is staged to be sent.
    return VertexRequest(wanted, count + 1, size, tuple(vertex_rules.warnings(wanted)))


def submit(request: VertexRequest, tell: Callable[[str], None] | None = None) -> VertexRun:
    """Laptop: upload code and data, then create the custom job.

    Args:
        request: the result of `plan`.
        tell: receives progress lines; the default prints to standard error.

    Raises:
        UsageError: Google Cloud rejected a call; one line with its reason.
    """
    tell = tell or (lambda line: print(line, file=sys.stderr, flush=True))
    wanted = request.draft
    with google_cloud.upload_errors():
        for item in wanted.data:
            sent = google_cloud.upload_data(item)
            tell(f"{item.parameter}: {figures.size(item.bytes)} {'uploaded' if sent else 'already there'}")
        with tempfile.TemporaryDirectory(prefix="stoker-") as scratch:
            folder = Path(scratch) / "code"
            request.stage(folder)
            google_cloud.upload_code(folder, wanted.code_uri)
        tell(f"code: {figures.size(request.code_bytes)} uploaded to {wanted.code_uri}")
    return VertexRun(google_cloud.create(wanted.parent, wanted.region, request.body), submitted=True)


def attach(run_id: str) -> VertexRun:
    """Laptop: find a run by `vertex:projects/<project>/locations/<region>/customJobs/<number>`.

    Raises:
        UsageError: the id has another form.
    """
    return VertexRun(named(run_id))


BACKEND = Backend(
    name="vertex",
    plan=lambda job, options, resume: plan(job, offline=options.offline),
    submit=submit,
    attach=attach,
    ids=("vertex:",),
    options=("offline", "request"),
    checkpoints="gs",
)
