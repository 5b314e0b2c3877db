"""A job whose data and checkpoints are on Cloud Storage, spoken to an emulator of its JSON API."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.storage.checkpoint_store import open_store, verify
from stoker.storage.filesystems import filesystem_of
from tests.e2e.commands import DIGITS, submit
from tests.fakes.google_cloud import BUCKET, cloud_storage


@pytest.mark.soak
def test_a_job_reads_gs_and_resumes_from_gs(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two whole jobs; what they ask of Cloud Storage: tests/unit/test_far_files.py."""
    with cloud_storage() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        filesystem, root = filesystem_of(f"gs://{BUCKET}/digits")
        for file in (digits / "parquet").rglob("*.parquet"):
            with filesystem.open_output_stream(
                f"{root}/{file.relative_to(digits / 'parquet')}"
            ) as stream:
                stream.write(file.read_bytes())
        kept = f"gs://{BUCKET}/flowers/checkpoints"
        job = [
            DIGITS,
            f"params.data=gs://{BUCKET}/digits",
            f"checkpoint.dir={kept}",
            "data.prepare=null",
        ]
        for epochs in (1, 2):
            done = submit(*job, f"train.epochs={epochs}", "--resume", "auto", cwd=tmp_path)
            assert done.returncode == 0, done.stdout + done.stderr
            summary = json.loads((tmp_path / "runs/latest/summary.json").read_text())
            assert summary["records"]["trained"] == epochs * 1437
        assert [event["event"] for event in summary["events"]].count("resumed") == 1
        store = open_store(kept)
        newest = store.names()[0]
        assert verify(store, newest) is None
        assert not (tmp_path / "runs/latest/checkpoints").exists()
