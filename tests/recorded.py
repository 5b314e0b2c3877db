"""Run directories as the head leaves them, made by its own Recorder from events of our choice."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from stoker.config.loading import load, resolved_yaml
from stoker.events.kinds import StepLogged, event_of
from stoker.events.recorder import Recorder
from stoker.events.summary import Cluster, Host, Summary
from stoker.train.device import StepTimes

MODES = (
    "val/acc1",
    "val/auroc",
    "val/accuracy",
    "val/confusion",
    "val/rates",
    "val/holes",
    "val/acc",
)
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
    summary.metrics.modes = dict.fromkeys(MODES, "max")
    summary.cluster = Cluster(
        hosts=[
            Host(
                host=f"algo-{i + 1}",
                group=kind,
                cpus=4,
                gpus=float(kind == "gpu"),
                ip=f"10.77.0.{i + 2}",
            )
            for i, kind in enumerate(kinds)
        ]
    )
    recorder = Recorder(folder, summary, 0.0)
    recorder.on_event(event_of({"time": 0.0, "event": "phase", "phase": "cluster formed"}))
    recorder.on_event(event_of({"time": 0.1, "event": "train_worker", "rank": 0, "node": "algo-1"}))
    per_epoch = per_epoch or max(1, steps // epochs)
    # Of a step of 0.1 s, as the train worker's own clock accounts for it.
    shares = {
        "wait_production": 0.74,
        "wait_transfer": 0.16,
        "wait_collate": 0.05,
        "host_to_device": 0.05,
    }
    parts = [*(0.1 * wait * share for share in shares.values()), 0.1 * (1 - wait)]
    times = StepTimes()
    for step in range(1, steps + 1):
        epoch, inside = divmod(step - 1, per_epoch)
        times = times if inside else StepTimes()
        times.add(parts)
        elapsed = 0.1 * (inside + 1)
        figures = {"epoch_samples": 64 * (inside + 1), "elapsed_s": elapsed, "wait_s": times.wait_s}
        figures |= {"terms_ms": times.since_told(), "batches": inside + 1}
        loss = 2.3 * math.exp(-step / steps) if step % 7 else float("nan")
        now = 10 + 0.1 * step
        recorder.on_event(
            StepLogged(time=now, epoch=epoch, step=step, loss=loss, lr=0.1, **figures)
        )
        if step % 20 == 0:
            use = {f"algo-{i + 1}": 30.0 + 10 * (i % 7) for i in range(hosts)}
            recorder.on_event(event_of({"time": now, "event": "host_cpu", "hosts": use}))
        if step % per_epoch == 0:
            times.fetch_s, times.fetch_cpu_s = 0.5 * elapsed, 0.1 * elapsed
            done: dict[str, Any] = {"samples": figures["epoch_samples"], "elapsed_s": elapsed}
            done |= {"steps": per_epoch, "step_ms": list(times.step_ms), "times": times.figures()}
            recorder.on_event(
                event_of({"time": now, "event": "pass", "split": "train", "epoch": epoch, **done})
            )
            metrics = {
                "train/loss": 1 / (epoch + 1),
                "val/loss": 1.2 / (epoch + 1),
                "val/acc1": 1 - 0.5 / (epoch + 1),
            }
            recorder.on_event(
                event_of(
                    {
                        "time": now,
                        "event": "epoch",
                        "epoch": epoch,
                        "step": step,
                        "metrics": metrics,
                    }
                )
            )
            recorder.on_event(
                event_of(
                    {
                        "time": now,
                        "event": "checkpoint",
                        "epoch": epoch,
                        "step": step,
                        "path": f"c/step-{step:08d}",
                    }
                )
            )
    for event in extra:
        recorder.on_event(event_of(event))
    summary.status = status
    summary.cost = {
        "usd": 1.25,
        "usd_per_million_samples": 0.4,
        "prices_as_of": "2026-11",
        "estimated": True,
    }
    summary.error = "the loss is NaN at step 12" if status == "failed" else None
    stages = [
        ("read", 0.2, 110_000),
        ("DecodeImage", 1.1, 562_000),
        ("RandomResizedCrop", 0.8, 150_000),
    ]
    chain = [
        {"stage": name, "cpu_ms_per_sample": ms, "bytes_out": size} for name, ms, size in stages
    ]
    tasks = {"algo-2": 7}
    recorder.figures = {
        "bytes_per_sample": 150_528,
        "chain": chain,
        "tasks_by_node": tasks,
        "open": [],
    }
    recorder.close(summary)
    return folder
