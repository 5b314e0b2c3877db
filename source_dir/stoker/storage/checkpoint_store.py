"""Every host: storage of checkpoints: a folder, SageMaker's synced folder, or an S3 prefix.

A checkpoint is a folder `step-00000123/`. Its `manifest.json`, with the SHA-256 of every file and of itself, is
written last: a checkpoint without a manifest is incomplete; with one, every bit can be verified.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import mmap
import os
import re
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stoker.errors import UsageError

MANIFEST = "manifest.json"
INCOMPLETE = "it is incomplete (no readable manifest)"
_NAME = re.compile(r"step-\d{8,}")
FULL = " is full"
LEAST_FREE_MB = 0.5
"""With less, a disk counts as full: a write that does not fit leaves some pages free."""
_CHUNK_BYTES = 16 * 2**20
_AHEAD_BYTES = 16 * _CHUNK_BYTES
"""pyarrow uploads in the background, and keeps in memory what is not uploaded yet: so much at most."""
COPIES, DRAFT = "stoker-checkpoints-", ".draft-"
"""Prefixes of folders that a process removes, or the next one if it was killed."""


def open_store(where: str, synced: bool = False) -> CheckpointStore:
    """The store for a folder or `s3://bucket/prefix`.

    `synced`: files are copied elsewhere as they appear (SageMaker to S3), so drafts must lie outside the
    folder, and the manifest must appear after the other files. The same holds, whatever this says, for
    object storage mounted as a folder: it cannot rename folders.
    """
    from stoker.storage.filesystems import filesystem_of, takes_whole_files

    filesystem, path = filesystem_of(where)
    copies = synced or "://" in where or takes_whole_files(Path(path))
    path = path.rstrip("/") or "/"
    return CheckpointStore(where if "://" in where else path, synced, filesystem, path, copies)


@dataclass
class CheckpointStore:
    """Checkpoints in a folder or below a URI, newest first.

    Drafts are made in the folder and renamed into place. If it `copies`, they are made on this host's disk and
    copied file by file, the manifest last.

    All methods raise OSError if the storage cannot be reached, and FileNotFoundError for an absent file.
    """

    where: str
    synced: bool
    filesystem: Any
    path: str
    copies: bool
    _lock: int | None = None
    """That of the folder of its draft."""

    def names(self) -> list[str]:
        from stoker.storage.filesystems import entries

        found = entries(self.filesystem, self.path)
        return newest_first(info.base_name for info in found if not info.is_file)

    def content(self, file: str) -> bytes:
        with self.filesystem.open_input_stream(f"{self.path}/{file}") as stream:
            return bytes(stream.read())

    def digest(self, name: str, file: str) -> str:
        return sha256(self.filesystem.open_input_stream(f"{self.path}/{name}/{file}"))

    @cached_property
    def _copies(self) -> Path:
        """What is here of its checkpoints; removed with this process, even if that is killed."""
        folder = Path(tempfile.mkdtemp(prefix=COPIES))
        self._cleaner = Cleaner(folder, COPIES)
        return folder

    def draft(self) -> Path:
        """In a folder of this writer, which that of the next draft removes once this one is gone."""
        if self.copies:
            return Path(tempfile.mkdtemp(dir=self._copies))
        Path(self.path).mkdir(parents=True, exist_ok=True)
        sweep(Path(self.path), DRAFT)
        work = Path(tempfile.mkdtemp(prefix=DRAFT, dir=self.path))
        self._lock = own(work)
        (work / "draft").mkdir()
        return work / "draft"

    def discard(self, draft: Path) -> None:
        shutil.rmtree(draft if self.copies else draft.parent, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def publish(self, draft: Path, name: str) -> None:
        """Turn a draft into a checkpoint, replacing one of that name; the manifest becomes visible last."""
        if self.copies:
            self._copy(draft, f"{self.path}/{name}", name)
        else:
            self._rename(draft, Path(self.path, name))
        self.discard(draft)

    def _rename(self, draft: Path, target: Path) -> None:
        for path in draft.iterdir():
            sync(path)
        # Each writer moves the previous one into its own folder; of two at once, the later one stays.
        while True:
            with contextlib.suppress(FileNotFoundError):
                target.rename(draft.with_name(uuid.uuid4().hex))
            try:
                draft.rename(target)
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        sync(target.parent)

    def _copy(self, draft: Path, folder: str, name: str) -> None:
        """Replace what an earlier start left there; where nothing may be removed, overwrite it."""
        from pyarrow import fs

        with contextlib.suppress(OSError):
            self.remove(name)
        if isinstance(self.filesystem, fs.LocalFileSystem):
            self.filesystem.create_dir(folder, recursive=True)
        for info in self.filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True)):
            # Of other weights, it would count as part of these.
            if not (draft / info.base_name).exists():
                self.filesystem.delete_file(info.path)
        # The manifest last, after every other file.
        for path in sorted(draft.iterdir(), key=lambda p: (p.name == MANIFEST, p.name)):
            with (
                path.open("rb") as source,
                self.filesystem.open_output_stream(f"{folder}/{path.name}") as target,
            ):
                while chunk := source.read(_CHUNK_BYTES):
                    target.write(chunk)
                    if source.tell() % _AHEAD_BYTES == 0:
                        target.flush()

    @contextlib.contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """A folder of this host with the files of a checkpoint."""
        from pyarrow import fs

        if not self.copies:
            yield Path(self.path, name)
            return
        folder = Path(tempfile.mkdtemp(dir=self._copies))
        try:
            fs.copy_files(f"{self.path}/{name}", str(folder), source_filesystem=self.filesystem)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def remove(self, name: str) -> None:
        from pyarrow import fs

        folder = f"{self.path}/{name}"
        if self.filesystem.get_file_info(folder).type != fs.FileType.Directory:
            return
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_file(f"{folder}/{MANIFEST}")
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_dir(folder)

    def write_note(self, file: str, content: str) -> None:
        if self.copies:
            with self.filesystem.open_output_stream(f"{self.path}/{file}") as stream:
                stream.write(content.encode())
            return
        target = Path(self.path, file)
        draft = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
        draft.write_text(content)
        sync(draft)
        draft.replace(target)

    def free_text(self) -> str:
        if self.copies and (drafts := disk_text(Path(tempfile.gettempdir()))).endswith(FULL):
            return drafts
        return "" if "://" in self.where else disk_text(Path(self.path))


def newest_first(names: Any) -> list[str]:
    return sorted((n for n in names if _NAME.fullmatch(n)), key=step_of, reverse=True)


def refuse_unwritable(where: str, key: str) -> None:
    """Write a small file into a folder or bucket that is first needed after hours of training."""
    from stoker.storage.filesystems import filesystem_of

    try:
        filesystem, path = filesystem_of(where)
        if "://" in where:
            probe = f"{path.rstrip('/')}/.writable"
            filesystem.open_output_stream(probe).close()
            with contextlib.suppress(OSError):  # which may be forbidden
                filesystem.delete_file(probe)
            return
        folder = Path(path)
        while not folder.exists():
            folder = folder.parent
        file = folder / f".writable-{uuid.uuid4().hex}"
        file.write_bytes(b"probe")
        with contextlib.suppress(OSError):
            file.unlink()
    except OSError as error:
        cause = " ".join((error.strerror or str(error)).split())[:300]
        if error.errno == errno.ENOSPC and "://" not in where:
            cause = f"{cause}; {disk_text(Path(where))}"
        raise UsageError(f"{key}: {where} cannot be written: {cause}") from error


def step_of(name: str) -> int:
    return int(name.partition("-")[2])


def name_of(step: int) -> str:
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Manifest:
    files: dict[str, str]
    """SHA-256 by name."""
    meta: dict[str, Any]
    """JSON; what the checkpoint is of."""

    @classmethod
    def of(cls, draft: Path, meta: dict[str, Any]) -> Manifest:
        files = {
            path.name: sha256(path.open("rb", buffering=0)) for path in sorted(draft.iterdir())
        }
        return cls(files, meta)

    @classmethod
    def read(cls, content: bytes) -> Manifest:
        """Raises ValueError if it is damaged."""
        try:
            found = json.loads(content)
            manifest = cls(found["files"], found["meta"])
            intact = found["sha256"] == manifest._digest()
        except (ValueError, KeyError, TypeError):
            intact = False
        if not intact:
            raise ValueError("its manifest is damaged")
        return manifest

    def text(self) -> str:
        return json.dumps({**vars(self), "sha256": self._digest()}, indent=1)

    def _digest(self) -> str:
        return hashlib.sha256(json.dumps([self.files, self.meta]).encode()).hexdigest()


def complete(store: CheckpointStore) -> Iterator[str]:
    """The checkpoints that were written to their end, newest first; their content may be damaged."""
    return (name for name in store.names() if verify(store, name, whole=False) != INCOMPLETE)


def verify(store: CheckpointStore, name: str, whole: bool = True) -> str | None:
    """What is wrong with a checkpoint, or only with its manifest, or None."""
    try:
        files = Manifest.read(content := store.content(f"{name}/{MANIFEST}")).files
    except FileNotFoundError:
        return INCOMPLETE
    except ValueError as error:
        return str(error) if content.strip() else INCOMPLETE
    for file, expected in files.items() if whole else ():
        try:
            found = store.digest(name, file)
        except FileNotFoundError:
            return f"{file} is absent"
        if found != expected:
            return f"{file} is damaged (its SHA-256 differs from the manifest)"
    return None


def sha256(opened: Any) -> str:
    """The SHA-256 of a file, in large chunks, since hashing releases the GIL only within one."""
    total = hashlib.sha256()
    # An anonymous mapping is returned to the system. Heap memory of a thread would stay with the process,
    # once per allocator arena, and every checkpoint has a new thread.
    with (
        opened as file,
        mmap.mmap(-1, _CHUNK_BYTES) as buffer,
        memoryview(buffer) as view,
    ):
        while count := file.readinto(buffer):
            with view[:count] as part:
                total.update(part)
    return total.hexdigest()


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_text(folder: Path) -> str:
    """`the disk mounted at /data has 3 of 12 MB free`, or `… (12 MB) is full`."""
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    mount = folder.resolve()
    while not mount.is_mount():
        mount = mount.parent
    free, total = usage.free / 2**20, usage.total / 2**20
    if free < LEAST_FREE_MB:
        return f"the disk mounted at {mount} ({total:.0f} MB){FULL}"
    return f"the disk mounted at {mount} has {free:.0f} of {total:.0f} MB free"


def _is_locked(descriptor: int) -> bool:
    """Closes it. OSError: the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


