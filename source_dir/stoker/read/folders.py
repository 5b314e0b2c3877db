"""Head: finds the files of a split, and sorts out those that are none of its records."""

from __future__ import annotations

import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import islice
from typing import Any
from urllib.parse import unquote

from stoker.errors import UsageError, nearest
from stoker.figures import count_of
from stoker.storage.filesystems import IMAGE_SUFFIXES as IMAGE_SUFFIXES
from stoker.storage.filesystems import (
    child_folders,
    children,
    filesystem_of,
    filesystem_of_files,
    is_file,
    is_hidden,
    join,
    list_files,
)

SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev", "eval", "test", "testing"),
}
_LAST = ("test", "testing")
"""Read for validation if there is nothing else."""
PARQUET_SUFFIXES = (".parquet", ".pq")
TAR_SUFFIXES = (".tar",)
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_UNREAD: dict[tuple[str, ...], tuple[str, ...]] = {
    IMAGE_SUFFIXES: (
        *(
            ".heic",
            ".heif",
            ".jxl",
            ".jxr",
            ".svg",
            ".svgz",
            ".dcm",
            ".exr",
            ".dng",
            ".cr2",
            ".cr3",
            ".nef",
        ),
        *(".arw", ".orf", ".raf", ".rw2", ".pef", ".srw"),
    ),
    TAR_SUFFIXES: (".tgz", ".tbz2", ".txz", *(".tar" + packed for packed in _PACKED)),
    PARQUET_SUFFIXES: tuple(suffix + packed for suffix in PARQUET_SUFFIXES for packed in _PACKED),
}
"""Files of the same kind that no source reads: beside others they would be missing silently."""
_COPIES = (
    *(
        ".bak",
        ".old",
        ".orig",
        ".tmp",
        ".temp",
        ".part",
        ".partial",
        ".crdownload",
        ".download",
        ".swp",
        "~",
    ),
)
"""Copies and unfinished files, which would be records twice or in part."""
_HARMLESS = re.compile(
    r"(readme|licen[cs]e|copying|notice|changelog|citation|authors|makefile|dockerfile|(sha|md)\d+(sums?)?)"
    r"(\..*)?|(eh)?thumbs\.db|desktop\.ini|icon\r|.*\.(txt|md|rst|json|xml|ya?ml|toml|ini|cfg|log|py|sh"
    r"|ipynb|url|lnk|xmp|aae|crc|md5|sha\d+|cff|bib|lock)"
)
"""Names, in lower case, of what people and programs lay beside records."""
_HEADS: dict[tuple[str, ...], re.Pattern[bytes]] = {
    kind: re.compile(head, re.DOTALL)
    for kind, head in {
        IMAGE_SUFFIXES: rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8[79]a|BM....\0\0\0\0|RIFF....WEBP|qoif"
        rb"|(II[*+]\0|MM\0[*+])(?!....CR)|\xff\x4f\xff\x51|\0\0\0\x0cjP  \r\n\x87\n|P[1-6]\s+[#\d]"
        rb"|....ftyp(avi[fs]|mi[af][f1]....(....){0,8}?avi[fs])",
        (): rb"....ftyp(hei|hev|mif1|msf1|crx)|\xff\x0a|\0\0\0\x0cJXL |.{128}DICM|v/1\x01|II\*\0....CR"
        rb"|II(RO|U\0)|FUJIFILMCCD|(\xef\xbb\xbf)?\s*(<[?!][^>]*>\s*){0,4}<svg",
        PARQUET_SUFFIXES: rb"PAR1",
        TAR_SUFFIXES: rb".{257}ustar",
    }.items()
}
"""How the files of a kind begin; (): images that no source reads."""
_HEAD_BYTES = 512
_PART = re.compile(
    rf"(?:(?:split=)?(?:{'|'.join(sum(SPLIT_NAMES.values(), ()))})/)?(.*)-(\d+)-of-(\d+)([^/]*)"
)
_COPY_OR_HASH = re.compile(
    r" *\(\d+\)|[-_. ]+(copy|(?!(19|20)\d\d\b)[0-9a-f]{4,})(?![a-z\d])", re.IGNORECASE
)
NULL = "__HIVE_DEFAULT_PARTITION__"
_kinds: dict[tuple[str, int, int], tuple[str, ...] | None] = {}
"""(path, size, modification time) of files that this process has opened → their kind, if it is known."""


