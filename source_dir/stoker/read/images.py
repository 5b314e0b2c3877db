"""Images in files: in one folder per class, or with their labels in a CSV file."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from stoker.errors import UsageError
from stoker.figures import count_of
from stoker.protocol import BadRecord, Record, Shard
from stoker.read.far_files import FarFiles, content_of
from stoker.read.folders import (
    IMAGE_SUFFIXES,
    LAST,
    SPLIT_NAMES,
    note_on_unread,
    of_kind,
    split_folder,
    split_name,
)
from stoker.read.identity import fingerprint_of_files
from stoker.read.labels import HUGGING_FACE, Labels, read_labels, tables_in
from stoker.read.sources import IndexedShards, IndexedSource, Source, read_again
from stoker.storage.filesystems import child_folders, filesystem_of, is_local, join, list_files

if TYPE_CHECKING:
    import numpy as np


class ImageFolderSource(IndexedSource):
    """`folder/class/file.jpg` → columns `image` (the file's bytes), `label`.

    Labels number the classes in alphabetical order.
    """

    random = False

    def __init__(
        self, folder: str, classes: list[str] | None = None, ignore: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        _, root = filesystem_of(folder)
        files, self.notes = of_kind(
            folder, list_files(folder, underscored=True), IMAGE_SUFFIXES, ignore
        )
        relative = [f.path[len(root) :].strip("/") for f in files]
        if loose := [path for path in relative if "/" not in path]:
            raise UsageError(
                f"{folder}: {loose[0]} lies outside any class folder; expected {folder}/<class>/file.jpg, or"
                " name a CSV file with the labels in params.labels"
            )
        classes_here = sorted({path.split("/")[0] for path in relative})
        if empty := [f"{name}/" for name in child_folders(folder) if name not in classes_here]:
            self.noting(f"{folder}: {', '.join(empty)} holds no image and is no class")
        self.names = classes_here if classes is None else classes
        label_of = {name: label for label, name in enumerate(self.names)}
        if unknown := [name for name in classes_here if name not in label_of]:
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
        self.several = labels.several
        files, numbers = zip(*labels.splits[split], strict=True)
        self._hold([*files], [*numbers])


def read_images(
    root: str | os.PathLike[str],
    split: str,
    labels: str | None = None,
    label_separator: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    class_names: Sequence[str] = (),
    multi_label: bool = False,
    ignore: Sequence[str] = (),
) -> Source | None:
    """Read images in one folder per class, `root/train/cat/1.jpg`; None without that split.

    The labels of all splits number the class folders of the training split.

    Args:
        root: folder or URI.
        split: train or val.
        labels: a CSV file with the labels instead, a path or URI, or a name below `root` or in the folder of
            each split; the images may lie in any sub-folders. Default: `metadata.csv`, as
            Hugging Face has it, if it is there.
        label_separator: separates several labels in a cell; the label of an image is then a vector of 0 and
            1.
        image_column: the column with the path or name of an image; default: `image` or `file_name`.
        label_column: the column with the label; default: `label`.
        class_names: in the order of their numbers; default: sorted, or 0 … n - 1 if all labels are integers.
        multi_label: labels are vectors of 0 and 1, as with a separator.
        ignore: patterns of files that are not read, such as `*.txt`.

    Raises:
        UsageError: another split has a class that the training split lacks.
    """
    root = os.fspath(root)
    if labels is None and HUGGING_FACE not in ignore and tables_in(root, HUGGING_FACE):
        labels = HUGGING_FACE
    if labels is not None:
        columns = image_column, label_column, class_names
        table = read_labels(root, labels, label_separator, *columns, multi_label)
        notes = table.notes if split == "train" else ()
        return LabelledImages(root, table, split).noting(*notes) if table.splits[split] else None
    folder = split_folder(root, split)
    if folder is None:
        return None
    notes = note_on_unread(root, split)
    test = split_name(root, "val")
    if test in LAST and (count := _unlabelled(join(root, test))):
        if split == "val":
            return None
        notes += (f"{root}: {test}/ ({count}) has no class folders and is not used",)
    training = [join(root, name) for name in SPLIT_NAMES["train"] if name in child_folders(root)]
    classes = None
    if training and split != "train":
        classes = ImageFolderSource(training[0], ignore=ignore).names
    return ImageFolderSource(folder, classes, ignore).noting(*notes)


def _unlabelled(folder: str) -> str:
    """The number of files of a test split without class folders, in words; empty if it has any."""
    return "" if child_folders(folder) else count_of(len(list_files(folder)), "file")
