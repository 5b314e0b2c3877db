"""Every host: pyarrow filesystems for paths and URIs, with more retries than pyarrow's default.

Paths in a store begin with their bucket, or their container.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from stoker.errors import UsageError
from stoker.place import LAUNCH_DIR_VARIABLE

S3_ATTEMPTS = 10
S3_CONNECT_S, S3_REQUEST_S = 5, 30
"""Limits of one request. Slow stores take longer for a listing than pyarrow's 3 s."""
GCS_RETRY_S = 30
SLOW_LISTING_S = 10
LISTS = 16
"""Requests in flight while a bucket is listed."""
MOST_LISTED = 4000
"""More folders than this have few files each and are listed as one."""
OBJECT_MOUNTS = ("/Volumes/", "/dbfs/", "/gcs/")
"""Where Databricks and Vertex AI mount object storage."""
OBJECT_FUSE = ("gcsfuse", "mountpoint-s3", "s3fs", "goofys", "blobfuse", "rclone")
"""What mounts object storage elsewhere: begins the subtype or, without one, the source of a mount."""
_IMAGES = (
    ".jpg .png .jpeg .jpe .jfif .mpo .apng .webp .bmp .dib .tif .tiff .gif .avif .jp2 .j2k .j2c .jpc .jpx"
    " .ppm .pgm .pbm .pnm .tga .pcx .qoi"
)
IMAGE_SUFFIXES = tuple(_IMAGES.split())
_HIDDEN = re.compile(
    r"(^|/)(\.|(@eadir|#recycle|__macosx|\$recycle\.bin|system volume information|lost\+found)(/|$))",
    re.I,
)
"""Dot files, and folders that systems lay beside the users' own."""


def filesystem_of(uri: str) -> tuple[Any, str]:
    """(pyarrow filesystem, path in it) of a local path, `file://`, `s3://`, `gs://` or `az://` URI.

    S3 requests are tried up to 10 times, within 25 s. pyarrow's default of 3 attempts fails when half of the
    answers are errors. So does its standard strategy with any number of attempts, after about 100 errors: a
    client then has no retries left, and every further error is final.
    """
    from pyarrow import fs

    scheme, sign, rest = uri.partition("://")
    if not sign:
        return fs.LocalFileSystem(), str(_absolute(uri))
    if scheme == "file":
        return fs.LocalFileSystem(), rest
    if scheme in ("s3", "gs", "az") and rest[:1] in ("", "/"):
        raise UsageError(f"{uri}: names no bucket; write {scheme}://<bucket>/…")
    if scheme == "s3":
        options: dict[str, Any] = {}
        if endpoint := endpoint_of_s3():
            options["scheme"], _, options["endpoint_override"] = endpoint.partition("://")
        if region := region_of_s3():
            options["region"] = region
        retry = fs.AwsDefaultS3RetryStrategy(max_attempts=S3_ATTEMPTS)
        options |= {"connect_timeout": S3_CONNECT_S, "request_timeout": S3_REQUEST_S}
        return fs.S3FileSystem(retry_strategy=retry, **options), rest.rstrip("/")
    if scheme == "gs":
        options = {}
        if emulator := gcs_emulator():
            options["scheme"], _, options["endpoint_override"] = emulator.partition("://")
            options["anonymous"] = True
        limit = timedelta(seconds=GCS_RETRY_S)
        return fs.GcsFileSystem(retry_time_limit=limit, **options), rest.rstrip("/")
    if scheme == "az":
        return _azure(uri), rest.rstrip("/")
    raise UsageError(f"{uri}: cannot read {scheme}:// addresses; use a path, s3://, gs:// or az://")


