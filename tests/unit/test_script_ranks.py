"""Scripts as processes, watched by what train workers run, without Ray: two ranks in two threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stoker.hosts.machine import runs
from stoker.scripts import rank as worker
from stoker.scripts import supervisor as supervising
from stoker.scripts.rank import Child
from stoker.scripts.supervisor import (
    Exit,
    RankCommand,
    Supervisor,
    failure_of,
    last_error,
)
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "POLL_S", 0.02)
    monkeypatch.setattr(worker, "ORDER_S", 0.1)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    started: list[Child] = []

    def start(text: str, rank: int = 0) -> Child:
        script = tmp_path / f"train-{len(started)}.py"
        script.write_text(text)
        environment = {**os.environ, "RANK": str(rank), "PYTHONPATH": str(ROOT / "source_dir")}
        started.append(Child([sys.executable, "-u", str(script)], environment, tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.close()


class Ranks:
    def __init__(
        self, child: Callable[..., Child], *texts: str, killed_after_s: float | None = None
    ) -> None:
        self.killed_after_s = killed_after_s
        self.supervisor = Supervisor("train.py", len(texts))
        self.lock = threading.Lock()  # an actor takes one call after the other
        self.calls = [0] * len(texts)
        self.children = [child(text, rank) for rank, text in enumerate(texts)]
        self.pool = ThreadPoolExecutor(len(texts))
        self.orders = [self.pool.submit(self._watch, rank) for rank in range(len(texts))]

    def _watch(self, rank: int) -> RankCommand:
        one = self.children[rank]

        def tell(output: str, events: list[dict[str, Any]], end: Exit | None) -> RankCommand:
            with self.lock:
                self.calls[rank] += 1
                return self.supervisor.report("a", rank, output, events, end)

        return worker.watch(one, "train.py", rank, tell, self.killed_after_s)

    def end(self) -> list[RankCommand]:
        return [order.result(timeout=60) for order in self.orders]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.supervisor.events if event["event"] == kind]

    def output(self, rank: int) -> str:
        return "".join(event["text"] for event in self.events("output") if event["rank"] == rank)

    def wait_for(self, text: str) -> None:
        until(lambda: all(text in self.output(rank) for rank in range(len(self.children))))


SLEEPS = "import time\nprint('ready')\ntime.sleep(600)\n"


def test_what_ranks_print_and_log_arrives_whole_and_the_run_is_complete(
    child: Callable[..., Child],
) -> None:
    text = (
        "import os, stoker\n"
        "for step in range(1, 2001):\n"
        "    print('ä' * 50, step)\n"
        "    stoker.log({'loss': 1 / step})\n"
        "print('no newline', end='')\n"
    )
    ranks = Ranks(child, text, text)
    assert ranks.end() == [RankCommand(over=True)] * 2
    whole = "".join(f"{'ä' * 50} {step}\n" for step in range(1, 2001)) + "no newline"
    assert (ranks.output(0), ranks.output(1)) == (whole, whole)
    logged = [(event["rank"], event["step"]) for event in ranks.events("metrics")]
    assert logged == [(0, step) for step in range(1, 2001)], "of rank 0 alone"
    assert len(ranks.events("complete")) == 1


def test_a_script_that_says_nothing_is_not_reported_more_often_than_orders_are_due(
    child: Callable[..., Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "ORDER_S", 0.2)
    began = time.monotonic()
    ranks = Ranks(child, "import os, time\nwhile not os.path.exists('over'): time.sleep(0.01)\n")
    until(lambda: ranks.calls[0] == 5)
    (tmp_path / "over").touch()
    assert ranks.end() == [RankCommand(over=True)]
    assert ranks.calls[0] <= (time.monotonic() - began) / 0.2 + 2


IGNORES = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
KILLED = "import os, signal\nos.kill(os.getpid(), signal.{})\n"
WAITS = "import os, time\nwhile not os.path.exists('ignores'): time.sleep(0.01)\nexit(3)\n"


@pytest.mark.parametrize(
    ("texts", "failure"),
    [
        (
            [SLEEPS, "raise ValueError('no data')\n"],
            "ValueError: no data (train-1.py:1) (rank 1); see logs/script-rank-1.log",
        ),
        (
            [f"{IGNORES}open('ignores', 'w')\n{SLEEPS}", WAITS],
            "train.py exited with code 3 (rank 1); see logs/script-rank-1.log",
        ),
        ([KILLED.format("SIGSEGV")], "train.py was killed by SIGSEGV (rank 0)"),
        ([KILLED.format("SIGKILL")], "train.py was killed by SIGKILL, as when memory runs out"),
    ],
    ids=["raises", "another ignores SIGTERM", "SIGSEGV", "SIGKILL"],
)
def test_a_failing_rank_ends_the_others_and_all_tell_its_reason(
    child: Callable[..., Child], monkeypatch: pytest.MonkeyPatch, texts: list[str], failure: str
) -> None:
    monkeypatch.setattr(supervising, "GRACE_S", 0.1)
    monkeypatch.setattr(worker, "SOON_S", 0.5)
    ranks = Ranks(child, *texts)
    (reason,) = {order.failure for order in ranks.end()}
    assert reason.startswith(failure) and not ranks.events("complete")


SAVES = (
    "import signal, stoker, sys, time\n"
    "def save(*_):\n"
    "    print('saved')\n"
    "    sys.exit({code})\n"
    "signal.signal(signal.SIGTERM, save)\n"
    "print('ready')\n"
    "time.sleep(600)\n"
)


@pytest.mark.parametrize("code", [0, 1])
def test_a_stop_is_sigterm_to_every_rank_and_no_failure(
    child: Callable[..., Child], code: int
) -> None:
    ranks = Ranks(child, *[SAVES.format(code=code)] * 2)
    ranks.wait_for("ready")
    ranks.supervisor.request_stop("SIGTERM")
    assert ranks.end() == [RankCommand(stop="SIGTERM", over=True)] * 2
    assert "saved" in ranks.output(0) and "saved" in ranks.output(1)
    assert not ranks.events("complete"), "it was interrupted, whatever it says of itself"


def test_a_rank_that_dies_because_another_was_stopped_does_not_fail_the_run() -> None:
    supervisor = Supervisor("train.py", 2)
    supervisor.request_stop("SIGTERM")
    supervisor.report("a", 0, end=Exit(0, -15, asked=True))
    order = supervisor.report(
        "a", 1, end=Exit(1, 1, line="RuntimeError: Connection closed by peer")
    )
    assert order == RankCommand(stop="SIGTERM", over=True)


def test_a_failure_before_the_stop_stays_a_failure() -> None:
    supervisor = Supervisor("train.py", 2)
    supervisor.report("a", 1, end=Exit(1, 1, line="ValueError: no"))
    supervisor.request_stop("SIGTERM")
    assert supervisor.report("a", 0, end=Exit(0, -15, asked=True)).failure.startswith(
        "ValueError: no"
    )


@pytest.mark.long
@pytest.mark.parametrize(("killed_after_s", "stop_s"), [(None, 0.3), (0.6, 900)])
def test_a_script_that_does_not_answer_sigterm_is_killed_after_the_deadline(
    child: Callable[..., Child],
    monkeypatch: pytest.MonkeyPatch,
    killed_after_s: float | None,
    stop_s: float,
) -> None:
    monkeypatch.setattr(worker, "STOP_S", stop_s)
    ranks = Ranks(child, IGNORES + SLEEPS, killed_after_s=killed_after_s)
    ranks.wait_for("ready")
    ranks.supervisor.request_stop("Ctrl-C")
    assert ranks.end() == [RankCommand(stop="Ctrl-C", over=True)]
    assert "did not end within" in ranks.output(0)


def test_a_restart_counts_its_own_exits_and_ends_what_is_left_of_the_start_before() -> None:
    supervisor = Supervisor("train.py", 1)
    assert supervisor.report("a", 0, end=Exit(0, 1, line="OSError")).failure
    assert supervisor.report("b", 0) == RankCommand()
    assert supervisor.report("a", 0).over
    assert supervisor.report("b", 0, end=Exit(0, 0)) == RankCommand(over=True)
    notes = [event["text"] for event in supervisor.events if event["event"] == "note"]
    assert notes == ["restarting the script on all train workers (start 2)"]


def test_hosts_that_could_not_be_requested_are_named_at_the_end() -> None:
    def notes(**event: Any) -> list[str]:
        supervisor = Supervisor("train.py", 1, scales=True)
        supervisor.report("a", 0, events=[{"time": 1.0, **event}])
        supervisor.report("a", 0, end=Exit(0, 0))
        return [event["text"] for event in supervisor.drain() if event["event"] == "note"]

    assert notes(event="loader", steps=3) == []
    assert notes(event="metrics", step=1, metrics={}) == [
        "cluster.cpu_hosts had no effect: the script did not train on a stoker.DataLoader"
    ]


@pytest.mark.long
@pytest.mark.parametrize("output", ["None", "-3"])
def test_nothing_that_the_script_started_outlives_it(
    child: Callable[..., Child], output: str
) -> None:
    """A process that it leaves is ended with it, whether or not it holds its output open."""
    text = (
        "import subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], stdout={output},"
        f" stderr={output})\n"
        "print('left', p.pid)\n"
    )
    ranks = Ranks(child, text)
    assert ranks.end() == [RankCommand(over=True)]
    left = int(ranks.output(0).split()[1])
    ranks.children[0].close()
    until(lambda: not runs(left))


def test_the_script_ends_with_the_process_that_watches_it(tmp_path: Path) -> None:
    """SIGKILL to a train worker leaves no script that trains on alone, and no files."""
    (tmp_path / "train.py").write_text("import os, time\nprint(os.getpid())\ntime.sleep(600)\n")
    text = (
        "import os, sys, time; from pathlib import Path\n"
        "from stoker.scripts.rank import Child\n"
        f"c = Child([sys.executable, '-u', 'train.py'], os.environ, Path({str(tmp_path)!r}))\n"
        "while not (said := c.output()): time.sleep(0.02)\n"
        "print(said, flush=True); os.kill(os.getpid(), 9)\n"
    )
    (tmp_path / "tmp").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "source_dir"),
        "TMPDIR": str(tmp_path / "tmp"),
    }
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == -signal.SIGKILL
    until(lambda: not runs(int(done.stdout)) and not any((tmp_path / "tmp").iterdir()))


# ---- one line for how a script failed: of the rank that failed first, with its last line ----

LOST = "RuntimeError: [pair.cc:561] Connection closed by peer [127.0.0.1]:49373 (train.py:6)"


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("def f():\n    raise ValueError('no  data')\n\nf()\n", "ValueError: no data (train.py:2)"),
        (
            "import json\njson.loads('x')\n",
            "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0) (train.py:2)",
        ),
        (
            "try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError(1) from e\n",
            "KeyError: 1 (train.py:4)",
        ),
        ("import atexit\natexit.register(print, 'bye')\nraise OSError\n", "OSError (train.py:3)"),
        (
            "x = (\n",
            "train.py exited with code 1; its last line: SyntaxError: '(' was never closed",
        ),
        ("raise Exception('two\\nlines')\n", "Exception: two (train.py:1)"),
        (
            "import sys\nsys.exit('no data')\n",
            "train.py exited with code 1; its last line: no data",
        ),
    ],
)
def test_the_last_line_of_the_last_traceback_with_the_scripts_own_line(
    tmp_path: Path, program: str, line: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 1
    assert last_error(done.stdout, "train.py") == line
    marked = "".join(f"[rank1]: {each}\n" for each in done.stdout.splitlines())
    assert "Traceback" not in marked or last_error(marked, "train.py") == line, (
        "as PyTorch marks it"
    )


def test_the_rank_that_failed_first_is_the_cause() -> None:
    lost, cause = Exit(0, 1, line=LOST, at=2.5), Exit(1, 1, line="ValueError: no", at=2.0)
    text = failure_of("train.py", [lost, cause, Exit(2, 1, line=LOST, at=3.0)])
    assert text.startswith("ValueError: no (rank 1); see") and f"; then {LOST} (rank 0)" in text
    killed = failure_of("train.py", [lost, Exit(1, -9, at=2.0)])
    assert killed.startswith("train.py was killed by SIGKILL")
    asked = Exit(1, -15, asked=True)
    assert failure_of("train.py", [lost, asked]).startswith(LOST)
    assert failure_of("train.py", [Exit(0, 0), asked]) == ""


def test_the_time_of_a_failure_is_that_of_its_traceback(child: Callable[..., Child]) -> None:
    """A rank may take long to end after it; those that it makes fail end sooner."""
    slow = "import atexit, time\natexit.register(time.sleep, 1)\nraise ValueError('cause')\n"
    first = child(slow, {})
    until(lambda: first.listen(0.1) or "cause" in first.tail + first.output())
    second = child("raise ValueError('effect')\n", {})
    until(lambda: second.listen(0.1) or (second.output(), second.poll())[1] == 1)
    until(lambda: first.listen(0.1) or (first.output(), first.poll())[1] == 1)
    assert first.failed_at < second.failed_at


def test_a_ray_scripts_own_traceback_is_told_from_those_of_its_workers() -> None:
    """Ray prints its workers' lines late, in one another, and once for several; it cuts off snippets."""
    own = (
        "no newlineTraceback (most recent call last):\n"
        '  File "/a/train.py", line 19, in <module>\n    trainer.fit()\n'
        "ray.train.WorkerGroupError: Training failed due to worker errors:\n[Rank 1 Error Snippet]:\n"
        "Traceback (most recent call last):\n"
        '  File "/a/train.py", line 10, in loop\n    raise ValueError("bad")\n'
    )
    one, other = "\x1b[36m(Worker pid=3)\x1b[0m ", "\x1b[36m(Worker pid=4)\x1b[0m "
    late = (
        f"{one}Traceback (most recent call last): [repeated 2x across cluster]\n"
        f'{one}  File "/a/train.py", line 10, in loop\n'
        f"{other}get_train_fn_utils().report(\n{one}ValueError: bad\n"
    )
    error = "ValueError: bad (train.py:10)"
    assert last_error(f"{own}ValueError: bad\n{late}", "train.py") == error
    assert last_error(late, "train.py") == error
    indented = '  Traceback (most recent call last):\n    File "x.py", line 1\n  KeyError: 1\n'
    assert last_error(f"{indented}{own}ValueError: bad\n", "train.py") == error
    cut = last_error(f"{own}... (Output truncated)\n{late}", "train.py")
    assert cut.startswith("ray.train.WorkerGroupError: Training failed")
