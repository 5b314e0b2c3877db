"""What `peek RUN --step N` rebuilds, compared with what the train workers recorded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from stoker_launcher.advise.peek.peek_run import rebuild


def rebuilt_as_recorded(
    run_dir: Path, batch_size: int, epoch_steps: int, steps: Iterable[int]
) -> None:
    """Every step of a run without restarts, one batch per train worker and step, is what each one trained."""
    for number in steps:
        epoch, within = divmod(number - 1, epoch_steps)
        step = rebuild(run_dir, number, [])
        assert step.epoch == epoch
        for rank in range(step.workers):
            path = run_dir / "records" / f"train-epoch-{epoch:03d}-rank-{rank}.txt"
            recorded = path.read_text().split()[within * batch_size : (within + 1) * batch_size]
            lines = [line for line in step.lines if line.rank == rank]
            assert [line.key for line in lines] == recorded, (number, rank)
            assert all(line.record["x0"] == int(line.key) % 7 for line in lines), "its own values"
            assert all(line.loss is not None for line in lines), step.notes
