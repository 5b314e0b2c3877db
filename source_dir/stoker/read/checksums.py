"""Every host: verifies data files against a `SHA256SUMS` file next to them.

Create one with `cd data && find . -type f ! -name SHA256SUMS -print0 | xargs -0 sha256sum > SHA256SUMS`.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from typing import Any

from stoker.errors import UsageError
from stoker.storage.filesystems import common_folder, filesystem_of, is_hidden, list_files

NAME = "SHA256SUMS"
CHUNK_BYTES = 4 * 2**20

_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_ESCAPED = {r"\\": "\\", r"\n": "\n", r"\r": "\r"}

_verified: set[tuple[str, str, int, int]] = set()
"""(path, SHA-256, size, modification time) of files that this process has verified."""


def sums_of(root: str, files: list[Any], suffixes: tuple[str, ...]) -> dict[str, str]:
    """Head: path → SHA-256 of the files of a split, from SHA256SUMS files in or below the data root.

    Args:
        root: the data root, or a single file.
        files: pyarrow FileInfo of the split's files.
        suffixes: of all data files.

    Returns:
        Empty if there is no such file.

    Raises:
        UsageError: it cannot be read, lists a data file that is absent, or does not list one that exists.
    """
    if root.lower().endswith(suffixes):
        root = root.rpartition("/")[0] or "."
    filesystem, top = filesystem_of(root)
    folders = [common_folder(files).rstrip("/")]
    while folders[-1].startswith(top + "/"):
        folders.append(folders[-1].rpartition("/")[0])
    names = [f"{folder}/{NAME}" for folder in folders]
    found = [info.path for info in filesystem.get_file_info(names) if info.is_file]
    if not found:
        return {}
    sums: dict[str, str] = {}
    for path in found:
        with filesystem.open_input_stream(path) as stream:
            for name, value in parse(stream.read(), path).items():
                if sums.setdefault(name, value) != value:
                    raise UsageError(f"{path}: its SHA-256 of {name} differs from {found[0]}; regenerate one")
    there = {f.path for f in list_files(root, suffixes)}
    for name in sums:
        hidden = is_hidden(name.removeprefix(top + "/"))
        if name.lower().endswith(suffixes) and not hidden and name not in there:
            raise UsageError(f"{found[0]}: lists {name}, which is absent; restore it or regenerate the sums")
    absent = [f.path for f in files if f.path not in sums]
    if absent:
        raise UsageError(
            f"{absent[0]}: is not in {found[0]} ({len(absent)} of {len(files)} files are not); regenerate the"
            " sums"
        )
    return {f.path: sums[f.path] for f in files}


def parse(content: bytes, path: str) -> dict[str, str]:
    """Head: parse a SHA256SUMS file; makes names absolute.

    Raises:
        UsageError: a line is not in `sha256sum` format.
    """
    sums = {}
    folder = path.rpartition("/")[0]
    lines = content.decode("utf-8", "surrogateescape").split("\n")
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line.rstrip("\r"))
        if match:
            escaped, value, name = match.groups()
            if escaped:
                name = re.sub(r"\\[\\nr]", lambda part: _ESCAPED[part[0]], name)
            sums[posixpath.join(folder, posixpath.normpath(name))] = value.lower()
        elif line:
            raise UsageError(f"{path}: line {number} is not in sha256sum format: {line[:80]!r}")
    return sums


def compare(path: str, found: str, expected: str) -> None:
    """Every host: refuse a file whose SHA-256 differs from the listed one.

    Raises:
        UsageError: names the file.
    """
    if found != expected:
        raise UsageError(
            f"{path}: damaged or changed: its SHA-256 is {found[:12]}…, {NAME} says {expected[:12]}…; restore"
            " it or regenerate the sums"
        )


def verify(filesystem: Any, path: str, expected: str) -> None:
    """Every host: read and verify a whole file, once per process unless it changes.

    Raises:
        UsageError: its SHA-256 differs from the listed one.
    """
    about = filesystem.get_file_info(path)
    state = (path, expected, about.size, about.mtime_ns)
    if state in _verified:
        return
    sha256 = hashlib.sha256()
    with filesystem.open_input_stream(path) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            sha256.update(chunk)
    compare(path, sha256.hexdigest(), expected)
    _verified.add(state)
