"""Laptop: MB/s of tar shards that chain workers read from S3 and decode, against the rate of the link.

A local S3 server is behind an emulated link of 1 Gb/s with 20 ms latency (`benchmarks/far_s3.py`). The link's
own rate is that of plain downloads over several connections in the same run. Decoding sleeps, which takes no
CPU, and has 1.5 times the throughput of the link: reading while decoding fills the link, reading and decoding
in turn does not. When shuffling, a shard of at most 1,024 records is read completely before its first record,
so chain workers have to fetch their next shard meanwhile.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.far_s3 import BUCKET, LINK_BYTES_PER_S
from benchmarks.harness import Measure
from benchmarks.jobs import ROOT, environment
from benchmarks.loaders.work import slope
from benchmarks.nodes import ray_nodes
from benchmarks.sleeping import wake_all_slots
from benchmarks.stream import one_pass
from stoker.config.loading import load
from stoker.data import read_webdataset
from stoker.read.sources import ID_MODULUS, record_id
from stoker.train.feed import Feed

RECORD_BYTES, SHARD_RECORDS, SHARDS = 100_000, 400, 48
TOTAL = SHARD_RECORDS * SHARDS
SLOTS, BATCH = 4, 64
DECODE_S = SLOTS * RECORD_BYTES / (1.5 * LINK_BYTES_PER_S)
ORDERS = {"in order": "false", "shuffled": "true"}
CONNECTIONS = 8
ROUNDS, GOAL = 3, 0.9
WINDOW = (0.25, 0.9)
"""The measured part of the records, without the start and the last shards."""


class Decode:
    """Chain worker: sleeps, and computes a checksum of the record."""

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        contents = columns.pop("bin")
        time.sleep(DECODE_S * len(contents))
        return {
            **columns,
            "crc": np.array([zlib.crc32(content) for content in contents], dtype=np.int64),
        }


def run() -> list[Measure]:
    """Run the benchmark and return its rows."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        file = Path(folder) / "shard.tar"
        crcs = write(file)
        with served("far_s3", str(file), str(SHARDS)) as ports, ray_nodes(SLOTS):
            wake_all_slots(SLOTS, sys.modules[__name__])
            found: dict[str, list[float]] = {}
            for number in range(ROUNDS):
                one = {
                    port: downloaded(ports[port], file.stat().st_size)
                    for port in ("server", "link")
                }
                for order, shuffle in ORDERS.items():
                    one[order] = stoker(file.stat().st_size, crcs, shuffle)
                for name, rate in one.items():
                    found.setdefault(name, []).append(rate)
                figures = ", ".join(f"{name} {rate:.1f}" for name, rate in one.items())
                print(f"round {number + 1}: {figures} MB/s", flush=True)
    return rows(found)


def rows(found: dict[str, list[float]]) -> list[Measure]:
    """Ours against the link; ratios are medians over rounds."""
    name = "tar shards from S3, 1 Gb/s, 20 ms"
    link, server = (statistics.median(found[port]) for port in ("link", "server"))
    measures = []
    for order in ORDERS:
        ours = statistics.median(found[order])
        ratio = statistics.median(a / b for a, b in zip(found[order], found["link"], strict=True))
        measures.append(
            Measure(
                f"{name}: {order}",
                ours,
                link,
                "plain downloads",
                ratio,
                GOAL,
                ratio >= GOAL,
                "MB/s",
            )
        )
    alone = f"  {name}: the server without the link"
    return [*measures, Measure(alone, server, link, "the link", server / link, None, None, "MB/s")]


def write(file: Path) -> dict[str, int]:
    """Write a shard of noise; return the checksum of each record by name."""
    noise, crcs = np.random.default_rng(0), {}
    with tarfile.open(file, "w") as tar:
        for number in range(SHARD_RECORDS):
            content = noise.bytes(RECORD_BYTES)
            member = tarfile.TarInfo(f"{number:05d}.bin")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
            crcs[f"{number:05d}"] = zlib.crc32(content)
    return crcs


@contextmanager
def served(server: str, *arguments: str) -> Iterator[dict[str, int]]:
    """Run a benchmark's server and point S3 clients here at its link; yields the ports."""
    command = [sys.executable, "-m", f"benchmarks.{server}", *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, **pipes)
    client = {
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    try:
        ports: dict[str, int] = json.loads(process.stdout.readline())
        os.environ |= client | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['link']}"}
        yield ports
    finally:
        # Keep Ray's token, which was set in the meantime.
        for name in (*client, "AWS_ENDPOINT_URL"):
            os.environ.pop(name, None)
        process.stdin.close()
        process.wait(timeout=30)


def downloaded(port: int, size: int) -> float:
    """MB/s of plain downloads over several connections, each fetching whole shards in sequence."""
    each = max(SHARDS // 4 // CONNECTIONS, 1)
    came: list[int] = []

    def download() -> None:
        connection, buffer = http.client.HTTPConnection("127.0.0.1", port), bytearray(2**20)
        for number in range(each):
            connection.request("GET", f"/{BUCKET}/train/{number:05d}.tar")
            answer = connection.getresponse()
            while count := answer.readinto(buffer):
                came.append(count)
        connection.close()

    threads = [threading.Thread(target=download) for _ in range(CONNECTIONS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.perf_counter() - began
    if sum(came) != each * CONNECTIONS * size:
        raise RuntimeError(f"{sum(came)} bytes received of {each * CONNECTIONS * size}")
    return sum(came) / spent / 1e6


def stoker(size: int, crcs: dict[str, int], shuffle: str) -> float:
    """MB/s of shards through the real pipeline.

    Raises:
        RuntimeError: records are missing, repeated or corrupted.
    """
    config = load(
        None,
        [f"data.shuffle={shuffle}", f"data.block_records={BATCH}", f"train.batch_size={BATCH}"],
    ).config
    source = read_webdataset(f"s3://{BUCKET}", "train")
    assert source is not None
    source.check()
    times: list[tuple[float, int]] = []
    sums: list[int] = []
    with one_pass(config, source, [("decode", Decode())], torch.device("cpu")) as stream:
        for batch in stream:
            sums += batch["crc"].tolist()
            times.append((time.perf_counter(), stream.rows))
    check(stream, sums, crcs)
    return slope(times, TOTAL, WINDOW) * size / SHARD_RECORDS / 1e6


def check(stream: Feed, sums: list[int], crcs: dict[str, int]) -> None:
    """Check that speed does not come from doing less: every record once, with the right contents."""
    ids = sum(record_id(f"{shard:05d}.tar:{name}") for shard in range(SHARDS) for name in crcs)
    if stream.rows != TOTAL or stream.id_sum != ids % ID_MODULUS:
        raise RuntimeError(
            f"{stream.rows} records received of {TOTAL}; some are missing or repeated"
        )
    if Counter(sums) != dict.fromkeys(crcs.values(), SHARDS):
        raise RuntimeError("records with wrong contents")
