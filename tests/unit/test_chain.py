"""What a chain does with records: the same wherever it runs, and images as Pillow and torchvision make them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import spoilt
import torch
from damage import chained
from PIL import Image, ImageOps
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from stoker.chain.entries import as_stages
from stoker.chain.picture import Picture
from stoker.chain.transforms import GaussianBlurs
from stoker.data import CheckLabel, DecodeImage, RandomResizedCrop, RecordTransform
from stoker.errors import ChainError, UsageError
from stoker.protocol import ID_COLUMN, BadRecord, Record
from stoker.read.sources import record_id


def jpeg(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 48, 3), dtype=np.uint8)
    return spoilt.encoded("JPEG", Image.fromarray(pixels), quality=95)


def records(n: int) -> list[Record]:
    return [{"key": f"r{i}", "image": jpeg(i), "label": i % 3} for i in range(n)]


def cropped(rows: list[Record], epoch: int) -> Any:
    crop = v2.RandomResizedCrop(32, antialias=True)
    columns, _ = chained(rows, DecodeImage(), crop, v2.RandomHorizontalFlip(), seed=7, epoch=epoch)
    return columns[IMAGE]


def test_where_a_record_is_processed_does_not_change_it_but_the_epoch_does() -> None:
    together = cropped(records(6), epoch=3)
    for i in (4, 1):
        assert np.array_equal(cropped([records(6)[i]], epoch=3)[0], together[i])
    assert not np.array_equal(together, cropped(records(6), epoch=1))


def test_text_counts_with_its_length_in_the_size_of_a_block() -> None:
    _, report = chained({"key": str(i), "text": "x" * 1000} for i in range(8))
    assert 8_000 <= report.bytes_out < 9_000


def test_any_callable_and_preprocessor_stand_between_record_stages() -> None:
    import pandas as pd
    from ray.data.preprocessors import StandardScaler

    scaler = StandardScaler(columns=["x"])
    scaler.stats_ = {"mean(x)": 2.0, "std(x)": 2.0}

    class Add(RecordTransform):
        def __call__(self, record: Record, rng: np.random.Generator) -> Record:
            return {**record, "x": record["x"] + 1.0}

    def double(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "x": batch["x"] * 2}

    rows = [{"key": str(i), "x": float(i)} for i in range(3)]
    columns, report = chained(rows, Add(), double, scaler, ("again", Add()))
    expected = (pd.Series([2.0, 4.0, 6.0]) - 2.0) / 2.0 + 1.0
    assert columns["x"].tolist() == expected.tolist()
    assert list(report.costs) == ["read", "Add", "double", "StandardScaler", "again"]


@pytest.mark.parametrize("index", [[0, 1, 1], [1, 2, 3], [2, 0, 1]])
@pytest.mark.parametrize("kind", ["int64", "float64", "object", "category", "str"])
def test_the_labels_of_a_series_say_whose_its_rows_are(index: list[int], kind: Any) -> None:
    import pandas as pd

    def run(values: Any) -> Any:
        rows = [{"key": str(i), "x": i} for i in range(3)]
        return chained(rows, lambda batch: {**batch, "y": values})[0]["y"].tolist()

    series = pd.Series([5.0, 6.0, 7.0], index=pd.Index(index).astype(kind))
    if sorted(index) == [0, 1, 2] and kind != "str":
        assert run(series) == [6, 7, 5]
    else:
        says = "column y is a pandas Series whose index has other labels"
        with pytest.raises(ChainError, match=says):
            run(series)
    assert run(series.reset_index(drop=True)) == run(series.to_numpy()) == [5, 6, 7]


def test_of_equal_keys_a_bad_record_is_taken_for_the_first() -> None:
    """Else one whose row was trained could seem to lie behind those."""
    rows = [{"key": str(i), "x": i} for i in range(3)]
    _, report = chained([BadRecord("1", "cannot be read"), *rows])
    assert [bad.place for bad in report.bad] == [0]


def test_a_bad_record_is_quarantined_with_its_reason_and_the_others_go_on() -> None:
    rows = records(4)
    rows[1]["image"] = rows[1]["image"][:300]
    rows[2]["label"] = 9
    rows += [BadRecord("r9", "cannot be read")]  # type: ignore[list-item]
    columns, report = chained(rows, DecodeImage(), CheckLabel(3))
    assert len(columns[ID_COLUMN]) == 2
    assert report.records == 5
    assert report.id_sum == sum(map(record_id, ["r0", "r1", "r2", "r3", "r9"]))
    assert report.bad_id_sum == sum(map(record_id, ["r1", "r2", "r9"]))
    assert {bad.key: bad.place for bad in report.bad} == {"r1": 1, "r2": 2, "r9": 4}
    reasons = {bad.key: bad.reason for bad in report.bad}
    assert reasons["r9"] == "cannot be read"
    assert "DecodeImage: DecodeError: cannot be decoded" in reasons["r1"]
    assert reasons["r2"] == "CheckLabel: ValueError: label 9 is outside 0…2"


MISFITS: list[tuple[list[Any], list[dict[str, Any]], str]] = [
    ([], [{"image": b"x"}], "still encoded bytes; add DecodeImage"),
    ([], [{"x": np.zeros(2)}, {"x": np.zeros(3)}], "differs in shape"),
    ([], [{"x": 1}, {"x": 0.5}], "column 'x' is float64 in record 1, int64 in"),
    ([lambda batch: 3], [{"x": 1}], "did not return a dict"),
]


@pytest.mark.parametrize(("stages", "rows", "expected"), MISFITS)
def test_records_that_do_not_fit_together_end_the_run(
    stages: Any, rows: Any, expected: str
) -> None:
    with pytest.raises(ChainError, match=expected):
        chained([{"key": str(i), **row} for i, row in enumerate(rows)], *stages)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (v2.MixUp(num_classes=3), "mixes the records of a batch; return it from on_device"),
        (DecodeImage, "is a class; write DecodeImage"),
        (3, "neither a transform nor a callable"),
    ],
)
def test_what_cannot_stand_in_a_chain_is_refused_by_name(entry: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        chained([], entry)


@pytest.mark.parametrize("shape", [(40, 48, 3), (3, 40, 48), (28, 28, 1), (16, 32, 64), (5, 6, 4)])
@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize(
    "entries", [[], [v2.RandomHorizontalFlip(p=1.0)], [v2.Lambda(lambda i: i)]]
)
def test_arrays_are_height_by_width_by_channels_and_tensors_have_channels_first(
    shape: tuple[int, ...], tensor: bool, entries: list[Any]
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    image = torch.from_numpy(pixels) if tensor else pixels
    columns, report = chained([{"key": "a", "image": image}], *entries)
    assert not report.bad
    first = columns[IMAGE].transpose(0, 3, 1, 2) if IMAGE in columns else columns["image"]
    expected = pixels if tensor else pixels.transpose(2, 0, 1)
    flipped = bool(entries) and isinstance(entries[0], v2.RandomHorizontalFlip)
    assert np.array_equal(first[0], expected[..., ::-1] if flipped else expected)


def test_stages_say_whether_their_result_may_be_kept_across_epochs() -> None:
    class Resize(v2.Resize):
        """A class of the user's own may do anything, whatever its name."""

    still = v2.Compose([v2.Resize(32), v2.CenterCrop(32)])
    chain = [DecodeImage(), CheckLabel(3), ("small", v2.Resize(40)), still]
    assert [stage.random for stage in as_stages(chain)] == [False] * 4
    moving = v2.Compose([v2.Resize(32), v2.RandomHorizontalFlip()])
    chain = [moving, v2.GaussianBlur(3), Resize(40), lambda batch: batch, v2.RandomResizedCrop(32)]
    assert [stage.random for stage in as_stages(chain)] == [True] * 5


