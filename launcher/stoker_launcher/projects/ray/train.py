"""A Ray script: Ray Data preprocesses synthetic images on every CPU, TorchTrainer trains on every GPU.

python train.py --images 64        # on this machine
"""

import argparse
from typing import Any

import numpy as np
import ray
import ray.train
import timm
import torch
from PIL import Image, ImageFilter
from ray.train.torch import TorchTrainer, get_device, prepare_model

CLASSES = 10


def make_image(row: dict[str, Any]) -> dict[str, Any]:
    """A row of numbers → an image of noise and its label."""
    pixels = np.random.default_rng(row["id"]).integers(0, 256, (96, 96, 3), np.uint8)
    return {"image": pixels, "label": row["id"] % CLASSES}


def blur(row: dict[str, Any]) -> dict[str, Any]:
    """Ten Gaussian blurs: work that a GPU host's CPUs would not finish in time."""
    image = Image.fromarray(row["image"])
    for _ in range(10):
        image = image.filter(ImageFilter.GaussianBlur(2))
    return {**row, "image": np.asarray(image.resize((64, 64)))}


def train_loop(settings: dict[str, Any]) -> None:
    model = timm.models.VisionTransformer(
        img_size=64, patch_size=16, embed_dim=64, depth=2, num_heads=2, num_classes=CLASSES
    )
    model = prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"])
    for epoch in range(settings["epochs"]):
        seen, total = 0, 0.0
        shard = ray.train.get_dataset_shard("train")
        for batch in shard.iter_torch_batches(
            batch_size=settings["batch_size"], device=get_device()
        ):
            images = batch["image"].permute(0, 3, 1, 2).float().div_(255)
            loss: Any = torch.nn.functional.cross_entropy(model(images), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen, total = seen + len(images), total + loss.item() * len(images)
        ray.train.report({"epoch": epoch, "loss": total / max(seen, 1), "images": seen})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.001)
    given = parser.parse_args()

    ray.init()
    num_gpus = int(ray.available_resources().get("GPU", 0))
    data = ray.data.range(given.images).map(make_image).map(blur)
    trainer = TorchTrainer(
        train_loop,
        train_loop_config=vars(given),
        scaling_config=ray.train.ScalingConfig(num_workers=max(num_gpus, 1), use_gpu=num_gpus > 0),
        datasets={"train": data},
    )
    trainer.fit()
    print(f"trained on {max(num_gpus, 1)} workers, {num_gpus} GPUs")


if __name__ == "__main__":
    main()
