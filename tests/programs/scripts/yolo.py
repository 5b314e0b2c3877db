"""Ultralytics trains a tiny YOLO on pictures of boxes, without random augmentation."""

from pathlib import Path

import numpy as np
from PIL import Image
from ultralytics import YOLO, settings

Path("tiny.yaml").write_text(
    """
nc: 2
backbone:
  - [-1, 1, Conv, [8, 3, 2]]
  - [-1, 1, Conv, [16, 3, 2]]
  - [-1, 1, Conv, [16, 3, 2]]
head:
  - [[2], 1, Detect, [nc]]
"""
)
generator = np.random.default_rng(0)
for part, many in (("train", 18), ("val", 6)):
    for kind in ("images", "labels"):
        Path("data", kind, part).mkdir(parents=True, exist_ok=True)
    for number in range(many):
        picture = generator.integers(0, 255, (64, 48 + number, 3), dtype=np.uint8)
        Image.fromarray(picture).save(f"data/images/{part}/{number}.png")
        Path(f"data/labels/{part}/{number}.txt").write_text(
            f"{number % 2} 0.5 0.5 0.4 0.{number % 4 + 2}\n"
        )
Path("data.yaml").write_text(
    f"path: {Path('data').resolve()}\ntrain: images/train\nval: images/val\nnames: [a, b]\n"
)


def show(trainer):
    print("\nloss", {name: float(loss) for name, loss in trainer.loss_items.items()})


def show_validation(trainer):
    print("\nloss", trainer.metrics)


settings.update({"mlflow": False, "tensorboard": False})
model = YOLO("tiny.yaml")
model.add_callback("on_train_batch_end", show)
model.add_callback("on_fit_epoch_end", show_validation)
random = ("mosaic", "hsv_h", "hsv_s", "hsv_v", "translate", "scale", "fliplr", "erasing")
model.train(
    data="data.yaml",
    epochs=3,
    imgsz=64,
    batch=4,
    workers=2,
    device="cpu",
    plots=False,
    amp=False,
    close_mosaic=1,
    auto_augment=None,
    project="runs",
    **dict.fromkeys(random, 0),
)
