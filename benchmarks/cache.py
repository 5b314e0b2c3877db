"""Laptop: what caching decoded images saves, per core and in the whole data plane."""

from __future__ import annotations

import itertools
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Measure, cpu_seconds
from benchmarks.per_core import CROP, IMAGES, photos
from stoker.chain.chain import Chain
from stoker.chain.entries import as_stages
from stoker.chain.stages import prefix_length
from stoker.chain.transforms import DecodeImage, ShrinkLarger
from stoker.protocol import PassPlan, Work
from stoker.read.host_cache import SHARED_MEMORY, CacheSpec, HostCache
from stoker.read.images import ImageFolderSource
from stoker.read.sources import ID_MODULUS, record_id
from stoker.serve.shards import LoadedSplit, blocks_of

COPIES = 25
"""Copies of each photo: 600 images, 0.34 GB decoded."""
EPOCHS = 8
ROUNDS = 3
ROUNDS_PER_CORE = 9
GOAL, GOAL_FOUND = 1.5, 0.85
GOALS_PARTLY = {25: 1.0, 50: 1.3, 75: 1.6}
"""Goals if so many percent of the photos fit."""


def run() -> list[Measure]:
    """Run the benchmark and return its rows."""
    return [*per_core(500, 375), *per_core(2048, 1536), *by_epoch(), *two_hosts()]


def per_core(width: int, height: int) -> list[Measure]:
    """Images/s of one core: read or look up, crop at random to 224², flip."""
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as shared,
    ):
        images = photos(width, height)
        write(Path(folder), images)
        source = ImageFolderSource(f"{folder}/train")

        ids = sorted(record_id(key) for key, *_ in source.files)

        def case(root: str, *reduce: ShrinkLarger, percent: int = 100) -> Callable[[], Any]:
            stages = as_stages([DecodeImage(), *reduce, *CROP])
            # The share that selects just so many of these few photos.
            share = 1.0 if percent == 100 else ids[len(ids) * percent // 100] / ID_MODULUS
            chain = Chain(stages, 0, prefix=prefix_length(stages) if root else 0, share=share)
            spec = CacheSpec("memory" if root == shared else "disk", "bench", 10**9)
            kept = HostCache(Path(root) / f"{len(reduce)}-{percent}", "k", spec) if root else None
            loaded, (shard,) = LoadedSplit(source, chain, kept), source.shards(len(images), None)
            epochs = itertools.count()

            def once() -> list[Any]:
                plan = PassPlan(0, next(epochs), "train", shuffle=True, block_records=len(images))
                return list(blocks_of(loaded, plan, Work(0, shard)))

            return once

        cases = {
            "no cache": case(""),
            "memory": case(shared),
            "disk, which the kernel holds in memory": case(folder),
            "memory, reduced to 320": case(shared, ShrinkLarger(320)),
            **{
                f"memory, room for {percent} %": case(shared, percent=percent)
                for percent in GOALS_PARTLY
            },
        }
        rates = {
            name: len(images) / spent for name, spent in cpu_seconds(cases, ROUNDS_PER_CORE).items()
        }
    none, rows = rates.pop("no cache"), []
    for name, rate in rates.items():
        goal = next(
            (goal for percent, goal in GOALS_PARTLY.items() if f"{percent} %" in name), None
        )
        met = None if goal is None else rate / none >= goal
        measure = f"data.cache, {width}×{height}, per core: {name}"
        rows.append(Measure(measure, rate, none, "no cache", rate / none, goal, met, "images/s"))
    return rows


def by_epoch() -> list[Measure]:
    """Images/s of the first and later epochs, through chain tasks, coordinator and feed."""
    from stoker.hosts.cluster import set_environment

    set_environment(secrets.token_hex(32))
    import ray

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), photos(500, 375) * COPIES)
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        try:
            # Interleave the cases, so that other load affects all of them equally.
            rates: dict[str, list[list[float]]] = {"none": [], "memory": [], "disk": []}
            for _ in range(ROUNDS):
                for kind, found in rates.items():
                    found.append(epochs(folder, kind)[0])
        finally:
            ray.shutdown()
    rows = []
    for kind in ("memory", "disk"):
        for name, part in (("epoch 1", slice(0, 1)), ("epochs 2 …", slice(1, None))):
            ours, peer = (
                statistics.median(rate for one in rates[each] for rate in one[part])
                for each in (kind, "none")
            )
            goal = None if name == "epoch 1" else GOAL
            met = None if goal is None else ours / peer >= goal
            measure = f"data.cache: {kind}, 500×375 → 224², {name}"
            rows.append(
                Measure(measure, ours, peer, "no cache", ours / peer, goal, met, "images/s")
            )
    return rows