def is_delta_table(uri: str) -> bool:
    return "_delta_log" in child_folders(uri, hidden=True)


def split_folder(root: str, split: str) -> str | None:
    """The sub-folder of a split; None if the data has only other splits."""
    if name := _folder_name(root, split):
        return join(root, name)
    if split == "train":
        files = list_files(root)
        there = child_folders(root)
        _refuse_misnamed(root, split, there)
        images = any(f.path.lower().endswith(IMAGE_SUFFIXES) for f in files)
        hint = (
            "; split it into train/ and val/ first, see docs/tutorials/own-images.md, or name a CSV file"
            " with the labels in params.labels"
        )
        hint = hint if images and not {*there} & {*SPLIT_NAMES["val"]} else ""
        raise UsageError(
            f"{root}: has no folder train/ (found: {', '.join(there) or 'no folder'}){hint}"
        )
    return None


def split_files(
    root: str, split: str, suffixes: tuple[str, ...]
) -> tuple[list[Any], tuple[str, ...]]:
    """The files of a split, in its folder or named with its prefix, and lines on what is not read."""
    one = is_one(root, suffixes)
    mine = (
        (list_files(root) if split == "train" else [])
        if one
        else files_of(root, split, underscored=True)
    )
    if is_file(root):
        return mine, ()
    lines = () if one else (*note_on_unread(root, split), *_gathered(root, split, mine))
    if any("/_delta_log/" in f.path or f.path.endswith(".metadata.json") for f in mine):
        raise UsageError(
            f"{root}: the {split} split holds a Delta or Iceberg table, so some files may be outdated; read"
            " it with read_delta, or with ray.data.read_iceberg"
        )
    top = len(filesystem_of(root)[1])
    hidden = {f.path for f in mine if is_hidden(f.path[top:])}
    read, notes = sort_out(root, [f for f in mine if f.path not in hidden], suffixes)
    _refuse_parts(root, read)
    left = [path[top:].strip("/") for path in sorted(hidden) if path.lower().endswith(suffixes)]
    if mine and not read and (name := _folder_name(root, split)):
        list_files(join(root, name), suffixes)  # says what is there instead
    if not read and split == "train":
        raise UsageError(
            f"{root}: no train split: expected a folder train/ or files train-*{suffixes[0]}"
            f" (found {list_files(root, suffixes)[0].base_name})"
        )
    return read, (*lines, *notes, *not_read(root, left))


def _refuse_parts(root: str, files: list[Any]) -> None:
    """Refuse a set such as `train-00002-of-00004` that lacks a part, or has one twice. The others may be in
    the folders of other splits."""
    sets = _sets(root, files)
    for (name, tail), parts in sets.items():
        if _is_whole(parts) or _is_whole(
            [part for key in sets if key[0] == name for part in sets[key]]
        ):
            continue
        count, numbers = max(parts)[0], {number for _, number in parts}
        top = len(filesystem_of(root)[1])
        everywhere = _sets(root, [f for f in list_files(root) if "/" in f.path[top:].strip("/")])[
            name, tail
        ]
        if min(parts)[0] == count and _is_whole([part for part in everywhere if part[0] == count]):
            continue
        whole = range(0 not in numbers, count + (0 not in numbers))
        lacking = ", ".join(
            map(str, islice((number for number in whole if number not in numbers), 20))
        )[:60]
        raise UsageError(
            f"{root}: {name}-…-of-{count}{tail}: its {count_of(len(parts), 'file')} are not this set"
            f" ({f'without {lacking}' if lacking else 'with one twice or too many'}); complete it, remove"
            " copies, or rename the files if you want these alone, or read them with ray.data in a recipe"
        )