def _azure(uri: str) -> Any:
    """Azure Blob Storage, by the variables of obstore and Azure's own tools."""
    from pyarrow import fs

    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if not account:
        raise UsageError(
            f"{uri}: set AZURE_STORAGE_ACCOUNT_NAME to the container's storage account"
        )
    if not hasattr(fs, "AzureFileSystem"):
        raise UsageError(f"{uri}: this pyarrow has no Azure file system; pip install -U pyarrow")
    options: dict[str, Any] = {}
    if endpoint := azure_endpoint():
        scheme, _, authority = endpoint.removesuffix(f"/{account}").partition("://")
        for service in ("blob", "dfs"):
            options[f"{service}_storage_scheme"] = scheme
            options[f"{service}_storage_authority"] = authority
    if key := os.environ.get("AZURE_STORAGE_ACCOUNT_KEY"):
        options["account_key"] = key
    elif token := os.environ.get("AZURE_STORAGE_SAS_TOKEN"):
        options["sas_token"] = token
    return fs.AzureFileSystem(account, **options)


def azure_endpoint() -> str | None:
    """A server that stands in for Azure's: `http://127.0.0.1:10000/ACCOUNT`, as Azurite's."""
    return os.environ.get("AZURE_STORAGE_ENDPOINT")


def gcs_emulator() -> str | None:
    """A server that stands in for Cloud Storage, as Google's own clients find it."""
    address = os.environ.get("STORAGE_EMULATOR_HOST")
    return address if not address or "://" in address else f"http://{address}"


def endpoint_of_s3() -> str | None:
    """The server that stands in for AWS's, as their own clients find it."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def region_of_s3() -> str | None:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")


def takes_whole_files(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether a folder is object storage mounted as a file system, which does not rename folders."""
    if str(folder).startswith(OBJECT_MOUNTS):
        return True
    kinds: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in mounts.read_text(errors="replace").splitlines():
            mount, _, source = line.partition(" - ")
            kinds[mount.split()[4].replace("\\040", " ")] = source
    path = folder.resolve()
    mount = next((kinds[str(at)] for at in (path, *path.parents) if str(at) in kinds), "none none")
    kind, source = mount.split()[:2]
    name = source if kind == "fuse" else kind.removeprefix("fuse.")
    return kind.startswith("fuse") and name.startswith(OBJECT_FUSE)


def list_files(uri: str, suffixes: tuple[str, ...] = (), underscored: bool = False) -> list[Any]:
    """The files below `uri` (Entry or pyarrow's FileInfo, sorted by path), without hidden ones."""
    from pyarrow import fs

    filesystem, path = filesystem_of(uri)
    info = _info(filesystem, path, uri)
    if info.type == fs.FileType.NotFound:
        raise UsageError(f"{uri}: no such file or folder{deepest_there(uri)}")
    if info.type == fs.FileType.File:
        return [info]
    found = _below(filesystem, path, recursive=True)
    files = [f for f in found if f.is_file and not is_hidden(f.path[len(path) :], underscored)]
    wanted = [f for f in files if not suffixes or f.path.lower().endswith(suffixes)]
    if not wanted:
        kinds = f" {' or '.join(suffixes[:2])}" if suffixes else ""
        raise UsageError(f"{uri}: the folder holds no{kinds} file (found {len(files)} others)")
    return sorted(wanted, key=lambda f: f.path)


def is_file(uri: str) -> bool:
    return bool(_info(*filesystem_of(uri), uri).is_file)


def is_hidden(relative: str, underscored: bool = False) -> bool:
    """Spark and Delta name their own files with an underscore; cameras name photos so: `_DSC0001.JPG`."""
    if _HIDDEN.search(relative):
        return True
    return (
        not underscored and "/_" in f"/{relative}" and not relative.lower().endswith(IMAGE_SUFFIXES)
    )


class Entry(NamedTuple):
    """A local file or folder, in the words of pyarrow's FileInfo."""

    path: str
    base_name: str
    is_file: bool
    size: int
    mtime_ns: int


