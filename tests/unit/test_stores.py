"""Data and checkpoints on Cloud Storage and Azure Blob Storage, against servers that stand in for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from damage import checked, read_all

from stoker.data import BadRecord, read_any
from stoker.errors import UsageError
from stoker.storage.checkpoint_store import MANIFEST, Manifest, open_store, verify
from stoker.storage.filesystems import child_folders, common_folder, filesystem_of, list_files
from tests.fakes import azure, google_cloud

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=["gs", "az"])
def root(request: pytest.FixtureRequest, digits: Path) -> Iterator[str]:
    """The digits as tar shards, Parquet and images, uploaded as any tool does: objects, no folders."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if request.param == "gs":
            environment = stack.enter_context(google_cloud.cloud_storage())
            root = f"gs://{google_cloud.BUCKET}"
        else:
            environment, _ = stack.enter_context(azure.blob_storage())
            root = f"az://{azure.CONTAINER}"
        for name, value in environment.items():
            patch.setenv(name, value)
        filesystem, at = filesystem_of(root)
        files = [
            path for form in ("webdataset", "parquet") for path in (digits / form).rglob("*.*")
        ]
        images = sorted((digits / "images" / "train").rglob("*.jpg"))
        for path in [*files, *images[:: len(images) // 40]]:
            with filesystem.open_output_stream(f"{at}/{path.relative_to(digits)}") as stream:
                stream.write(path.read_bytes())
        yield root


@pytest.mark.parametrize("form", ["webdataset", "parquet"])
def test_every_record_comes_once(form: str, root: str) -> None:
    source = checked(read_any(f"{root}/{form}", "val"))
    assert source.fingerprint()
    records = read_all(source)
    assert not any(isinstance(record, BadRecord) for record in records)
    assert len({record["key"] for record in records}) == len(records) == 360


def test_classes_of_images_are_their_folders(root: str) -> None:
    source = checked(read_any(f"{root}/images", "train"))
    assert source.classes() == [str(digit) for digit in range(10)]
    records = read_all(source, 16)
    assert len(records) == source.count() and not any(isinstance(r, BadRecord) for r in records)


def test_folders_are_the_beginnings_of_names(root: str) -> None:
    assert child_folders(root) == ["images", "parquet", "webdataset"]
    assert child_folders(f"{root}/webdataset") == ["train", "val"]
    files = list_files(f"{root}/webdataset")
    bucket = root.partition("://")[2]
    assert common_folder(files) == f"{bucket}/webdataset/"
    assert all(file.path.startswith(f"{bucket}/webdataset/") and file.size for file in files)
    with pytest.raises(UsageError, match=f"{root}/nothing: no such file or folder"):
        list_files(f"{root}/nothing")


def test_checkpoints_appear_whole_and_damage_is_found(root: str, tmp_path: Path) -> None:
    store = open_store(f"{root}/job/checkpoints")
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
    filesystem, at = filesystem_of(root)
    with filesystem.open_output_stream(
        f"{at}/job/checkpoints/step-00000012/model.safetensors"
    ) as stream:
        stream.write(b"other")
    assert "damaged" in str(verify(store, "step-00000012"))
    store.remove("step-00000012")
    assert store.names() == ["step-00000005"]
