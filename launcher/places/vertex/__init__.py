"""Laptop: `--on vertex`: one Vertex AI CustomJob, fully checked before anything is uploaded.

request = plan(job)              # asks only whether the bucket exists
print(request.render())          # as shown by --dry-run
run = submit(request)
for line in run.logs(follow=True): ...
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.job import Job
from launcher.places import Place, remote
from launcher.places.remote import collected
from launcher.places.vertex import google_cloud, vertex_rules
from launcher.places.vertex.custom_job import CustomJobDraft, draft
from launcher.places.vertex.vertex_run import VertexRun, named
from launcher.source import measure
from stoker.errors import UsageError
from stoker.events.prices import google_prices


@dataclass(frozen=True)
class VertexRequest(remote.CloudRequest):
    """The CustomJob, its uploads, and warnings."""

    draft: CustomJobDraft

    def title(self) -> str:
        return f"Vertex AI custom job {self.name} in {self.draft.parent}, entry {self.draft.settings.entry}"

    def costs(self) -> str:
        settings, pools = self.draft.settings, self.draft.groups
        prices, seconds = google_prices(settings), settings.max_runtime_s
        return remote.cost_table(pools, "vertex", seconds, settings.spot, prices) + "; without disks"

    def for_command_line(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.body["jobSpec"]
        return spec

    def copy_command(self, source: Path, target: str) -> list[str]:
        # It follows links to files when told so, and never those to folders.
        links = (path for path in source.rglob("*") if path.is_symlink() and path.is_dir())
        if link := next(links, None):
            raise UsageError(f"--request: {link} is a link to a folder, which gcloud leaves out; copy it")
        how = ["rsync", "-r", "--no-ignore-symlinks"] if source.is_dir() else ["cp"]
        return ["gcloud", "storage", *how, str(source), target]

    def create_command(self, file: Path) -> list[str]:
        wanted = self.draft
        create = ["gcloud", "ai", "custom-jobs", "create", f"--project={wanted.project}"]
        create += [f"--region={wanted.region}", f"--display-name={wanted.name}", f"--config={file}"]
        create += [f"--labels={','.join(f'{k}={v}' for k, v in self.body['labels'].items())}"]
        return [*create, *([f"--kms-key={wanted.settings.kms_key}"] if wanted.settings.kms_key else [])]


def plan(job: Job, *, offline: bool = False) -> VertexRequest:
    """Build and check the request; uploads nothing.

    Args:
        job: what to run.
        offline: make no calls to Google Cloud; requires `vertex.project`.

    Raises:
        UsageError: lists every problem, one line each.
    """
    settings = job.resolved.config.vertex
    problems: list[str] = []
    project = collected(problems, lambda: google_cloud.project_of(settings.project, offline), "")
    uri = (settings.gcs_uri or "gs://bucket").rstrip("/")
    wanted = draft(job, remote.job_name(job.name, remote.stamp()), project, uri)
    found: list[str] = []
    found += collected(found, lambda: vertex_rules.problems(wanted), [])
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


def submit(request: VertexRequest, tell: remote.Tell | None = None) -> VertexRun:
    """Upload code and data, then create the custom job; UsageError if Google Cloud rejects a call."""
    with google_cloud.upload_errors():
        request.upload(google_cloud.CloudStorage(), tell)
    wanted = request.draft
    return VertexRun(google_cloud.create(wanted.parent, wanted.region, request.body), submitted=True)


def attach(run_id: str) -> VertexRun:
    """Find a run by `vertex:projects/<project>/locations/<region>/customJobs/<number>`."""
    return VertexRun(named(run_id))


PLACE = Place(
    name="vertex",
    plan=lambda job, options, resume: plan(job, offline=options.offline),
    submit=submit,
    attach=attach,
    ids=("vertex:",),
    options=("offline", "request"),
    checkpoints="gs",
)
