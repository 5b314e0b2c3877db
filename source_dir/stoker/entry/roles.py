"""Every host of a job: the roles of the head and of a worker host."""

from __future__ import annotations

import importlib
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from stoker.config.loading import Resolved
from stoker.config.redaction import scrub
from stoker.entry.door import Door, Head, HeadLost
from stoker.errors import Failure, StokerError
from stoker.hosts import cluster, forks, raynode, requirements
from stoker.hosts.machine import HOST_GPUS_VARIABLE
from stoker.hosts.output import Copies, say, say_at_once, write_failure_soon
from stoker.hosts.raynode import ClusterError, RayNode
from stoker.hosts.services import Service
from stoker.hosts.topology import Topology, label
from stoker.place import PLACE_VARIABLE, Outcome, RunPlace

FORCED_SHARE = 5 / 6
"""Of the time until the place kills: then the process ends by force. The driver gives up before."""
UNSAVED_S = 120.0
"""`RunPlace.killed_after_s` in all places as long as there is nothing to save."""
END_GRACE_S = 5.0
LAST_FILES_S = 5.0
"""How long a host that ends the job stays after the head's end, for the head to write its last files."""
REJOINS, FORGIVEN_S = 3, 3600.0
"""How often a host joins again that was never joined for so long."""
REJOIN_S = 60.0
"""How long a host that was cut off, or whose Ray has ended, tries to reach the head again."""


class StoppedBySignal(Exception):  # noqa: N818 - a request, not an error
    """A stop signal arrived before there was anything to save."""


class Stop:
    """Turns SIGTERM into a stop request that the current phase handles."""

    def __init__(
        self,
        end_by_force: Callable[[str], None] = lambda cause: os._exit(143),
        killed_after_s: float | None = None,
    ) -> None:
        self.end_by_force, self.killed_after_s = end_by_force, killed_after_s
        self.requested_at: float | None = None
        self.on_request: Callable[[str], Any] | None = None
        """Called from the signal handler; if None, `check` raises instead."""
        self.settled = False
        """Whether the driver has returned, so that nothing is left to end by force."""

    def install(self) -> None:
        """Every host, main thread: install the handler. Call it again after `ray.init`, which replaces it."""
        signal.signal(signal.SIGTERM, self._handle)

    def check(self) -> None:
        if self.requested_at is not None and self.on_request is None:
            raise StoppedBySignal

    @property
    def overdue(self) -> bool:
        at = self.requested_at
        return not self.settled and at is not None and time.monotonic() - at > self.timeout_s

    @property
    def timeout_s(self) -> float:
        """From the request to the forced end."""
        unsaved = self.on_request is None
        return (self.killed_after_s or (UNSAVED_S if unsaved else math.inf)) * FORCED_SHARE

    def watch(self) -> None:
        """Head, in a thread: end the process by force if a stop takes too long."""
        while not self.overdue:
            if self.settled:
                return
            time.sleep(1)
        late = f"no checkpoint could be committed within {self.timeout_s:.0f} s"
        self.end_by_force(f"stopped by SIGTERM; {late}")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested_at is not None:
            return
        self.requested_at = time.monotonic()
        say_at_once("SIGTERM: stopping")
        if self.on_request is not None:
            self.on_request("SIGTERM")