def walk(
    root: str, hidden: bool = False, ignore: Callable[[str, list[str]], set[str]] | None = None
) -> Iterator[Entry]:
    """What is below a local folder, through links: for reading, fingerprints, staging and uploads alike."""
    pending: list[tuple[str, tuple[Any, ...]]] = [(root, ())]
    while pending:
        folder, above = pending.pop()
        about = Path(folder).stat()
        here = about.st_dev, about.st_ino
        if here in above:
            raise UsageError(f"{folder}: is a link to a folder above it; remove it")
        entries = _entries(folder, ignore)
        yield from entries
        pending += [
            (entry.path, (*above, here))
            for entry in entries
            if not entry.is_file and (hidden or not entry.base_name.startswith("."))
        ]


def _entries(
    folder: str, ignore: Callable[[str, list[str]], set[str]] | None = None
) -> list[Entry]:
    """The files and folders in a local folder, without sockets and the like."""
    found = []
    try:
        with os.scandir(folder) as entries:
            there = [*entries]
        left_out = ignore(folder, [entry.name for entry in there]) if ignore else set()
        for entry in there:
            if entry.name in left_out:
                continue
            entry.name.encode()
            try:
                about = entry.stat()
            except OSError:
                # Editors lock files by hidden links that lead nowhere; anything else has gone meanwhile.
                if entry.is_symlink() and not entry.name.startswith("."):
                    where = Path(entry).readlink()
                    raise UsageError(
                        f"{entry.path}: is a link to {where}, which is not there; restore or remove it"
                    ) from None
                continue
            is_file = stat.S_ISREG(about.st_mode)
            if is_file or stat.S_ISDIR(about.st_mode):
                found.append(
                    Entry(entry.path, entry.name, is_file, about.st_size, about.st_mtime_ns)
                )
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{folder}: the name {os.fsencode(error.object)!r} is not UTF-8; rename it"
        ) from None
    except OSError as error:
        raise UsageError(
            f"{folder}: cannot be listed: {error.strerror}; check its permissions"
        ) from None
    return found


def _below(filesystem: Any, folder: str, recursive: bool) -> list[Any]:
    """What is in a folder, and if `recursive` below it: Entry of local ones, pyarrow's FileInfo of others."""
    from pyarrow import fs

    if isinstance(filesystem, fs.LocalFileSystem):
        return [*walk(folder)] if recursive else _entries(folder)
    what, ask = "in", partial(entries, filesystem, folder, recursive)
    if recursive:
        what = "below"
        if isinstance(filesystem, fs.S3FileSystem):
            ask = partial(_below_in_parts, filesystem, folder)
    try:
        found: list[Any] = _remembered(folder, f"{what} {filesystem.type_name}", ask)
    except OSError as error:
        text = error.strerror or " ".join(str(error).split())[:300]
        raise UsageError(f"{folder}: cannot be listed: {text}; check its permissions") from None
    return found


def entries(filesystem: Any, folder: str, recursive: bool = False) -> list[Any]:
    """What is in a folder of a store. One of Cloud Storage exists while objects begin with its name, which
    pyarrow does not list."""
    from pyarrow import fs

    flat = isinstance(filesystem, fs.GcsFileSystem)
    selector = fs.FileSelector(folder, recursive=recursive or flat, allow_not_found=True)
    found: list[Any] = filesystem.get_file_info(selector)
    if not flat:
        return found
    files = [info for info in found if info.is_file]
    folders = {info.path for info in found} - {info.path for info in files}
    for path in [info.path for info in found]:
        while len(path := path.rpartition("/")[0]) > len(folder) and path not in folders:
            folders.add(path)
    found = [fs.FileInfo(path, type=fs.FileType.Directory) for path in folders] + files
    return [info for info in found if recursive or info.path.rpartition("/")[0] == folder]


_listings: ContextVar[dict[tuple[str, str], Any] | None] = ContextVar("listings", default=None)


