"""Laptop: CPU time that the GPU host spends to receive one preprocessed image (κ of the limits model).

Two Ray nodes on this machine, each with its own object store: one makes constant images, the other receives
and drops them. "Received" counts the receiving process and its Ray daemon; "whole host" adds everything else
on the GPU host: Stoker's coordinator or Ray Data's executor.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import time
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness import Measure
from tests.fakes.ray_nodes import ray_nodes

SIDE = 224
BATCH = 64
BLOCK = 256
IMAGES = {"uint8": 10_240, "float32": 4_096}
ROUNDS = 3
STORE_MB = 1500
RAW_BUFFERS = 32
"""The raw receiver rotates buffers like a feed: a single one would stay in the CPU cache."""


class Picture:
    """Chain worker: the same image for every record, at almost no cost."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        made = images(len(batch["index"]), self.dtype)
        if self.dtype == "uint8":
            return made
        import torch  # slow to load

        # Channels first, which is the layout of a tensor; an array's is channels last.
        return made | {"image": torch.from_numpy(made["image"])}


_KEPT: dict[tuple[int, str], Any] = {}


def images(count: int, dtype: str) -> dict[str, Any]:
    """Chain worker: make a block; float32 images are channels first, as after normalisation."""
    if (count, dtype) not in _KEPT:
        shape = (count, SIDE, SIDE, 3) if dtype == "uint8" else (count, 3, SIDE, SIDE)
        _KEPT[count, dtype] = np.full(shape, 7, dtype)
    return {"image": _KEPT[count, dtype], "label": np.arange(count)}


def stock_block(batch: dict[str, Any], dtype: str, rows: int) -> dict[str, Any]:
    """Chain worker: make a block for Ray Data."""
    return images(rows, dtype)


class Receiver:
    """GPU host: the process that receives in place of a train worker."""

    def __init__(self) -> None:
        from stoker.serve.blocks.batches import BufferPool

        # A training process allocates its batch buffers once, in the first seconds.
        self.buffers = BufferPool(pinned=False)

    def stock(self, dtype: str, rows: int) -> tuple[float, float]:
        """Ray Data as under TorchTrainer, with its executor in another process of this host."""
        import ray

        ray.data.DataContext.get_current().enable_progress_bars = False
        blocks = IMAGES[dtype] // rows
        make = partial(stock_block, dtype=dtype, rows=rows)
        dataset = ray.data.range(blocks, override_num_blocks=blocks).map_batches(
            make, batch_size=None, label_selector={"stoker-group": "cpu"}
        )
        iterator = dataset.streaming_split(1)[0]
        used = Used()
        count = 0
        for batch in iterator.iter_torch_batches(batch_size=BATCH, prefetch_batches=2):
            count += len(batch["label"])
        return used.per_image(count)

    def ours(self, dtype: str, rows: int, transport: str) -> tuple[float, float]:
        """The real coordinator, agents and feed."""
        import ray
        import torch

        from benchmarks.stream import one_pass
        from stoker.config.schema import Config
        from stoker.data import read_range

        data = {
            "block_records": rows,
            "preprocess_on": ["cpu"],
            "transport": transport,
            "shuffle": False,
        }
        config = Config.model_validate({"data": data, "train": {"batch_size": BATCH}})
        source = read_range(IMAGES[dtype])
        with one_pass(config, source, [Picture(dtype)], torch.device("cpu")) as stream:
            deadline = time.monotonic() + 60
            while (
                transport == "direct" and not ray.get(stream.coordinator.servers.remote()).servers
            ):
                if time.monotonic() > deadline:
                    raise RuntimeError("the other node serves no blocks")
                time.sleep(0.1)
            stream.transport.buffers = self.buffers
            batches = iter(stream)
            next(batches)  # by then, the chain workers have started
            used = Used()
            for batch in batches:
                assert batch["image"].shape[1:] == (3, SIDE, SIDE), batch["image"].shape
            figures = used.per_image(stream.rows - BATCH)
            came = stream.transport.bytes_by
            expected = "direct" if transport == "direct" else "ray"
            if came[expected] < 0.95 * came.total():
                raise RuntimeError(f"blocks did not use the requested transport: {dict(came)}")
        return figures


class Used:
    """GPU host: CPU time of this process and its Ray daemon, and of all processes the daemon started."""

    def __init__(self) -> None:
        self.before = self.now()

    @staticmethod
    def now() -> tuple[dict[int, float], dict[int, float]]:
        import psutil

        me = psutil.Process()
        daemon = me.parent()
        if daemon.name() != "raylet":
            raise RuntimeError(f"the parent of a worker is {daemon.name()}, not Ray's daemon")
        own = {each.pid: seconds(each) for each in (me, daemon)}
        return own, own | {
            p.pid: seconds(p) for p in daemon.children(recursive=True) if p.pid != me.pid
        }

    def per_image(self, count: int) -> tuple[float, float]:
        """(received, whole host), ms per image; of processes that ended meanwhile, nothing is counted."""

        def used(before: dict[int, float], after: dict[int, float]) -> float:
            return 1000 * sum(at - before.get(pid, 0.0) for pid, at in after.items()) / count

        received, host = (used(*both) for both in zip(self.before, self.now(), strict=True))
        return received, host


