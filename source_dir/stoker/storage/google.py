"""Every host: Google Cloud Storage as a pyarrow filesystem whose paths are `gs://bucket/object`.

pyarrow's own does not list folders that exist only as the beginning of objects' names, as those of every
uploaded data set do, so folders are derived from the objects below them.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

from pyarrow import fs

EMULATOR_VARIABLE = "STORAGE_EMULATOR_HOST"
"""As for Google's own clients: the address of a server that stands in for Cloud Storage."""
RETRIES = timedelta(seconds=30)
SCHEME = "gs://"


def google_filesystem() -> Any:
    """Cloud Storage with the credentials of this host: its service account, or the user's."""
    return fs.PyFileSystem(GoogleFiles(os.environ.get(EMULATOR_VARIABLE, "")))


class GoogleFiles(fs.FileSystemHandler):  # type: ignore[misc]  # pyarrow has no types
    """pyarrow's filesystem with folders. Files are opened by pyarrow, so reading costs no Python."""

    def __init__(self, emulator: str = "") -> None:
        options: dict[str, Any] = {}
        if emulator:
            scheme, sign, host = emulator.rpartition("://")
            options = {
                "anonymous": True,
                "scheme": scheme if sign else "http",
                "endpoint_override": host,
            }
        self.emulator = emulator
        self.inner = fs.GcsFileSystem(retry_time_limit=RETRIES, **options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GoogleFiles) and other.emulator == self.emulator

    def __reduce__(self) -> Any:
        return GoogleFiles, (self.emulator,)

    def get_type_name(self) -> str:
        return "gs"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[Any]:
        return [
            _renamed(info) for info in self.inner.get_file_info([_object(path) for path in paths])
        ]

    def get_file_info_selector(self, selector: Any) -> list[Any]:
        base = _object(selector.base_dir).rstrip("/")
        within = fs.FileSelector(base, allow_not_found=selector.allow_not_found, recursive=True)
        files = [info for info in self.inner.get_file_info(within) if info.type == fs.FileType.File]
        if not files and not selector.allow_not_found and not self._exists(base):
            raise FileNotFoundError(f"{SCHEME}{base}: no such folder")
        folders: dict[str, None] = {}
        for info in files:
            above = info.path.rpartition("/")[0]
            while len(above) > len(base) and above not in folders:
                folders[above] = None
                above = above.rpartition("/")[0]
        found = [fs.FileInfo(SCHEME + path, type=fs.FileType.Directory) for path in folders]
        found += [_renamed(info) for info in files]
        if selector.recursive:
            return found
        return [info for info in found if info.path.rpartition("/")[0] == SCHEME + base]

    def _exists(self, path: str) -> bool:
        found: bool = self.inner.get_file_info(path).type != fs.FileType.NotFound
        return found

    def create_dir(self, path: str, recursive: bool) -> None:
        """Nothing to do: a folder exists while objects begin with its name."""

    def delete_dir(self, path: str) -> None:
        # After the last object pyarrow deletes the folder's own, which does not have to exist.
        with contextlib.suppress(FileNotFoundError):
            self.inner.delete_dir(_object(path))

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self.inner.delete_dir_contents(_object(path), missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise OSError("all buckets at once are not deleted")

    def delete_file(self, path: str) -> None:
        self.inner.delete_file(_object(path))

    def move(self, src: str, dest: str) -> None:
        self.inner.move(_object(src), _object(dest))

    def copy_file(self, src: str, dest: str) -> None:
        self.inner.copy_file(_object(src), _object(dest))

    def open_input_stream(self, path: str) -> Any:
        return self.inner.open_input_stream(_object(path))

    def open_input_file(self, path: str) -> Any:
        return self.inner.open_input_file(_object(path))

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        return self.inner.open_output_stream(_object(path), metadata=metadata)

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise OSError(f"{path}: objects cannot be appended to")


def _object(path: str) -> str:
    return path.removeprefix(SCHEME)


def _renamed(info: Any) -> Any:
    if info.type != fs.FileType.File:
        return fs.FileInfo(SCHEME + info.path, type=info.type)
    return fs.FileInfo(SCHEME + info.path, type=info.type, mtime_ns=info.mtime_ns, size=info.size)