def run_head(
    resolved: Resolved, topology: Topology, service: Service, code: Path, stop: Stop, started: float
) -> Outcome:
    """Start Ray, wait for the hosts, run the driver and report the outcome to every host."""
    config = resolved.config
    node: RayNode | None = None
    door: Door | None = None
    outcome = Outcome(1, "the head ended without a result")
    threading.Thread(target=stop.watch, name="stop", daemon=True).start()
    try:
        cluster.set_environment(cluster.read_token(code), config.cluster.dashboard)
        address = raynode.address_of(topology.interface)
        # Open the door first, so that the others learn of any later failure.
        raynode.probe_port(address, config.cluster.port + 1, "cluster.port + 1")
        door = Door(address, config.cluster.port + 1)
        raynode.probe_port(address, config.cluster.port, "cluster.port")
        head = ["--head", f"--port={config.cluster.port}", *cluster.dashboard_arguments(config)]
        node = _start_ray(resolved, topology, head, address)
        import ray

        node.wait_started(stop.check)
        door.tell({"ready": package_versions(code)})
        # Check the recipe while the hosts join, so that problems show before training.
        from stoker.entry import job_checks as checks

        opened = checks.check_chains(checks.check(resolved))
        context = ray.init(
            address=f"{address}:{config.cluster.port}",
            _node_ip_address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        stop.install()
        if config.cluster.dashboard:
            say(
                f"dashboard: http://{context.dashboard_url} on this host alone, with the job's token"
            )
        present = cluster.wait_for_hosts(topology, config, started, stop.check)
        formed = time.monotonic() - started
        say(f"cluster formed in {formed:.1f} s: {topology.describe(present)}")
        place = place_of(service, topology, formed)
        outcome = Copies(place.copies).during(lambda: drive(resolved, place, stop, opened))
    except StoppedBySignal:
        outcome = Outcome(143, "stopped by SIGTERM before the training began")
    except OSError as error:
        outcome = Outcome(1, scrub(str(error)))
    except (Exception, SystemExit) as error:
        outcome = _failure(error)
    finally:
        stop.on_request = lambda reason: None  # already ending
        # Before the other hosts learn of it: the service may end the job with one of them.
        if outcome.code:
            write_failure_soon(lambda: service.place().failure, outcome.cause)
        if door is not None:
            # Give late hosts time to come, so that they do not wait for a head that failed early.
            door.end(outcome.code, len(topology.hosts) - 1, END_GRACE_S if outcome.code else 0)
        if node is not None:
            import ray

            ray.shutdown()
            node.stop()
    return outcome


def run_worker(
    resolved: Resolved, topology: Topology, ends_job: bool, code: Path, stop: Stop, started: float
) -> Outcome:
    """Join, stay until the head ends, then leave within seconds.

    Once joined, a host exits with 0: SageMaker fails a job for any host's non-zero exit code, and the head's
    code alone decides the outcome. A host with `ends_job` exits with the head's code.
    """
    config = resolved.config
    cluster.set_environment(cluster.read_token(code), config.cluster.dashboard)
    head = Head(topology.head, config.cluster.port + 1, topology.host)
    deadline = started + config.cluster.join_timeout_s
    joined = 0

    def check() -> None:
        stop.check()
        if stop.overdue:
            raise StoppedBySignal
        head.check()

    try:
        while True:
            head.reach(deadline, stop.check, again=joined > 0)
            node: RayNode | None = None
            try:
                _refuse_other_packages(head, code, deadline, stop)
                to = f"--address={head.address}:{config.cluster.port}"
                node = _start_ray(resolved, topology, [to], raynode.address_of(topology.interface))
                node.wait_started(check)
                joined += 1
                since = time.monotonic()
                say(f"joined the head {topology.head} after {time.monotonic() - started:.1f} s")
                # A stop reaches every host; keep serving until the head has written its last checkpoint.
                stop.on_request = lambda reason: None
                while node.alive:
                    check()
                    time.sleep(0.25)
                    joined = 1 if time.monotonic() - since > FORGIVEN_S else joined
                why = "Ray ended on this host; rejoining"
            except HeadLost as lost:
                if lost.code is not None or not 0 < joined <= REJOINS:
                    raise
                why = f"{lost}; trying to rejoin"
            finally:
                if node is not None:
                    node.stop()
                head.close()
            if joined > REJOINS:
                return _without(
                    f"Ray ended {joined} times on this host; not joining again", ends_job
                )
            say(why)
            stop.on_request = None
            deadline = time.monotonic() + REJOIN_S
    except HeadLost as lost:
        return _left(lost, ends_job)
    except StoppedBySignal:
        if joined and not ends_job:
            return Outcome(0)
        return Outcome(143, "stopped by SIGTERM" if joined else "stopped by SIGTERM before joining")
    except (ClusterError, OSError) as error:
        if joined:
            return _without(f"left: {error}", ends_job)
        if config.cluster.min_cpu_hosts is not None:
            return _without(f"did not join: {error}; cluster.min_cpu_hosts allows that", ends_job)
        return Outcome(1, f"{topology.host} ({topology.group}) did not join: {error}")


def _refuse_other_packages(head: Head, code: Path, deadline: float, stop: Stop) -> None:
    on_head = head.ready(max(deadline, time.monotonic() + 1), stop.check)
    if differs := requirements.difference(package_versions(code), on_head):
        raise ClusterError(
            f"its packages differ from those of the head {head.name}: {differs}; pin them in"
            f" {requirements.CONSTRAINTS} next to requirements.txt, or use one image for all hosts"
        )


def drive(resolved: Resolved, place: RunPlace, stop: Stop, opened: Any = None) -> Outcome:
    """Head: run the driver; any exit other than its return, user code's included, is a failure."""

    try:
        driver: Any = importlib.import_module("stoker.entry.driver")
        stop.on_request = driver.request_stop
        if stop.requested_at is not None:
            raise StoppedBySignal
        outcome: Outcome = driver.run(resolved, place, opened)
    except StoppedBySignal:
        raise
    except BaseException as error:
        return _failure(error)
    finally:
        stop.settled = True
    if outcome.code != 143:
        return outcome
    # Scripts save their own checkpoints.
    kept = "" if resolved.config.script is not None else ", with a checkpoint committed"
    return Outcome(143, f"stopped{kept}: {outcome.cause}")


def place_of(service: Service, topology: Topology, formed_s: float) -> RunPlace:
    place = service.place()
    return replace(
        place,
        name=os.environ.get(PLACE_VARIABLE, place.name),
        formed_s=formed_s,
        train_group=label(topology.gpu_group),
        expected_hosts=topology.hosts,
    )


def package_versions(code: Path) -> dict[str, str]:
    file = code / "requirements.txt"
    return requirements.versions(file.read_text(encoding="utf-8") if file.is_file() else "")


def _start_ray(resolved: Resolved, topology: Topology, how: list[str], address: str) -> RayNode:
    folder = raynode.private_folder()
    imports = forks.FOR_TRAINING if topology.trains else forks.FOR_CHAINS
    recipe = forks.FOR_RECIPES if resolved.config.script is None else ()
    server = forks.started((*imports, *recipe), folder)
    return RayNode([*how, *_shared_arguments(resolved, topology, address)], folder, server)


def _shared_arguments(resolved: Resolved, topology: Topology, address: str) -> list[str]:
    gpus = raynode.count_gpus() if topology.trains else 0
    # Emulated hosts have none, and Slurm grants devices itself.
    without = os.environ.get(PLACE_VARIABLE) in ("rehearsal", "slurm")
    if topology.rents_gpus and not gpus and not without:
        why = f"{topology.host} of group {topology.group} has no usable GPU (no /dev/nvidia*)"
        raise ClusterError(
            f"{why}; training on its CPUs would cost as much: choose another image or type"
        )
    arguments = raynode.arguments_for(
        address=address,
        labels=cluster.ray_labels(topology),
        cpus=raynode.cpus_to_declare(gpus, resolved.config.driver),
        # None lets Ray detect GPUs; a group that does not train must not attract train workers.
        gpus=(int(os.environ.get(HOST_GPUS_VARIABLE, "0")) or None) if topology.trains else 0,
        trains=topology.trains,
        prints=resolved.config.driver,
    )
    return arguments + raynode.store_arguments(resolved.config.cluster.object_store_mb)


def _failure(error: BaseException) -> Outcome:
    """An exception of user code or the driver, with where it was raised."""
    failure = Failure.of(error)
    if isinstance(error, StokerError):
        return Outcome(error.exit_code, scrub(str(failure)))
    if isinstance(error, SystemExit):
        number = error.code if isinstance(error.code, int) and error.code else 1
        return Outcome(number, f"sys.exit({error.code!r}) in {failure.where or 'unknown place'}")
    print(scrub("".join(traceback.format_exception(error))), file=sys.stderr)
    return Outcome(1, scrub(str(failure)))


def _left(lost: HeadLost, ends_job: bool) -> Outcome:
    say(f"leaving: {lost}")
    if not ends_job:
        return Outcome(0)
    time.sleep(LAST_FILES_S)
    return Outcome(1 if lost.code is None else lost.code, str(lost))


def _without(why: str, ends_job: bool) -> Outcome:
    say(why if ends_job else f"{why}; the job continues without this host")
    return Outcome(1, f"{why}; the service ends the job with this host") if ends_job else Outcome(0)
