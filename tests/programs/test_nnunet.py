"""nnU-Net v2 as people run it, with one line more: the batches of its own processes, made on the cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ONE_LINE = "nnunet.NonDetMultiThreadedAugmenter = stoker.MultiThreadedAugmenter"
PROGRAM = """
import sys
import torch
import nnunetv2.training.nnUNetTrainer.nnUNetTrainer as nnunet
from nnunetv2.run.run_training import get_trainer_from_args
import stoker

{line}
if __name__ == "__main__":
    trainer = get_trainer_from_args("1", "2d", 0, "nnUNetTrainer", "nnUNetPlans", device=torch.device("cpu"))
    trainer.num_epochs, trainer.num_iterations_per_epoch, trainer.num_val_iterations_per_epoch = 2, 4, 2
    {run}
"""
SEEDED = """
import hashlib, random
import numpy as np
from batchgenerators.dataloading.multi_threaded_augmenter import MultiThreadedAugmenter

class Seeded:
    def __init__(self, data_loader):
        self.data_loader = data_loader

    def set_thread_id(self, thread):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(thread)
        self.data_loader.set_thread_id(thread)

    def __next__(self):
        return next(self.data_loader)

def augmenter(data_loader, transform, num_processes, *_, **__):
    return {kind}(Seeded(data_loader), transform, num_processes, seeds=list(range(num_processes)))

def digest(batch):
    arrays = [batch["data"], *batch["target"]]
    return hashlib.sha1(b"".join(np.ascontiguousarray(each).tobytes() for each in arrays)).hexdigest()

nnunet.NonDetMultiThreadedAugmenter = augmenter
"""
BATCHES = """trainer.initialize()
    training, validation = trainer.get_dataloaders()  # has taken the first batch of each
    print("batches", *[digest(next(training)) for _ in range(9)])
    training._finish(), validation._finish()"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of nnU-Net with ten small preprocessed cases."""
    folder = tmp_path_factory.mktemp("nnunet")
    raw = folder / "raw/Dataset001_Tiny"
    generator = np.random.default_rng(0)
    for name in ("imagesTr", "labelsTr"):
        (raw / name).mkdir(parents=True)
    for case in range(10):
        image = generator.integers(0, 255, (64, 64, 3), np.uint8)
        label = np.zeros((64, 64), np.uint8)
        top, left = generator.integers(5, 40, 2)
        label[top : top + 15, left : left + 15] = 1
        image[label == 1] //= 3
        Image.fromarray(image).save(raw / f"imagesTr/case_{case:03}_0000.png")
        Image.fromarray(label).save(raw / f"labelsTr/case_{case:03}.png")
    about = {
        "channel_names": {"0": "R", "1": "G", "2": "B"},
        "labels": {"background": 0, "blob": 1},
    }
    (raw / "dataset.json").write_text(
        json.dumps(about | {"numTraining": 10, "file_ending": ".png"})
    )
    names = {"raw": "raw", "preprocessed": "preprocessed", "results": "results"}
    environment = {**os.environ, **{f"nnUNet_{n}": str(folder / f) for n, f in names.items()}}
    environment |= {"nnUNet_n_proc_DA": "2", "nnUNet_compile": "f"}
    command = Path(sys.executable).parent / "nnUNetv2_plan_and_preprocess"
    run([str(command), "-d", "1", "-c", "2d", "-np", "2", "-npfp", "2"], environment, folder)
    return environment


def run(command: list[str], environment: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=590
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def program(folder: Path, environment: dict[str, str], line: str, then: str) -> str:
    script = folder / "program.py"
    script.write_text(PROGRAM.format(line=line, run=then))
    return run([sys.executable, str(script)], environment, folder)


def test_one_line_trains_nnunet(cases: dict[str, str], tmp_path: Path) -> None:
    shown = program(tmp_path, cases, ONE_LINE, "trainer.run_training()")
    assert "Epoch 1" in shown and "Training done." in shown


def test_batches_are_those_of_its_own_processes_for_the_same_seeds(
    cases: dict[str, str], tmp_path: Path
) -> None:
    theirs, ours = (
        program(tmp_path, cases, SEEDED.replace("{kind}", kind), BATCHES).split("batches ")[1]
        for kind in ("MultiThreadedAugmenter", "stoker.MultiThreadedAugmenter")
    )
    assert ours == theirs and len(set(ours.split())) == 9
