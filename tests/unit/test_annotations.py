"""Images with their labels in a CSV file: read by the parameters of ImageClassification, or refused."""

from __future__ import annotations

import json
from functools import partial
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

SIX = ("images/a.jpg", "images/b.png", "images/c", "images/deep/d.jpg", "e.JPG", "images/_f.jpg")
SPLIT = (
    "id,label,split\na,cat,train\nb,dog,train\nc,eel,train\nd,dog,train\ne,cat,val\n_f,eel,val\n"
)


def folder(root: Path, csv: str | bytes, *files: str, name: str = "labels.csv") -> Path:
    for file in files or SIX:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(PNG if file.endswith("png") else JPG)
    (root / name).write_bytes(csv if isinstance(csv, bytes) else csv.encode())
    return root


opened = partial(damage.opened, labels="labels.csv")


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


TRAIN = {"images/a.jpg": 0, "images/b.png": 1, "images/c": 2, "images/deep/d.jpg": 1}
VAL = {"e.JPG": 0, "images/_f.jpg": 2}
ALIKE = {
    "stems": SPLIT,
    "names": SPLIT.replace("\na,", "\na.jpg,")
    .replace("\nd,", "\nd.jpg,")
    .replace("\ne,", "\ne.JPG,"),
    "paths": SPLIT.replace("\na,", "\nimages/a.jpg,").replace("\nd,", "\n./images\\deep\\d.jpg,"),
    "paths without a suffix": SPLIT.replace("\nd,", "\nimages/deep/d,"),
    "a byte order mark and Windows": "\ufeff" + SPLIT.replace("\n", "\r\n"),
    "semicolons": SPLIT.replace(",", ";"),
    "tabs": SPLIT.replace(",", "\t"),
    "spaces and quotes": SPLIT.replace("cat", '"cat"').replace(",dog", ", dog "),
    "the index of pandas": "".join(
        f"{'' if i == 0 else i},{x}\n" for i, x in enumerate(SPLIT.split())
    ),
    "other names": SPLIT.replace("id,label,split", "File_Name,class,Subset"),
    "training and validation": SPLIT.replace(",train", ",Training").replace(",val", ",VALIDATION"),
    "another order": "split,label,id\n"
    + "".join(",".join(x.split(",")[::-1]) + "\n" for x in SPLIT.split()[1:]),
}


@pytest.mark.parametrize("case", ALIKE)
def test_text_labels_are_classes_in_sorted_order_however_they_are_written(
    case: str, tmp_path: Path
) -> None:
    found, names, notes = read(folder(tmp_path, ALIKE[case]))
    assert (found, names, notes) == ({"train": TRAIN, "val": VAL}, ["cat", "dog", "eel"], [])


def test_numbers_are_the_numbers_of_their_classes(tmp_path: Path) -> None:
    csv = SPLIT.replace("cat", "0").replace("dog", "10").replace("eel", "2")
    found, names, _ = read(folder(tmp_path, csv))
    assert (found["val"], names) == ({"e.JPG": 0, "images/_f.jpg": 2}, [str(i) for i in range(11)])
    assert read(folder(tmp_path, csv.replace("10", "10.0")))[0] == found
    padded = csv.replace(",0", ",000").replace(",2", ",002").replace(",10", ",010")
    assert read(folder(tmp_path, padded))[:2] == (
        {
            "train": {"images/a.jpg": 0, "images/b.png": 2, "images/c": 1, "images/deep/d.jpg": 2},
            "val": {"e.JPG": 0, "images/_f.jpg": 1},
        },
        ["000", "002", "010"],
    )


