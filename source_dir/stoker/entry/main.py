"""Every host: find this host's role, play it and exit. Called by `train.py`.

Before the requirements are installed, this module may import only the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import StokerError
from stoker.hosts import requirements
from stoker.hosts.output import prefix_output, say, write_failure
from stoker.hosts.services import Service, services
from stoker.hosts.topology import TopologyError, resolve
from stoker.place import LAUNCH_DIR_VARIABLE, ORIGINS_FILE, PLACE_VARIABLE, Outcome

if TYPE_CHECKING:
    from stoker.config.loading import Resolved

STARTED = time.monotonic()
CODE = Path(__file__).resolve().parents[2]
"""The folder of train.py."""


def main(arguments: list[str] | None = None) -> None:
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run as a host of the service that started this process, else locally."""
    if os.environ.get(PLACE_VARIABLE) not in ("local", "ray"):
        for service in services():
            try:
                resource = service.resource()
            except TopologyError as error:
                write_failure(service.place().failure, str(error))
                print(f"error: {error}", file=sys.stderr)
                return 2
            if resource is not None:
                return run_on_host(service, resource, arguments)
    try:
        return run_locally(arguments)
    except StokerError as error:
        return _refused(error)
    except KeyboardInterrupt:
        return 130


def run_locally(arguments: list[str]) -> int:
    """Laptop, or a job's process on a Ray cluster."""
    from stoker.hosts import cluster, forks, run_lock
    from stoker.place import CHECK_VARIABLE, local_place

    starting = None
    gc.disable()  # until the driver runs, to import faster
    check_only, on_cluster = CHECK_VARIABLE in os.environ, os.environ.get(PLACE_VARIABLE) == "ray"
    here = local_place()
    if here.run_dir.is_dir() and not here.copies and not check_only:
        run_lock.hold(here.run_dir)  # on a Ray cluster, the driver creates it
    try:
        resolved = read_configuration(arguments, {})
        if on_cluster:
            cluster.refuse_old_ray()
        else:
            cluster.set_environment(secrets.token_hex(32), resolved.config.cluster.dashboard)
            recipe = forks.FOR_RECIPES if resolved.config.script is None else ()
            imports = (*forks.FOR_TRAINING, *recipe)
            starting = None if check_only else cluster.LocalCluster(resolved.config, imports)
        from stoker.entry import job_checks as checks  # while Ray starts

        opened = checks.check_chains(checks.check(resolved, data_too=not on_cluster))
        if check_only:
            return 0
        from stoker.entry import driver
    except BaseException:
        if starting is not None:
            # A second Ctrl-C must not leave Ray behind.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            starting.stop()
        raise
    with starting or cluster.connected():
        # After ray.init, which installs its own handlers.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _stop_locally)
        gc.freeze()
        gc.enable()
        place = replace(local_place(), formed_s=time.monotonic() - STARTED)
        try:
            return driver.run(resolved, place, opened).code
        finally:
            gc.unfreeze()  # else libraries in C++ say at the end which of their objects "leaked"


def _refused(error: StokerError) -> int:
    from stoker.config.redaction import scrub

    for problem in error.problems:
        print(f"error: {scrub(problem)}", file=sys.stderr)
    return error.exit_code


def _stop_locally(number: int, frame: Any) -> None:
    """Laptop: the first signal requests a checkpoint and a stop, a second Ctrl-C or hang-up exits at once.

    SIGTERM asks once, however often it comes: `timeout` and service managers signal the whole process group,
    and the launcher passes its own on.
    """
    from stoker.entry import driver

    if driver.stop_requested():
        if number == signal.SIGTERM:
            return
        raise KeyboardInterrupt
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    driver.request_stop(name, code=128 + number)


def run_on_host(service: Service, resource: Mapping[str, Any], arguments: list[str]) -> int:
    import ctypes

    group, host = resource.get("current_group_name"), resource.get("current_host")
    failure = service.place().failure
    prefix_output(str(group or "all"), str(host), "start")
    with contextlib.suppress(OSError, AttributeError):
        # Orphaned daemons become children of this process, so that they can be found and stopped.
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    try:
        outcome = _play(service, resource, arguments)
    except StokerError as error:
        outcome = Outcome(error.exit_code, str(error.failure))
    except Exception as error:  # anything: show it in the job's console
        import traceback

        from stoker.config.redaction import scrub

        print(scrub(traceback.format_exc()), file=sys.stderr)
        write_failure(failure, f"{type(error).__name__}: {error}")
        return 1
    finally:
        _end_leftovers()
    if outcome.code == 0:
        say("done")
    else:
        say(f"failed with exit code {outcome.code}: {outcome.cause}")
        write_failure(failure, outcome.cause)
    return outcome.code


