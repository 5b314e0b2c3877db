"""Images with labels in folders or a CSV file: read by the parameters of ImageClassification, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import damage
import pytest
import torch
from inprocess import no_ray_data
from spoilt import JPG, PNG

from stoker.config.loading import load
from stoker.entry import job_checks as checks
from stoker.errors import UsageError
from stoker.image_classification import ImageClassification

__all__ = ["no_ray_data"]

SIX = (
    "images/a.jpg",
    "images/b.png",
    "images/c.png",
    "images/deep/d.jpg",
    "e.JPG",
    "images/_f.jpg",
)
SPLIT = (
    "image,label,split\na,cat,train\nb,dog,train\nc,eel,train\nd,dog,train\ne,cat,val\n_f,eel,val\n"
)


def folder(root: Path, csv: str | bytes, *files: str, name: str = "labels.csv") -> Path:
    for file in files or SIX:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(PNG if file.endswith("png") else JPG)
    (root / name).write_bytes(csv if isinstance(csv, bytes) else csv.encode())
    return root


def opened(root: Path, **params: Any) -> damage.Opened:
    return damage.opened(root, **{"labels": "labels.csv", **params})


def read(root: Path, **params: Any) -> tuple[dict[str, dict[str, Any]], list[str], list[str]]:
    """Key → label per split, as the chain leaves them; the classes; the notes."""
    config, data = opened(root, **params)
    found: dict[str, dict[str, Any]] = {}
    for split, source in data.sources.items():
        found[split] = {}
        for shard in source.shards(100, None):
            for key, alone in source.listing(shard):
                columns, report = data.chains[split].run(source.for_workers().read(alone, None), 0)
                assert not report.bad and columns["image__hwc"].shape == (1, 16, 16, 3)
                found[split][key] = columns["label"][0].tolist()
    names = data.sources["train"].classes()
    assert config.params["num_classes"] == len(names)
    return found, names, data.notes()


TRAIN = {"images/a.jpg": 0, "images/b.png": 1, "images/c.png": 2, "images/deep/d.jpg": 1}
VAL = {"e.JPG": 0, "images/_f.jpg": 2}
ALIKE = {
    "stems": SPLIT,
    "names": SPLIT.replace("\na,", "\na.jpg,").replace("\ne,", "\ne.JPG,"),
    "paths": SPLIT.replace("\na,", "\nimages/a.jpg,").replace("\nd,", "\n./images/deep/d.jpg,"),
    "paths without a suffix": SPLIT.replace("\nd,", "\nimages/deep/d,"),
    "a byte order mark and Windows": "\ufeff" + SPLIT.replace("\n", "\r\n"),
    "semicolons": SPLIT.replace(",", ";"),
    "tabs": SPLIT.replace(",", "\t"),
    "spaces and quotes": SPLIT.replace("cat", '"cat"').replace(",dog", ", dog "),
    "the index of pandas": "".join(f"{i or ''},{x}\n" for i, x in enumerate(SPLIT.split())),
    "Hugging Face's name": SPLIT.replace("image,label", "file_name,label"),
    "training and validation": SPLIT.replace(",train", ",Training").replace(",val", ",VALIDATION"),
    "another order": "".join(",".join(x.split(",")[::-1]) + "\n" for x in SPLIT.split()),
}


@pytest.mark.parametrize("case", ALIKE)
def test_text_labels_are_classes_in_sorted_order_however_they_are_written(
    case: str, tmp_path: Path
) -> None:
    found, names, notes = read(folder(tmp_path, ALIKE[case]))
    assert (found, names, notes) == ({"train": TRAIN, "val": VAL}, ["cat", "dog", "eel"], [])


WRITTEN = {
    "integers": ("0 10 2", [*map(str, range(11))], [0, 10, 2]),
    "of one width": ("000 010 002", ["000", "002", "010"], [0, 2, 1]),
    "floats are text": ("0.0 10.0 2.0", ["0.0", "10.0", "2.0"], [0, 1, 2]),
    "numbers and text": ("2 J 10", ["10", "2", "J"], [1, 2, 0]),
    "NA is text": ("NA None nan", ["NA", "None", "nan"], [0, 1, 2]),
    "spellings": ("True true 1", ["1", "True", "true"], [1, 2, 0]),
    "lists and signs are text": ("a|b ['c'] -1", ["-1", "['c']", "a|b"], [2, 1, 0]),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_labels_are_text_or_integers_as_written(case: str, tmp_path: Path) -> None:
    texts, names, numbers = WRITTEN[case]
    cat, dog, eel = texts.split()
    csv = SPLIT.replace("cat", cat).replace("dog", dog).replace("eel", eel)
    found, classes, _ = read(folder(tmp_path, csv))
    labels = found["val"]["e.JPG"], found["train"]["images/b.png"], found["val"]["images/_f.jpg"]
    assert ([*labels], classes) == (numbers, names)


BY_SIGN = "image,label,split\na,cat,train\nb,dog|cat,train\nc,,train\nd,eel,train\n"
BY_SIGN += "e,cat,val\n_f,dog|cat,val\n"
ANIMALS = ["cat", "dog", "eel"]


@pytest.mark.parametrize(("separator", "csv"), [("|", BY_SIGN), (" ", BY_SIGN.replace("|", "  "))])
def test_several_labels_of_an_image_are_a_vector_of_0_and_1(
    separator: str, csv: str, tmp_path: Path
) -> None:
    found, names, notes = read(folder(tmp_path, csv), label_separator=separator)
    assert names == ANIMALS
    train = {"images/a.jpg": [1, 0, 0], "images/b.png": [1, 1, 0], "images/c.png": [0, 0, 0]}
    assert found["train"] == {**train, "images/deep/d.jpg": [0, 0, 1]}
    assert found["val"] == {"e.JPG": [1, 0, 0], "images/_f.jpg": [1, 1, 0]}
    [note] = notes
    assert "1 image without a label, so of no class (first: c)" in note
    assert opened(tmp_path, label_separator=separator)[0].params["multi_label"] is True


def test_one_label_per_image_is_a_vector_if_several_are_declared(tmp_path: Path) -> None:
    found, _, _ = read(folder(tmp_path, SPLIT), multi_label=True)
    assert found["train"]["images/a.jpg"] == [1, 0, 0]


def test_the_loss_of_several_labels_is_binary_and_its_metric_counts_all_of_them() -> None:
    recipe = ImageClassification(data=".", labels="x.csv", multi_label=True, num_classes=3)
    logits = torch.tensor([[2.0, -1.0, 0.5], [-3.0, 1.0, -0.5]])
    target = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
    batch = {"image": logits, "label": target}
    chances = logits.sigmoid()
    expected = -(target * chances.log() + (1 - target) * (1 - chances).log()).mean()
    found = recipe.validation_step(torch.nn.Identity(), batch)
    assert torch.allclose(recipe.training_step(torch.nn.Identity(), batch), expected)  # type: ignore[arg-type]
    assert torch.allclose(found["loss"], expected)
    [(name, metric)] = recipe.metrics().items()
    metric.update(found["preds"], found["target"])
    assert (name, metric.compute()) == ("f1", pytest.approx(2 * 2 / (2 * 2 + 1 + 1)))


def test_without_a_column_for_it_the_split_is_the_folder(tmp_path: Path) -> None:
    csv = "image,label\n1,cat\n2,dog\n3,cat\n4,dog\n"
    files = ("train/1.jpg", "train/2.jpg", "valid/3.jpg", "valid/4.jpg")
    found, _, notes = read(folder(tmp_path / "a", csv, *files))
    assert found["train"] == {"train/1.jpg": 0, "train/2.jpg": 1}
    assert found["val"] == {"valid/3.jpg": 0, "valid/4.jpg": 1} and notes == []
    found, _, notes = read(folder(tmp_path / "b", csv, "1.jpg", "2.jpg", "3.jpg", "4.jpg"))
    assert [len(rows) for rows in found.values()] == [4]
    [note] = notes
    assert "no row for validation; add a column split" in note


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    csv = changed("split\n", "split,width\n", "train\n", "train,7\n", "val\n", "val,7\n")
    csv += "x,,test,7\ny,,test,7\n"
    root = folder(tmp_path / "data", csv, *SIX, "other/z.jpg", "x.jpg", "other/w.mp4")
    (root / "other/w.mp4").write_bytes(b"video")
    found, _, notes = read(root)
    assert found == {"train": TRAIN, "val": VAL}
    for text in (
        "1 file not read: 1 .mp4 (other/w.mp4)",
        "2 rows of split test not read",
        "1 column not read (first: width)",
        f"1 image of {root} in no row and not read (first: {root}/other/z.jpg)",
    ):
        assert any(text in note for note in notes), (text, notes)
    assert len(notes) == 4


def changed(*pairs: str, more: str = "") -> str:
    text = SPLIT
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        text = text.replace(old, new)
    return text + more


IDS = changed("cat", "70000000", "dog", "1", "eel", "2")
WRONG: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "images missing": (
        changed(more="z,cat,train\ny,cat,val\n"),
        ("2 rows without their image", "8, z"),
    ),
    "a row twice": (changed(more="a.jpg,cat,train\n"), ("of another row", "as line 2, a)")),
    "labels missing": (changed("a,cat", "a,", "e,cat", "e, "), ("2 rows without a label",)),
    "a label of validation": (changed(more="x.jpg,fox,val\n"), ("a label that no training image",)),
    "all at once": (changed("a,cat", "a,", more="y,cat,val\n"), ("without their", "without a la")),
    "an unknown split": (changed("val", "hold"), ("2 rows of no known", "line 6, e: 'hold'")),
    "an empty split": (changed(",val", ","), ("2 rows of no known split", "write train, val or")),
    "two of validation": (changed("e,cat,val", "e,cat,valid"), ("val and valid both name the",)),
    "ids as labels": (IDS, ("labels up to 70000000",)),
    "no column of labels": ("image,x\na,1\n", ("params.label_column: one of image, x",)),
    "no column of images": ("foto,label\na,cat\n", ("'foto,label', has no column image",)),
    "no line of names": ("a,cat\nb,dog\n", ("its first line, 'a,cat', has no column image",)),
    "a column twice": ("image,label,label\na,cat,dog\n", ("has the column label twice",)),
    "cells missing": (changed(more="x,cat\n"), ("1 row with other than 3 cells", "line 8")),
    "an open quote": (changed(more='x,"cat,train\n'), ("line 8: unexpected end of data",)),
    "no CSV": ("PK\x03\x04", ("its first line",)),
    "no text": ("caf\xe9".encode("latin-1"), ("is not UTF-8",)),
    "no rows": ("image,label,split\n", ("holds no row below the names",)),
    "no training": (changed("train", "val"), ("no row of the split train",)),
    "one class": (changed("dog", "cat", "eel", "cat"), ("one class only",)),
    "one name for several": (changed(more="g,cat,train\n"), ("for several images", "line 8, g")),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_are_refused_with_counts_and_lines(case: str, tmp_path: Path) -> None:
    csv, expected = WRONG[case]
    with pytest.raises(UsageError) as refused:
        opened(folder(tmp_path, csv, *SIX, "x.jpg", "g.jpg", "images/g.jpg"))
    for text in expected:
        assert any(text in problem for problem in refused.value.problems), refused.value.problems


NUMBERED = changed("cat", "1", "dog", "2", "eel", "3")
PARAMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "too few classes": ({"num_classes": 2}, SPLIT, "params.num_classes: .* has 3 classes"),
    "no such file": ({"labels": "label.csv"}, SPLIT, "label.csv: cannot be read"),
    "no labels": ({"labels": None, "label_separator": "|"}, SPLIT, "separator requires labels"),
    "flat images": ({"labels": None}, SPLIT, "name a CSV file with the labels in params.labels"),
    "a class too few": ({"class_names": ["1", "2"]}, NUMBERED, "class_names does not list .*3"),
}


@pytest.mark.parametrize("case", PARAMS)
def test_wrong_parameters_are_refused(case: str, tmp_path: Path) -> None:
    params, csv, expected = PARAMS[case]
    with pytest.raises(UsageError, match=expected):
        opened(folder(tmp_path, csv), **params)


OTHER_NAMES = {"image_column": "Image Index", "label_column": "Finding"}
NAMED: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "columns": (changed("image,label", "Image Index,Finding"), OTHER_NAMES, [0, 1, 2, 1]),
    "classes in another order": (SPLIT, {"class_names": ANIMALS[::-1]}, [2, 1, 0, 1]),
    "classes of integers": (
        changed("cat", "0", "dog", "1", "eel", "2"),
        {"class_names": ANIMALS},
        [0, 1, 2, 1],
    ),
    "classes whose names are integers": (
        changed("cat", "2", "dog", "3", "eel", "1"),
        {"class_names": ["2", "3", "1"]},
        [0, 1, 2, 1],
    ),
}


@pytest.mark.parametrize("case", NAMED)
def test_columns_and_classes_may_be_named(case: str, tmp_path: Path) -> None:
    csv, params, labels = NAMED[case]
    found, names, _ = read(folder(tmp_path, csv), **params)
    assert [*found["train"].values()] == labels
    assert names == params.get("class_names", ANIMALS)


def test_the_file_may_lie_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "data", "image,label\na,dog\n")
    folder(tmp_path / "here", SPLIT, "x", name="own.csv")
    monkeypatch.chdir(tmp_path / "here")
    for labels in (str(tmp_path / "here/own.csv"), "own.csv"):
        found, _, notes = read(tmp_path / "data", labels=labels)
        assert found == {"train": TRAIN, "val": VAL}
        assert notes == [f"{tmp_path}/data: 1 file not read: 1 .csv (labels.csv)"]


def test_what_mixes_single_labels_is_refused_with_several(tmp_path: Path) -> None:
    root = folder(tmp_path, BY_SIGN)
    params = {"data": str(root), "labels": "labels.csv", "label_separator": "|"}
    train = {"mixup": 0.2, "label_smoothing": 0.1, "batch_size": 2}
    (tmp_path / "job.yaml").write_text(json.dumps({"params": params, "train": train}))
    says = "train.label_smoothing, train.mixup: the images may have several"
    with pytest.raises(UsageError, match=says):
        checks.check(load(tmp_path / "job.yaml"))


@dataclass
class Layout:
    photos: list[str]
    texts: dict[str, str] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """Records of each split; empty: the folder is refused."""
    says: str = ""
    """Of the refusal, or of a note."""


def of(pattern: str, count: int = 4) -> list[str]:
    return [pattern.format(n) for n in range(count)]


def rows(header: str, row: Callable[[int], str], count: int = 4) -> str:
    return "".join(f"{line}\n" for line in (header, *map(row, range(count))))


FOUR = {"train": 4}
BOTH = FOUR | {"val": 4}
PETS = ["cat", "dog"]
LIST = {"labels": "all.txt"}
SPLITS = [*of("train/cat/{}.jpg"), *of("train/dog/{}.jpg")]
MNIST = [f"{s}/{k}/{n}.png" for s in ("training", "testing") for k in "01" for n in "ab"]
BREEDS = rows("id,breed", lambda n: f"{n},{'ab'[n % 2]}")
KAGGLE = {"labels": "all.csv", "image_column": "id", "label_column": "breed"}
HUB = rows("file_name,label", lambda n: f"{n}.jpg,{'ab'[n % 2]}")
HUB_WHOLE = rows("file_name,label", lambda n: f"{('train', 'val')[n // 4]}/{n % 4}.jpg,{n % 2}", 8)
ROBOFLOW = rows("filename,class", lambda n: f"{n}.jpg,{PETS[n % 2]}")
OF_ROBOFLOW = {"image_column": "filename", "label_column": "class"}
ALBATROSS = of("images/00{}.Albatross/x.jpg")
LISTED = {"all.txt": "1 001.Albatross/x.jpg\n"}
PET_LIST = {"all.txt": "#Image CLASS-ID SPECIES BREED ID\nAbyssinian_0 1 1 1\n"}
NO_HEADER = {"all.txt": rows("0.jpg 0", lambda n: f"{n}.jpg {n % 2}")}
NO_SPLIT = "has no folder train/.*params.labels"
LAYOUTS = {
    "a competition's test without labels": Layout(
        [*SPLITS, *of("test/{}.jpg", 5)],
        counts={"train": 8},
        says="test/ (5 files) has no class folders and is not used",
    ),
    "Hugging Face, a table in each split": Layout(
        [*of("train/{}.jpg"), *of("test/{}.jpg")],
        {"train/metadata.csv": HUB, "test/metadata.csv": HUB},
        counts=BOTH,
    ),
    "Hugging Face, one table": Layout(
        [*of("train/{}.jpg"), *of("val/{}.jpg")], {"metadata.csv": HUB_WHOLE}, counts=BOTH
    ),
    "Hugging Face, JSON lines": Layout(
        of("train/{}.jpg"), {"train/metadata.jsonl": "{}"}, says="ignore"
    ),
    "Kaggle, ids without a suffix": Layout(
        [*of("train/{}.jpg"), *of("test/9{}.jpg")],
        {"all.csv": BREEDS, "sample_submission.csv": "id,a,b\n90,0.5,0.5\n"},
        KAGGLE,
        FOUR,
        "4 images of",
    ),
    "Kaggle, no column named": Layout(
        of("train/{}.jpg"), {"all.csv": BREEDS}, {"labels": "all.csv"}, says="image_column"
    ),
    "Roboflow": Layout(
        [*of("train/{}.jpg"), *of("valid/{}.jpg"), *of("test/{}.jpg")],
        {f"{split}/_annotations.csv": ROBOFLOW for split in ("train", "valid", "test")},
        {"labels": "_annotations.csv", **OF_ROBOFLOW},
        BOTH,
        "4 images of",
    ),
    "MNIST as PNG": Layout(MNIST, counts=BOTH),
    "a list without a header": Layout(
        of("{}.jpg"), NO_HEADER, LIST, says="params.image_column and params.label_column"
    ),
    "CUB-200": Layout(ALBATROSS, LISTED, says=NO_SPLIT),
    "CUB-200, its list": Layout(ALBATROSS, LISTED, LIST, says="params.image_column"),
    "Oxford pets": Layout(of("i/Aby_{}.jpg"), PET_LIST, LIST, says="params.image_column"),
    "iNaturalist": Layout(of("train2019/Birds/202/{}.jpg"), {"train2019.json": ""}, says=NO_SPLIT),
    "annotations beside images": Layout(
        SPLITS, {"train/a.xml": "", "train/b.xml": ""}, says=r"2 files not .*\*\.xml"
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_folder_is_read_or_refused_with_the_key_to_write(case: str, tmp_path: Path) -> None:
    layout = LAYOUTS[case]
    for name in [*layout.photos, *layout.texts]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(layout.texts[name].encode() if name in layout.texts else JPG)
    if not layout.counts:
        with pytest.raises(UsageError, match=layout.says) as refused:
            damage.opened(tmp_path, **layout.params)
        assert len(refused.value.problems) == 1
        return
    _, data = damage.opened(tmp_path, **layout.params)
    assert {split: source.count() for split, source in data.sources.items()} == layout.counts
    for split, count in layout.counts.items():
        assert sum(len(c["label"]) for c, _ in damage.preprocessed(data, split)) == count
    notes = " ".join(data.notes())
    assert layout.says in notes if layout.says else notes == ""
