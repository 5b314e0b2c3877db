"""Images in files: in one folder per class, or with their labels in a CSV file.

The CSV file has the columns `id,label,split`, or a column of 0 and 1 per class.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import io
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from posixpath import basename, normpath
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker.config.values import Texts, read_yaml
from stoker.errors import UsageError
from stoker.figures import count_of
from stoker.protocol import BadRecord, Record, Shard
from stoker.read.far_files import FarFiles, content_of
from stoker.read.folders import (
    IMAGE_SUFFIXES,
    SPLIT_NAMES,
    note_on_unread,
    only,
    sort_out,
    split_folder,
)
from stoker.read.identity import fingerprint_of_files
from stoker.read.sources import IndexedShards, IndexedSource, Source, read_again
from stoker.storage.filesystems import (
    child_folders,
    filesystem_of,
    is_local,
    is_there,
    join,
    list_files,
)

if TYPE_CHECKING:
    import numpy as np

MOST_CLASSES = 1_000_000
IDS = (
    *(
        "id",
        "image",
        "image_id",
        "imageid",
        "image_name",
        "imagename",
        "image_path",
        "img",
        "img_name",
    ),
    *("file", "filename", "file_name", "fname", "filepath", "file_path", "path"),
)
LABELS = ("label", "labels", "class", "classes", "class_name", "category", "target", "tag", "tags")
SPLITS = ("split", "set", "subset", "partition")
SEPARATORS = "|;,"
"""What probably separates several labels in one cell."""
_MINUS, _ZERO = ("-1", "-1.0"), ("0", "0.0", "False", "FALSE", "false")
_SIGNS = {
    **dict.fromkeys((*_MINUS, *_ZERO), False),
    **dict.fromkeys(("1", "1.0", "True", "TRUE", "true"), True),
}
_COUNT = re.compile(r"(0|[1-9]\d*)(\.0)?")
_ARRAY = re.compile(r"[-\d.]+\s[-\d.\s]+")
_FRACTION = re.compile(r"-\d+|-?\d*\.\d+(e-?\d+)?", re.IGNORECASE)
_MISSING = {"NA", "N/A", "n/a", "#N/A", "None", "NULL", "null", "<NA>"}
_TOOLS = (".ipynb_checkpoints", ".git", ".cache", ".Trash", ".thumbnails", ".dvc")
_DIGITS = re.compile(r"[-+]?\d+(\.\d*)?")
_SPLIT_OF = {name: split for split, names in SPLIT_NAMES.items() for name in names}


class Labels(NamedTuple):
    splits: dict[str, list[tuple[Any, Any]]]
    """File and label: a number, or a tuple of numbers if an image may have several labels."""
    names: list[str]
    notes: tuple[str, ...]


@dataclass
class LabelRow:
    where: str
    labels: list[str]
    id: str
    split: str
    cells: list[str]
    file: Any = None


@dataclass
class Columns:
    id: int
    labels: list[int]
    """One, or one per class."""
    split: int | None
    lists: bool = False
    wrong: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def read_labels(
    root: str,
    table: str,
    separator: str | None = None,
    image_column: str | None = None,
    label_column: str | list[str] | None = None,
    class_names: list[str] | None = None,
    multi_label: bool = False,
) -> Labels:
    path = table if is_there(table) else join(root, table)
    filesystem, at = filesystem_of(path)
    header, lines = _lines(path, filesystem, at)
    there = [f for f in list_files(root, underscored=True) if f.path != at]
    files, notes = sort_out(root, there, IMAGE_SUFFIXES)
    images = _Images(root, files)
    if class_names and {*class_names} <= {*header}:
        label_column = class_names
    columns = _columns(path, header, lines, image_column, label_column, images)
    rows = _rows(columns, header, lines, separator)
    per_class, known = len(columns.labels) > 1, class_names or []
    for row in rows if not per_class else ():
        cell = row.cells[columns.labels[0]]
        row.labels = [
            t for t in row.labels if t in known or not is_missing(t) or t not in ("", cell)
        ]
    if columns.split is not None:
        notes += _choose_splits(path, rows)
    taken = _find_files(images, rows, columns.wrong)
    if columns.split is None:
        notes += _split_by_folder(path, root, rows)
    if not any(row.split == "train" for row in rows):
        raise UsageError(f"{path}: no row of the split train")
    used, wrong = [row for row in rows if row.split], columns.wrong
    sums = per_class and any(len(row.labels) != 1 for row in used)
    several = multi_label or bool(separator) or columns.lists or sums
    if per_class:
        signs = [{row.cells[i] for i in columns.labels} for row in used]
        minus = [
            row.where for row, mine in zip(used, signs, strict=True) if not mine.isdisjoint(_MINUS)
        ]
        if minus and not set().union(*signs).isdisjoint(_ZERO):
            what = "with -1 in the column of a class, where others have 0; write 0 or 1, or remove the rows"
            wrong[what] += minus
    names = [header[i] for i in columns.labels] if per_class else _names(used, wrong, known)
    number = {name: label for label, name in enumerate(names)}
    for row in used:
        marks = not per_class and any(text not in known and is_missing(text) for text in row.labels)
        if marks or not (row.labels or several):
            what = "without a label, or with NA or the like; correct it, or list all classes in class_names"
            wrong[what].append(row.where)
        if names and not {*row.labels} <= number.keys():
            what = "class_names does not list" if known else "no training image has"
            wrong[f"with a label that {what}"].append(f"{row.where}: {', '.join(row.labels)}")
    if wrong:
        raise UsageError(*(_counted(path, "row", what, which) for what, which in wrong.items()))
    splits: dict[str, list[tuple[Any, Any]]] = {split: [] for split in SPLIT_NAMES}
    for row in used:
        labels = tuple(sorted({number[text] for text in row.labels}))
        splits[row.split].append((row.file, labels if several else labels[0]))
    read = (columns.id, columns.split, *columns.labels)
    told = (
        ("column", "not read", [name for i, name in enumerate(header) if name and i not in read]),
        (
            "image",
            f"of {root} in no row and not read",
            [f.path for f in files if f.path not in taken],
        ),
        ("image", "without a label, so of no class", [row.id for row in used if not row.labels]),
    )
    notes += tuple(_counted(path, noun, what, which) for noun, what, which in told if which)
    notes += alike(names)
    if not splits["val"]:
        notes += (f"{path}: no row for validation; add a column split, or folders train/ and val/",)
    return Labels(splits, names, notes)


def _counted(path: str, noun: str, what: str, which: list[str]) -> str:
    return f"{path}: {count_of(len(which), noun)} {what} (first: {which[0]})"


def _lines(path: str, filesystem: Any, at: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    try:
        with filesystem.open_input_stream(at) as stream:
            text = stream.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is not UTF-8; save it as CSV UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {' '.join(str(error).split())[:200]}") from None
    sign = max(",;\t|", key=text.partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=sign, strict=True)
    try:
        lines = [
            (reader.line_num, [cell.strip() for cell in cells]) for cells in reader if any(cells)
        ]
    except csv.Error as error:
        raise UsageError(f"{path}: line {reader.line_num}: {error}") from None
    if len(lines) < 2:
        raise UsageError(f"{path}: holds no row below the names of its columns")
    header = [
        "" if name.startswith("Unnamed: ") else name for name in lines.pop(0)[1]
    ]  # the index of pandas
    if twice := next((name for name in header if name and header.count(name) > 1), None):
        raise UsageError(f"{path}: has the column {twice} twice; rename or remove one")
    if uneven := [number for number, cells in lines if len(cells) != len(header)]:
        what = f"with other than {len(header)} cells, as its first line has"
        raise UsageError(_counted(path, "row", what, [f"line {number}" for number in uneven]))
    return header, lines


def _columns(
    path: str,
    header: list[str],
    lines: list[tuple[int, list[str]]],
    image_column: str | None,
    label_column: str | list[str] | None,
    images: _Images,
) -> Columns:
    free = [i for i, name in enumerate(header) if name]

    def pick(given: str | list[str] | None, usual: tuple[str, ...], key: str) -> list[int]:
        names = [given] if isinstance(given, str) else given or []
        if absent := [name for name in names if name not in header]:
            raise UsageError(
                f"params.{key}: {path} has no column {absent[0]}; it has {', '.join(header)}"
            )
        found = [header.index(name) for name in names] or [
            i for i in free if header[i].lower() in usual
        ]
        if not names and len(found) > 1:
            either = " and ".join(header[i] for i in found)
            raise UsageError(
                f"{path}: {either} could both be meant; write params.{key}: {header[found[0]]}"
            )
        free[:] = [i for i in free if i not in found]
        return found

    labels = pick(label_column, (), "label_column")
    image = pick(image_column, IDS, "image_column")
    split = pick(None, SPLITS, "split_column")
    labels = labels or pick(None, LABELS, "label_column")
    if not image and any(images.named(name) for name in header if name):
        raise UsageError(
            f"{path}: its first line names an image; write the columns there, such as id,label,split"
        )
    if not image:  # by content
        image = [i for i in free if all(images.named(cells[i]) for _, cells in lines)]
        image = image if len(image) == 1 else []
        free = [i for i in free if i not in image]
    if not labels and (
        len(free) == 1 or all(cells[i] in _SIGNS for _, cells in lines for i in free)
    ):
        labels = free
    for found, key in ((image, "image_column"), (labels, "label_column")):
        if not found:
            which = ", ".join(filter(None, header))
            raise UsageError(
                f"{path}: has no column of a usual name; write params.{key}: one of {which}"
            )
    return Columns(image[0], labels, split[0] if split else None)


def _rows(
    columns: Columns, header: list[str], lines: list[tuple[int, list[str]]], separator: str | None
) -> list[LabelRow]:
    found = []
    for number, cells in lines:
        where = f"line {number}, {cells[columns.id]}"
        if len(columns.labels) > 1:
            labels = [header[i] for i in columns.labels if _SIGNS.get(cells[i], False)]
            if odd := [
                f"{header[i]} = {cells[i]!r}" for i in columns.labels if cells[i] not in _SIGNS
            ]:
                columns.wrong["with something else than 0 and 1 in the column of a class"].append(
                    f"{where}: {odd[0]}"
                )
        else:
            cell = cells[columns.labels[0]]
            labels = [text.strip() for text in cell.split(separator)] if separator else [cell]
            if separator != "" and cell.startswith("[") and cell.endswith("]"):
                if (listed := _listed(cell)) is None:
                    columns.wrong["with an unclear list; write ['cat', 'dog']"].append(
                        f"{where}: {cell}"
                    )
                labels, columns.lists = listed or [], True
            elif separator is None and (
                sign := next((sign for sign in SEPARATORS if sign in cell), "")
            ):
                columns.wrong[
                    f"with {sign!r} in the label; write params.label_separator: {sign!r} if it separates"
                    " several labels, or '' if it is part of one"
                ].append(f"{where}: {cell}")
        split = "train" if columns.split is None else cells[columns.split]
        found.append(LabelRow(where, labels, cells[columns.id], split, cells))
    return found


@cache
def _listed(cell: str) -> list[str] | None:
    """The labels in a list; None if commas do not separate them, as in arrays of NumPy."""
    with contextlib.suppress(ValueError):
        found = read_yaml(cell, Texts)
        if all(isinstance(text, str) and not _ARRAY.fullmatch(text) for text in found):
            return [str(text) for text in found]
    return None


def _choose_splits(path: str, rows: list[LabelRow]) -> tuple[str, ...]:
    """Replace the split of each row by train, val, or "" for a test split beside validation; notes it."""
    there = Counter(row.split.lower() for row in rows)
    if odd := [row for row in rows if row.split.lower() not in _SPLIT_OF]:
        which = [f"{row.where}: {row.split!r}" for row in odd]
        raise UsageError(
            _counted(path, "row", "of no known split; write train, val or test", which)
        )
    read = {
        only(path, split, [n for n in names if n in there]) for split, names in SPLIT_NAMES.items()
    }
    for row in rows:
        row.split = _SPLIT_OF[row.split.lower()] if row.split.lower() in read else ""
    return tuple(
        f"{path}: {n} rows of split {name} not read"
        for name, n in there.items()
        if name not in read
    )


def _split_by_folder(path: str, root: str, rows: list[LabelRow]) -> tuple[str, ...]:
    """Take train/ and val/ below `root` as the splits, if images lie there; otherwise all of them train."""
    top = len(filesystem_of(root)[1])
    folders = [row.file.path[top:].strip("/").partition("/")[0] if row.file else "" for row in rows]
    if not {*folders} & _SPLIT_OF.keys():
        return ()
    for row, folder in zip(rows, folders, strict=True):
        row.split = folder or "train"
    return _choose_splits(path, rows)


class _Images:
    """Images by path below the root or by name, with suffix or without."""

    def __init__(self, root: str, files: list[Any]) -> None:
        self.root, self.top = root, filesystem_of(root)[1]
        self.files = {f.path[len(self.top) :].strip("/"): f for f in files}
        self._forms: list[Callable[[str], str]] = [
            str,
            _stem,
            basename,
            lambda path: _stem(basename(path)),
        ]
        self._known: list[dict[str, list[str]]] = []

    def named(self, name: str) -> list[str]:
        if "/" in (name := name.replace("\\", "/")):
            name = normpath(name.removeprefix(f"{self.top}/"))
            name = name if name in self.files else name.removeprefix(f"{basename(self.top)}/")
        for place, form in enumerate(self._forms):
            if place == len(self._known):
                self._known.append(defaultdict(list))
                for path in self.files:
                    self._known[place][form(path)].append(path)
            if found := self._known[place].get(name):
                return found
        return []


def _find_files(
    images: _Images, rows: list[LabelRow], wrong: dict[str, list[str]]
) -> dict[str, str]:
    """Give each row its file. Returns path → row."""
    taken: dict[str, str] = {}
    for row in rows:
        hits = images.named(row.id)
        own = [hit for hit in hits if hit.partition("/")[0] in SPLIT_NAMES.get(row.split, ())]
        hits = own if len(hits) > 1 and len(own) == 1 else hits
        if len(hits) == 1 and (path := images.files[hits[0]].path) not in taken:
            row.file, taken[path] = images.files[hits[0]], row.where
        elif not row.split:
            continue  # of a split that is not read
        elif not hits:
            what = f"without their image in {images.root}; add the images or remove the rows"
            wrong[what].append(row.where)
        elif len(hits) > 1:
            what = f"for several images; write the path below {images.root}"
            wrong[what].append(f"{row.where}: {hits[0]} and {hits[1]}")
        else:
            what = "for the image of another row; remove them, or write all labels into one cell"
            wrong[what].append(f"{row.where}, as {taken[path]}")
    return taken


def _stem(path: str) -> str:
    suffix = next((suffix for suffix in IMAGE_SUFFIXES if path.lower().endswith(suffix)), "")
    return path[: len(path) - len(suffix)]


def _names(rows: list[LabelRow], wrong: dict[str, list[str]], given: list[str]) -> list[str]:
    """The classes: those given; 0 … n - 1 if all labels are numbers; or the training rows' texts, sorted."""
    texts = {text for row in rows for text in row.labels}
    counts = bool(texts) and all(map(_COUNT.fullmatch, texts))
    if given and (not counts or ({text.removesuffix(".0") for text in texts} | texts) & {*given}):
        for row in rows:  # names such as 1, which pandas has written as 1.0
            row.labels = [
                text.removesuffix(".0") if text not in given and _COUNT.fullmatch(text) else text
                for text in row.labels
            ]
        return given
    if counts:
        for row in rows:
            row.labels = [text.removesuffix(".0") for text in row.labels]
        most = max(
            (int(text) for row in rows if row.split == "train" for text in row.labels), default=-1
        )
        if most > MOST_CLASSES:
            wrong[f"with labels up to {most}; number the classes 0, 1, …"] += [
                row.where for row in rows
            ]
            return []
        if given:  # of class 0, 1, …
            for row in rows:
                row.labels = [
                    given[int(text)] if int(text) < len(given) else text for text in row.labels
                ]
        return given or [str(number) for number in range(most + 1)]
    if any(map(_FRACTION.fullmatch, texts)) and all(map(re.compile(r"[-\d.e]+").fullmatch, texts)):
        wrong["with labels such as 0.5 or -1, which number no class"] += [
            row.where for row in rows if any(map(_FRACTION.fullmatch, row.labels))
        ]
        return []
    why, odd = unclear(Counter(text for row in rows for text in row.labels))
    if why:
        wrong[why] += [f"{row.where}: {text}" for row in rows for text in row.labels if text in odd]
    return sorted({text for row in rows if row.split == "train" for text in row.labels})


