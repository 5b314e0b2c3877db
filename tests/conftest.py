"""Shared by all tests: paths, a clean environment, the example data, soak tests apart, time by part."""

from __future__ import annotations

import fcntl
import functools
import gc
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
RECIPES = Path(__file__).resolve().parent / "recipes"
LONG_S = 45.0
"""A test that takes longer says in its docstring why."""

# Ray's worker processes import the tests' recipes too.
os.environ["PYTHONPATH"] = os.pathsep.join([str(RECIPES), os.environ.get("PYTHONPATH", "")])
sys.path[:0] = [str(RECIPES), str(Path(__file__).resolve().parent)]
for name in ("STOKER_RUN_DIR", "STOKER_PLACE", "RAY_ADDRESS", "AWS_PROFILE"):
    os.environ.pop(name, None)
# Ray runs its workers at nice 15: beside anything else that computes here, they would hardly get on.
# Its own node has 30 s to start, in which it may ask but once.
os.environ |= {"RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "150"}
# A process that is killed by a signal says where it was.
os.environ["PYTHONFAULTHANDLER"] = "1"
# A shell starts background jobs with SIGINT ignored, and children inherit that; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# An example takes as long as the machine is slow.
settings.register_profile("stoker", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("stoker")


def part_of(path: Path) -> str:
    return path.relative_to(ROOT / "tests").parts[0]


TOGETHER = {
    "ranks": (
        *("test_exact_resume", "test_finite_on_ranks", "test_metrics_on_ranks"),
        *("test_step_on_two_ranks", "test_strategies"),
    ),
    "nodes": ("test_ray_jobs", "test_several_hosts", "test_notebook_run"),
    "demo": ("test_local", "test_notebook"),
}
"""Files whose tests share what is slow to start: they run in one process, one after the other."""
FIRST = (
    *TOGETHER["nodes"],
    "test_schema_of_a_split",
    "test_init",
    "test_site",
    "test_loader_order",
)
"""They take longest, so they start first: at the end, the other processes would wait for them."""


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As `--dist loadfile`, with some files as one."""
    from xdist.scheduler import LoadFileScheduling

    group_of = {file: group for group, files in TOGETHER.items() for file in files}

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return group_of.get(Path(file).stem, file)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its part; leave those of `make soak` out."""
    for item in items:
        item.add_marker(getattr(pytest.mark, part_of(item.path)))
    items.sort(key=lambda item: item.path.stem not in FIRST)
    if "soak" in (config.option.markexpr or ""):
        return
    soak = [item for item in items if item.get_closest_marker("soak")]
    config.hook.pytest_deselected(items=soak)
    items[:] = [item for item in items if item not in soak]


def pytest_collection_finish() -> None:
    """Garbage collections need not look through all that was imported, each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The time of each part, and long tests that do not say why."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if not isinstance(report, pytest.TestReport):
                continue
            seconds[part_of(ROOT / report.nodeid.split("::")[0])] += report.duration
            long = report.when == "call" and report.duration > LONG_S
            if long and DOCUMENTED not in report.user_properties:
                text = f"{report.nodeid} took {report.duration:.0f} s"
                terminalreporter.write_line(f"{text}: shorten it, or say in its docstring why")
    if seconds:
        parts = "  ".join(f"{part} {spent:.0f} s" for part, spent in seconds.items())
        terminalreporter.write_line(f"seconds spent in tests: {parts}")


DOCUMENTED = ("documented", "yes")


def pytest_itemcollected(item: pytest.Item) -> None:
    if getattr(getattr(item, "function", None), "__doc__", None):
        item.user_properties.append(DOCUMENTED)


@pytest.fixture(autouse=True)
def other_tests_are_no_part_of_the_script(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of `stoker.DataLoader` looks through its script's modules: here, what this file imports."""
    if (state := sys.modules.get("stoker.loader.script_state")) is None:
        return
    named = {getattr(value, "__module__", None) for value in vars(request.module).values()}
    files = {getattr(sys.modules.get(str(name)), "__file__", None) for name in named}
    own, files = state.is_own_file, {*files, str(request.path)}

    @functools.cache  # thousands of modules, in each pass
    def is_own_file(file: str | None) -> bool:
        return (file in files or not str(file).startswith(f"{ROOT}/")) and bool(own(file))

    monkeypatch.setattr(state, "is_own_file", is_own_file)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written once for all test processes, which only read it."""
    from recipes.digits import write

    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with (root / "digits.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write(root / "digits")
    return root / "digits"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A failure is shown when it happens, not half an hour later."""
    if report.failed:
        lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
        print(f"\nFAILED in {report.when}: {report.nodeid}\n" + "\n".join(lines[:5]), flush=True)
