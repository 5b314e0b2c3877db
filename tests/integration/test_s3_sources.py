"""Records straight from S3 (a moto server), also while it errs; each byte is read once, damage is found."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest
from damage import checked, read_all, tar_of

from stoker.config.loading import Resolved
from stoker.config.schema import Config
from stoker.data import read_any, read_images
from stoker.entry.job_checks import open_sources_of
from stoker.errors import UsageError
from stoker.storage import filesystems
from tests.fakes.aws import moto, moto_server, served

BUCKET = "stoker-data"
THREADS = 12
"""Most of the time of a request is waiting for the next attempt."""


@pytest.fixture(scope="module")
def s3(digits: Path) -> Iterator[dict[str, str]]:
    with moto_server() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        for form in ("webdataset", "parquet"):
            for path in (digits / form).rglob("*.*"):
                client.upload_file(str(path), BUCKET, str(path.relative_to(digits)))
        yield environment


def read(form: str, least_passes: int = 1) -> list[Any]:
    source = checked(read_any(f"s3://{BUCKET}/{form}", "val"))
    reader, shards = source.for_workers(), source.shards(100, None)

    def one_pass(_: int) -> list[Any]:
        return [record for shard in shards for record in reader.read(shard, None)]

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(one_pass, range(least_passes)))[-1]


@pytest.mark.parametrize("form", ["webdataset", "parquet"])
def test_records_come_from_s3(form: str, s3: dict[str, str]) -> None:
    assert len({record["key"] for record in read(form)}) == 360


def test_half_of_the_answers_being_503_loses_nothing(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, attempts = random.Random(3), Counter[str]()
    refused, app = 0, moto()

    def flaky(environ: dict[str, Any], start_response: Any) -> Any:
        nonlocal refused
        # One for all attempts of a call: ten refusals, after which a client gives up, are no chance here.
        call = environ["HTTP_AMZ_SDK_INVOCATION_ID"]
        attempts[call] += 1
        if faults.random() < 0.5 and attempts[call] <= 5:
            refused += 1
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>"]
        return app(environ, start_response)

    with served(flaky) as environment:
        monkeypatch.setenv("AWS_ENDPOINT_URL", environment["AWS_ENDPOINT_URL"])
        assert len(read("parquet")) == 360
        # After some hundred errors a client of AWS's SDK may have used up its retries for good.
        while refused < 250:
            assert len(read("parquet", least_passes=36)) == 360
        assert max(attempts.values()) == 6


def test_images_come_from_s3_in_folders_and_with_their_labels_in_a_file(s3: dict[str, str]) -> None:
    client, jpeg = boto3.client("s3"), b"\xff\xd8\xff\xe0" + bytes(40)
    for split in ("train", "val"):
        for name in ("cat/0.jpg", "cat/1.PNG", "dog/x.txt", "_eel/2.webp"):
            client.put_object(Bucket=BUCKET, Key=f"photos/{split}/{name}", Body=jpeg)
    table = b"image,label,split\n0,b,train\n2,a,train\n1,a,val\n"
    labelled = {"labels.csv": table, "0.png": jpeg, "deep/1.jpg": jpeg, "2.jpg": jpeg}
    for name, content in labelled.items():
        client.put_object(Bucket=BUCKET, Key=f"labelled/{name}", Body=content)
    with pytest.raises(UsageError, match=r"1 file not of the kind .*dog/x.txt.*ignore"):
        read_any(f"s3://{BUCKET}/photos", "train")
    train = read_any(f"s3://{BUCKET}/photos", "train", ignore=["*.txt"])
    assert train is not None and train.classes() == ["_eel", "cat"]
    keys = [record["key"] for record in read_all(train)]
    assert sorted(keys) == ["_eel/2.webp", "cat/0.jpg", "cat/1.PNG"]
    for split, labels in {"train": {"0.png": 1, "2.jpg": 0}, "val": {"deep/1.jpg": 0}}.items():
        found = read_all(read_images(f"s3://{BUCKET}/labelled", split, "labels.csv"))
        assert found == [{"key": k, "image": jpeg, "label": label} for k, label in labels.items()]


def test_a_job_lists_each_folder_once_and_names_a_slow_store(
    s3: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    client = boto3.client("s3")
    for split in ("train", "val"):
        for number in range(8):
            image = {"Key": f"once/{split}/{number % 2}/{number}.png", "Body": b"\x89PNG"}
            client.put_object(Bucket=BUCKET, **image)
    asked: Counter[tuple[str, str]] = Counter()
    ask = filesystems._remembered

    def counted(path: str, what: str, answer: Any) -> Any:
        return ask(path, what, lambda: (asked.update([(path, what)]), answer())[1])

    monkeypatch.setattr(filesystems, "_remembered", counted)
    monkeypatch.setattr(filesystems, "SLOW_LISTING_S", 0)
    job = Resolved(Config.model_validate({"params": {"data": f"s3://{BUCKET}/once"}}), {})
    _, data = open_sources_of(job)
    counts = {split: source.count() for split, source in data.sources.items()}
    assert counts == {"train": 8, "val": 8}
    assert asked and {*asked.values()} == {1}, asked
    assert "still listing" in capfd.readouterr().err


PHOTOS = "stoker-photos"
JPEG = b"\xff\xd8\xff\xe0"


def test_each_image_is_requested_once_whatever_becomes_of_the_answer(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first requests for an image, a third are refused, a third are cut short; the rest is whole."""
    client, app, asked = boto3.client("s3"), moto(), Counter[tuple[str, str]]()
    client.create_bucket(Bucket=PHOTOS)
    expected = {f"{n % 3}/a b+{n}~ä.jpg": JPEG + f"{n}".encode() * 2000 for n in range(90)}
    for key, content in expected.items():
        client.put_object(Bucket=PHOTOS, Key=f"train/{key}", Body=content)

    def spoilt(environ: dict[str, Any], start_response: Any) -> Any:
        key, method = environ["PATH_INFO"].encode("latin-1").decode(), environ["REQUEST_METHOD"]
        asked[method, key] += 1
        if not harm or not key.endswith(".jpg") or asked[method, key] > 1:
            return app(environ, start_response)
        if sum(key.encode()) % 3 == 0:
            start_response("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        whole = b"".join(app(environ, start_response))
        return [whole[:-1] if sum(key.encode()) % 3 == 1 else whole]

    with served(spoilt) as environment:
        monkeypatch.setenv("AWS_ENDPOINT_URL", environment["AWS_ENDPOINT_URL"])
        for harm in (False, True):
            source = read_images(f"s3://{PHOTOS}", "train")
            assert source is not None and source.far
            asked.clear()
            [shard] = source.shards(100, None)
            records = [*source.for_workers().read(shard, None)]
            assert {record["key"]: record["image"] for record in records} == expected
            if not harm:
                assert asked == Counter(("GET", f"/{PHOTOS}/train/{key}") for key in expected)
        assert sum(asked.values()) == 90 + 60, "the spoilt ones once more"


@pytest.mark.parametrize("most", [0, 4000])
def test_a_bucket_that_is_listed_in_parts_has_the_same_files(
    most: int, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, bucket = boto3.client("s3"), f"stoker-listing-{most}"
    client.create_bucket(Bucket=bucket)
    folders = ["a", "a/b", "a/b/c", "b", "c.jpg", "d/e/f/g/h"]
    keys = [f"top/{folder}/{n}" for folder in folders for n in range(3)]
    keys += ["top/c", "top/a.jpg", "topmost/x"]
    for key in [*keys, "top/empty/", "top/a/b/"]:
        client.put_object(Bucket=bucket, Key=key, Body=b"" if key.endswith("/") else b"1")
    monkeypatch.setattr(filesystems, "MOST_LISTED", most)
    found = [file.path for file in filesystems.list_files(f"s3://{bucket}/top")]
    assert found == sorted(f"{bucket}/{key}" for key in keys if key.startswith("top/"))


DAMAGED = "stoker-damage"


@pytest.mark.parametrize("keys", [["top//"], ["top/p00//x"], ["top//p00/y", "top/p01/"]])
def test_a_bucket_with_empty_names_in_its_keys_is_listed_as_in_one_go(
    s3: dict[str, str], keys: list[str], request: pytest.FixtureRequest
) -> None:
    from pyarrow import fs

    client, bucket = boto3.client("s3"), f"stoker-empty-{abs(hash(request.node.name))}"
    client.create_bucket(Bucket=bucket)
    for key in [*(f"top/p{number:02d}/x" for number in range(20)), *keys]:
        client.put_object(Bucket=bucket, Key=key, Body=b"" if key.endswith("/") else b"content")
    filesystem = filesystems.filesystem_of(f"s3://{bucket}/top")[0]
    whole = filesystem.get_file_info(fs.FileSelector(f"{bucket}/top", recursive=True))
    found = [file.path for file in filesystems.list_files(f"s3://{bucket}/top")]
    assert sorted(found) == sorted(info.path for info in whole if info.is_file)
    assert len({*found}) == len(found) >= 20


@pytest.fixture(scope="module")
def answered() -> Iterator[list[tuple[str, int]]]:
    """A bucket behind a server that notes (path, bytes) of every answer to a GET."""
    app, seen = moto(), list[tuple[str, int]]()

    def noting(environ: dict[str, Any], start_response: Any) -> Any:
        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            if environ["REQUEST_METHOD"] == "GET":
                seen.append((environ["PATH_INFO"], int(dict(headers).get("Content-Length", 0))))
            return start_response(status, headers, *rest)

        return app(environ, start)

    with served(noting) as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket=DAMAGED)
        yield seen


def upload(folder: Path, prefix: str) -> str:
    for path in folder.rglob("*.*"):
        boto3.client("s3").upload_file(str(path), DAMAGED, f"{prefix}/{path.relative_to(folder)}")
    return f"s3://{DAMAGED}/{prefix}"


def shard() -> bytes:
    return tar_of((f"{i:04d}.{s}", b"x" * 700) for i in range(100) for s in ("jpg", "txt"))


def test_a_shard_is_read_once(answered: list[tuple[str, int]], tmp_path: Path) -> None:
    (tmp_path / "train-0.tar").write_bytes(shard())
    root = upload(tmp_path, "whole")
    source = checked(read_any(root, "train"))
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
        read_all(read_any(root, "train"))