BY_SIGN = "id,label,split\na,cat,train\nb,dog|cat,train\nc,,train\nd,eel,train\ne,cat,val\n_f,dog|cat,val\n"
PER_CLASS = (
    "id,cat,dog,eel,split\na,1,0,0,train\nb,1,1,0,train\nc,0,0,0,train\nd,0,0,1,train\ne,1,0,0,val\n"
    "_f,1,1,0,val\n"
)
LISTS = (
    "id;label;split\na;['cat'];train\nb;['dog', \"cat\"];train\nc;[];train\nd;[eel];train\ne;[cat];val\n"
    "_f;['dog','cat'];val\n"
)
SEVERAL: dict[str, tuple[dict[str, Any], str]] = {
    "separated": ({"label_separator": "|"}, BY_SIGN),
    "by spaces": ({"label_separator": " "}, BY_SIGN.replace("|", "  ")),
    "lists": ({}, LISTS),
    "lists with commas": ({}, LISTS.replace("dog", "dog, small").replace("[eel]", '["eel"]')),
    "a column per class": ({}, PER_CLASS),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_several_labels_of_an_image_are_a_vector_of_0_and_1(case: str, tmp_path: Path) -> None:
    params, csv = SEVERAL[case]
    found, names, notes = read(folder(tmp_path, csv), **params)
    assert names == ["cat", "dog, small" if "commas" in case else "dog", "eel"]
    train = {"images/a.jpg": [1, 0, 0], "images/b.png": [1, 1, 0], "images/c": [0, 0, 0]}
    assert found["train"] == {**train, "images/deep/d.jpg": [0, 0, 1]}
    assert found["val"] == {"e.JPG": [1, 0, 0], "images/_f.jpg": [1, 1, 0]}
    [note] = notes
    assert "1 image without a label, so of no class (first: c)" in note
    assert opened(tmp_path, **params)[0].params["multi_label"] is True


def test_columns_of_which_exactly_one_holds_1_are_one_label(tmp_path: Path) -> None:
    csv = (
        "id,cat,dog,eel,split\na,1,-1,-1,train\nb,-1,1,-1,train\nc,-1,-1,1,train\nd,-1,1,-1,train\n"
    )
    found, names, notes = read(folder(tmp_path, csv + "e,1,-1,-1,val\n_f,-1,-1,1,val\n"))
    assert (found, names, notes) == ({"train": TRAIN, "val": VAL}, ["cat", "dog", "eel"], [])


def test_minus_1_beside_0_in_the_columns_of_classes_is_refused(tmp_path: Path) -> None:
    csv = PER_CLASS.replace("b,1,1,0", "b,1,-1,0")
    with pytest.raises(
        UsageError, match=r"1 row with -1 in the column .* write 0 or 1, .*line 3, b"
    ):
        opened(folder(tmp_path, csv))
    withheld = csv.replace("b,1,-1,0,train", "b,-1,-1,-1,test")  # of a split that is not read
    assert "images/b.png" not in read(folder(tmp_path, withheld))[0]["train"]


def test_the_loss_of_several_labels_is_binary_and_its_metric_counts_all_of_them() -> None:
    recipe = ImageClassification(data=".", labels="x.csv", multi_label=True, num_classes=3)
    logits = torch.tensor([[2.0, -1.0, 0.5], [-3.0, 1.0, -0.5]])
    target = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
    batch = {"image": logits, "label": target}
    expected = -(
        target * logits.sigmoid().log() + (1 - target) * (1 - logits.sigmoid()).log()
    ).mean()
    found = recipe.validation_step(torch.nn.Identity(), batch)
    assert torch.allclose(recipe.training_step(torch.nn.Identity(), batch), expected)  # type: ignore[arg-type]
    assert torch.allclose(found["loss"], expected)
    [(name, metric)] = recipe.metrics().items()
    metric.update(found["preds"], found["target"])
    assert (name, metric.compute()) == ("f1", pytest.approx(2 * 2 / (2 * 2 + 1 + 1)))


def test_without_a_column_for_it_the_split_is_the_folder(tmp_path: Path) -> None:
    csv = "id,label\n1,cat\n2,dog\n3,cat\n4,dog\n"
    files = ("train/1.jpg", "train/2.jpg", "valid/3.jpg", "valid/4.jpg")
    found, _, notes = read(folder(tmp_path / "a", csv, *files))
    assert found == {
        "train": {"train/1.jpg": 0, "train/2.jpg": 1},
        "val": {"valid/3.jpg": 0, "valid/4.jpg": 1},
    }
    assert notes == []
    found, _, notes = read(folder(tmp_path / "b", csv, "1.jpg", "2.jpg", "3.jpg", "4.jpg"))
    assert [len(rows) for rows in found.values()] == [4]
    [note] = notes
    assert "no row for validation; add a column split" in note


def test_classes_that_only_capitals_tell_apart_are_named(tmp_path: Path) -> None:
    _, names, [note] = read(folder(tmp_path, SPLIT.replace("b,dog", "b,Cat")))
    assert names == ["Cat", "cat", "dog", "eel"]
    assert "classes that look alike: 'Cat', 'cat'" in note


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    csv = (
        SPLIT.replace("split\n", "split,width\n")
        .replace("train\n", "train,7\n")
        .replace("val\n", "val,7\n")
    )
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


NUMBERS = ("dog", "1", "eel", "2")
WRONG: dict[str, tuple[str, list[str]]] = {
    "images missing": (
        changed(more="x,cat,train\ny,cat,val\n"),
        ["2 rows without their image", "line 8, x"],
    ),
    "a row twice": (
        changed(more="a.jpg,cat,train\n"),
        ["1 row for the image of another row", "as line 2, a)"],
    ),
    "labels missing": (changed("a,cat", "a,", "e,cat", "e,nan"), ["2 rows without a label"]),
    "a label of validation": (
        changed(more="x.jpg,fox,val\n"),
        ["1 row with a label that no training image"],
    ),
    "all at once": (
        changed("a,cat", "a,", more="y,cat,val\n"),
        ["without their image", "without a label"],
    ),
    "an unknown split": (
        changed("val", "hold"),
        ["2 rows of no known split", "first: line 6, e: 'hold'"],
    ),
    "an empty split": (
        changed(",val", ","),
        ["2 rows of no known split", "write train, val or test"],
    ),
    "two of validation": (changed("e,cat,val", "e,cat,valid"), ["val and valid both name the val"]),
    "an array": (
        changed("a,cat", "a,['cat' 'dog']", "b,dog", "b,[1 2]"),
        ["2 rows with an unclear list"],
    ),
    "several perhaps": (
        changed("a,cat", "a,cat|dog"),
        ["1 row with '|' in", "label_separator: '|' if"],
    ),
    "fractions": (changed("cat", "0.5", *NUMBERS), ["2 rows with labels such as 0.5 or -1"]),
    "negative numbers": (changed("cat", "-1", *NUMBERS), ["number no class"]),
    "ids as labels": (changed("cat", "70000000", *NUMBERS), ["labels up to 70000000"]),
    "no column of labels": (
        "id,x,y\na,1,2\nb,3,4\n",
        ["write params.label_column: one of id, x, y"],
    ),
    "no column of images": (
        "foto,label\na,cat\nq,dog\n",
        ["params.image_column: one of foto, label"],
    ),
    "no line of names": ("a,cat\nb,dog\n", ["its first line names an image"]),
    "two columns of images": (
        "id,path,label\na,b,cat\nb,a,dog\n",
        ["id and path could both be meant"],
    ),
    "a column twice": ("id,label,label\na,cat,dog\n", ["has the column label twice"]),
    "cells missing": (changed(more="x,cat\n"), ["1 row with other than 3 cells", "line 8"]),
    "an open quote": (
        changed(more='x,"cat,train\n'),
        ["labels.csv: line 8: unexpected end of data"],
    ),
    "no CSV": ("PK\x03\x04", ["holds no row"]),
    "no rows": ("id,label,split\n", ["holds no row below the names"]),
    "no training": (changed("train", "val"), ["no row of the split train"]),
    "one class": (changed("dog", "cat", "eel", "cat"), ["one class only"]),
}
PARAMS: dict[str, tuple[dict[str, Any], str]] = {
    "too few classes": ({"num_classes": 2}, "params.num_classes: labels.csv has 3 classes"),
    "no such file": ({"labels": "label.csv"}, "label.csv: cannot be read"),
    "no labels": ({"labels": None, "label_separator": "|"}, "label_separator requires labels"),
    "flat images": ({"labels": None}, "name a CSV file with the labels in params.labels"),
}


MARKS = ["NA", "N/A", "#N/A", "None", "NULL", "null", "<NA>", "nan", "NaN", " "]


@pytest.mark.parametrize("labels", [("cat", "dog"), ("0", "1")])
@pytest.mark.parametrize("mark", MARKS)
def test_a_mark_for_a_missing_label_is_no_class_unless_it_is_listed(
    mark: str, labels: tuple[str, str], tmp_path: Path
) -> None:
    root = folder(tmp_path, f"id,label\na,{labels[0]}\nb,{labels[1]}\nc,{mark}\nd,{labels[1]}\n")
    with pytest.raises(
        UsageError, match=r"1 row without a label, or with NA or the like; .* line 4, c"
    ):
        opened(root)
    if mark.strip():
        found, names, _ = read(root, class_names=[mark, *labels])
        assert names == [mark, *labels] and sorted(found["train"].values()) == [0, 1, 2, 2]


@pytest.mark.parametrize(
    "cells", ["cat|{0}", "{0}|cat", "cat|dog|{0}", "['cat', '{0}']", "['{0}']"]
)
@pytest.mark.parametrize("mark", ["NA", "None", "nan"])
def test_a_mark_among_the_labels_of_a_cell_is_never_dropped(
    mark: str, cells: str, tmp_path: Path
) -> None:
    root = folder(tmp_path, f'id,label\na,dog\nb,"{cells.format(mark)}"\nc,cat|\nd,{mark}\n')
    with pytest.raises(
        UsageError, match=r"1 row without a label, or with NA or the like; .* line 3, b"
    ):
        opened(root, label_separator="|")
    found, names, _ = read(root, label_separator="|", class_names=["cat", mark, "dog"])
    assert names == ["cat", mark, "dog"] and found["train"]["images/b.png"][1] == 1
    assert found["train"]["images/c"] == [1, 0, 0] and found["train"]["images/deep/d.jpg"] == [
        0,
        1,
        0,
    ]


def test_a_mark_that_is_the_whole_cell_is_an_image_of_no_class_and_noted(tmp_path: Path) -> None:
    root = folder(tmp_path, "id,label\na,cat|dog\nb,NA\nc,\nd,dog\n")
    found, names, notes = read(root, label_separator="|")
    assert names == ["cat", "dog"] and found["train"]["images/b.png"] == [0, 0]
    assert any("2 images without a label, so of no class (first: b)" in note for note in notes)


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ("?", r"with '\?' \(1\) where most labels are numbers; .* \(first: line 62, 60: \?\)"),
        ("unknown", "with 'unknown' .1. where most labels are numbers"),
        ("True", "with 'True' .1. where most labels are numbers"),
    ],
)
def test_text_beside_numbers_does_not_renumber_the_classes(
    odd: str, says: str, tmp_path: Path
) -> None:
    files = [f"images/{number}.jpg" for number in range(61)]
    csv = (
        "id,label\n" + "".join(f"{number},{number % 12}\n" for number in range(60)) + f"60,{odd}\n"
    )
    with pytest.raises(UsageError, match=says):
        opened(folder(tmp_path, csv, *files))
    listed = [*map(str, range(12)), odd]
    found, names, _ = read(tmp_path, class_names=listed)
    assert names == listed and found["train"] == {
        f"images/{n}.jpg": n % 12 if n < 60 else 12 for n in range(61)
    }
    # Numbers of one width are text, too, which sorts as they do.
    found, names, _ = read(folder(tmp_path, csv.replace(odd, "012").replace(",", ",0"), *files))
    assert len(names) == 13 and names == sorted(names)


