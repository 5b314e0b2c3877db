"""The bootstrap's parts: requirements, log lines, the head's door, the object store, arguments."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from stoker.config.loading import load
from stoker.entry import driver, roles
from stoker.entry import main as run
from stoker.entry.door import Door, Head, HeadLost
from stoker.errors import ScriptError
from stoker.events import kinds
from stoker.hosts import cluster, raynode, requirements
from stoker.hosts.cluster import read_token, set_environment
from stoker.hosts.output import PrefixedStream, write_failure
from stoker.hosts.raynode import STARTS, ClusterError, RayNode, probe_port, store_arguments
from stoker.hosts.requirements import ConflictError
from stoker.hosts.services import sagemaker, vertex
from stoker.hosts.topology import TopologyError, resolve
from stoker.serve.blocks import wire
from tests.waiting import until

TOKEN = "0" * 64
TRAIN = Path(run.__file__).parents[2] / "train.py"
TWO_HOSTS = resolve({"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]})


def test_what_is_absent_too_old_or_lacks_an_extra_is_found() -> None:
    text = """
    # a comment
    --extra-index-url https://example.org
    pydantic>=2  # satisfied
    pydantic>=99
    no-such-package-here
    another; python_version < "3"
    ray[no-such-extra]
    """
    assert requirements.unsatisfied(text) == ["pydantic>=99", "no-such-package-here"]


def test_every_line_names_its_origin() -> None:
    target = io.StringIO()
    stream = PrefixedStream(target, "[cpu algo-2 worker] ")
    stream.write("one\ntw")
    stream.write("o\n\nbar 1\rbar 2\r")
    assert target.getvalue().splitlines() == [
        "[cpu algo-2 worker] one",
        "[cpu algo-2 worker] two",
        "[cpu algo-2 worker] bar 1",
        "[cpu algo-2 worker] bar 2",
    ]
    assert not stream.isatty()


def test_no_process_of_a_cluster_unpickles_what_data_files_bring_along() -> None:
    with mock.patch.dict(os.environ, {"RAY_DATA_AUTOLOAD_PYEXTENSIONTYPE": "1"}):
        set_environment(TOKEN)
        assert not any(name.startswith("RAY_DATA_AUTOLOAD_") for name in os.environ)


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    opened = Door("127.0.0.1", 0)
    yield opened
    opened.close()


def reached(port: int, name: str = "algo-2") -> Head:
    head = Head("127.0.0.1", port, name)
    head.reach(time.monotonic() + 60, lambda: None)
    return head


def nothing() -> None: ...


def test_a_host_learns_when_ray_is_ready_and_how_the_job_ends(door: Door) -> None:
    early = reached(door.port)
    with pytest.raises(ClusterError, match="was not ready before the timeout"):
        early.ready(time.monotonic() + 0.1, nothing)
    door.tell({"ready": {"timm": "1.0"}})
    reached(door.port, "algo-3").close()  # and comes again
    for head in (early, late := reached(door.port, "algo-3")):
        assert head.ready(time.monotonic() + 60, nothing) == {"timm": "1.0"}
        head.check()
    door.end(3, hosts=2, grace_s=60)
    for head in (early, late):
        with pytest.raises(HeadLost, match="the head has ended with exit code 3") as ended:
            head.ready(time.monotonic() + 60, nothing)
        assert ended.value.code == 3


def test_neither_side_of_the_door_believes_a_wrong_token(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    door.tell({"ready": {}})
    monkeypatch.setenv("RAY_AUTH_TOKEN", "1" * 64)
    with pytest.raises(
        ClusterError, match=r"closed the connection: is its token that of this host\?"
    ):
        Head("127.0.0.1", door.port, "algo-2").reach(time.monotonic(), nothing)
    monkeypatch.setattr(wire, "GREETING_TIMEOUT_S", 0.3)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(ClusterError, match="cannot reach"),
    ):
        Head("127.0.0.1", silent.getsockname()[1], "algo-2").reach(time.monotonic(), nothing)


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ClusterError) as refused:
            probe_port("127.0.0.1", port, "cluster.port")
    assert f"cluster.port: port {port}" in str(refused.value)


def test_the_object_store_never_outgrows_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stat:
        f_frsize = 4096
        f_bavail = (64 * 2**20) // 4096

    monkeypatch.setattr(raynode.os, "statvfs", lambda path: Stat)
    assert (
        "--plasma-directory" in store_arguments(None, tmp_path)[1]
        and "on disk" in capsys.readouterr().out
    )
    Stat.f_bavail = (200 * 2**20) // 4096
    (small,) = store_arguments(1024, tmp_path)
    assert (
        int(small.partition("=")[2]) <= 200 * 2**20
        and "limited to 190 MB" in capsys.readouterr().out
    )
    Stat.f_bavail = 2**40 // 4096
    assert store_arguments(1024, tmp_path) == [f"--object-store-memory={1024 * 2**20}"]


def test_a_missing_or_short_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="openssl rand"):
        read_token(tmp_path)
    (tmp_path / ".ray-token").write_text("short")
    with pytest.raises(ClusterError, match="too short") as refused:
        read_token(tmp_path)
    assert "short'" not in str(refused.value)


@pytest.mark.long
def test_ray_takes_this_jobs_token_and_no_other_whatever_the_environment_says() -> None:
    code = (
        "from stoker.hosts.cluster import set_environment; set_environment('a' * 64);"
        "from ray._private.authentication.authentication_utils import validate_request_token as takes;"
        "print(takes('Bearer ' + 'a' * 64), takes('Bearer ' + 'b' * 64))"
    )
    other = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_AUTH_TOKEN": "b" * 64,
        "RAY_AUTH_TOKEN_PATH": "/none",
    }
    environment = {**os.environ, **other}
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert shown.stdout.split() == ["True", "False"], shown.stderr


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "input" / "config").mkdir(parents=True)
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    return tmp_path


def test_the_failure_file_is_short_and_the_first_cause_stays(base: Path) -> None:
    failure = sagemaker.SERVICE.place().failure
    write_failure(failure, "the cause " + "x" * 3000)
    write_failure(failure, "something later")
    text = (base / "output" / "failure").read_text()
    assert text.startswith("the cause") and len(text) == 1024


@pytest.mark.long
def test_an_error_nobody_foresaw_fails_the_host_and_is_its_cause(base: Path) -> None:
    config = base / "input" / "config"
    (config / "resourceconfig.json").write_text('{"current_host": "algo-1", "hosts": ["algo-1"]}')
    (config / "hyperparameters.json").write_text(r'{"config": "\u0000"}')
    done = subprocess.run([sys.executable, TRAIN], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert (base / "output" / "failure").read_text().startswith("ValueError: embedded null byte")


@pytest.mark.parametrize("content", ["[]", '{"train.lr": '])
def test_damaged_hyperparameters_are_not_taken_for_none(base: Path, content: str) -> None:
    (base / "input" / "config" / "hyperparameters.json").write_text(content)
    with pytest.raises(TopologyError, match=r"hyperparameters\.json"):
        sagemaker.SERVICE.given()


def test_names_that_resolve_late_are_waited_for(door: Door) -> None:
    answers = [socket.gaierror(), socket.gaierror(), "127.0.0.1"]
    with mock.patch.object(socket, "gethostbyname", side_effect=answers):
        head = Head("algo-1", door.port, "algo-2")
        head.reach(time.monotonic() + 60, nothing)
    assert head.address == "127.0.0.1"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (socket.gaierror(), "the name algo-1 does not resolve yet"),
        (["127.0.0.1"] * 99, "port 1 of algo-1: Connection refused"),
    ],
)
def test_a_head_that_cannot_be_reached_is_named_with_what_is_missing(
    answer: Any, says: str
) -> None:
    with (
        mock.patch.object(socket, "gethostbyname", side_effect=answer),
        pytest.raises(ClusterError, match=says),
    ):
        Head("algo-1", 1, "algo-2").reach(time.monotonic() + 0.5, nothing)


@pytest.mark.parametrize(
    ("behaviour", "code", "cause"),
    [
        ("exit", 3, "sys.exit(3) in driver.py:"),
        ("fail", 1, "loss is NaN at step 12"),
        ("raise", 1, "RuntimeError: the recipe raised this (driver.py:"),
    ],
)
def test_however_the_driver_fails_the_outcome_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, behaviour: str, code: int, cause: str
) -> None:
    driver = tmp_path / "driver.py"
    shutil.copy(Path(__file__).parents[1] / "rehearsal/standin.py", driver)
    spec = importlib.util.spec_from_file_location("stoker.entry.driver", driver)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "stoker.entry.driver", module)
    place = roles.place_of(sagemaker.SERVICE, TWO_HOSTS, 1.0)
    outcome = roles.drive(load(None, [f"params.behaviour={behaviour}"]), place, roles.Stop())
    assert outcome.code == code
    assert outcome.cause.startswith(cause)


@pytest.fixture
def sigterm() -> Iterator[Callable[[roles.Stop], None]]:
    """Sends it, as a service does."""
    before = signal.getsignal(signal.SIGTERM)

    def send(stop: roles.Stop) -> None:
        stop.install()
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: stop.requested_at is not None)

    yield send
    signal.signal(signal.SIGTERM, before)


def test_a_stop_ends_by_force_before_the_place_kills(sigterm: Callable[[roles.Stop], None]) -> None:
    ended: list[str] = []
    stop = roles.Stop(ended.append, killed_after_s=1.2)
    stop.on_request = lambda reason: None
    threading.Thread(target=stop.watch, daemon=True).start()
    sigterm(stop)
    until(lambda: bool(ended))
    assert ended == ["stopped by SIGTERM; no checkpoint could be committed within 1 s"]


def test_where_nobody_kills_a_stop_has_a_deadline_only_while_there_is_nothing_to_save(
    sigterm: Callable[[roles.Stop], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles, "UNSAVED_S", 0.0)
    ended: list[str] = []
    stop = roles.Stop(ended.append)
    sigterm(stop)
    stop.watch()
    assert len(ended) == 1, "while the recipe is checked, or Ray starts"
    stop.on_request = lambda reason: None
    assert not stop.overdue


def test_a_host_that_is_paid_for_its_gpu_does_not_train_on_its_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raynode, "count_gpus", lambda: 0)
    monkeypatch.delenv("STOKER_PLACE", raising=False)
    hosts = {"current_host": "algo-1", "hosts": ["algo-1"]}

    def arguments(kind: str) -> list[str]:
        topology = resolve({**hosts, "current_instance_type": kind})
        return roles._shared_arguments(load(None), topology, "127.0.0.1")

    with pytest.raises(ClusterError, match=r"algo-1 of group homogeneousCluster has no usable GPU"):
        arguments("ml.g5.2xlarge")
    assert arguments("ml.c5.2xlarge"), "CPU hosts may train"
    monkeypatch.setenv("STOKER_PLACE", "rehearsal")
    assert arguments("ml.g5.2xlarge"), "emulated hosts have none"


@pytest.mark.parametrize("kind", ["RecipeConfig", "ScriptConfig"])
def test_a_train_worker_whose_pytorch_cannot_use_its_gpu_fails(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    class Group:
        def execute(self, function: Any, *arguments: Any) -> Any:
            return function(*arguments)

        def __len__(self) -> int:
            return 1

    from stoker.train import trainer

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = getattr(trainer, kind)(backend="nccl")
    with pytest.raises(ScriptError, match=r"cannot use the GPU of .*; choose an image"):
        config.backend_cls().on_start(Group(), config)


def ray_that_exits(times: int, counter: Path) -> str:
    return f"""
