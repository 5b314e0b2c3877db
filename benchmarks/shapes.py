"""Laptop: the example recipes without fixed-size images, against a DataLoader that does the same.

Both read the same files, call the same transforms and give the same columns, shuffled within each file and
padded the same way; the benchmark compares them. Stoker uses coordinator, two chain tasks and a feed on a
local cluster. The peer is a hand-written `IterableDataset` with two workers in a separate process. Both
alternate; the window is the wall time between 45 % and 95 % of the records.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchvision import tv_tensors

from benchmarks.harness import Measure
from benchmarks.jobs import environment
from benchmarks.loaders.work import rate
from stoker.data import RecordTransform

KINDS = {
    "text": ("recipes.text:Reviews", 4000, 50, 1e-9),
    "segmentation": ("recipes.segmentation:Shapes", 100, 60, 0.1),
    "audio": ("recipes.audio:Tones", 200, 80, 1e-6),
    "video": ("recipes.video:Motion", 100, 40, 0.02),
}
"""Recipe, records per file, number of files (links to one file, to exclude the disk), and the allowed
difference of the mean sum of a record's values: above rounding only for random crops and clips."""
ROUNDS, BATCH, WORKERS = 3, 64, 2


class Files(IterableDataset[dict[str, Any]]):
    """Records of a worker's files: read, shuffled within each file, transformed."""

    def __init__(self, folder: Path, columns: list[str], chain: list[Any]) -> None:
        self.files, self.columns = sorted((folder / "train").iterdir()), columns
        self.chain = [entry[1] if isinstance(entry, tuple) else entry for entry in chain]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        rng = np.random.default_rng(worker.id)
        for path in self.files[worker.id :: worker.num_workers]:
            records = rows(path, self.columns) if path.suffix == ".parquet" else members(path)
            for i in rng.permutation(len(records)):
                record = records[i]
                for transform in self.chain:
                    if isinstance(transform, RecordTransform):
                        record = transform(record, rng)
                        continue
                    if isinstance(image := record["image"], np.ndarray):
                        pixels = torch.from_numpy(image).permute(2, 0, 1)
                        record = {**record, "image": tv_tensors.Image(pixels)}
                    record = transform(record)
                del record["key"]
                yield record


def rows(path: Path, columns: list[str]) -> list[dict[str, Any]]:
    """Read a Parquet file."""
    from pyarrow import parquet

    found = parquet.read_table(path, columns=columns).to_pylist()
    return [{"key": f"{path.name}:{i}", **row} for i, row in enumerate(found)]


