"""Images in files: in one folder per class, or with their labels in a CSV file."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from stoker.errors import UsageError
from stoker.messages import BadRecord, Record, Shard
from stoker.read import checksums
from stoker.read.annotations import Labels, read_labels
from stoker.read.base import IndexedSource, Source, cut_indices
from stoker.read.files import IMAGE_SUFFIXES, SPLIT_NAMES, beside, sort_out, split_folder
from stoker.read.identity import fingerprint_of_files
from stoker.read.rereading import read_again
from stoker.storage.filesystems import child_folders, filesystem_of, is_local, join, list_files

if TYPE_CHECKING:
    import numpy as np


class ImageFolderSource(IndexedSource):
    """Head and chain worker: `folder/class/file.jpg` → columns `image` (the file's bytes), `label`.

    Labels number the classes in alphabetical order.

    Args:
        folder: of the split.
        data: the data root above it; None: the folder itself. A SHA256SUMS file in either is used.
        classes: the class folders in the order of their labels; None: those found in `folder`.

    Raises:
        UsageError: a file lies outside a class folder, or in one that is not among `classes`.
    """

    random = False

    def __init__(self, folder: str, data: str | None = None, classes: list[str] | None = None) -> None:
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
        if empty := [f"{name}/" for name in child_folders(folder) if name not in {*found}]:
            self.noting(f"{folder}: {', '.join(empty)} holds no image and is no class")
        self.names = found if classes is None else classes
        label_of = {name: label for label, name in enumerate(self.names)}
        if unknown := [name for name in found if name not in label_of]:
            raise UsageError(
                f"{folder}: the training split has no class folder {' or '.join(unknown)}"
                f" (it has {', '.join(self.names)})"
            )
        self._hold(data or folder, files, [label_of[path.split("/")[0]] for path in relative])

    def _hold(self, data: str, files: list[Any], labels: list[Any]) -> None:
        self.root = filesystem_of(self.folder)[1]
        self.sizes = [f.size or 0 for f in files]
        sums = checksums.sums_of(data, files, IMAGE_SUFFIXES)
        self.files = [
            (f.path[len(self.root) :].strip("/"), label, *([sums[f.path]] if sums else []))
            for label, f in zip(labels, files, strict=True)
        ]
        """Path, label and, if listed, SHA-256."""

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

    def shards(self, records: int, order: np.random.Generator | None, homes: int = 0) -> list[Shard]:
        cut = cut_indices(len(self.files), records, order, homes)
        return [
            Shard(self.root, rows=p.rows, items=tuple(self.files[i] for i in p.items), home=p.home, name="")
            for p in cut
        ]

    def listing(self, shard: Shard) -> list[tuple[str, Shard]]:
        return [(item[0], Shard(shard.path, items=(item,))) for item in shard.items]

    def for_workers(self) -> ImageFolderSource:
        light = copy.copy(self)
        light.files, light.sizes = [], []
        return light

    def read(self, shard: Shard, order: np.random.Generator | None) -> Iterator[Record | BadRecord]:
        filesystem, _ = filesystem_of(self.folder)
        for path, label, *sums in shard.items:
            load = partial(_content, filesystem, f"{shard.path}/{path}")
            content = read_again(path, load, far=not is_local(shard.path))
            if isinstance(content, BadRecord):
                yield content
                continue
            if sums and hashlib.sha256(content).hexdigest() != sums[0]:
                yield BadRecord(path, f"damaged or changed: its SHA-256 is not that of {checksums.NAME}")
                continue
            yield {"key": path, "image": content, "label": self.label(label)}

    def label(self, label: Any) -> Any:
        """Chain worker: the label as the record has it: several labels as a vector of 0 and 1."""
        if not isinstance(label, tuple):
            return label
        import numpy as np

        vector = np.zeros(len(self.names), np.float32)
        vector[[*label]] = 1
        return vector


class LabelledImages(ImageFolderSource):
    """Head and chain worker: images in any folders, with the labels that a CSV file gives them.

    Args:
        folder: the data root.
        labels: see `read_labels`.
        split: train or val.
    """

    def __init__(self, folder: str, labels: Labels, split: str) -> None:
        self.folder, self.names = folder, labels.names
        self.several = any(isinstance(label, tuple) for _, label in labels.splits["train"])
        """Whether an image may have several labels."""
        files, numbers = zip(*labels.splits[split], strict=True)
        self._hold(folder, [*files], [*numbers])


def _content(filesystem: Any, path: str) -> bytes:
    with filesystem.open_input_file(path) as file:
        content: bytes = file.readall()
    return content


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
    """Head: read images in one folder per class, `root/train/cat/1.jpg`; None without that split.

    The labels of all splits number the class folders of the training split.

    Args:
        root: folder or URI.
        split: train or val.
        labels: a CSV file with the labels instead; `read_labels` describes it and what follows.
        label_separator: separates several labels of an image; its label is then a vector of 0 and 1.
        image_column: the column with the path or name of an image; default: of a usual name.
        label_column: the column with the label; default: of a usual name.
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
    return ImageFolderSource(folder, root, classes).noting(*beside(root, split))
