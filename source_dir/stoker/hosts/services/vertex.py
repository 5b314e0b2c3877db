"""Every host: a Vertex AI custom job. Worker pools are groups; outputs go where the `AIP_…` variables say.

Standard library only. `CLUSTER_SPEC` ("Distributed training" in Google's documentation) names the hosts. Its
`job` often is a JSON string without machines, so the launcher describes the pools in a variable of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.hosts.services import Service
from stoker.hosts.topology import TopologyError
from stoker.place import PLACE_VARIABLE, RunPlace

CLUSTER_VARIABLE = "CLUSTER_SPEC"
JOB_VARIABLE = "CLOUD_ML_JOB_ID"
"""Set on every host of a job, with one host or many."""
POOLS_VARIABLE = "STOKER_VERTEX_POOLS"
"""From the launcher: `{"workerpool0": {"group": "gpu", "type": "g2-standard-8", "gpus": 1}, …}`. Pools of one
group train together, because Vertex AI allows one replica in the first pool."""
MODEL_VARIABLE, CHECKPOINT_VARIABLE = "AIP_MODEL_DIR", "AIP_CHECKPOINT_DIR"
TENSORBOARD_VARIABLE = "AIP_TENSORBOARD_LOG_DIR"
OUTPUT_VARIABLES = (MODEL_VARIABLE, CHECKPOINT_VARIABLE, TENSORBOARD_VARIABLE)
MOUNTS = Path("/gcs")
"""Every bucket that the job may read is a folder here (Cloud Storage FUSE)."""
RUN_FOLDER, FAILURES = "run", "failures"
"""Next to the model, in the job's output directory."""
OWNER = "job.id"
"""There, too: the job whose run it has."""

_LOCAL = Path(tempfile.gettempdir()) / "stoker" / "run"
_STARTED = time.strftime("%Y%m%d-%H%M%S", time.gmtime())


def resource_of(variables: Mapping[str, str]) -> Mapping[str, Any] | None:
    """The job's hosts from its environment; None outside of a Vertex AI job. Pure."""
    text = variables.get(CLUSTER_VARIABLE, "")
    if JOB_VARIABLE not in variables and "workerpool" not in text:
        if variables.get(PLACE_VARIABLE) == "vertex":
            raise TopologyError(
                f"{CLUSTER_VARIABLE}, {JOB_VARIABLE}: not set, so this host knows no others"
            )
        return None
    missing = [name for name in OUTPUT_VARIABLES if not variables.get(name, "").startswith("gs://")]
    if missing:
        raise TopologyError(
            f"{missing[0]}: no gs:// address, so the results would be lost with the machines;"
            " give the job a baseOutputDirectory"
        )
    pools, current, host = _cluster(text)
    machines = json.loads(variables.get(POOLS_VARIABLE) or "{}")
    if machines and (missing_pools := pools.keys() - machines.keys()):
        raise TopologyError(
            f"{POOLS_VARIABLE}: does not describe {min(missing_pools)} of {CLUSTER_VARIABLE}; submit the job"
            " again"
        )
    names = {pool: str(machines.get(pool, {}).get("group") or pool) for pool in pools}
    groups: dict[str, dict[str, Any]] = {}
    for pool, hosts in pools.items():
        machine, name = machines.get(pool, {}), names[pool]
        about = {"instance_group_name": name, "instance_type": str(machine.get("type") or "")}
        group = groups.setdefault(name, {**about, "hosts": []})
        if machine:
            group["gpus"] = int(machine.get("gpus") or 0)
        group["hosts"] += hosts
    return {
        "source": CLUSTER_VARIABLE,
        "current_host": host,
        "current_group_name": names[current],
        "hosts": [host for hosts in pools.values() for host in hosts],
        "instance_groups": list(groups.values()),
    }


