"""What a job does in S3, under the policy of docs/iam/job-role.json, and when deleting is denied."""

from __future__ import annotations

import fnmatch
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import boto3
import pytest
import torch
from damage import checked

from stoker.checkpoints import format as checkpoint
from stoker.checkpoints.format import Content, Retention
from stoker.data import read_any
from stoker.storage.checkpoint_store import CheckpointStore, open_store
from tests.fakes.aws import REGION, ROLE, moto, served

ROOT = Path(__file__).resolve().parents[2]
BUCKET, DATA = "my-bucket", "my-data"
WHERE = f"s3://{BUCKET}/stoker/checkpoints"


@dataclass
class Policed:
    """A moto server behind a door that lets through what a policy allows, and remembers what was asked."""

    statements: list[dict[str, Any]]
    asked: set[str] = field(default_factory=set)
    denied: list[str] = field(default_factory=list)
    owners: set[str | None] = field(default_factory=set)
    """Accounts that must own the bucket, by the requests that upload."""
    guarded: bool = False

    def __post_init__(self) -> None:
        self.moto = moto()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        length = environ.get("CONTENT_LENGTH")
        chunked = length is None and environ.get("wsgi.input_terminated")
        body = environ["wsgi.input"].read(-1 if chunked else int(length or 0))
        environ |= {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        for action, resource in wanted(environ, body) if self.guarded else ():
            self.asked.add(action)
            if action == "s3:PutObject":
                self.owners.add(environ.get("HTTP_X_AMZ_EXPECTED_BUCKET_OWNER"))
            if not self.allows(action, resource):
                self.denied.append(f"{action} {resource}")
                start_response("403 Forbidden", [("Content-Type", "application/xml")])
                return [
                    b"<Error><Code>AccessDenied</Code><Message>denied by the policy</Message></Error>"
                ]
        return self.moto(environ, start_response)

    def allows(self, action: str, resource: str) -> bool:
        return any(
            action in as_list(statement["Action"])
            and any(
                fnmatch.fnmatchcase(resource, pattern) for pattern in as_list(statement["Resource"])
            )
            for statement in self.statements
        )


def as_list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def wanted(environ: dict[str, Any], body: bytes) -> list[tuple[str, str]]:
    if "/s3/aws4_request" not in environ.get("HTTP_AUTHORIZATION", ""):
        return []  # of another service
    bucket, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
    query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    method, arn = environ["REQUEST_METHOD"], f"arn:aws:s3:::{bucket}"
    if not key:
        if method == "POST" and "delete" in query:
            keys = re.findall(rb"<Key>(.*?)</Key>", body)
            return [("s3:DeleteObject", f"{arn}/{name.decode()}") for name in keys]
        names = {"GET": "s3:GetBucketLocation" if "location" in query else "s3:ListBucket"}
        return [
            (names.get(method, "s3:ListBucket" if method == "HEAD" else f"s3:{method}Bucket"), arn)
        ]
    actions = {"GET": "GetObject", "HEAD": "GetObject", "PUT": "PutObject", "POST": "PutObject"}
    deletes = "AbortMultipartUpload" if "uploadId" in query else "DeleteObject"
    return [(f"s3:{actions.get(method, deletes)}", f"{arn}/{key}")]


def statements(policy: str) -> list[dict[str, Any]]:
    text = (ROOT / f"docs/iam/{policy}.json").read_text()
    text = text.replace("DATA-BUCKET", DATA).replace("BUCKET", BUCKET)
    return [s for s in json.loads(text)["Statement"] if "s3:" in json.dumps(s["Action"])]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Policed]:
    door = Policed(statements("job-role"))
    with served(door) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        for bucket in (BUCKET, DATA):
            boto3.client("s3").create_bucket(Bucket=bucket)
        door.guarded = True
        yield door


def keep_four(store: CheckpointStore, said: list[str]) -> Retention:
    shelf = Retention(store, newest=2, top_k=0, tell=said.append)
    for step in range(1, 5):
        about = {
            "step": step,
            "monitored": {"metric": "val/loss", "mode": "min", "value": 1.0 / step},
        }
        shelf.add(checkpoint.save(store, Content({"w": torch.full((9,), float(step))}, {}, about)))
    return shelf


def test_the_jobs_policy_names_every_call_that_a_job_makes(s3: Policed, digits: Path) -> None:
    s3.guarded = False
    client = boto3.client("s3")
    for form in ("webdataset", "parquet"):
        for path in (digits / form).rglob("*.*"):
            client.upload_file(str(path), DATA, str(path.relative_to(digits)))
    s3.guarded = True
    said: list[str] = []
    store = open_store(WHERE)
    keep_four(store, said)
    store.write_note("best.json", "{}")
    assert store.content("best.json") == b"{}"
    found = checkpoint.newest_valid(open_store(WHERE), said.append)
    assert found is not None
    assert checkpoint.load_checkpoint(found).weights["w"][0] == 4
    large = {"w": torch.zeros(3 * 2**20)}  # sent in several parts
    checkpoint.save(store, Content(large, {}, {"step": 9, "monitored": None}))
    for form in ("webdataset", "parquet"):
        source = checked(read_any(f"s3://{DATA}/{form}", "val"))
        assert next(iter(source.for_workers().read(source.shards(100, None)[0], None)))["key"]
    assert s3.denied == []
    assert said == []
    assert store.names() == ["step-00000009", "step-00000004", "step-00000003"]
    assert s3.asked == {"s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"}


def test_a_denied_delete_is_said_once_and_every_checkpoint_stays(s3: Policed) -> None:
    for statement in s3.statements:
        statement["Action"] = [a for a in as_list(statement["Action"]) if a != "s3:DeleteObject"]
    said: list[str] = []
    store = open_store(f"{WHERE}/denied")
    keep_four(store, said)
    assert len(store.names()) == 4
    assert s3.denied and all(line.startswith("s3:DeleteObject") for line in s3.denied)
    assert len(said) == 1
    assert "step-00000001" in said[0] and "s3:DeleteObject" in said[0] and "\n" not in said[0]
    newest = checkpoint.newest_valid(store, said.append)
    assert newest is not None and newest.name == "step-00000004"
    assert len(said) == 1, "the others are whole, too"


def test_the_launchers_policy_names_every_call_that_it_makes(s3: Policed, tmp_path: Path) -> None:
    from stoker.config.loading import load
    from stoker_launcher.job import open_job
    from stoker_launcher.places import sagemaker
    from stoker_launcher.places.sagemaker import aws

    s3.statements = statements("launcher")
    (tmp_path / "shards").mkdir()
    with (tmp_path / "shards" / "0.tar").open("wb") as file:
        file.truncate(9 * 2**20)  # sent in several parts
    keys = [
        f"sagemaker.region={REGION}", f"sagemaker.role={ROLE}", f"sagemaker.s3_uri=s3://{BUCKET}/stoker",
        "sagemaker.gpu.type=ml.g5.2xlarge", f"params.data={tmp_path / 'shards'}",
    ]  # fmt: skip
    aws.client.cache_clear()
    try:
        sagemaker.submit(sagemaker.plan(open_job(load(None, keys))), lambda line: None)
    finally:
        aws.client.cache_clear()
    assert s3.denied == []
    assert s3.asked == {"s3:ListBucket", "s3:PutObject"}
    assert s3.owners == {ROLE.split(":")[4]}, (
        "every upload names the account that must own the bucket"
    )