IMAGE = "image__hwc"


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)

    def noise(*size: int) -> Any:
        image = Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))
        return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC), dtype=float)

    coarse, fine = noise(6, 8), noise(height // 4 + 1, width // 4 + 1)
    return Image.fromarray((0.8 * coarse + 0.2 * fine).astype(np.uint8))


def encoded(image: Image.Image, form: str = "JPEG", **options: Any) -> bytes:
    return spoilt.encoded(form, image, **({"quality": 90} if form == "JPEG" else {}), **options)


def reference(content: bytes, mode: str = "RGB") -> torch.Tensor:
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert(mode)
    return functional.pil_to_tensor(image)


def levels(ours: Any, theirs: torch.Tensor) -> tuple[int, float]:
    """Greatest and mean difference, of 255 levels."""
    difference = np.abs(ours.astype(int) - theirs.permute(1, 2, 0).numpy().astype(int))
    return int(difference.max()), float(difference.mean())


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "jpeg": ("JPEG", {}),
    "progressive": ("JPEG", {"progressive": True}),
    "without subsampling": ("JPEG", {"subsampling": 0}),
    "restart markers": ("JPEG", {"restart_marker_rows": 1}),
    "png": ("PNG", {}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_a_crop_equals_torchvision_on_the_same_box(kind: str, seed: int) -> None:
    form, options = KINDS[kind]
    content = encoded(photo(150, 200, seed), form, **options)
    box = RandomResizedCrop(64).box(150, 200, np.random.default_rng(seed))
    ours = Picture(content).resized_crop(box, 64, 64).pixels()
    theirs = functional.resized_crop(reference(content), *box, [64, 64], antialias=True)
    assert levels(ours, theirs)[0] <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(60, 84), (403, 601)])