def two_hosts() -> list[Measure]:
    """Share of the records that two CPU hosts find in their own caches in later epochs, in both orders."""
    from benchmarks.nodes import ray_nodes

    rows = []
    with tempfile.TemporaryDirectory() as folder, ray_nodes(head_cpus=1) as nodes:
        write(Path(folder), photos(500, 375) * COPIES)
        nodes.add("cpu", 2)
        nodes.add("cpu", 2)
        for order in ("any", "exact"):
            data = {"order": order, "preprocess_on": ["cpu"], "block_records": 10}
            shares = [
                found for _ in range(ROUNDS) for found in epochs(folder, "memory", **data)[1][1:]
            ]
            share = statistics.median(shares)
            rows.append(
                Measure(
                    f"data.cache on two hosts, order {order}: records found, lowest {min(shares):.2f}",
                    share, 1.0, "all", share, GOAL_FOUND, share >= GOAL_FOUND, "",
                )
            )  # fmt: skip
    return rows


def write(folder: Path, images: list[bytes]) -> None:
    """Write photos to class folders."""
    for number, content in enumerate(images):
        path = folder / "train" / f"c{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def epochs(
    folder: str, kind: str, passes: int = EPOCHS, **data: Any
) -> tuple[list[float], list[float], float]:
    """A job whose train worker consumes batches as fast as they arrive.

    Returns:
        Images/s of the first epoch and of the later ones, which overlap; share of each epoch's records that
        were found in a cache; CPU seconds of preprocessing per image after the first epoch.
    """
    import ray

    from stoker.config.schema import Config
    from stoker.serve.blocks.client import open_transport
    from stoker.serve.opening import open_data, start_coordinator
    from stoker.train.feed import Feed

    count = COPIES * IMAGES
    settings: dict[str, Any] = {
        "recipe": "ImageClassification",
        "params": {"data": folder, "num_classes": 2},
        "data": {"cache": kind, "block_records": 50, **data},
        "train": {"epochs": passes, "batch_size": 50},
    }
    config = Config.model_validate(settings)
    coordinator = start_coordinator(config, open_data(config), workers=1)
    ends: list[tuple[float, int]] = []
    """The times of the first batch and of each epoch's last one, and the images in between."""
    made: list[tuple[float, int]] = []
    """CPU time and rows of the chain workers at the end of each epoch."""
    try:
        ray.get(coordinator.begin.remote(coordinator, 0, 1, 0), timeout=60)
        device = torch.device("cpu")
        transport = open_transport(coordinator, config.data, device)
        for epoch in range(passes):
            stream = Feed(
                coordinator=coordinator,
                attempt=0,
                split="train",
                epoch=epoch,
                rank=0,
                device=device,
                transport=transport,
                data=config.data,
            )
            first = 0
            for _batch in stream:
                if not ends:  # processes have started and imported
                    first = stream.rows
                    ends.append((time.perf_counter(), 0))
            ends.append((time.perf_counter(), count - first))
            if stream.rows != count:
                raise RuntimeError(f"epoch {epoch}: got {stream.rows} of {count} images")
            stages = ray.get(coordinator.figures.remote(), timeout=60)["chain"]
            rows = (epoch + 1) * count
            made.append((sum(stage["cpu_ms_per_sample"] for stage in stages) * rows / 1000, rows))
            used = (stream.rows, stream.id_sum, 0)
            ray.get(coordinator.epoch_done.remote(0, "train", epoch, 0, used), timeout=60)
        (begun, _), (warm, images), *_, (end, _) = ends
        events = [
            e for e in ray.get(coordinator.drain.remote(), timeout=60) if e["event"] == "cache"
        ]
        found = [event["found"] / event["records"] for event in events]
        (cpu_s, rows), (whole_cpu_s, all_rows) = made[0], made[-1]
        spent = (whole_cpu_s - cpu_s) / (all_rows - rows)
        return [images / (warm - begun), count * (passes - 1) / (end - warm)], found, spent
    finally:
        ray.kill(coordinator)
