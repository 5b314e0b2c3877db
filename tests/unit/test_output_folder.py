"""A folder in which no run can be kept is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from launcher import run_directory
from stoker.errors import UsageError


def test_a_folder_that_cannot_be_made_or_has_no_room_is_named(tmp_path: Path) -> None:
    run_directory.refuse_unwritable(tmp_path / "new" / "runs")
    assert not list(tmp_path.iterdir()), "looking leaves nothing behind"
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file cannot be written: .*Not a directory"):
        run_directory.refuse_unwritable(tmp_path / "file")
    with pytest.raises(UsageError, match="/proc/runs cannot be written"):
        run_directory.refuse_unwritable(Path("/proc/runs"))
    full = mock.Mock(free=2**20)
    with mock.patch("shutil.disk_usage", return_value=full), pytest.raises(UsageError, match=r"full \(1 MB"):
        run_directory.refuse_unwritable(tmp_path)