OWNER = "owner"
"""A file in a folder that whoever uses it keeps locked."""
LEFT_AFTER_S = 600.0
"""A folder of this age that was never locked is left over, too."""
# When a worker ends, Ray kills its children but not their children. Processes that are ending may still write
# while the folder is removed.
_SCRIPT = """
exec 3<&0 </dev/null
{ cat <&3 >/dev/null; for i in 1 2 3; do rm -rf -- "$1"; sleep 1; done; } &
"""


class Cleaner:
    """Removes a folder when this process has ended.

    A shell waits for this process to end, which it sees as a closed pipe, so the folder is removed even after
    a SIGKILL. What that shell could not remove, the cleaner of the next folder with this prefix does.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        sweep(folder.parent, prefix, folder)
        own(folder)
        shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "stoker-cleaner", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        shell.wait(30)
        self._pipe = shell.stdin


def own(folder: Path) -> int:
    """Keep others from sweeping a folder while this process lives; the descriptor of its lock."""
    draft = folder / f"{OWNER}.new"
    lock = os.open(draft, os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks, on which nothing is swept
        fcntl.flock(lock, fcntl.LOCK_EX)
    draft.rename(folder / OWNER)  # locked from its first moment
    return lock


def sweep(parent: Path, prefix: str, own: Path | None = None) -> None:
    """Remove folders that ended processes have left behind, but for `own`."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            about = folder.lstat()
            ours = about.st_uid == os.getuid() and folder != own
            if ours and _left_behind(folder, time.time() - about.st_mtime):
                shutil.rmtree(folder, ignore_errors=True)


def _left_behind(folder: Path, age_s: float) -> bool:
    try:
        return not _is_locked(os.open(folder / OWNER, os.O_RDWR))
    except FileNotFoundError:
        return age_s > LEFT_AFTER_S