CLASSES = {
    "playing cards": [*map(str, range(2, 11)), "J", "Q", "K", "A"],
    "signs": [*map(str, range(10)), *"+-x/="],
    "ages": ["1", "2", "10+"],
    "few rows": [*map(str, range(12)), "?"],
    "polarity": [*["-1", "0", "1"] * 5, "mixed"],
    "one number among text": ["1", "cat", "dog"],
}


@pytest.mark.parametrize("case", CLASSES)
def test_text_that_is_not_rare_beside_numbers_is_a_class_and_another_numbering_is_noted(
    case: str, tmp_path: Path
) -> None:
    labels = CLASSES[case]
    csv = "id,label\n" + "".join(f"{n},{label}\n" for n, label in enumerate(labels))
    root = folder(tmp_path, csv, *(f"images/{n}.jpg" for n in range(len(labels))))
    found, names, notes = read(root)
    assert names == sorted({*labels})
    assert list(found["train"].values()) == [names.index(label) for label in labels]
    assert any("numbers are not the numbers of their classes" in note for note in notes)


@pytest.mark.parametrize(
    "written", ["True FALSE true false", "True true True False", "True False 1 0"]
)
def test_one_sign_in_several_spellings_is_no_further_class(written: str, tmp_path: Path) -> None:
    rows = "".join(f"{id},{text}\n" for id, text in zip("abcd", written.split(), strict=True))
    with pytest.raises(UsageError, match=r"with True and False in several spellings .* write one"):
        opened(folder(tmp_path, "id,label\n" + rows))


