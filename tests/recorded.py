"""Run directories as the head leaves them, made by its own Recorder from events of our choice."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from stoker.config.loading import load, resolved_yaml
from stoker.events.kinds import StepLogged, event_of
from stoker.events.recorder import Recorder
from stoker.events.summary import Host, Summary
from stoker.train.device import StepTimes

KNOWN = ("acc1", "auroc", "accuracy", "confusion", "rates", "holes", "acc")
"""Metrics of which more is better."""


def record(
    folder: Path,
    steps: int,
    *,
    epochs: int = 2,
    hosts: int = 3,
    wait: float = 0.38,
    status: Any = "succeeded",
    gpu: bool = True,
    per_epoch: int | None = None,
    extra: tuple[dict[str, Any], ...] = (),
) -> Path:
    """A run of `steps` steps in `epochs` epochs, of which `wait` (0…1) was spent waiting for data."""
    folder.mkdir(parents=True)
    job = folder.parent / "job.yaml"
    job.write_text("name: flowers\nparams: {data: '<b>rows</b>'}\ntrain: {epochs: 2}\n")
    (folder / "config.yaml").write_text(resolved_yaml(load(job, ["train.lr=0.1"])))
    kinds = ["gpu", *["cpu"] * (hosts - 1)] if gpu else ["cpu"] * hosts
    summary = Summary(name="flowers", place="rehearsal", status="running", train_workers=1)
    summary.metrics.modes = {f"val/{name}": "max" for name in KNOWN}
    for i, kind in enumerate(kinds, 1):
        about = {"group": kind, "cpus": 4, "gpus": float(kind == "gpu"), "ip": f"10.77.0.{i + 1}"}
        summary.cluster.hosts.append(Host(host=f"algo-{i}", **about))
    recorder = Recorder(folder, summary, 0.0)

    def tell(event: str, time: float, **values: Any) -> None:
        recorder.on_event(event_of({"event": event, "time": time, **values}))

    tell("phase", 0.0, phase="cluster formed")
    tell("train_worker", 0.1, rank=0, node="algo-1")
    per_epoch = per_epoch or max(1, steps // epochs)
    # Of a step of 0.1 s, as the train worker's own clock accounts for it.
    shares = (0.74, 0.16, 0.05, 0.05)  # production, transfer, collate, host to device
    parts = [*(0.1 * wait * share for share in shares), 0.1 * (1 - wait)]
    times = StepTimes()
    for step in range(1, steps + 1):
        epoch, inside = divmod(step - 1, per_epoch)
        times = times if inside else StepTimes()
        times.add(parts)
        elapsed, samples, now = 0.1 * (inside + 1), 64 * (inside + 1), 10 + 0.1 * step
        figures = {"epoch_samples": samples, "elapsed_s": elapsed, "wait_s": times.wait_s}
        figures |= {"terms_ms": times.since_told(), "batches": inside + 1}
        loss = 2.3 * math.exp(-step / steps) if step % 7 else float("nan")
        recorder.on_event(
            StepLogged(time=now, epoch=epoch, step=step, loss=loss, lr=0.1, **figures)
        )
        if step % 20 == 0:
            use = {f"algo-{i + 1}": 30.0 + 10 * (i % 7) for i in range(hosts)}
            tell("host_cpu", now, hosts=use)
        if step % per_epoch == 0:
            times.fetch_s, times.fetch_cpu_s = 0.5 * elapsed, 0.1 * elapsed
            done: dict[str, Any] = {"samples": samples, "elapsed_s": elapsed, "steps": per_epoch}
            done |= {"step_ms": list(times.step_ms), "times": times.figures()}
            tell("pass", now, split="train", epoch=epoch, **done)
            good = 1 - 0.5 / (epoch + 1)
            metrics = {"train/loss": 1 / (epoch + 1), "val/loss": 1.2 / (epoch + 1)}
            tell("epoch", now, epoch=epoch, step=step, metrics={**metrics, "val/acc1": good})
            tell("checkpoint", now, epoch=epoch, step=step, path=f"c/step-{step:08d}")
    for event in extra:
        recorder.on_event(event_of(event))
    summary.status = status
    summary.cost = {"usd": 1.25, "usd_per_million_samples": 0.4, "prices_as_of": "2026-11"}
    summary.error = "the loss is NaN at step 12" if status == "failed" else None
    stages = {"read": (0.2, 110_000), "DecodeImage": (1.1, 562_000), "Crop": (0.8, 150_000)}
    chain = [
        {"stage": name, "cpu_ms_per_sample": ms, "bytes_out": size}
        for name, (ms, size) in stages.items()
    ]
    recorder.figures = {"bytes_per_sample": 150_528, "chain": chain, "open": []}
    recorder.figures["tasks_by_node"] = {"algo-2": 7}
    recorder.close(summary)
    return folder
