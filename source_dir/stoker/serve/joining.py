"""Head: lets a run share its preprocessed blocks with others (`data.share`)."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path
from typing import Any

from stoker.config.loading import SECRETS_FILE
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.hosts.topology import NODE_LABEL
from stoker.place import COMMIT_FILE, TOKEN_FILE
from stoker.read.sources import digest
from stoker.recipe import SOURCE_FOLDER
from stoker.serve.datasets import DatasetSource
from stoker.serve.sharing import Share, WindowActor, patience_s

WINDOW_SHARE = 0.1
"""Kept for runs that are behind, as a share of the cluster's object stores."""
LEAST_WINDOW_BYTES = 64 * 2**20
MOST_CALLS = 10_000
"""Chain workers that wait at once."""
ANSWER_S = 120.0
OF_THE_JOB = ("job.yaml", "job.origins.json", SECRETS_FILE, COMMIT_FILE, TOKEN_FILE)
"""Files that differ between jobs with the same code."""


def depends_on(
    config: Config,
    sources: dict[str, Any],
    chains: dict[str, Any],
    fingerprints: dict[str, str],
    unstable: dict[str, str],
) -> dict[str, str]:
    """Head: everything that decides what the blocks of a run hold, by its name in messages.

    Args:
        config: the job.
        sources: of its splits.
        chains: of its splits.
        fingerprints: of their records.
        unstable: why records of a split cannot be reproduced; empty: they can.

    Raises:
        UsageError: the blocks of a split depend on more than that.
    """
    found = {
        "seed": str(config.seed),
        "data.shuffle": str(config.data.shuffle),
        "data.block_records": str(config.data.block_records),
        "splits": ", ".join(sources),
    }
    for split, source in sources.items():
        if why := unstable.get(split):
            raise UsageError(f"data.share: {why}, so another run would make other blocks")
        if isinstance(source, DatasetSource):
            raise UsageError(
                f"data.share: {config.recipe}.read({split!r}) returns a ray.data.Dataset, whose blocks two"
                " runs divide differently; return a Source from stoker.data, or set data.share=null"
            )
        chain = chains[split]
        settings = (
            chain.seed, chain.with_keys, chain.max_pixels, sorted(chain.pads.items()), chain.bucket_by,
            chain.max_tokens, chain.collate is not None,
        )  # fmt: skip
        found[f"{split} data"] = fingerprints[split]
        if source.random or not source.fingerprint():
            # A fingerprint of samples does not see everything that a dataset's own code depends on.
            found[f"{split} source"] = _pickled(source.for_workers())
        found[f"{split} chain"] = digest(settings, _pickled(chain.stages))
    return found | {"code": digest(_code(SOURCE_FOLDER))}


def _pickled(value: Any) -> str:
    """Digest of an object with all that it holds, wherever this job's code is staged."""
    from ray import cloudpickle

    here = str(SOURCE_FOLDER).encode()
    return hashlib.blake2b(cloudpickle.dumps(value).replace(here, b""), digest_size=16).hexdigest()


def _code(folder: Path) -> list[tuple[str, str]]:
    """Digests of the files beside the job's configuration: code, and what transforms read."""
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and "__pycache__" not in path.parts and name not in OF_THE_JOB:
            with path.open("rb") as file:
                found.append((name, hashlib.file_digest(file, "blake2b").hexdigest()))
    return found


def join(config: Config, own: dict[str, str], store_bytes: float) -> Share:
    """Head: enter the run among those that share its blocks.

    Args:
        config: the job.
        own: result of `depends_on`.
        store_bytes: size of the cluster's object stores.

    Raises:
        UsageError: runs of this name have other data, another chain or another seed.
    """
    import ray

    name = config.data.share
    context = ray.get_runtime_context()
    run = f"{context.get_job_id()}/{uuid.uuid4().hex}"
    actor: Any = ray.remote(WindowActor).options(
        name=f"stoker-share-{name}", namespace="stoker", get_if_exists=True, lifetime="detached", num_cpus=0,
        max_concurrency=MOST_CALLS, label_selector={NODE_LABEL: context.get_node_id()},
    )  # fmt: skip
    for last_try in (False, True):
        window = actor.remote(max(LEAST_WINDOW_BYTES, int(WINDOW_SHARE * store_bytes)))
        try:
            differs = ray.get(window.join.remote(window, run, own), timeout=ANSWER_S)
            break
        except ray.exceptions.RayActorError:  # it ends with its last run, which was just over
            if last_try:
                raise
    if differs:
        raise UsageError(
            f"data.share: the runs named {name!r} differ from this one in: {differs}; only runs with the same"
            " data, chain, code and seed can share blocks, so choose another name"
        )
    return Share(window, run, patience_s(config.data.stall_timeout_s))
