"""Laptop: MB/s of 1 million images of 100 kB that chain workers read from S3, against the rate of the link.

A local server (`benchmarks/far_objects.py`) answers after 30 ms and sends 30 MB/s. A chain compares the bytes
of each image and drops it, so reading alone binds. A pass is measured after `WARM_S` for `SECONDS`; then it
is given up. The requests, and the connections that are open at the same time, are the server's own count.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
import zlib
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.far_objects import BUCKET, CONTENT, EACH, FOLDERS, LINK_BYTES_PER_S, OBJECT_BYTES
from benchmarks.harness import Measure
from benchmarks.nodes import ray_nodes
from benchmarks.s3 import served
from benchmarks.sleeping import wake_all_slots
from benchmarks.stream import one_pass
from stoker.config.loading import load
from stoker.data import read_images
from stoker.read.far_files import READS
from stoker.read.sources import Source

SLOTS, BATCH = 4, 64
WARM_S, SECONDS = 8.0, 25.0
GOAL = 0.9
CRC = zlib.crc32(CONTENT)


class Compare:
    """Chain worker: whether each image has all of its bytes."""

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        images = columns.pop("image")
        return {**columns, "right": np.array([zlib.crc32(image) == CRC for image in images])}


def run() -> list[Measure]:
    """Run the benchmark and return its rows."""
    with served("far_objects", str(FOLDERS)) as ports:
        began, used, before = time.perf_counter(), time.process_time(), memory()
        source = read_images(f"s3://{BUCKET}", "train")
        assert source is not None and source.count() == FOLDERS * EACH
        spent, cpu = time.perf_counter() - began, time.process_time() - used
        held, asked = memory() - before, counts(ports["link"])["LIST"]
        print(
            f"listed in {spent:.1f} s ({cpu:.1f} s of CPU), {held / 1e6:.0f} MB, {asked} requests",
            flush=True,
        )
        with ray_nodes(SLOTS):
            wake_all_slots(SLOTS, sys.modules[__name__])
            rate, first_s, requests = read(source, ports["link"])
    return rows(rate, first_s, requests) + of_listing(spent, cpu, held)


def read(source: Source, port: int) -> tuple[float, float, dict[str, int]]:
    """MB/s, seconds to the first batch, and what was requested.

    Raises:
        RuntimeError: a record has other bytes, or came without being requested.
    """
    config = load(None, [f"data.block_records={BATCH}", f"train.batch_size={BATCH}"]).config
    before, times = dict[str, int](), list[tuple[float, int]]()
    began = time.perf_counter()
    with one_pass(config, source, [("compare", Compare())], torch.device("cpu")) as stream:
        for batch in stream:
            times.append((time.perf_counter() - began, stream.rows))
            before = before or counts(port)
            if not bool(batch["right"].all()):
                raise RuntimeError("records with wrong contents")
            if times[-1][0] > times[0][0] + WARM_S + SECONDS:
                break
        after = counts(port)
    if after["keys"] < times[-1][1]:
        raise RuntimeError(f"{times[-1][1]} records of {after['keys']} objects")
    first_s = times[0][0]
    begin, end = next(each for each in times if each[0] > first_s + WARM_S), times[-1]
    rate = (end[1] - begin[1]) * OBJECT_BYTES / (end[0] - begin[0]) / 1e6
    print(f"{rate:.1f} MB/s, {after}", flush=True)
    # The fingerprint has sampled a few objects before.
    asked = {name: after.get(name, 0) - before.get(name, 0) for name in ("GET", "HEAD", "keys")}
    return rate, first_s, asked | {"most open": after["most open"]}


def rows(rate: float, first_s: float, requests: dict[str, int]) -> list[Measure]:
    name, link = "1 M images of 100 kB from S3, 30 ms", LINK_BYTES_PER_S / 1e6
    share, each = rate / link, requests["GET"] + requests.get("HEAD", 0)
    asked, most = each / requests["keys"], SLOTS * READS
    unit = "requests"
    return [
        Measure(name, rate, link, "the link", share, GOAL, share >= GOAL, "MB/s"),
        Measure("  requests per image", asked, 1, "one GET", 1 / asked, 0.999, asked < 1.001, unit),
        Measure(
            "  open connections at most",
            requests["most open"],
            most,
            f"{READS} per chain worker",
            None,
            None,
            requests["most open"] <= most + SLOTS,
            "connections",
        ),
        Measure("  first batch of 1 M images", first_s, None, "–", None, None, None, "s"),
    ]


def of_listing(spent: float, cpu: float, held: int) -> list[Measure]:
    count = FOLDERS * EACH
    return [
        Measure("  listing 1 M images", spent, cpu, "CPU time of the head", None, None, None, "s"),
        Measure("  memory of the list", held / count, None, "–", None, None, None, "bytes/image"),
    ]


def memory() -> int:
    return int(psutil.Process().memory_info().rss)


def counts(port: int) -> dict[str, int]:
    """What the server has been asked."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/counts", timeout=30) as answer:
        found: dict[str, int] = json.load(answer)
    return found
