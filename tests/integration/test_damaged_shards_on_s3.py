"""Tar shards on S3: damage is found in the one read of the chain task, which reads each byte once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import boto3
import pytest
from damage import records, tar_of

from stoker.data import read_any
from stoker.errors import UsageError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakes"))
from aws import moto_server

BUCKET = "stoker-damage"


@pytest.fixture(scope="module")
def answered() -> Iterator[list[tuple[str, int]]]:
    """A bucket behind a server that notes (path, bytes) of every answer to a GET."""
    from moto.server import DomainDispatcherApplication, create_backend_app

    app = DomainDispatcherApplication(create_backend_app)
    seen: list[tuple[str, int]] = []

    def noting(environ: dict[str, Any], start_response: Any) -> Any:
        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            if environ["REQUEST_METHOD"] == "GET":
                seen.append((environ["PATH_INFO"], int(dict(headers).get("Content-Length", 0))))
            return start_response(status, headers, *rest)

        return app(environ, start)

    class Quiet(WSGIRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    server = make_server("127.0.0.1", 0, noting, handler_class=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with moto_server() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield seen
    server.shutdown()


def upload(folder: Path, prefix: str) -> str:
    for path in folder.rglob("*.*"):
        boto3.client("s3").upload_file(str(path), BUCKET, f"{prefix}/{path.relative_to(folder)}")
    return f"s3://{BUCKET}/{prefix}"


def shard() -> bytes:
    return tar_of((f"{i:04d}.{s}", b"x" * 700) for i in range(100) for s in ("jpg", "txt"))


def test_a_shard_is_read_once(answered: list[tuple[str, int]], tmp_path: Path) -> None:
    (tmp_path / "train-0.tar").write_bytes(shard())
    root = upload(tmp_path, "whole")
    source = read_any(root, "train")
    assert source is not None
    source.check()
    answered.clear()
    [only] = source.shards(100, None)
    assert len(list(source.read(only, None))) == 100
    assert sum(size for path, size in answered if path.endswith("train-0.tar")) == len(shard())


def test_a_damaged_header_is_found(answered: list[tuple[str, int]], tmp_path: Path) -> None:
    at = 40 * 3072
    content = bytearray(shard())
    content[at + 3] ^= 1
    (tmp_path / "train-0.tar").write_bytes(content)
    root = upload(tmp_path, "damaged")
    with pytest.raises(UsageError, match=f"damaged tar shard, byte {at}: bad checksum"):
        records(root)