def is_missing(text: str) -> bool:
    """Whether a label is empty, or what pandas, R and databases write for none."""
    return text in _MISSING or text.strip().lower() in ("", "nan")


def unclear(texts: Counter[str]) -> tuple[str, set[str]]:
    """Why labels are probably no classes by their texts and rows (0: unknown), and which; empty: they are."""
    words = any(text.lower() in ("true", "false") for text in texts)
    if words and {*texts} <= _SIGNS.keys() and len(texts) > len({_SIGNS[text] for text in texts}):
        return (
            f"with True and False in several spellings ({', '.join(sorted(texts))}); write one",
            {*texts},
        )
    odd = Counter({text: count for text, count in texts.items() if not _DIGITS.fullmatch(text)})
    if not 0 < len(odd) <= 2 or 50 * odd.total() >= texts.total():
        return "", set()
    shown = ", ".join(f"{text!r} ({count})" for text, count in odd.items())
    remedy = "correct that, or list all classes in class_names"
    return f"with {shown} where most labels are numbers; {remedy}", {*odd}


def alike(names: list[str]) -> tuple[str, ...]:
    """Lines on names that only capitals, spaces or the encoding of accents tell apart, and on numbers among
    text that are not those of their classes."""
    folded: dict[str, list[str]] = defaultdict(list)
    for name in names:
        folded["".join(unicodedata.normalize("NFKC", name).casefold().split())].append(name)
    same = [name for those in folded.values() if len(those) > 1 for name in those]
    shown = [
        repr(name) if unicodedata.is_normalized("NFC", name) else ascii(name) for name in same[:6]
    ]
    notes = [f"classes that look alike: {', '.join(shown)}"] if same else []
    moved = [
        f"{name!r} is {n}"
        for n, name in enumerate(names)
        if _DIGITS.fullmatch(name) and name != str(n)
    ]
    if moved and not all(map(_DIGITS.fullmatch, names)):
        notes += [
            f"names among text whose numbers are not the numbers of their classes: {', '.join(moved[:3])}"
        ]
    return tuple(notes)