def members(path: Path) -> list[dict[str, Any]]:
    """Read a tar shard; files with the same stem form a record."""
    found: dict[str, dict[str, Any]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            stem, _, suffix = member.name.partition(".")
            content = tar.extractfile(member)
            assert content
            name = {"cls": "label", "png": "image", "mask.png": "mask"}.get(suffix, suffix)
            data = content.read()
            record = found.setdefault(stem, {"key": stem})
            record[name] = int(data) if name == "label" else data
    return list(found.values())


def collate(records: list[dict[str, Any]], pads: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a batch, with lengths for padded columns."""
    batch: dict[str, Any] = {}
    for name in records[0]:
        values = [torch.as_tensor(record[name]) for record in records]
        if name in pads:
            batch[f"{name}_length"] = torch.tensor([len(value) for value in values])
            multiple = pads[name].multiple
            short = -max(map(len, values)) % multiple
            batch[name] = torch.nn.utils.rnn.pad_sequence(values, True, pads[name].value)
            if short:
                sides = [0, 0] * (batch[name].ndim - 2) + [0, short]
                batch[name] = torch.nn.functional.pad(batch[name], sides, value=pads[name].value)
        else:
            batch[name] = torch.stack(values)
    return batch


def consume(batches: Iterable[dict[str, Any]], total: int) -> dict[str, Any]:
    """Consume all batches: the rate, and statistics to compare the work."""
    times: list[tuple[float, int]] = []
    sums: dict[str, float] = {}
    kinds: dict[str, list[Any]] = {}
    count = 0
    for batch in batches:
        count += len(next(iter(batch.values())))
        for name, column in batch.items():
            # Padding is 0 and does not affect sums.
            sums[name] = sums.get(name, 0.0) + float(column.sum(dtype=torch.float64))
            kinds[name] = [str(column.dtype), column.ndim]
        times.append((time.perf_counter(), count))
    means = {name: value / count for name, value in sums.items()}
    return {"rate": rate(times, total), "rows": count, "means": means, "kinds": kinds}


def peer(kind: str, folder: str) -> dict[str, Any]:
    """In a separate process: an epoch with torch's DataLoader."""
    from stoker.serve.opening import pads_of

    recipe = recipe_of(kind)(data=folder)
    columns = getattr(recipe.read("train"), "columns", None) or []
    data, pads = Files(Path(folder), columns, recipe.preprocess("train")), pads_of(recipe)
    loader = DataLoader(
        data, BATCH, num_workers=WORKERS, collate_fn=lambda records: collate(records, pads)
    )
    return consume(loader, total_of(kind))


def stoker(kind: str, folder: str) -> dict[str, Any]:
    """Connected to the cluster: an epoch with Stoker."""
    from benchmarks.stream import pass_over
    from stoker.config.schema import Config
    from stoker.serve.opening import open_data

    settings = {
        "recipe": KINDS[kind][0],
        "params": {"data": folder},
        "train": {"batch_size": BATCH},
    }
    config = Config.model_validate(settings)
    with pass_over(config, open_data(config), torch.device("cpu")) as feed:
        return consume(feed, total_of(kind))


def recipe_of(kind: str) -> Any:
    """The recipe's class."""
    module, _, name = KINDS[kind][0].partition(":")
    return getattr(importlib.import_module(module), name)


def total_of(kind: str) -> int:
    """Records of an epoch."""
    _, records, files, _ = KINDS[kind]
    return records * files


def write(kind: str, folder: Path) -> None:
    """The recipe's own data, with its training file under many names."""
    recipe, records, files, _ = KINDS[kind]
    importlib.import_module(recipe.partition(":")[0]).write(folder / "once", records=records)
    first = next((folder / "once").glob("train/*.tar"), folder / "once/train.parquet")
    (folder / "data/train").mkdir(parents=True)
    for number in range(files):
        os.link(first, folder / "data/train" / f"{number:04}{first.suffix}")


def alone(kind: str, folder: str) -> dict[str, Any]:
    """Run the peer in a separate process."""
    code = f"import json; from benchmarks import shapes; print(json.dumps(shapes.peer({kind!r}, {folder!r})))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=180,
    )
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def check(kind: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Check that speed does not come from doing less: all records, with the same columns and values.

    Raises:
        RuntimeError: the two sides differ.
    """
    for name, seen in (("Stoker", ours), ("DataLoader", theirs)):
        if seen["rows"] != total_of(kind):
            raise RuntimeError(f"{kind}: {name} gave {seen['rows']} of {total_of(kind)} records")
    if ours["kinds"] != theirs["kinds"]:
        raise RuntimeError(f"{kind}: Stoker gave {ours['kinds']}, the DataLoader {theirs['kinds']}")
    for name, mean in ours["means"].items():
        if abs(mean - theirs["means"][name]) > KINDS[kind][3] * abs(mean):
            raise RuntimeError(
                f"{kind}: {name} sums to {mean} a record, the DataLoader's {theirs['means']}"
            )


def run() -> list[Measure]:
    """Run the benchmark and return its rows."""
    from stoker.hosts.cluster import set_environment

    set_environment(secrets.token_hex(32))
    os.environ.update(environment())
    import ray

    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as scratch:
        for kind in KINDS:
            write(kind, Path(scratch) / kind)
        ray.init(address="local", num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
        try:
            for number in range(ROUNDS):
                for kind, rates in found.items():
                    folder = str(Path(scratch) / kind / "data")
                    ours, theirs = stoker(kind, folder), alone(kind, folder)
                    check(kind, ours, theirs)
                    rates.append((ours["rate"], theirs["rate"]))
                    print(
                        f"round {number + 1}: {kind:<13} {ours['rate']:9.0f} {theirs['rate']:9.0f}",
                        flush=True,
                    )
        finally:
            ray.shutdown()
    return [
        Measure(
            f"example recipe, {kind}",
            statistics.median(ours for ours, _ in rates),
            statistics.median(theirs for _, theirs in rates),
            f"DataLoader, {WORKERS} workers",
            statistics.median(ours / theirs for ours, theirs in rates),
            None,
            None,
            "records/s",
        )
        for kind, rates in found.items()
    ]
