"""python -m pytest: the rows that reach training have the right shape and labels."""

import numpy as np

from train import CLASSES, blur, make_image


def test_an_image_is_blurred_and_keeps_its_label() -> None:
    rows = [make_image({"id": number}) for number in range(12)]
    blurred = [blur(row) for row in rows]
    assert [row["label"] for row in blurred] == [number % CLASSES for number in range(12)]
    assert {(row["image"].shape, row["image"].dtype) for row in blurred} == {
        ((64, 64, 3), np.dtype(np.uint8))
    }
    assert blurred[0]["image"].std() < rows[0]["image"].std() / 4