def _cluster(text: str) -> tuple[dict[str, list[str]], str, str]:
    """Pool → its hosts' names, by the pools' numbers and without empty ones; this host's pool and name."""
    try:
        spec = json.loads(text)
        listed = {int(pool.removeprefix("workerpool")): pool for pool in spec["cluster"]}
        pools = {
            pool: [re.sub(r":\d+$", "", address) for address in spec["cluster"][pool]]
            for _, pool in sorted(listed.items())
            if spec["cluster"][pool]
        }
        pool, index = spec["task"]["type"], spec["task"]["index"]
        return pools, pool, pools[pool][range(len(pools[pool]))[index]]
    except (ValueError, TypeError, LookupError) as error:
        why = f"{type(error).__name__}: {error}"
        raise TopologyError(
            f"{CLUSTER_VARIABLE}: names no hosts in the documented form ({why}); got {text[:200]!r}"
        ) from None


def resource() -> Mapping[str, Any] | None:
    """Refuses also a bucket for the outputs that is not mounted, or has the run of another job."""
    found = resource_of(os.environ)
    if found is not None and (absent := unmounted(os.environ)):
        raise TopologyError(
            f"{absent}: its bucket is no folder in {MOUNTS}; let the job's service account read and write it"
        )
    if found is not None and (owner := _owner(os.environ)) != os.environ.get(JOB_VARIABLE, ""):
        raise TopologyError(
            f"{os.environ[MODEL_VARIABLE]}: has the run of job {owner}, whose request this is; to continue"
            " it, submit the job with --resume"
        )
    return found


def unmounted(variables: Mapping[str, str]) -> str:
    """The first output address whose bucket is not mounted; empty if all are."""
    uris = [variables[name] for name in OUTPUT_VARIABLES]
    buckets = {uri: MOUNTS / uri.removeprefix("gs://").partition("/")[0] for uri in uris}
    return next((uri for uri, bucket in buckets.items() if not bucket.is_dir()), "")


def _owner(variables: Mapping[str, str]) -> str:
    """The job whose run the output directory has: this one, unless a request was submitted twice."""
    job = variables.get(JOB_VARIABLE, "")
    file = gcs_folder(variables[MODEL_VARIABLE]).parent / OWNER
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x") as output:
            output.write(job)
    with contextlib.suppress(OSError):
        return file.read_text() or job
    return job


def place() -> RunPlace:
    """Outputs in the mounted bucket. The run directory is local, and the head copies it there.

    Each host has a failure file of its own, named by its start: the service restarts hosts and jobs.
    """
    places = {name: os.environ.get(name, "") for name in OUTPUT_VARIABLES}
    if not all(places.values()) or unmounted(places):
        return RunPlace("vertex", _LOCAL, _LOCAL, _LOCAL, failure=_LOCAL / "failure")
    model, checkpoints, board = (gcs_folder(uri) for uri in places.values())
    base = model.parent
    # Not among those of the job that owns the directory.
    mine = _owner(os.environ) == os.environ.get(JOB_VARIABLE, "")
    failure = (base / FAILURES if mine else _LOCAL) / f"{_STARTED}-{_replica()}"
    copies = {_LOCAL: base / RUN_FOLDER, _LOCAL / "tensorboard": board}
    return RunPlace(
        name="vertex",
        run_dir=_LOCAL,
        checkpoint_dir=checkpoints,
        model_dir=model,
        synced=True,
        copies=copies,
        failure=failure,
        job=os.environ.get(JOB_VARIABLE, ""),
    )


def gcs_folder(uri: str) -> Path:
    return MOUNTS / uri.removeprefix("gs://").rstrip("/")


def ends_job() -> bool:
    """Whether this is the first replica of the first pool, with which the job ends."""
    return _replica() == f"{next(iter(_cluster(os.environ[CLUSTER_VARIABLE])[0]))}-0"


def _replica() -> str:
    """This host as the service's console names it: `workerpool0-0`."""
    try:
        pools, pool, host = _cluster(os.environ.get(CLUSTER_VARIABLE, ""))
    except TopologyError:
        return "unknown"
    return f"{pool}-{pools[pool].index(host)}"


SERVICE = Service(resource=resource, place=place, ends_job=ends_job)
