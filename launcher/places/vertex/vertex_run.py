"""Laptop: an existing Vertex AI custom job: status, logs, end and cost."""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.files import table
from launcher.places.sagemaker.training_run import dollars
from launcher.places.vertex import google_cloud
from launcher.places.vertex.custom_job import Pool
from launcher.runs import Patience
from stoker.errors import UsageError
from stoker.events import google
from stoker.events.prices import PriceList
from stoker.hosts.services.vertex import FAILURES, RUN_FOLDER

POLL_S = 10.0
DRAIN_S = 20.0
"""How long to wait for the last lines after the job has ended."""
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
_EXIT_CODES = {"succeeded": 0, "failed": 1, "interrupted": 143}


@dataclass
class VertexRun:
    """Laptop: one custom job, by its resource name."""

    name: str
    """`projects/<project>/locations/<region>/customJobs/<number>`."""
    poll_s: float = POLL_S
    submitted: bool = False
    """Whether this process has submitted it, so that there is a run, whatever the service answers."""

    def __post_init__(self) -> None:
        self._patiently = Patience(self.poll_s, answered=self.submitted)

    @property
    def id(self) -> str:
        return f"vertex:{self.name}"

    @property
    def region(self) -> str:
        return self.name.split("/")[3]

    def job(self) -> Any:
        """The CustomJob as the service describes it.

        Raises:
            UsageError: the job does not exist, or access is denied.
        """
        with google_cloud.readable_errors(f"job {self.name}"):
            return google_cloud.jobs(self.region).get_custom_job(
                name=self.name, timeout=google_cloud.CALL_TIMEOUT_S
            )

    def status(self) -> str:
        """running, succeeded, failed or interrupted, with the cause after a colon."""
        return status_text(self.job())

    def wait(self) -> int:
        """Block until the end; returns the exit code that corresponds to the status."""
        while (state := status_text(self._patiently(self.job))).startswith("running"):
            time.sleep(self.poll_s)
        return _EXIT_CODES.get(state.partition(":")[0], 1)

    def stop(self) -> str | None:
        """Cancel the job. The service says nothing of a signal before the hosts are taken away."""
        with google_cloud.readable_errors(f"job {self.name}"):
            google_cloud.jobs(self.region).cancel_custom_job(
                name=self.name, timeout=google_cloud.CALL_TIMEOUT_S
            )
        return "cancelled; its hosts may be taken away before they have written a checkpoint"

    def logs(self, follow: bool = False) -> Iterator[str]:
        """The lines of all hosts in Cloud Logging, each as `[workerpool0-0] text`, and changes of state."""
        since, last_state, seen = "", "", set()
        ended_at: float | None = None
        while True:
            job = self._patiently(self.job)
            state = status_text(job)
            if follow and state != last_state:
                last_state = state
                yield f"[{job.display_name}] {state}"
            entries = self._patiently(functools.partial(google_cloud.log_entries, self.name, since))
            fresh = [entry for entry in entries if entry["id"] not in seen]
            for entry in fresh:
                seen.add(entry["id"])
                since = max(since, entry["at"])
                yield from (f"[{entry['host']}] {line}" for line in entry["text"].splitlines() or [""])
            if not follow:
                return
            if not state.startswith("running"):
                ended_at = ended_at or time.monotonic()
                # The last lines arrive late: end at the first poll without new lines after a delay.
                if not fresh and time.monotonic() - ended_at >= min(DRAIN_S, 3 * self.poll_s):
                    return
            time.sleep(self.poll_s)

    def closing(self) -> str:
        """Message after the end: outcome, cost as the run itself reckoned it, location of the results."""
        job = self._patiently(self.job)
        base = base_of(job)
        lines = [f"{job.display_name}: {status_text(job)}"]
        with contextlib.suppress(OSError, ValueError, KeyError):
            cost = json.loads(read(f"{base}/{RUN_FOLDER}/summary.json"))["cost"]
            region = cost["prices_region"]
            lines.append(
                f"cost: ${cost['usd']:.2f} (estimated, prices of {cost['prices_as_of']} in {region})"
            )
        lines.append(f"model: {base}/model/")
        lines.append(f"results: gcloud storage cp -r {shlex.quote(f'{base}/{RUN_FOLDER}')} .")
        return "\n".join(lines)

    def detached(self) -> str:
        """Message when the user stops watching: the job continues."""
        return (
            f"{self.name} keeps running. Watch it again: stoker logs -f {shlex.quote(self.id)};"
            f" stop it: stoker stop {shlex.quote(self.id)}"
        )


