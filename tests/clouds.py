"""Jobs of SageMaker and Vertex AI that can be planned as they stand, and what changes of them mean."""

from __future__ import annotations

from pathlib import Path

from stoker.config.loading import load
from stoker_launcher.job import Job, open_job

SAGEMAKER = {
    "name": "flowers",
    "sagemaker.region": "us-east-1",
    "sagemaker.role": "arn:aws:iam::123456789012:role/StokerJob",
    "sagemaker.s3_uri": "s3://my-bucket/stoker",
    "sagemaker.gpu.type": "ml.g5.2xlarge",
    "sagemaker.cpu.type": "ml.c5.4xlarge",
    "sagemaker.cpu.count": "2",
}
VERTEX = {
    "name": "flowers",
    "vertex.project": "my-project",
    "vertex.gcs_uri": "gs://my-bucket/stoker",
    "vertex.image": "us-central1-docker.pkg.dev/my-project/images/stoker:1",
    "vertex.gpu.machine_type": "g2-standard-8",
    "vertex.cpu.machine_type": "c2-standard-16",
    "vertex.cpu.replicas": "2",
}


def words(keys: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in keys.items()]


WORDS = {"sagemaker": words(SAGEMAKER), "vertex": words(VERTEX)}
"""What a command needs to plan a job, by place."""


def job_of(keys: dict[str, str], source_dir: Path | None = None) -> Job:
    return open_job(load(None, words(keys)), source_dir)


def full(key: str, place: str) -> str:
    """The keys of a table are those of the place's section, unless they name another."""
    return (
        key
        if key.partition(".")[0] in ("checkpoint", "cluster", "data", "params", "tracking", "train")
        else f"{place}.{key}"
    )


def changes_of(text: str, place: str) -> dict[str, str]:
    """`gpu.count=0; train.workers=2` as keys and values."""
    pairs = [pair.partition("=") for pair in text.split("; ") if pair]
    return {full(key, place): value for key, _, value in pairs}