def _sets(root: str, files: list[Any]) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Name of a set below its split, without copy marks and hashes → count and number of each part."""
    sets, top = defaultdict(list), len(filesystem_of(root)[1])
    for match in (_PART.fullmatch(f.path[top:].strip("/")) for f in files):
        if match:
            sets[match[1], _COPY_OR_HASH.sub("", match[4])].append((int(match[3]), int(match[2])))
    return sets


def _is_whole(parts: list[tuple[int, int]]) -> bool:
    """Whether each part is there once: from 0 or 1, and up to the count or one less."""
    counts, numbers = {count for count, _ in parts}, sorted(number for _, number in parts)
    if len(counts) != 1 or numbers != [*range(numbers[0], numbers[0] + len(numbers))]:
        return False
    return (numbers[0], numbers[-1] - max(counts)) in ((0, -1), (0, 0), (1, 0))


def is_one(root: str, suffixes: tuple[str, ...]) -> bool:
    """Whether data without splits is one file, or a folder that its writer calls a file, as Spark."""
    named = root.rstrip("/").lower().endswith(suffixes)
    return is_file(root) or (
        named and not any(files_of(root, split, True) for split in SPLIT_NAMES)
    )


def files_of(root: str, split: str, underscored: bool = False) -> list[Any]:
    """The files of a split, of any kind: in its folder, or else named with its prefix or partition."""
    if name := _folder_name(root, split):
        return list_files(join(root, name), underscored=underscored)
    files, top = list_files(root, underscored=underscored), len(filesystem_of(root)[1])
    found = {
        name: [f for f in files if _is_of((name,), f.path[top:])] for name in SPLIT_NAMES[split]
    }
    return found.get(only(root, split, [name for name in found if found[name]]), [])


def sort_out(
    folder: str, files: list[Any], suffixes: tuple[str, ...]
) -> tuple[list[Any], tuple[str, ...]]:
    """The files of a split that have one format, and a line that counts what is not read.

    Only files whose suffix is unknown are opened.
    """
    read, unread, unknown = [], [], []
    for file in files:
        name = file.path.lower()
        if name.endswith(suffixes):
            read.append(file)
        elif name.endswith(_UNREAD[suffixes]):
            unread.append(file)
        else:
            unknown.append(file)
    left = []
    for file, kind in kinds_of(unknown):
        if kind == suffixes:
            read.append(file)
        elif kind == () and suffixes == IMAGE_SUFFIXES:
            unread.append(file)
        elif not is_hidden(file.path.rpartition("/")[2]):
            left.append(file)
    if unread:
        raise UsageError(
            f"{unread[0].path}: files of this kind are not read ({len(unread)} of {len(files)}); convert or"
            f" decompress them to {' or '.join(suffixes[:2])}, or move them elsewhere"
        )
    top = len(filesystem_of(folder)[1])
    return sorted(read, key=lambda f: f.path), not_read(
        folder, [f.path[top:].strip("/") for f in left]
    )


def kinds_of(files: list[Any]) -> list[tuple[Any, tuple[str, ...] | None]]:
    """The files that are not known to be harmless, with their kind as their first bytes tell it.

    Copies and unfinished files are of no kind.
    """
    files = [f for f in files if not _HARMLESS.fullmatch(f.base_name.lower())]
    filesystem: Any = filesystem_of_files(files) if files else None

    def look(file: Any) -> None:
        try:
            with filesystem.open_input_file(file.path) as stream:
                head = stream.read(_HEAD_BYTES)
        except OSError as error:
            text = " ".join(str(error).split())[:200]
            raise UsageError(f"{file.path}: cannot be read: {text}") from None
        found = next((kind for kind, start in _HEADS.items() if start.match(head)), None)
        _kinds[file.path, file.size, file.mtime_ns] = found

    with ThreadPoolExecutor(16) as pool:
        new = [f for f in files if (f.path, f.size, f.mtime_ns) not in _kinds]
        list(pool.map(look, [f for f in new if not f.path.lower().endswith(_COPIES)]))
    return [(f, _kinds.get((f.path, f.size, f.mtime_ns))) for f in files]


def not_read(folder: str, paths: list[str]) -> tuple[str, ...]:
    found = defaultdict(list)
    for path in paths:
        _, sign, suffix = path.rpartition("/")[2].rpartition(".")
        found[f".{suffix}" if sign and len(suffix) < 9 else "without a suffix"].append(path)
    texts = [
        f"{len(those)} {kind} ({those[0]}{', …' * (len(those) > 1)})"
        for kind, those in found.items()
    ]
    what = f"{count_of(len(paths), 'file')} not read"
    return (f"{folder}: {what}: {', '.join(texts[:4])}{', …' * (len(texts) > 4)}",) if paths else ()


def note_on_unread(root: str, split: str) -> tuple[str, ...]:
    """A line on folders and files beside the splits; empty except for the training split."""
    names = sum(SPLIT_NAMES.values(), ())
    there = children(root) if split == "train" else []
    if any(f.base_name in names for f in there):
        found = [f.base_name + "/" * (not f.is_file) for f in there if f.base_name not in names]
    else:
        top = len(filesystem_of(root)[1])
        found = (
            [f.base_name for f in list_files(root) if not _is_of(names, f.path[top:])]
            if there
            else []
        )
    found = [
        n
        for n in found
        if not (is_hidden(n) or n.startswith("_") or _HARMLESS.fullmatch(n.lower()))
    ]
    found.sort(key=lambda name: not name.endswith("/"))
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return (f"{root}: {', '.join(found[:3])}{more} not read: in no split",) if found else ()


def _gathered(root: str, split: str, files: list[Any]) -> tuple[str, ...]:
    """A line on folders whose files are one split, as the configurations of a dataset on the Hub would be."""
    top = len(filesystem_of(root)[1])
    folders = {
        f.path[top:].strip("/").partition("/")[0] for f in files if f.path[top:].count("/") > 1
    }
    folders = {
        name for name in folders if "=" not in name and not name.lower().endswith(PARQUET_SUFFIXES)
    }
    if len(folders) < 2 or split != "train" or _folder_name(root, split):
        return ()
    names = ", ".join(sorted(folders)[:3]) + ", …" * (len(folders) > 3)
    return (
        f"{root}: the files of {len(folders)} folders ({names}) are read as one split; name one folder if"
        " each is a dataset of its own",
    )


@cache
def _prefixes(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name + sign for name in names for sign in "-_.0123456789")


def _is_of(names: tuple[str, ...], path: str) -> bool:
    """Whether the name of a file, or of a folder that Spark wrote as one, begins with that of a split, or a
    folder is a partition `split=NAME`."""
    *folders, name = path.split("/")
    written = [folder for folder in folders if folder.lower().endswith(PARQUET_SUFFIXES)]
    begins = any(part.startswith(_prefixes(names)) for part in (name, *written))
    return begins or any(f"split={name}" in folders for name in names)


def partitions_of(
    root: str, files: list[Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any], dict[str, str]]:
    """Path → the columns that its folders give (`label=cat/`, of Hive and Spark); their types; and those of
    which two folders are the same number.

    A column is of integers if all its values below the root are, in any split.
    """
    import pyarrow as pa

    top = len(filesystem_of(root)[1])

    def columns(file: Any) -> dict[str, str]:
        folders = file.path[top:].split("/")[:-1]
        return {
            unquote(name): unquote(value)
            for name, sign, value in (folder.partition("=") for folder in folders)
            if sign
        }

    if not any(columns(file) for file in files):
        return {}, {}, {}
    texts: dict[str, set[str]] = defaultdict(set)
    for file in list_files(root):
        for name, value in columns(file).items():
            texts[name].add(value)
    numbers = {
        n
        for n, values in texts.items()
        if all(re.fullmatch(r"-?\d{1,18}", v) for v in values - {NULL})
    }
    twice: dict[str, str] = {}
    for name in numbers:
        firsts: dict[int, str] = {}
        for text in sorted(texts[name] - {NULL}):
            if (first := firsts.setdefault(int(text), text)) != text:
                twice[name] = f"{name}={first}/ and {name}={text}/"

    def value_of(name: str, text: str) -> Any:
        return None if text == NULL else int(text) if name in numbers else text

    types = {name: pa.int64() if name in numbers else pa.string() for name in texts}
    constants = {
        f.path: {name: value_of(name, text) for name, text in columns(f).items()} for f in files
    }
    return constants, types, twice


def _folder_name(root: str, split: str) -> str:
    there = child_folders(root)
    name = only(root, split, [name for name in SPLIT_NAMES[split] if name in there])
    if not name and split == "val" and {*there} & {*SPLIT_NAMES["train"]}:
        # A run without validation would be the only sign of a misspelt name.
        _refuse_misnamed(root, split, there, cutoff=0.8)
    return name


def _refuse_misnamed(root: str, split: str, there: list[str], cutoff: float = 1.0) -> None:
    names = SPLIT_NAMES[split]
    for other in there:
        low = other.lower()
        if low.startswith(_prefixes(names)) or nearest(low, names, cutoff=cutoff):
            raise UsageError(
                f"{root}: {other}/ is no split; rename it to {split}/, or move it elsewhere"
            )


def only(root: str, split: str, names: list[str]) -> str:
    """The name to read of those of a split; a test split if there is no other for validation."""
    found = [name for name in names if name not in _LAST] or names
    if len(found) > 1:
        raise UsageError(
            f"{root}: {found[0]} and {found[1]} both name the {split} split; merge or rename one"
        )
    return found[0] if found else ""