def seconds(process: Any) -> float:
    """CPU seconds used by a process."""
    import psutil

    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def raw() -> float:
    """The lower bound: ms per image for the same bytes over one TCP connection into process memory."""
    batches = IMAGES["uint8"] // BATCH
    server = socket.create_server(("127.0.0.1", 0))
    sender = os.fork()
    if sender == 0:
        connection, _ = server.accept()
        content = memoryview(np.full(BATCH * SIDE * SIDE * 3, 7, np.uint8))
        for _ in range(batches):
            connection.sendall(content)
        os._exit(0)
    connection = socket.create_connection(server.getsockname())
    buffers = [
        memoryview(np.full(BATCH * SIDE * SIDE * 3, 7, np.uint8)) for _ in range(RAW_BUFFERS)
    ]
    started = time.process_time()
    for number in range(batches):
        target, at = buffers[number % RAW_BUFFERS], 0
        while at < len(target):
            at += connection.recv_into(target[at:], 0, socket.MSG_WAITALL)
    used = time.process_time() - started
    os.waitpid(sender, 0)
    connection.close()
    server.close()
    return 1000 * used / IMAGES["uint8"]


def measure() -> dict[str, tuple[float, float]]:
    """Medians of interleaved rounds: (received, whole host) ms per image by case."""
    found: dict[str, list[tuple[float, float]]] = {}
    # `Used` needs the processes of each host below its own raylet.
    with ray_nodes(
        ("gpu", "cpu"), cpus=1, store_mb=STORE_MB, dashboard=False, forked=False
    ) as nodes:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": nodes.token}
        import ray

        ray.init(address=nodes.gcs, log_to_driver=False)
        try:
            actor = ray.remote(Receiver).options(num_cpus=0, label_selector={"stoker-group": "gpu"})
            receiver = actor.remote()
            cases = {
                "ours": lambda: receiver.ours.remote("uint8", BLOCK, "direct"),
                "ours through Ray": lambda: receiver.ours.remote("uint8", BLOCK, "ray"),
                "stock": lambda: receiver.stock.remote("uint8", BLOCK),
                "stock float32": lambda: receiver.stock.remote("float32", BLOCK),
            }
            once = {
                "ours, blocks of 64": lambda: receiver.ours.remote("uint8", 64, "direct"),
                "ours, blocks of 1024": lambda: receiver.ours.remote("uint8", 1024, "direct"),
                "ours, float32": lambda: receiver.ours.remote("float32", BLOCK, "direct"),
                "stock, blocks of 64": lambda: receiver.stock.remote("uint8", 64),
                "stock, blocks of 1024": lambda: receiver.stock.remote("uint8", 1024),
            }
            for number in range(ROUNDS + 1):  # the first round is a warm-up
                for name, case in (cases | once if number == 1 else cases).items():
                    figures = ray.get(case(), timeout=120)
                    if number:
                        found.setdefault(name, []).append(figures)
        finally:
            ray.shutdown()
    return {
        name: (statistics.median(v[0] for v in values), statistics.median(v[1] for v in values))
        for name, values in found.items()
    }


def run() -> list[Measure]:
    """Run the benchmark and return its rows; ratios are the peer's cost over ours."""
    floor = statistics.median(raw() for _ in range(ROUNDS))
    found = measure()
    ours = found["ours"][0]

    def against(name: str, peer_name: str, peer: float | None, goal: float | None) -> Measure:
        ratio = peer / ours if peer is not None else None
        return Measure(
            name,
            ours,
            peer,
            peer_name,
            ratio,
            goal,
            ratio >= goal if ratio and goal else None,
            "ms/image",
        )

    unit = "ms/image"
    name = "received uint8 224² image"
    rows = [
        Measure(
            f"{name}: at most 0.15 ms", ours, 0.15, "the goal", 0.15 / ours, 1.0, ours <= 0.15, unit
        ),
        against(f"{name}: against Ray Data, uint8", "Ray Data, uint8", found["stock"][0], 1 / 0.45),
        against(
            f"{name}: against the float32 path", "Ray Data, float32", found["stock float32"][0], 7.0
        ),
        against(
            f"{name}: against Ray's object store",
            "ours through Ray",
            found["ours through Ray"][0],
            None,
        ),
        against(f"{name}: against the floor", "one raw TCP connection", floor, None),
    ]
    whole, stock = found["ours"][1], found["stock"][1]
    whole_name = f"{name}, with coordination"
    rows.append(
        Measure(whole_name, whole, stock, "Ray Data, uint8", stock / whole, None, None, unit)
    )
    for case, (received, _) in found.items():
        if "," in case:
            rows.append(Measure(f"  received: {case}", received, None, "–", None, None, None, unit))
    return rows
