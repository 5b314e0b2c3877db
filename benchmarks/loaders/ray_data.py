"""Laptop: stock Ray Data into a TorchTrainer, as in its documentation and in the first post."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from benchmarks.loaders.work import BATCH, WORKERS, Consumer, files_of, pillow, transforms


def read(folder: Path) -> Any:
    """The files in random order, labelled by folder."""
    import ray

    return ray.data.read_binary_files(str(folder / "train"), include_paths=True, shuffle="files")


def label_of(path: str) -> int:
    return int(Path(path).parent.name.removeprefix("class"))


def stock(folder: Path, out: Path) -> None:
    """`map` with Pillow and torchvision v2, uint8, `iter_torch_batches`."""
    of = pillow()

    def decode(row: dict[str, Any]) -> dict[str, Any]:
        return {"image": of(row["bytes"]).numpy(), "label": label_of(row["path"])}

    train(folder, out, lambda: read(folder).map(decode))


def float32(folder: Path, out: Path) -> None:
    """Decode first, then crop, flip and normalise in float32 with a `TorchVisionPreprocessor`."""

    def prepared() -> Any:
        import numpy as np
        from ray.data.preprocessors import TorchVisionPreprocessor
        from torchvision.transforms import v2

        def decode(row: dict[str, Any]) -> dict[str, Any]:
            import io

            from PIL import Image

            image = np.asarray(Image.open(io.BytesIO(row["bytes"])).convert("RGB"))
            return {"image": image, "label": label_of(row["path"])}

        steps = [v2.ToTensor(), *transforms(), v2.Normalize([0.5] * 3, [0.5] * 3)]
        return TorchVisionPreprocessor(columns=["image"], transform=v2.Compose(steps)).transform(
            read(folder).map(decode)
        )

    train(folder, out, prepared)


def train(folder: Path, out: Path, dataset: Any) -> None:
    """Run one train worker that consumes the batches, plus `WORKERS` CPUs for tasks."""
    # Otherwise Ray writes a token to the home folder.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    # Ray Train reserves one CPU; Ray Data uses the others.
    ray.init(address="local", num_cpus=WORKERS + 1, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    total = len(files_of(folder))

    def loop() -> None:
        consumer = Consumer(total)
        for batch in ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=BATCH):
            consumer.take(batch["image"], batch["label"])
        consumer.write(out)

    TorchTrainer(
        loop,
        datasets={"train": dataset()},
        scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(out.parent / "ray"), name="bench"),
    ).fit()
    ray.shutdown()