def test_orientation_is_applied_also_where_the_picture_is_decoded_smaller(
    orientation: int, size: tuple[int, int]
) -> None:
    image = photo(*size)
    exif = image.getexif()
    exif[0x0112] = orientation
    content = encoded(image, exif=exif.tobytes())
    assert levels(Picture(content).pixels(), reference(content))[0] == 0
    box = RandomResizedCrop(32).box(
        *reference(content).shape[1:], np.random.default_rng(orientation)
    )
    picture = Picture(content).resized_crop(box, 32, 32)
    theirs = functional.resized_crop(reference(content), *picture.box, [32, 32], antialias=True)
    greatest, mean = levels(picture.pixels(), theirs)
    assert greatest <= 12
    assert mean <= 2


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (40, 1400), (375, 500), (900, 600)])
@pytest.mark.parametrize("color", ["RGB", "L"])
@pytest.mark.parametrize("form", ["JPEG", "grey JPEG", "CMYK JPEG", "PNG"])
@pytest.mark.long
def test_resize_and_centre_crop_equal_torchvision(
    size: tuple[int, int], color: str, form: str
) -> None:
    image = photo(*size).convert({"grey JPEG": "L", "CMYK JPEG": "CMYK"}.get(form, "RGB"))
    content = encoded(image, form.split()[-1])
    chain = [DecodeImage(color), CheckLabel(2), v2.Resize(40), v2.CenterCrop(32)]  # type: ignore[arg-type]
    columns, report = chained([{"key": "a", "image": content, "label": 1}], *chain)
    assert not report.bad
    theirs = v2.CenterCrop(32)(v2.Resize(40)(reference(content, color)))
    greatest, mean = levels(columns[IMAGE][0], theirs)
    assert greatest <= 12
    assert mean <= 2


def test_boxes_are_distributed_as_torchvisions() -> None:
    torch.manual_seed(0)
    module, ours = v2.RandomResizedCrop(32), RandomResizedCrop(32)
    image = torch.empty(3, 90, 130)
    theirs = np.array([list(module.make_params([image]).values())[:4] for _ in range(4000)])
    rng = np.random.default_rng(0)
    own = np.array([ours.box(90, 130, rng) for _ in range(4000)])
    quantiles = (0.1, 0.25, 0.5, 0.75, 0.9)
    assert np.abs(np.quantile(own, quantiles, 0) - np.quantile(theirs, quantiles, 0)).max() <= 4


@pytest.mark.parametrize("damage", ["cut", "cut with an end marker", "cut below the crop"])
def test_a_truncated_jpeg_is_quarantined_never_grey(damage: str) -> None:
    whole = encoded(photo(300, 400))
    content = whole[: len(whole) * (9 if "below" in damage else 5) // 10]
    if "marker" in damage:
        content += b"\xff\xd9"
    for crop in (v2.RandomResizedCrop(32), v2.Resize(32), v2.CenterCrop(400)):
        _, report = chained([{"key": "a", "image": content}], DecodeImage(), crop)
        [bad] = report.bad
        assert bad.reason.startswith("DecodeImage: DecodeError: cannot be decoded")


def test_fused_stages_are_one_in_the_report_and_a_user_behind_torchvision_gets_a_tensor() -> None:
    seen = []

    def user(batch: dict[str, Any]) -> dict[str, Any]:
        seen.append(batch["image"].shape)
        return batch

    chain = [DecodeImage(), CheckLabel(2), v2.RandomResizedCrop(32), v2.RandomHorizontalFlip()]
    row = {"key": "a", "image": encoded(photo(60, 80)), "label": 1}
    _, report = chained([row], *chain, user)
    fused = "DecodeImage+RandomResizedCrop+RandomHorizontalFlip"
    assert [*report.costs] == ["read", "CheckLabel", fused, "user"]
    assert seen == [(1, 3, 32, 32)]


@pytest.mark.parametrize("kind", ["float32", "uint8"])
def test_blurs_as_one_equal_torchvision_one_after_the_other(kind: str) -> None:
    modules = [v2.GaussianBlur(11) for _ in range(10)]
    image = torch.from_numpy(np.random.default_rng(0).random((3, 64, 72), dtype=np.float32))
    if kind == "uint8":
        image = (image * 255).to(torch.uint8)
    blurs = GaussianBlurs([(tuple(m.kernel_size), tuple(m.sigma)) for m in modules])
    torch.manual_seed(5)
    ours = blurs({"key": "a", "image": image}, np.random.default_rng(0))["image"]
    torch.manual_seed(5)
    theirs = v2.Compose(modules)(image)
    difference = np.abs(ours.numpy().astype(float) - theirs.numpy().astype(float)).max()
    assert difference <= (1e-6 if kind == "float32" else 2)


def test_a_kernel_larger_than_the_image_is_torchvisions_to_refuse() -> None:
    row = {"key": "a", "image": np.zeros((4, 4, 3), np.uint8)}
    _, report = chained([row], v2.GaussianBlur(11), v2.GaussianBlur(11))
    assert "padding" in report.bad[0].reason.lower()