def test_a_column_per_class_may_have_the_name_of_a_mark(tmp_path: Path) -> None:
    found, names, _ = read(folder(tmp_path, "id,None,crack\na,1,0\nb,0,1\nc,1,0\nd,0,1\n"))
    assert names == ["None", "crack"] and [*found["train"].values()] == [0, 1, 0, 1]


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_are_refused_with_counts_and_lines(case: str, tmp_path: Path) -> None:
    csv, expected = WRONG[case]
    with pytest.raises(UsageError) as refused:
        opened(folder(tmp_path, csv, *SIX, *(["x.jpg"] if "x.jpg" in csv else [])))
    for text in expected:
        assert any(text in problem for problem in refused.value.problems), refused.value.problems


@pytest.mark.parametrize("case", PARAMS)
def test_wrong_parameters_are_refused(case: str, tmp_path: Path) -> None:
    params, expected = PARAMS[case]
    with pytest.raises(UsageError, match=expected):
        opened(folder(tmp_path, SPLIT), **params)


def test_ids_that_several_images_share_are_refused_unless_their_split_tells(tmp_path: Path) -> None:
    csv = "id,label,split\n1,cat,train\n2,dog,train\n1,dog,val\n2,cat,val\n"
    files = ("train/1.jpg", "train/2.jpg", "val/1.jpg", "val/2.jpg")
    found, _, _ = read(folder(tmp_path / "a", csv, *files))
    assert found == {
        "train": {"train/1.jpg": 0, "train/2.jpg": 1},
        "val": {"val/1.jpg": 1, "val/2.jpg": 0},
    }
    with pytest.raises(
        UsageError, match=r"1 row for several images; .*line 2, 1: x/1.jpg and y/1.jpg"
    ):
        opened(
            folder(
                tmp_path / "b",
                "".join(csv.splitlines(keepends=True)[:3]),
                "x/1.jpg",
                "y/1.jpg",
                "2.jpg",
            )
        )


