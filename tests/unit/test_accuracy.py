"""The default metric of recipes is what torchmetrics calculates."""

from __future__ import annotations

import pytest
import torch

from stoker.accuracy import Accuracy


@pytest.mark.long
@pytest.mark.parametrize("more", [(), (4, 5)])
def test_scores_and_classes_count_as_in_torchmetrics(more: tuple[int, ...]) -> None:
    from torchmetrics.classification import MulticlassAccuracy  # takes seconds to import

    ours, theirs = Accuracy(), MulticlassAccuracy(num_classes=None, average="micro")
    for records in (7, 1, 12):
        scores, target = torch.randn(records, 3, *more), torch.randint(0, 3, (records, *more))
        for preds in (scores, torch.randint(0, 3, (records, *more))):
            ours.update(preds, target)
            theirs.update(preds, target)
    assert ours.compute() == pytest.approx(float(theirs.compute()))


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"preds of shape \(4, 1\) do not fit target of shape \(4, 4\)"):
        Accuracy().update(torch.zeros(4, 1), torch.zeros(4, 4))
