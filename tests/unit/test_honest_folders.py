"""Image folders as people have them: each is read, or refused in one line that names the key to write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import damage
import pytest
from inprocess import no_ray_data
from spoilt import JPG

from stoker.errors import UsageError

__all__ = ["no_ray_data"]


@dataclass
class Layout:
    images: list[str]
    texts: dict[str, str] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """Records of each split; empty: the folder is refused."""
    says: str = ""
    """Of the refusal, or of a note."""

    def write(self, root: Path) -> Path:
        for name in self.images:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(JPG)
        for name, text in self.texts.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return root


def of(pattern: str, count: int = 4) -> list[str]:
    return [pattern.format(n) for n in range(count)]


def rows(header: str, row: Callable[[int], str], count: int = 4) -> str:
    return header + "\n" + "".join(f"{row(n)}\n" for n in range(count))


KINDS = "ab"
SPLITS = [*of("train/cat/{}.jpg"), *of("train/dog/{}.jpg"), *of("val/cat/{}.jpg")]
BREEDS = rows("id,breed", lambda n: f"{n},{KINDS[n % 2]}")
DISEASES = rows("image_id,rust,scab", lambda n: f"Train_{n},{n % 2},{1 - n % 2}")
ROBOFLOW = rows("filename, cat, dog", lambda n: f"{n}.jpg, {n % 2}, {1 - n % 2}")
CELEBA = rows("image_id,Smiling,Young", lambda n: f"{n}.jpg,-1,1")
HUGGING_FACE = rows("file_name,label", lambda n: f"{n}.jpg,{KINDS[n % 2]}")
EXCEL = "\ufeff" + rows(
    "image;label;split\r",
    lambda n: f"imgs\\{KINDS[n % 2]}\\{n}.jpg;{KINDS[n % 2]};{'val' if n > 3 else 'train'}\r",
    6,
)
LAYOUTS = {
    "a competition's test without labels": Layout(
        [*SPLITS[:8], *of("test/{}.jpg", 5)],
        counts={"train": 8},
        says="test/ (5 files) has no class folders and is not used",
    ),
    "Hugging Face, a table in each split": Layout(
        [*of("train/{}.jpg"), *of("test/{}.jpg")],
        {f"{split}/metadata.csv": HUGGING_FACE for split in ("train", "test")},
        counts={"train": 4, "val": 4},
    ),
    "Hugging Face, one table": Layout(
        [*of("train/{}.jpg"), *of("validation/{}.jpg")],
        {
            "metadata.csv": rows(
                "file_name,label",
                lambda n: f"{('train', 'validation')[n // 4]}/{n % 4}.jpg,{n % 2}",
                8,
            )
        },
        counts={"train": 4, "val": 4},
    ),
    "Excel on Windows": Layout(
        [f"imgs/{KINDS[n % 2]}/{n}.jpg" for n in range(6)],
        {"labels.csv": EXCEL},
        {"labels": "labels.csv"},
        {"train": 4, "val": 2},
    ),
    "a list without a header": Layout(
        of("{}.jpg"),
        {"labels.csv": rows("0.jpg 0", lambda n: f"{n}.jpg {n % 2}")},
        {"labels": "labels.csv"},
        says="params.image_column and params.label_column",
    ),
    "tabs": Layout(
        of("imgs/{}.jpg"),
        {"all.tsv": rows("image\tlabel", lambda n: f"imgs/{n}.jpg\t{KINDS[n % 2]}")},
        {"labels": "all.tsv"},
        {"train": 4},
        "no row for validation",
    ),
    "Kaggle, ids without a suffix": Layout(
        [*of("train/{}.jpg"), *of("test/9{}.jpg")],
        {"labels.csv": BREEDS, "sample_submission.csv": "id,a,b\n90,0.5,0.5\n"},
        {"labels": "labels.csv", "image_column": "id", "label_column": "breed"},
        {"train": 4},
        "4 images of",
    ),
    "Kaggle, the usual names of others": Layout(
        of("train/{}.jpg"), {"labels.csv": BREEDS}, {"labels": "labels.csv"}, says="image_column"
    ),
    "Kaggle, a column per class": Layout(
        of("images/Train_{}.jpg"),
        {"train.csv": DISEASES},
        {"labels": "train.csv", "image_column": "image_id", "class_names": ["rust", "scab"]},
        {"train": 4},
        "no row for validation",
    ),
    "CelebA, -1 and 1": Layout(
        of("{}.jpg"),
        {"list.csv": CELEBA},
        {
            "labels": "list.csv",
            "image_column": "image_id",
            "class_names": ["Smiling", "Young"],
            "multi_label": True,
        },
        says="something else than 0 and 1 in the column of a class",
    ),
    "Roboflow": Layout(
        [f"{split}/{n}.jpg" for split in ("train", "valid", "test") for n in range(4)],
        {f"{split}/_classes.csv": ROBOFLOW for split in ("train", "valid", "test")},
        {
            "labels": "_classes.csv",
            "image_column": "filename",
            "class_names": ["cat", "dog"],
            "multi_label": True,
        },
        {"train": 4, "val": 4},
        "4 images of",
    ),
    "CUB-200": Layout(
        of("images/00{}.Albatross/x.jpg"),
        {"images.txt": "1 001.Albatross/x.jpg\n", "train_test_split.txt": "1 0\n"},
        says="has no folder train/.*params.labels",
    ),
    "CUB-200, its list": Layout(
        of("images/00{}.Albatross/x.jpg"),
        {"images.txt": "1 001.Albatross/x.jpg\n"},
        {"labels": "images.txt"},
        says="params.image_column",
    ),
    "Oxford pets": Layout(
        of("images/Abyssinian_{}.jpg"),
        {"annotations/list.txt": "#Image CLASS-ID SPECIES BREED ID\nAbyssinian_0 1 1 1\n"},
        {"labels": "annotations/list.txt"},
        says="params.image_column",
    ),
    "iNaturalist": Layout(
        of("train_val2019/Birds/202/{}.jpg"),
        {"train2019.json": "{}"},
        says="has no folder train/.*params.labels",
    ),
    "MNIST as PNG": Layout(
        [
            f"{split}/{kind}/{n}.png"
            for split in ("training", "testing")
            for kind in "01"
            for n in "ab"
        ],
        counts={"train": 4, "val": 4},
    ),
    "what programs leave": Layout(
        SPLITS,
        dict.fromkeys(
            ("train/.DS_Store", "train/cat/Thumbs.db", "train/README.md", "val/desktop.ini"), ""
        ),
        counts={"train": 8, "val": 4},
    ),
    "annotations beside images": Layout(
        SPLITS,
        {"train/cat/0.xml": "<a/>", "train/cat/1.xml": "<a/>"},
        says=r"2 files not .*\*\.xml",
    ),
    "annotations that are left out": Layout(
        SPLITS,
        {"train/cat/0.xml": "<a/>"},
        {"ignore": ["*.xml"]},
        {"train": 8, "val": 4},
        r"1 file not read: 1 .xml \(cat/0.xml\)",
    ),
    "Hugging Face as JSON lines": Layout(
        of("train/{}.jpg"), {"train/metadata.jsonl": "{}"}, says="ignore"
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_folder_is_read_or_refused_with_the_key_to_write(case: str, tmp_path: Path) -> None:
    layout = LAYOUTS[case]
    root = layout.write(tmp_path)
    if not layout.counts:
        with pytest.raises(UsageError, match=layout.says) as refused:
            damage.opened(root, **layout.params)
        assert len(refused.value.problems) == 1
        return
    _, data = damage.opened(root, **layout.params)
    assert {split: source.count() for split, source in data.sources.items()} == layout.counts
    for split in layout.counts:
        assert (
            sum(len(columns["label"]) for columns, _ in damage.preprocessed(data, split))
            == (layout.counts[split])
        )
    notes = " ".join(data.notes())
    assert layout.says.replace("\\", "") in notes if layout.says else notes == ""
