"""What a checkpoint holds of lightning.Trainer is data, too: nothing in it is executed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.checkpoints import format as checkpoint
from stoker.checkpoints.format import Content
from stoker.storage.checkpoint_store import open_store

pytest.importorskip("lightning")


class Attack:
    """Makes a file as it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def test_the_state_of_a_lightning_trainer_is_read_as_data(ray_cluster: None, tmp_path: Path) -> None:
    # With the cluster, although it is not used: Ray, once imported, knows no other authentication mode.
    from stoker.integrations import lightning_loop

    mark = tmp_path / "executed"
    inner = tmp_path / "inner.pt"
    torch.save({"callbacks": {"C": Attack(mark)}}, inner)
    forged = torch.frombuffer(bytearray(inner.read_bytes()), dtype=torch.uint8)
    about = {"step": 5, "monitored": None}
    content = Content({"w": torch.zeros(3)}, {"scheduler": {"lightning": forged}}, about)
    loaded = checkpoint.load(checkpoint.save(open_store(str(tmp_path / "kept")), content))
    state = lightning_loop.TrainerState(print)
    state.load_state_dict(loaded.state["scheduler"])  # the bytes alone are a plain tensor
    with pytest.raises(OSError, match="could run code"), state.as_file(torch.nn.Linear(1, 1)) as path:
        torch.load(path, weights_only=True)
    assert not mark.exists()
