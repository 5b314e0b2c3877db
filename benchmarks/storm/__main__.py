"""`python -m benchmarks.storm [--minutes 10] [--seed N]`: a job under seeded faults; see docs/reliability.md.

Writes benchmarks/results/soak.json and exits with 1 if anything is lost, repeated, different or left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS
from benchmarks.jobs import ROOT
from benchmarks.storm import ground, verdict
from benchmarks.storm.faults import FAULTS
from benchmarks.storm.hosts import Hosts
from benchmarks.storm.job import (
    STEPS,
    StormJob,
    Trace,
    complete_lines,
    epochs_for,
    starts,
    upload_rows,
)
from benchmarks.storm.s3_proxy import ENDPOINT, S3Proxy
from benchmarks.storm.supervisor import Storm, StormError, as_rows
from benchmarks.storm.watch import Watch
from tests.fakes.aws import moto_server

FILE = RESULTS.with_name("soak.json")
REFERENCE_HOSTS = "gpu=1,cpu=1"
KEPT = ROOT / "build" / "storm"


def main() -> int:
    """Laptop: run a storm; returns the exit code."""
    asked = _arguments()
    seed = ["--minutes", f"{asked.minutes:g}", "--seed", str(asked.seed), "--faults", asked.faults]
    folder = ground.enter(seed)
    print(f"storm: {asked.minutes:g} minutes, SEED={asked.seed}", flush=True)
    started = time.monotonic()
    place = ground.prepare(folder)
    with moto_server() as server:
        result = _storm(asked, place, server)
    result["wall_s"] = round(time.monotonic() - started, 1)
    _write(result)
    for row in result["by_fault"]:
        print(
            f"  {row['fault']:<20} {row['times']:>3}×  lost {row['lost']}  repeated {row['repeated']}"
            f"  recovered after {row['recovered_s_median']:.0f} s (at most {row['recovered_s_max']:.0f})"
            f"  {row['outcome'][:90]}"
        )
    for problem in result["problems"]:
        print(f"PROBLEM {problem}")
    print(f"logs: {_keep(place)}")
    if result["problems"]:
        print(f"again: make storm MINUTES={asked.minutes:g} SEED={asked.seed}")
    else:
        print(
            f"nothing lost, nothing left: {result['steps']} steps, {len(result['events'])} faults"
        )
    return 1 if result["problems"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storm", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument(
        "--faults", default=",".join(FAULTS), help="only these, separated by commas"
    )
    asked = parser.parse_args()
    if unknown := set(asked.faults.split(",")) - FAULTS.keys():
        parser.error(f"--faults: no {', '.join(sorted(unknown))}; use some of {', '.join(FAULTS)}")
    return asked


def _storm(
    asked: argparse.Namespace, place: ground.Ground, server: dict[str, str]
) -> dict[str, Any]:
    import boto3

    os.environ.update(server)
    upload_rows(boto3.client("s3"))
    epochs = epochs_for(asked.minutes)
    environment = {**server, "AWS_ENDPOINT_URL": ENDPOINT}
    proxy = S3Proxy(server["AWS_ENDPOINT_URL"], asked.seed)
    clock = _clock(place.folder)
    if clock is not None:
        environment["LD_PRELOAD"] = str(clock)
    mark = ground.mark_of(place.folder)
    marks = (mark, f"stoker-{os.getpid()}-")
    timeout_s = asked.minutes * 60 + 3600

    def job(folder: str, checkpoints: Path) -> StormJob:
        return StormJob("storm", place.folder / folder, checkpoints, epochs, environment, timeout_s)

    before = ground.look(marks)  # all that is there now belongs to the storm
    reference = job("reference", place.folder / "reference" / "checkpoints")
    reference_run = _undisturbed(reference, proxy)
    expected = complete_lines(starts(reference.trace)[0])
    stormy = job("trace", place.disk / "checkpoints")
    stormy.trace.mkdir()
    hosts = Hosts(mark)
    watch = Watch(Trace(stormy.trace, expected), hosts)
    storm = Storm(stormy, place, proxy, hosts, watch, asked.seed, clock=clock)
    problems: list[str] = []
    watch.start()
    try:
        storm.blow(asked.minutes, asked.faults.split(","))
    except StormError as error:
        problems.append(str(error))
    finally:
        watch.close()
        storm.close()
    run_dir = storm.run.run_dir
    last = storm.ends[-1] if storm.ends else {"code": None, "reason": "it did not end"}
    if last["code"] != 0:
        problems.append(f"the job ended with {last['code']}: {last['reason']}")
    problems += [f"{event.fault}: {event.outcome}" for event in storm.events if not event.ok]
    wrong, lost, repeated = verdict.compare_traces(stormy.trace, expected)
    for event in storm.events:
        epochs_hit = range(event.from_step // STEPS, event.to_step // STEPS + 1)
        event.lost = sum(lost[epoch] for epoch in epochs_hit)
        event.repeated = sum(repeated[epoch] for epoch in epochs_hit)
    problems += wrong
    problems += [f"{sum(lost.values())} records lost"] if lost else []
    problems += [f"{sum(repeated.values())} records repeated"] if repeated else []
    if last["code"] == 0:
        problems += verdict.books(run_dir, epochs) + verdict.compare_weights(run_dir, reference_run)
    watch.save(place.folder / "memory.json")
    grown = verdict.growth(watch.memory, watch.commands)
    problems += verdict.memory_problems(grown)
    hosts.close()
    problems += [f"left behind: {thing}" for thing in ground.left(before, marks)]
    events = as_rows(storm.events)
    return {
        "seed": asked.seed,
        "minutes": asked.minutes,
        "epochs": epochs,
        "steps": len(expected),
        "problems": problems,
        "by_fault": verdict.by_fault(events),
        "events": events,
        "launches": storm.ends,
        "memory": grown,
        "s3": dict(proxy.counts),
        "left_out": storm.left_out,
    }


def _clock(folder: Path) -> Path | None:
    """Build what steps the date of a host; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library, source = folder / "clock.so", Path(__file__).with_name("clock.c")
    ground.run(
        compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl", "-lpthread"
    )
    return library


def _undisturbed(job: StormJob, proxy: S3Proxy) -> Path:
    """The same job without faults or pauses; returns its run directory.

    Raises:
        SystemExit: it failed.
    """
    job.trace.mkdir()
    job.hurry()
    run = job.launch(REFERENCE_HOSTS)
    proxy.listen(run.process_id)
    code = run.wait()
    proxy.close()
    if code:
        logs = "\n".join(
            path.read_text()[-3000:] for path in sorted((run.run_dir / "logs").glob("*.log"))
        )
        sys.exit(f"the undisturbed run ended with {code}: {run.failure_reason}\n{logs}")
    return run.run_dir


def _write(result: dict[str, Any]) -> None:
    """Add the storm to the results: one per seed and length, the newest of each."""
    rows = json.loads(FILE.read_text())["storms"] if FILE.is_file() else []
    key = ("seed", "minutes")
    rows = [row for row in rows if [row[k] for k in key] != [result[k] for k in key]]
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    result |= {
        "commit": commit.stdout.strip(),
        "day": date.today().isoformat(),
        "cores": os.cpu_count(),
    }
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps({"storms": [*rows, result]}, indent=1))


def _keep(place: ground.Ground) -> Path:
    """Keep the logs, traces and run directories of the last storm."""
    shutil.rmtree(KEPT, ignore_errors=True)
    shutil.copytree(
        place.folder, KEPT, ignore=shutil.ignore_patterns("disk*", "hosts"), symlinks=True
    )
    return KEPT


if __name__ == "__main__":
    sys.exit(main())