@contextlib.contextmanager
def listing_once() -> Iterator[None]:
    """Within this, each remote folder is listed once: the data does not change while it is opened."""
    token = _listings.set(_listings.get() or {})
    try:
        yield
    finally:
        _listings.reset(token)


def _remembered(path: str, what: str, ask: Callable[[], Any]) -> Any:
    """The answer of a remote filesystem; says so once if it takes more than 10 s."""
    known = _listings.get()
    if known is not None and (path, what) in known:
        return known[path, what]
    text = f"{path}: the store has not answered for {SLOW_LISTING_S} s; still listing …"
    slow = threading.Timer(SLOW_LISTING_S, print, (text,), {"file": sys.stderr, "flush": True})
    slow.daemon = True
    slow.start()
    try:
        answer = ask()
    finally:
        slow.cancel()
    if known is not None:
        known[path, what] = answer
    return answer


def _below_in_parts(filesystem: Any, folder: str) -> list[Any]:
    """What is below a folder of S3, which lists 1,000 keys at a time: its own folders at once.

    One listing of all if those are not strictly inside it, as with `//` in keys, or may not be listed by
    themselves.
    """
    whole = partial(entries, filesystem, recursive=True)
    with contextlib.suppress(OSError), ThreadPoolExecutor(LISTS) as pool:
        found = entries(filesystem, folder)
        odd = any(not re.fullmatch("/[^/]+", info.path[len(folder) :]) for info in found)
        folders = [info.path for info in found if not info.is_file]
        if not odd and len(folders) <= MOST_LISTED:
            return found + [info for part in pool.map(whole, folders) for info in part]
    return whole(folder)


def is_local(path: str) -> bool:
    """Whether a path of a file system is one of this machine; those of stores begin with a bucket."""
    return path.startswith("/")


def common_folder(files: list[Any]) -> str:
    """The deepest folder above all files, with a slash; paths below it are unique."""
    folders: list[str] = [f.path.rpartition("/")[0] for f in files]
    return os.path.commonpath(folders).rstrip("/") + "/"


def child_folders(uri: str, hidden: bool = False) -> list[str]:
    return [
        f.base_name
        for f in children(uri)
        if not f.is_file and (hidden or f.base_name[:1] not in "._")
    ]


def children(uri: str) -> list[Any]:
    """What lies directly below `uri`, as in `list_files`, sorted; nothing if it is no folder."""
    from pyarrow import fs

    filesystem, path = filesystem_of(uri)
    folder = _info(filesystem, path, uri).type == fs.FileType.Directory
    return sorted(_below(filesystem, path, recursive=False), key=lambda f: f.path) if folder else []


def join(uri: str, *parts: str) -> str:
    return "/".join([uri.rstrip("/"), *parts])


def _absolute(path: str) -> Path:
    """Resolve a relative path against the folder of the command, never against the job's copy of the source,
    which the next start of the run replaces."""
    return Path(os.environ.get(LAUNCH_DIR_VARIABLE, ""), path).absolute()


def _info(filesystem: Any, path: str, uri: str) -> Any:
    from pyarrow import fs

    ask = partial(filesystem.get_file_info, path)
    try:
        if isinstance(filesystem, fs.LocalFileSystem):
            return ask()
        return _remembered(path, f"is {filesystem.type_name}", ask)
    except OSError as error:
        raise UsageError(
            f"{uri}: cannot be reached: {' '.join(str(error).split())[:300]}"
        ) from None


def refuse_absent(uri: str) -> None:
    if "://" not in uri and not _absolute(uri).exists():
        raise UsageError(f"{uri}: no such file or folder{deepest_there(uri)}")


def deepest_there(uri: str) -> str:
    """The deepest existing part of an absent local path, to show where it goes wrong."""
    if "://" in uri:
        return ""
    path = _absolute(uri)
    while not path.exists() and path != path.parent:
        path = path.parent
    return f" ({path} exists)" if path != path.parent else ""