import pathlib, sys, time
counter = pathlib.Path({str(counter)!r})
tries = len(counter.read_text()) if counter.exists() else 0
counter.write_text("." * (tries + 1))
if tries < {times}:
    sys.exit("Error: no")
print("Ray runtime started.", flush=True)
time.sleep(600)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("exits", "after_s", "starts"), [(STARTS - 1, 0.0, STARTS), (99, 0.0, STARTS), (99, 30.0, 1)]
)
def test_ray_that_gives_up_at_its_own_deadline_is_started_again_and_for_another_reason_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exits: int, after_s: float, starts: int
) -> None:
    monkeypatch.setattr(raynode, "COMMAND_LINE", ray_that_exits(exits, tmp_path / "starts"))
    monkeypatch.setattr(raynode, "OWN_DEADLINE_S", after_s)
    node = RayNode([], tmp_path)
    try:
        if exits < STARTS:
            node.wait_started()
            assert node.alive
        else:
            with pytest.raises(ClusterError, match="Ray did not start: Error: no"):
                node.wait_started()
    finally:
        node.stop()
    assert len((tmp_path / "starts").read_text()) == starts


def test_ray_gets_a_folder_in_a_private_one_wherever_temporary_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray opens its own to every user of the host, and the paths of its sockets have at most 107 bytes."""
    monkeypatch.setattr(raynode, "COMMAND_LINE", "import sys; print(sys.argv); sys.exit()")
    monkeypatch.setattr("tempfile.tempdir", None)
    short = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    made = []
    try:
        for variable, where in (
            ("TMPDIR", short),
            ("TMPDIR", tmp_path / ("é" * 14)),
            ("RAY_TMPDIR", short),
        ):
            where.mkdir(exist_ok=True)
            monkeypatch.setenv(variable, str(where))
            monkeypatch.setattr("tempfile.tempdir", None)
            made.append(raynode.private_folder())
        assert [folder.parent for folder in made] == [short, Path("/tmp"), short]
        node = RayNode([], made[0])
        node._process.wait(60)
        assert f"'--temp-dir={made[0]}/s'" in node.log.read_text()
        assert [oct(folder.stat().st_mode & 0o777) for folder in made] == ["0o700"] * 3
    finally:
        for folder in (*made, short):
            shutil.rmtree(folder)


FORMING = {"cpu": ["algo-2", "algo-3"], "gpu": ["algo-1"]}


@pytest.mark.parametrize(
    ("least", "arrives", "expected"),
    [
        (None, [], "lost while the cluster formed: cpu: algo-3"),
        (2, [], "lost while the cluster formed: cpu: algo-3"),
        (1, ["algo-2"], ["algo-1", "algo-2"]),
        (1, [], "did not join within 300 s: cpu: algo-2, algo-3"),
        (0, [], ["algo-1"]),
    ],
)
def test_a_host_that_is_lost_while_it_joins_is_not_waited_for_until_the_timeout(
    least: int | None,
    arrives: list[str],
    expected: str | list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = [{"instance_group_name": name, "hosts": hosts} for name, hosts in FORMING.items()]
    hosts = [host for group in FORMING.values() for host in group]
    about = {
        "current_host": "algo-1",
        "current_group_name": "gpu",
        "hosts": hosts,
        "instance_groups": groups,
    }
    topology = resolve(about, "gpu")
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def present(_: object) -> dict[str, dict[str, Any]]:
        return {host: {} for host in ["algo-1", *(["algo-3"] if now[0] < 5 else arrives)]}

    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(cluster, "present_hosts", present)
    config = load({"cluster": {"join_timeout_s": 300, "min_cpu_hosts": least}}).config

    def formed() -> list[str]:
        return cluster.wait_for_hosts(topology, config, 0.0, lambda: None)

    if isinstance(expected, list):
        assert formed() == expected
    else:
        with pytest.raises(ClusterError, match=expected):
            formed()
    # Only where another host may still come is the timeout what ends the wait.
    waits = "did not join" in str(expected) or least == 0
    assert now[0] > 300 if waits else 5 + cluster.GONE_S <= now[0] < 5 + cluster.GONE_S + 1


def test_a_stop_is_judged_by_progress_also_after_a_start_from_a_newer_checkpoint_than_foreseen() -> (
    None
):
    begun = kinds.AttemptStarted(workers=1, start={})
    for events, trains in (
        ([kinds.TrainWorkerStarted(rank=0, node="n"), begun], True),
        (
            [kinds.TrainWorkerStarted(rank=0, node="n"), begun.model_copy(update={"ahead": True})],
            False,
        ),
    ):
        deadline = driver.StopDeadline(None)
        deadline.take(events)
        assert (deadline.passed_since(time.monotonic() - driver.NOBODY_S - 1) == "") == trains


@pytest.mark.parametrize("content", ["{", "[]", "7"])
def test_hosts_that_are_described_wrongly_fail_with_the_reason(base: Path, content: str) -> None:
    (base / "input/config/resourceconfig.json").write_text(content)
    # No package is needed before the requirements are there.
    command = [sys.executable, "-S", TRAIN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: resourceconfig.json: cannot be read")
    assert (base / "output" / "failure").read_text() in done.stderr


def test_attempts_of_a_queued_job_are_one_job_to_its_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINING_JOB_NAME", "AWSBatchflowers-1-0123")
    assert sagemaker.place().job == "AWSBatchflowers-1-0123"
    monkeypatch.setenv("STOKER_SERVICE_JOB", "flowers-1")
    assert sagemaker.place().job == "flowers-1"


@pytest.mark.long
def test_the_heads_cause_is_written_before_another_host_learns_of_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vertex AI ends a job with the first host of its first pool, which need not be the head."""
    code, config = tmp_path / "code", tmp_path / "ml" / "input" / "config"
    shutil.copytree(TRAIN.parent, code, ignore=shutil.ignore_patterns("__pycache__"))
    config.mkdir(parents=True)
    token = "7" * 64
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    (code / ".ray-token").write_text(token)
    hosts = {
        "current_host": "algo-1",
        "hosts": ["algo-1", "algo-2"],
        "network_interface_name": "lo",
    }
    (config / "resourceconfig.json").write_text(json.dumps(hosts))
    failure = tmp_path / "ml" / "output" / "failure"
    port = raynode.free_port()
    with socket.create_server(("127.0.0.1", port)):  # Ray needs it, too
        (code / "job.yaml").write_text(
            f"recipe: recipes.digits:Digits\ncluster: {{port: {port}}}\n"
        )
        environment = {**os.environ, "SAGEMAKER_BASE_DIR": str(tmp_path / "ml")}
        head = subprocess.Popen([sys.executable, code / "train.py"], env=environment)
        seen = Head("127.0.0.1", port + 1, "")
        seen.reach(time.monotonic() + 120, lambda: None)
        with pytest.raises(HeadLost):
            seen.ready(time.monotonic() + 120, lambda: None)
        assert f"port {port}" in failure.read_text()
    assert head.wait(120) == 1


def test_a_vertex_request_that_is_submitted_twice_does_not_mix_two_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bucket").mkdir()
    monkeypatch.setattr(vertex, "MOUNTS", tmp_path)
    task = {"cluster": {"workerpool0": ["a-0:2222"]}, "task": {"type": "workerpool0", "index": 0}}
    variables = {
        name: f"gs://bucket/jobs/one/{i}/" for i, name in enumerate(vertex.OUTPUT_VARIABLES)
    }
    variables |= {vertex.CLUSTER_VARIABLE: json.dumps(task), "CLOUD_ML_JOB_ID": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for _ in ("its first start", "restarted by the service"):
        assert vertex.SERVICE.resource()
    monkeypatch.setenv("CLOUD_ML_JOB_ID", "2")
    with pytest.raises(TopologyError, match="has the run of job 1, whose request this is"):
        vertex.SERVICE.resource()
    assert not vertex.SERVICE.place().failure.is_relative_to(tmp_path), (
        "not a cause of the first job's"
    )


def test_hosts_that_outlive_the_job_get_nothing_installed(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("pytest\nno-such-package\n")
    with pytest.raises(ConflictError, match="no-such-package not installed for"):
        requirements.ensure(tmp_path, install=False)
