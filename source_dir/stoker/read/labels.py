"""Head: the labels of images in a CSV file with the columns `image`, `label` and, optionally, `split`."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from posixpath import basename, normpath, splitext
from typing import Any, NamedTuple

from stoker.errors import UsageError
from stoker.figures import count_of
from stoker.read.folders import IMAGE_SUFFIXES, SPLIT_NAMES, not_read, only, split_name
from stoker.storage.filesystems import filesystem_of, is_file, join, list_files

MOST_CLASSES = 1_000_000
HUGGING_FACE = "metadata.csv"
"""The file of Hugging Face's image folders, in the folder of each split."""
IMAGE_COLUMNS = "image", "file_name"
INTEGER = re.compile(r"0|[1-9]\d*")
_SPLIT_OF = {name: split for split, names in SPLIT_NAMES.items() for name in names}


class Labels(NamedTuple):
    splits: dict[str, list[tuple[Any, Any]]]
    """File and label: a number, or a tuple of numbers if an image may have several labels."""
    names: list[str]
    several: bool
    notes: tuple[str, ...]


@dataclass
class Row:
    where: str
    image: str
    labels: list[str]
    split: str
    folder: str
    """Of the table, if each split has its own."""
    file: Any = None


def tables_in(root: str, name: str) -> list[tuple[str, str]]:
    """The path of a table, or the paths of those in the folders of the splits, with these folders."""
    for path in (name, join(root, name)):
        if "://" in name or is_file(path):
            return [(path, "")]
    folders = [split_name(root, split) for split in SPLIT_NAMES]
    paths = [(join(root, folder, name), folder) for folder in folders if folder]
    return [(path, folder) for path, folder in paths if is_file(path)]


def read_labels(
    root: str,
    name: str,
    separator: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    class_names: Sequence[str] = (),
    multi_label: bool = False,
) -> Labels:
    wrong: dict[str, list[str]] = defaultdict(list)
    paths = tables_in(root, name) or [(join(root, name), "")]
    path, label, several = paths[0][0], label_column or "label", multi_label or bool(separator)
    rows, unread, by_folder = list[Row](), set[str](), True
    for table, folder in paths:
        header, lines = _read_table(table, (image_column,) if image_column else IMAGE_COLUMNS)
        image = image_column or next(each for each in IMAGE_COLUMNS if each in header)
        if label not in header:
            raise UsageError(
                f"{table}: has no column {label}; write params.label_column: one of"
                f" {', '.join(filter(None, header))}"
            )
        unread |= {*filter(None, header)} - {image, "split", label}
        by_folder = by_folder and not folder and "split" not in header
        for number, cells in lines:
            where, split = f"line {number}, {cells[image]}", cells.get("split", folder or "train")
            texts = cells[label].split(separator) if separator else [cells[label]]
            labels = [text.strip() for text in texts if text.strip()]
            rows.append(Row(where, cells[image], labels, split, folder))
    images = _Images(root, [filesystem_of(table)[1] for table, _ in paths])
    notes = () if by_folder else _choose_splits(path, rows)
    read = _find_files(images, rows, wrong)
    if by_folder:
        notes = _split_by_folder(path, images.top, rows)
    if not any(row.split == "train" for row in rows):
        raise UsageError(f"{path}: no row of the split train")
    used = [row for row in rows if row.split]
    names = [*class_names] or _names(used, wrong)
    number_of = _numbers(names, used)
    for row in used:
        if not (row.labels or several):
            wrong["without a label"].append(row.where)
        if names and (unknown := [text for text in row.labels if text not in number_of]):
            whose = "class_names does not list" if class_names else "no training image has"
            wrong[f"with a label that {whose}"].append(f"{row.where}: {unknown[0]}")
    if wrong:
        raise UsageError(*(_counted(path, "row", what, which) for what, which in wrong.items()))
    splits: dict[str, list[tuple[Any, Any]]] = {split: [] for split in SPLIT_NAMES}
    for row in used:
        numbers = tuple(sorted({number_of[text] for text in row.labels}))
        splits[row.split].append((row.file, numbers if several else numbers[0]))
    left = [f.path for f in images.files.values() if f.path not in read]
    for noun, what, which in (
        ("column", "not read", sorted(unread)),
        ("image", f"of {root} in no row and not read", left),
        ("image", "without a label, so of no class", [r.image for r in used if not r.labels]),
    ):
        notes += (_counted(path, noun, what, which),) if which else ()
    if not splits["val"]:
        notes += (f"{path}: no row for validation; add a column split, or folders train/ and val/",)
    return Labels(splits, names, several, notes + not_read(root, images.others))


def _counted(path: str, noun: str, what: str, which: list[str]) -> str:
    return f"{path}: {count_of(len(which), noun)} {what} (first: {which[0]})"


