"""Laptop: `--on vertex`: one Vertex AI CustomJob, fully checked before anything is uploaded."""

from __future__ import annotations

import contextlib
import json
import shlex
from dataclasses import replace
from typing import Any

from stoker.errors import Problems, UsageError
from stoker.events.prices import spot_note
from stoker.hosts.services.vertex import FAILURES, RUN_FOLDER
from stoker_launcher.job import Job, Staged
from stoker_launcher.places import Place
from stoker_launcher.places.remote import (
    CloudRun,
    LogEntry,
    Tell,
    job_name,
    stamp,
)
from stoker_launcher.places.vertex import custom_job, google_cloud
from stoker_launcher.places.vertex.custom_job import VertexRequest, request_of

POLL_S = 10.0
_WORDS = {
    "JOB_STATE_QUEUED": "running: queued",
    "JOB_STATE_PENDING": "running: waiting for hosts",
    "JOB_STATE_RUNNING": "running",
    "JOB_STATE_SUCCEEDED": "succeeded",
    "JOB_STATE_CANCELLING": "running: stopping",
    "JOB_STATE_CANCELLED": "interrupted",
    "JOB_STATE_PAUSED": "running: paused",
    "JOB_STATE_EXPIRED": "failed: it took longer than vertex.max_runtime_s",
    "JOB_STATE_UPDATING": "running: updating",
}


def plan(job: Job, *, offline: bool = False) -> VertexRequest:
    settings = job.resolved.config.vertex
    problems, project = Problems(), ""
    with problems:
        project = google_cloud.project_of(settings.project, offline)
    uri = (settings.gcs_uri or "gs://bucket").rstrip("/")
    wanted = request_of(job, job_name(job.name, stamp()), project, uri)
    with problems:
        # Missing credentials also explain why no project is known.
        problems.add(*custom_job.problems(wanted, bool(project or problems)))
    staged = Staged(wanted.job, wanted.data_at)
    problems.add(*staged.problems())
    problems.refuse()
    return replace(wanted, staged=staged)


def submit(request: VertexRequest, tell: Tell | None = None) -> VertexRun:
    try:
        request.upload(google_cloud.CloudStorage(), tell)
    except OSError as error:
        raise UsageError(f"upload to Cloud Storage: {google_cloud.reason_of(error)}") from None
    return VertexRun(
        google_cloud.create(request.parent, request.region, request.body), submitted=True
    )


def attach(run_id: str) -> VertexRun:
    """Find a run by `vertex:projects/<project>/locations/<region>/customJobs/<number>`."""
    name = run_id.removeprefix("vertex:")
    parts = name.split("/")
    if len(parts) != 6 or parts[::2] != ["projects", "locations", "customJobs"] or not all(parts):
        raise UsageError(
            f"{run_id}: write vertex:projects/<project>/locations/<region>/customJobs/<number>"
        )
    return VertexRun(name)


class VertexRun(CloudRun):
    def __init__(self, name: str, poll_s: float = POLL_S, submitted: bool = False) -> None:
        super().__init__(f"vertex:{name}", name, poll_s, submitted)
        self.name, self.region = name, name.split("/")[3]

    def ask(self) -> Any:
        with google_cloud.readable_errors(f"job {self.name}"):
            service = google_cloud.jobs(self.region)
            return service.get_custom_job(name=self.name, timeout=google_cloud.CALL_TIMEOUT_S)

    def status_in(self, description: Any) -> str:
        state = description.state.name
        if state == "JOB_STATE_FAILED":
            told = " ".join(description.error.message.split()) or "no reason given"
            return f"failed: {reported_cause(base_of(description)) or told}"
        return _WORDS.get(state, f"unknown: {state}")

    def stop(self) -> str | None:
        """Cancel the job. The service says nothing of a signal before the hosts are taken away."""
        with google_cloud.readable_errors(f"job {self.name}"):
            service = google_cloud.jobs(self.region)
            service.cancel_custom_job(name=self.name, timeout=google_cloud.CALL_TIMEOUT_S)
        return "cancelled; its hosts may be taken away before they have written a checkpoint"

    def entries(self, since_s: float) -> list[LogEntry]:
        return google_cloud.log_entries(self.name, since_s)

    def closing(self) -> str:
        job = self.describe()
        base = base_of(job)
        lines = [f"{job.display_name}: {self.status_in(job)}"]
        with contextlib.suppress(OSError, ValueError, KeyError):
            cost = json.loads(read(f"{base}/{RUN_FOLDER}/summary.json"))["cost"]
            source = f"prices of {cost['prices_as_of']} in {cost['prices_region']}{spot_note(cost)}"
            lines.append(f"cost: ${cost['usd']:.2f} (estimated, {source})")
        lines.append(f"model: {base}/model/")
        lines.append(f"results: gcloud storage cp -r {shlex.quote(f'{base}/{RUN_FOLDER}')} .")
        return "\n".join(lines)


def reported_cause(base: str) -> str:
    """The cause that the hosts of the last attempt left; empty if there is none.

    Worker hosts repeat only that the head has ended, so the head's own words come first.
    """
    from pyarrow import fs

    from stoker.storage.filesystems import filesystem_of

    try:
        filesystem, folder = filesystem_of(f"{base}/{FAILURES}")
        found = filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True))
        names = sorted((info.base_name for info in found), reverse=True)
        texts = [read(f"{base}/{FAILURES}/{name}") for name in names[:8]]
    except OSError:
        return ""
    own = [text for text in texts if not text.startswith("the head")]
    return " ".join((own or texts or [""])[0].split())


def read(uri: str) -> str:
    from stoker.storage.filesystems import filesystem_of

    filesystem, path = filesystem_of(uri)
    with filesystem.open_input_stream(path) as stream:
        content: bytes = stream.read()
    return content.decode("utf-8", "replace")


def base_of(job: Any) -> str:
    return str(job.job_spec.base_output_directory.output_uri_prefix).rstrip("/")


PLACE = Place(
    name="vertex",
    plan=lambda job, options, resume: plan(job, offline=options.offline),
    submit=submit,
    attach=attach,
    ids=("vertex:",),
    options=("offline", "request"),
    checkpoints="gs",
)
