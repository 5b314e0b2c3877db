"""A training job of short epochs that records its memory and, at the end, the cost of accounting."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.recipes.images import Images

REPEATS, CALLS = 20_000, 300


class Epochs(Images):
    """Like `Images`, with steps as long as on a GPU, and validation."""

    epochs: int
    step_s: float = 0.0
    """Sleep per step, besides fetching the batch."""

    def read(self, split: str) -> Any:
        from stoker.data import read_images

        return read_images(self.data, split)

    def training_step(self, model: Any, batch: Any) -> Any:
        import torch

        time.sleep(self.step_s)
        consumer = model.consumer
        consumer.take(batch["image"], batch["label"])
        if consumer.rows % self.total == 0:
            note = {"epoch": consumer.rows // self.total - 1, **memory()}
            if note["epoch"] == self.epochs - 1:
                note |= accounting()
            with Path(self.out).open("a") as file:
                file.write(json.dumps(note) + "\n")
        return model(torch.ones(1, 1)).sum()

    def validation_step(self, model: Any, batch: Any) -> Any:
        import torch

        return {"loss": model(torch.ones(1, 1)).sum()}


def memory() -> dict[str, Any]:
    """Train worker: private bytes of this process, and the anonymous ones among them."""
    import psutil

    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    anonymous = next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
    return {"uss": psutil.Process().memory_full_info().uss, "anonymous": 1024 * anonymous}


def accounting() -> dict[str, float]:
    """Train worker: CPU time of this thread in µs for the timers of a step, and for a logged step."""
    import ray

    from stoker.events.kinds import StepLogged
    from stoker.train.device import HostClock, Stamps, StepTimes

    times = StepTimes()
    clock = HostClock(times)
    began = time.thread_time()
    for _ in range(REPEATS):
        at = time.perf_counter()
        clock.waited(at, time.perf_counter(), Stamps(at, at, at))
        clock.finished()
    per_step = (time.thread_time() - began) / REPEATS

    class Log:
        def log(self, event: StepLogged) -> None: ...

    log = ray.remote(num_cpus=0)(Log).remote()
    began = time.thread_time()
    for number in range(CALLS):
        values = {
            "epoch": 0,
            "step": number,
            "loss": 0.1,
            "lr": 0.1,
            "grad_norm": None,
            "wait_s": 0.1,
        }
        counts = {"epoch_samples": number, "elapsed_s": 1.0, "terms_ms": times.since_told()}
        log.log.remote(StepLogged.model_validate(values | counts))
    per_log = (time.thread_time() - began) / CALLS
    ray.kill(log)
    return {"per_step_us": 1e6 * per_step, "per_log_us": 1e6 * per_log}