def status_text(job: Any) -> str:
    """Laptop: the state of a CustomJob, in the terms common to all backends."""
    state = job.state.name
    if state == "JOB_STATE_FAILED":
        told = " ".join(job.error.message.split()) or "no reason given"
        return f"failed: {cause_of(base_of(job)) or told}"
    return _WORDS.get(state, f"unknown: {state}")


def cause_of(base: str) -> str:
    """Laptop: the cause that the hosts of the last attempt left; empty if there is none.

    Worker hosts repeat only that the head has ended, so the head's own words come first.
    """
    from pyarrow import fs

    from stoker.storage.filesystems import filesystem_of

    try:
        filesystem, folder = filesystem_of(f"{base}/{FAILURES}")
        found = filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True))
        names = sorted((info.base_name for info in found), reverse=True)
        texts = [read(f"{folder}/{name}") for name in names[:8]]
    except OSError:
        return ""
    own = [text for text in texts if not text.startswith("the head")]
    return " ".join((own or texts or [""])[0].split())


def read(uri: str) -> str:
    """Laptop: a small object; OSError if it cannot be read."""
    from stoker.storage.filesystems import filesystem_of

    filesystem, path = filesystem_of(uri)
    with filesystem.open_input_stream(path) as stream:
        content: bytes = stream.read()
    return content.decode("utf-8", "replace")


def base_of(job: Any) -> str:
    """Laptop: the job's output directory."""
    return str(job.job_spec.base_output_directory.output_uri_prefix).rstrip("/")


def named(run_id: str) -> str:
    """Laptop: the resource name in `vertex:projects/…/locations/…/customJobs/…`.

    Raises:
        UsageError: it has another form.
    """
    name = run_id.removeprefix("vertex:")
    parts = name.split("/")
    if len(parts) != 6 or parts[::2] != ["projects", "locations", "customJobs"] or not all(parts):
        raise UsageError(f"{run_id}: write vertex:projects/<project>/locations/<region>/customJobs/<number>")
    return name


def usd_per_hour(pool: Pool, known: PriceList) -> float | None:
    """Laptop: estimated $/h of a pool; None if its price is unknown."""
    return known.usd_per_hour(pool.machine_type, pool.replicas, pool.group)


def cost_table(pools: Sequence[Pool], max_runtime_s: int, spot: bool, known: PriceList) -> str:
    """Laptop: a table of pools with $/h, and the maximum cost of the job."""
    rows, each = [], [usd_per_hour(pool, known) for pool in pools]
    for pool, price in zip(pools, each, strict=True):
        machine = google.MACHINES.get(pool.machine_type)
        rows.append(
            (
                pool.group,
                str(pool.replicas),
                pool.machine_type,
                str(machine.vcpus * pool.replicas) if machine else "?",
                f"{pool.gpus * pool.replicas}×{pool.gpu_type}" if pool.gpus else "-",
                dollars(price, 3),
            )
        )
    total = None if None in each else sum(price for price in each if price is not None)
    rows.append(("total", str(sum(pool.replicas for pool in pools)), "", "", "", dollars(total, 3)))
    head = ("group", "hosts", "type", "vCPUs", "GPUs", "$/h")
    hours = max_runtime_s / 3600
    most = dollars(total * hours if total is not None else None)
    note = "; spot usually costs less" if spot else ""
    return (
        f"{table(head, rows)}\nat most ${most} in {hours:g} h (vertex.max_runtime_s); {known.label}{note};"
        " without disks"
    )