def deeper(folder: str, paths: list[str]) -> tuple[str, ...]:
    """A line on folders that repeat below those of the classes: `2023/cat/1.jpg`, `2024/cat/2.jpg`."""
    if not all(path.count("/") > 1 for path in paths):
        return ()
    below = {tuple(path.split("/", 2)[:2]) for path in paths}
    count = Counter(inner for _, inner in below)
    outer, again = sorted({outer for outer, _ in below}), sorted(n for n in count if count[n] > 1)
    if len(again) < 2:  # such as images/ in each class of Tiny ImageNet
        return ()
    classes = f"the classes are {', '.join(outer[:6])}, not {', '.join(again[:6])} in them"
    return (f"{folder}: {classes}; if those are, move their images into {folder}/<class>/",)


class ImageFolderSource(IndexedSource):
    """`folder/class/file.jpg` → columns `image` (the file's bytes), `label`.

    Labels number the classes in alphabetical order.
    """

    random = False

    def __init__(self, folder: str, classes: list[str] | None = None) -> None:
        self.folder = folder
        _, root = filesystem_of(folder)
        files, self.notes = sort_out(folder, list_files(folder, underscored=True), IMAGE_SUFFIXES)
        if not files:
            list_files(folder, IMAGE_SUFFIXES)  # says what is there instead
        relative = [f.path[len(root) :].strip("/") for f in files]
        loose = [path for path in relative if "/" not in path]
        if loose:
            raise UsageError(
                f"{folder}: {loose[0]} lies outside any class folder; expected {folder}/<class>/file.jpg, or"
                " name a CSV file with the labels in params.labels"
            )
        found = sorted({path.split("/")[0] for path in relative})
        if len(found) > 1 and {*found} <= {*sum(SPLIT_NAMES.values(), ())}:
            raise UsageError(
                f"{folder}: holds the splits {', '.join(found)}; name this folder, not the one above"
            )
        below = child_folders(folder, hidden=True)
        for name in (name for name in below if name[0] == "." and name not in _TOOLS):
            with contextlib.suppress(UsageError):  # it holds no image
                count = count_of(len(list_files(join(folder, name), IMAGE_SUFFIXES)), "image")
                self.noting(f"{folder}: {name}/ is hidden, so no class: {count} not read")
        if empty := [f"{name}/" for name in below if name[0] not in "._" and name not in {*found}]:
            self.noting(f"{folder}: {', '.join(empty)} holds no image and is no class")
        self.names = found if classes is None else classes
        if classes is None:
            self.noting(*alike(found), *deeper(folder, relative))
        label_of = {name: label for label, name in enumerate(self.names)}
        if unknown := [name for name in found if name not in label_of]:
            raise UsageError(
                f"{folder}: the training split has no class folder {' or '.join(unknown)}"
                f" (it has {', '.join(self.names)})"
            )
        self._hold(files, [label_of[path.split("/")[0]] for path in relative])

    def _hold(self, files: list[Any], labels: list[Any]) -> None:
        self.root = filesystem_of(self.folder)[1]
        self.far = not is_local(self.root)
        self.files_afar = FarFiles(self.folder)
        self.sizes = [f.size or 0 for f in files]
        paths = [f.path[len(self.root) :].strip("/") for f in files]
        self.files = list(zip(paths, labels, strict=True))

    def check(self) -> None:
        if len(self.names) < 2:
            raise UsageError(
                f"{self.folder}: holds one class only ({self.names[0]}); a classifier needs two or more"
            )

    def classes(self) -> list[str]:
        return self.names

    def path_of(self, key: str) -> str:
        return f"{self.folder}/{key}"

    def count(self) -> int:
        return len(self.files)

    def fingerprint(self) -> str:
        paths = [f"{self.root}/{path}" for path, *_ in self.files]
        return fingerprint_of_files(filesystem_of(self.folder)[0], paths, self.sizes, self.files)

    def shards(
        self, records: int, order: np.random.Generator | None, homes: int = 0
    ) -> Sequence[Shard]:
        return IndexedShards(len(self.files), records, order, homes, self._shard)

    def _shard(self, indices: Sequence[int], home: str) -> Shard:
        items = tuple(self.files[index] for index in indices)
        return Shard(self.root, rows=len(items), items=items, home=home, name="")

    def listing(self, shard: Shard) -> list[tuple[str, Shard]]:
        return [(item[0], Shard(shard.path, items=(item,))) for item in shard.items]

    def for_workers(self) -> ImageFolderSource:
        light = copy.copy(self)
        light.files, light.sizes = [], []
        vars(light).pop("_filesystem", None)
        return light

    @cached_property
    def _filesystem(self) -> Any:
        """Opened once: with a cache, the others are read one by one."""
        return filesystem_of(self.folder)[0]

    def read(self, shard: Shard, order: np.random.Generator | None) -> Iterator[Record | BadRecord]:
        paths = [path for path, _ in shard.items]
        contents = self.files_afar.read(paths) if self.far else self._contents(shard.path, paths)
        for (path, label), content in zip(shard.items, contents, strict=True):
            if isinstance(content, BadRecord):
                yield content
                continue
            yield {"key": path, "image": content, "label": self.label(label)}

    def _contents(self, root: str, paths: list[str]) -> Iterator[bytes | BadRecord]:
        for path in paths:
            yield read_again(path, partial(content_of, self._filesystem, f"{root}/{path}"))

    def prepare(self, shard: Shard) -> None:
        self.files_afar.expect([path for path, _ in shard.items])

    def label(self, label: Any) -> Any:
        if not isinstance(label, tuple):
            return label
        import numpy as np

        vector = np.zeros(len(self.names), np.float32)
        vector[[*label]] = 1
        return vector