def _read_table(
    path: str, image_columns: tuple[str, ...]
) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """The columns of a table, and its rows with the numbers of their lines. Its separator is that with which
    the first line has a column for images."""
    filesystem, at = filesystem_of(path)
    try:
        with filesystem.open_input_stream(at) as stream:
            text = stream.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is not UTF-8; save it as CSV UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {' '.join(str(error).split())[:200]}") from None
    first = text.partition("\n")[0].strip()
    for sign in ",;\t":
        header = next(csv.reader([first], delimiter=sign), [])
        if {*map(str.strip, header)} & {*image_columns}:
            break
    else:
        raise UsageError(
            f"{path}: its first line, {first[:60]!r}, has no column {image_columns[0]}; begin the file"
            " with the names of its columns, such as image,label,split, or name yours in"
            " params.image_column and params.label_column"
        )
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=sign, strict=True)
    try:
        lines = [
            (reader.line_num, [cell.strip() for cell in cells]) for cells in reader if any(cells)
        ]
    except csv.Error as error:
        raise UsageError(f"{path}: line {reader.line_num}: {error}") from None
    header = lines.pop(0)[1]
    if not lines:
        raise UsageError(f"{path}: holds no row below the names of its columns")
    if twice := next((column for column in header if column and header.count(column) > 1), None):
        raise UsageError(f"{path}: has the column {twice} twice; rename or remove one")
    if uneven := [f"line {number}" for number, cells in lines if len(cells) != len(header)]:
        what = f"with other than {len(header)} cells, as its first line has"
        raise UsageError(_counted(path, "row", what, uneven))
    return header, [(number, dict(zip(header, cells, strict=True))) for number, cells in lines]


def _choose_splits(path: str, rows: list[Row]) -> tuple[str, ...]:
    """Replace the split of each row by train, val, or "" for a test split beside validation; notes it."""
    counts = Counter(row.split.lower() for row in rows)
    if odd := [f"{row.where}: {row.split!r}" for row in rows if row.split.lower() not in _SPLIT_OF]:
        raise UsageError(_counted(path, "row", "of no known split; write train, val or test", odd))
    read = {
        only(path, split, [name for name in names if name in counts])
        for split, names in SPLIT_NAMES.items()
    }
    for row in rows:
        row.split = _SPLIT_OF[row.split.lower()] if row.split.lower() in read else ""
    return tuple(
        f"{path}: {count} rows of split {name} not read"
        for name, count in counts.items()
        if name not in read
    )


def _split_by_folder(path: str, top: str, rows: list[Row]) -> tuple[str, ...]:
    """Take train/ and val/ as the splits, if images lie there; otherwise all of them train."""
    folders = [
        row.file.path[len(top) :].strip("/").partition("/")[0] if row.file else "" for row in rows
    ]
    if not {*folders} & _SPLIT_OF.keys():
        return ()
    for row, folder in zip(rows, folders, strict=True):
        row.split = folder or "train"
    return _choose_splits(path, rows)


class _Images:
    """Images by path below the root or by name, with suffix or without."""

    def __init__(self, root: str, tables: list[str]) -> None:
        self.root, self.top = root, filesystem_of(root)[1]
        self.files: dict[str, Any] = {}
        self.others: list[str] = []
        self._paths: dict[str, list[str]] = defaultdict(list)
        for file in list_files(root, underscored=True):
            path = file.path[len(self.top) :].strip("/")
            if path.lower().endswith(IMAGE_SUFFIXES):
                self.files[path] = file
                for name in {splitext(path)[0], basename(path), splitext(basename(path))[0]}:
                    self._paths[name].append(path)
            elif file.path not in tables:
                self.others.append(path)

    def named(self, name: str, folder: str) -> list[str]:
        path = normpath(f"{folder}/{name}" if folder else name.removeprefix(f"{self.top}/"))
        return [path] if path in self.files else self._paths.get(path, [])


def _find_files(images: _Images, rows: list[Row], wrong: dict[str, list[str]]) -> dict[str, str]:
    """Give each row its file. Returns path → row."""
    taken: dict[str, str] = {}
    for row in rows:
        paths = images.named(row.image, row.folder)
        if len(paths) == 1 and (path := images.files[paths[0]].path) not in taken:
            row.file, taken[path] = images.files[paths[0]], row.where
        elif not row.split:
            continue  # of a split that is not read
        elif not paths:
            what = f"without their image in {images.root}; add the images or remove the rows"
            wrong[what].append(row.where)
        elif len(paths) > 1:
            what = f"for several images; write the path below {images.root}"
            wrong[what].append(f"{row.where}: {paths[0]} and {paths[1]}")
        else:
            what = "for the image of another row; remove them, or write all labels into one cell"
            wrong[what].append(f"{row.where}, as {taken[path]}")
    return taken


def _names(rows: list[Row], wrong: dict[str, list[str]]) -> list[str]:
    """The classes: 0 … n - 1 if all labels are integers, or the training rows' texts, sorted."""
    texts = {text for row in rows if row.split == "train" for text in row.labels}
    if not texts or not all(INTEGER.fullmatch(text) for row in rows for text in row.labels):
        return sorted(texts)
    most = max(map(int, texts))
    if most > MOST_CLASSES:
        wrong[f"with labels up to {most}; number the classes 0, 1, …"] += [r.where for r in rows]
        return []
    return [str(number) for number in range(most + 1)]


def _numbers(names: list[str], rows: list[Row]) -> dict[str, int]:
    """Label → number of its class: its place among the names, or the label itself if all are integers."""
    texts = {text for row in rows for text in row.labels}
    if all(map(INTEGER.fullmatch, texts)) and not texts & {*names}:
        return {str(number): number for number in range(len(names))}
    return {name: number for number, name in enumerate(names)}
