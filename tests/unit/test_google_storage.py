"""Data and checkpoints on Cloud Storage, spoken to an emulator of its JSON API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from damage import checked, read_all

from stoker.data import read_any
from stoker.errors import UsageError
from stoker.protocol import BadRecord
from stoker.storage.checkpoint_store import MANIFEST, Manifest, open_store, verify
from stoker.storage.filesystems import child_folders, common_folder, filesystem_of, list_files
from tests.fakes.google_cloud import BUCKET, cloud_storage

pytestmark = pytest.mark.long

ROOT = f"gs://{BUCKET}"


@pytest.fixture(scope="module")
def bucket(digits: Path) -> Iterator[None]:
    """The digits as tar shards, Parquet and images, uploaded as any tool does: objects, no folders."""
    with cloud_storage() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        filesystem, _ = filesystem_of(ROOT)
        files = [
            path for form in ("webdataset", "parquet") for path in (digits / form).rglob("*.*")
        ]
        images = sorted((digits / "images" / "train").rglob("*.jpg"))
        for path in [*files, *images[:: len(images) // 40]]:
            with filesystem.open_output_stream(f"{ROOT}/{path.relative_to(digits)}") as stream:
                stream.write(path.read_bytes())
        yield


@pytest.mark.parametrize("form", ["webdataset", "parquet"])
def test_every_record_comes_once(form: str, bucket: None) -> None:
    source = checked(read_any(f"{ROOT}/{form}", "val"))
    assert source.fingerprint()
    records = read_all(source)
    assert not any(isinstance(record, BadRecord) for record in records)
    assert len({record["key"] for record in records}) == len(records) == 360


def test_classes_of_images_are_their_folders(bucket: None) -> None:
    source = checked(read_any(f"{ROOT}/images", "train"))
    assert source.classes() == [str(digit) for digit in range(10)]
    records = read_all(source, 16)
    assert len(records) == source.count() and not any(isinstance(r, BadRecord) for r in records)


def test_folders_are_the_beginnings_of_names(bucket: None) -> None:
    assert child_folders(ROOT) == ["images", "parquet", "webdataset"]
    assert child_folders(f"{ROOT}/webdataset") == ["train", "val"]
    files = list_files(f"{ROOT}/webdataset")
    assert common_folder(files) == f"{ROOT}/webdataset/"
    assert all(file.path.startswith(f"{ROOT}/webdataset/") and file.size for file in files)
    with pytest.raises(UsageError, match=f"{ROOT}/nothing: no such file or folder"):
        list_files(f"{ROOT}/nothing")


def test_checkpoints_appear_whole_and_damage_is_found(bucket: None, tmp_path: Path) -> None:
    store = open_store(f"{ROOT}/job/checkpoints")
    assert store.names() == []
    for step in (5, 12):
        draft = store.draft()
        (draft / "model.safetensors").write_bytes(bytes([step]) * 100)
        (draft / MANIFEST).write_text(Manifest.of(draft, {}).text())
        store.publish(draft, f"step-{step:08d}")
    assert store.names() == ["step-00000012", "step-00000005"]
    assert [verify(store, name) for name in store.names()] == [None, None]
    with store.local("step-00000012") as folder:
        assert (folder / "model.safetensors").read_bytes() == bytes([12]) * 100
    filesystem, _ = filesystem_of(ROOT)
    with filesystem.open_output_stream(
        f"{ROOT}/job/checkpoints/step-00000012/model.safetensors"
    ) as stream:
        stream.write(b"other")
    assert "damaged" in str(verify(store, "step-00000012"))
    store.remove("step-00000012")
    assert store.names() == ["step-00000005"]