def test_columns_may_be_named_or_found_by_their_content(tmp_path: Path) -> None:
    """A file of isic-archive.com, of pandas' get_dummies, and one whose ids have a name of their own."""
    more = SPLIT.replace("id,label", "Image Index,Finding,Finding 2").replace(",cat", ",cat,x")
    more = more.replace(",dog", ",dog,y").replace(",eel", ",eel,x")
    found, names, _ = read(folder(tmp_path, more), label_column="Finding")
    assert (found, names) == ({"train": TRAIN, "val": VAL}, ["cat", "dog", "eel"])
    dummies = (
        "image,age,MEL,NV,split\na,3,True,False,train\nb,4,False,True,train\nc,1,True,True,train\n"
    )
    found, names, notes = read(folder(tmp_path, dummies), class_names=["NV", "MEL"])
    assert found == {"train": {"images/a.jpg": [0, 1], "images/b.png": [1, 0], "images/c": [1, 1]}}
    assert names == ["NV", "MEL"] and any("(first: age)" in note for note in notes)
    found, names, _ = read(
        folder(tmp_path, SPLIT), class_names=["eel", "dog", "cat"], multi_label=True
    )
    assert (found["val"], names) == (
        {"e.JPG": [0, 0, 1], "images/_f.jpg": [1, 0, 0]},
        ["eel", "dog", "cat"],
    )
    numbered = SPLIT.replace("cat", "0").replace("dog", "1.0").replace("eel", "2")
    found, names, _ = read(folder(tmp_path, numbered), class_names=["cat", "dog", "eel"])
    assert (found, names) == ({"train": TRAIN, "val": VAL}, ["cat", "dog", "eel"])
    found, names, _ = read(folder(tmp_path, SPLIT.replace("cat", "[cat]")), label_separator="")
    assert (found, names) == ({"train": TRAIN, "val": VAL}, ["[cat]", "dog", "eel"])


@pytest.mark.parametrize("names", [["1", "2", "3"], ["2", "3", "1"], ["3.0", "2.0", "1.0"]])
def test_numbers_that_pandas_wrote_as_floats_are_the_names_given(
    names: list[str], tmp_path: Path
) -> None:
    floats = SPLIT.replace("cat", "1.0").replace("dog", "2.0").replace("eel", "3.0")
    found, classes, _ = read(folder(tmp_path, floats), class_names=names)
    number = [names.index(name if name in names else f"{name}.0") for name in "123"]
    assert classes == names
    assert found["train"] == {key: number[label] for key, label in TRAIN.items()}
    with pytest.raises(
        UsageError, match=r"1 row with a label that class_names does not list .* 0\b"
    ):
        read(folder(tmp_path, floats.replace("a,1.0", "a,0.0")), class_names=names)


def test_the_file_may_lie_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "data", "id,label\na,dog\n")
    folder(tmp_path / "here", SPLIT, "x", name="own.csv")
    monkeypatch.chdir(tmp_path / "here")
    for labels in (str(tmp_path / "here/own.csv"), "own.csv"):
        found, _, notes = read(tmp_path / "data", labels=labels)
        assert found == {"train": TRAIN, "val": VAL}
        assert notes == [f"{tmp_path}/data: 1 file not read: 1 .csv (labels.csv)"]


def test_what_mixes_single_labels_is_refused_with_several(tmp_path: Path) -> None:
    root = folder(tmp_path, SEVERAL["a column per class"][1])
    params = {"data": str(root), "labels": "labels.csv"}
    train = {"mixup": 0.2, "label_smoothing": 0.1, "batch_size": 2}
    (tmp_path / "job.yaml").write_text(json.dumps({"params": params, "train": train}))
    with pytest.raises(
        UsageError, match=r"train.label_smoothing, train.mixup: the images may have several"
    ):
        checks.check(load(tmp_path / "job.yaml"))