class LabelledImages(ImageFolderSource):
    def __init__(self, folder: str, labels: Labels, split: str) -> None:
        self.folder, self.names = folder, labels.names
        self.several = any(isinstance(label, tuple) for _, label in labels.splits["train"])
        files, numbers = zip(*labels.splits[split], strict=True)
        self._hold([*files], [*numbers])


def read_images(
    root: str,
    split: str,
    labels: str | None = None,
    label_separator: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    class_names: list[str] | None = None,
    multi_label: bool = False,
) -> Source | None:
    """Read images in one folder per class, `root/train/cat/1.jpg`; None without that split.

    The labels of all splits number the class folders of the training split.

    Args:
        root: folder or URI.
        split: train or val.
        labels: a CSV file with the labels instead, a path or URI, or a name below `root`; the images may
            lie in any sub-folders.
        label_separator: separates several labels in a cell; the label of an image is then a vector of 0 and
            1. "": a cell is one label, whatever it holds.
        image_column: the column with the path or name of an image; default: of a usual name.
        label_column: the column with the label; default: of a usual name, or all others if they hold 0 and 1.
        class_names: in the order of their numbers, or the names of one column per class; default: sorted.
        multi_label: labels are vectors of 0 and 1, whatever the file holds.

    Raises:
        UsageError: another split has a class that the training split lacks.
    """
    if labels is not None:
        columns = image_column, label_column, class_names
        found = read_labels(root, labels, label_separator, *columns, multi_label)
        notes = found.notes if split == "train" else ()
        return LabelledImages(root, found, split).noting(*notes) if found.splits[split] else None
    folder = split_folder(root, split)
    if folder is None:
        return None
    training = [join(root, name) for name in SPLIT_NAMES["train"] if name in child_folders(root)]
    classes = ImageFolderSource(training[0]).names if training and split != "train" else None
    return ImageFolderSource(folder, classes).noting(*note_on_unread(root, split))