def _play(service: Service, resource: Mapping[str, Any], arguments: list[str]) -> Outcome:
    installed = requirements.ensure(CODE, service.installs)
    if installed:
        say(f"installed {', '.join(installed)} in {time.monotonic() - STARTED:.0f} s")

    # Ray's tasks must import this job's code, whatever else is installed.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(CODE), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    from stoker.entry import roles

    place = service.place()
    stop = roles.Stop(functools.partial(end_by_force, place.failure), place.killed_after_s)
    stop.install()
    resolved = read_configuration(arguments, service.given())
    topology = resolve(resource, resolved.config.cluster.gpu_group)
    prefix_output(topology.group, topology.host, topology.role)
    say(f"hosts: {topology.describe(topology.hosts)}; head: {topology.head}")
    if topology.role == "head":
        return roles.run_head(resolved, topology, service, CODE, stop, STARTED)
    return roles.run_worker(resolved, topology, service.ends_job(), CODE, stop, STARTED)


def read_configuration(arguments: list[str], passed: Mapping[str, str]) -> Resolved:
    """Read job.yaml, then what the service passes, then arguments, with the origin of each value."""
    from stoker.config import redaction
    from stoker.config.loading import SECRETS_FILE, TYPED, Resolved, hyperparameter_overrides, load

    parser = argparse.ArgumentParser(description="Run one Stoker job on this host.")
    parser.add_argument("--config", type=Path)
    known, rest = parser.parse_known_args(arguments)
    given = dict(passed)
    path = known.config or Path(_plain(given.pop("config", "job.yaml")))
    if not path.is_absolute() and not path.exists():
        path = CODE / path
    # Values that the launcher resolved from file and command line keep their original origin.
    origins = {}
    with contextlib.suppress(OSError, ValueError):
        origins = json.loads(path.with_name(ORIGINS_FILE).read_text())
    resolved = load(
        path,
        [] if _copied_by_toolkit(arguments) else hyperparameter_overrides(rest),
        origin="arguments",
        passed={key.replace("__", "."): value for key, value in given.items() if key != "config"},
        texts=[
            key for key, origin in origins.items() if origin in TYPED and key.startswith("params.")
        ],
    )
    config = resolved.config
    redaction.learn_job(config.model_dump(mode="json"))
    if os.environ.get(PLACE_VARIABLE) == "local":
        # The staged copy is in the run directory, which users keep and share.
        with contextlib.suppress(OSError):
            path.with_name(SECRETS_FILE).unlink(missing_ok=True)
        # `peek` reads it from any folder.
        if (where := config.checkpoint.dir) and "://" not in where:
            at = {"dir": str(Path(os.environ.get(LAUNCH_DIR_VARIABLE, ""), where).absolute())}
            config = config.model_copy(
                update={"checkpoint": config.checkpoint.model_copy(update=at)}
            )
    later = {key: origin for key, origin in resolved.origins.items() if origin == "arguments"}
    return Resolved(config, {**(origins or resolved.origins), **later})


def end_by_force(failure: Path, cause: str) -> None:
    """Head, any thread: the driver did not stop in time."""
    write_failure(failure, cause)
    say(cause)
    _end_leftovers()
    os._exit(143)


def _copied_by_toolkit(arguments: list[str]) -> bool:
    """Whether the arguments are the toolkit's lossy copy of hyperparameters.json ("007" becomes 007)."""
    try:
        return bool(json.loads(os.environ["SM_USER_ARGS"]) == arguments)
    except (KeyError, ValueError):
        return False


def _plain(text: str) -> str:
    """`job.yaml` with or without the quotes of JSON."""
    with contextlib.suppress(ValueError):
        inner = json.loads(text)
        if isinstance(inner, str):
            return inner
    return text


def _end_leftovers() -> None:
    """Kill all remaining child processes; one that holds the container's output would keep the job alive."""
    with contextlib.suppress(ImportError):
        import psutil

        left = psutil.Process().children(recursive=True)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=3)
