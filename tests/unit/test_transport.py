"""Blocks of hosts: over a socket, mapped, or made again; both ends as they run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.chain.columns import schema_of
from stoker.errors import DataError, Failure
from stoker.protocol import BlockSlice, Directory, Server
from stoker.serve.blocks import wire
from stoker.serve.blocks.agents import _Agent
from stoker.serve.blocks.batches import BatchBuilder, BufferPool
from stoker.serve.blocks.client import DirectHosts, Transport
from stoker.serve.blocks.folder import BlockFolder, BlockServer
from tests.waiting import until

SECRET = b"s" * 32


@dataclass
class Setting:
    server: BlockServer
    folder: BlockFolder
    hosts: DirectHosts
    notes: list[str]

    def block(self, rows: int, first: int = 0) -> BlockSlice:
        return BlockSlice(self.folder.write(columns_of(rows, first)), 0, rows, "far", rows)

    def fetch(self, *parts: BlockSlice) -> tuple[dict[str, Any], list[bool]]:
        rows = sum(part.stop - part.start for part in parts)
        batch = BatchBuilder(BufferPool(pinned=False), rows, schema_of(columns_of(1)))
        asked = [self.hosts.ask(part) for part in parts]
        came, at = [], 0
        for request, part in zip(asked, parts, strict=True):
            came.append(request is not None and request.receive(batch, at) is not None)
            at += part.stop - part.start
        return batch.finish() if all(came) else {}, came


def columns_of(rows: int, first: int = 0) -> dict[str, Any]:
    ids = np.arange(first, first + rows, dtype=np.int64)
    image = np.repeat(ids.astype(np.uint8), 48).reshape(rows, 4, 4, 3)
    return {
        "__id": ids,
        "image__hwc": image,
        "word": np.array([f"w{i}" for i in ids], dtype=object),
    }


def setting(root: Path, worker_secret: bytes = SECRET) -> Setting:
    folder = BlockFolder("test", "far")
    folder.roots = [root]
    server, notes = BlockServer("127.0.0.1", SECRET, folder), list[str]()
    hosts = DirectHosts(notes.append)
    hosts.update(Directory("test", worker_secret, {"far": Server(None, "127.0.0.1", server.port)}))
    return Setting(server, folder, hosts, notes)


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Setting]:
    here = setting(tmp_path)
    yield here
    here.server.close()


def test_a_block_that_only_one_process_knows_goes_with_its_next_request(far: Setting) -> None:
    first, second = far.block(8), far.block(8)
    far.fetch(first)
    far.hosts.done(first.node, [first.block])
    far.fetch(second)
    assert [path.name for path in far.folder.roots[0].iterdir()] == [second.block]


def test_who_does_not_hold_the_key_gets_nothing(tmp_path: Path) -> None:
    here = setting(tmp_path, worker_secret=b"x" * 32)
    columns, came = here.fetch(here.block(4))
    assert came == [False] and columns == {}
    assert "block server 127.0.0.1" in here.notes[0] and len(here.notes) == 1
    here.server.close()


def test_the_key_depends_on_the_cluster_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "one")
    first = wire.run_key(SECRET)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "two")
    assert wire.run_key(SECRET) != first


def test_a_host_that_went_away_is_told_once_and_avoided(far: Setting) -> None:
    block = far.block(4)
    far.fetch(block)
    far.server.close()
    link = far.hosts._links["far"]
    link.idle[0].shutdown(socket.SHUT_RDWR)
    for _ in range(3):
        _, came = far.fetch(block)
        assert came == [False]
    assert len(far.notes) == 1 and "another way" in far.notes[0]
    assert link.avoided_until > time.monotonic()


def test_after_a_failure_a_host_is_used_again_told_of_anew_and_loses_what_is_done(
    far: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.serve.blocks.client.AVOID_S", 0.0)
    talk, kept = far.server.talk, far.block(4)
    for failure in (1, 2):
        done = far.block(8)
        far.hosts.done(done.node, [done.block])
        monkeypatch.setattr(
            far.server, "talk", lambda connection: None
        )  # it closes each new connection
        assert far.fetch(kept, kept)[1][-1] is False and len(far.notes) == failure
        assert not far.hosts.knows("far")
        monkeypatch.setattr(far.server, "talk", talk)
        assert far.fetch(kept)[1] == [True] and far.hosts.knows("far")
        assert [path.name for path in far.folder.roots[0].iterdir()] == [kept.block]


def test_requests_are_never_too_long_however_many_blocks_are_done(far: Setting) -> None:
    kept, last = far.block(4), far.block(4)
    for number in range(50_000):
        far.hosts.done(last.node, [f"{number:024x}"])
    far.hosts.done(last.node, [last.block])
    for _ in range(51):
        assert far.fetch(kept)[1] == [True]
    assert [path.name for path in far.folder.roots[0].iterdir()] == [kept.block]


RUNS_OUT_OF_DESCRIPTORS = """
import os, resource, socket, threading, time
from stoker.serve.blocks import wire
from stoker.serve.blocks.agents import _Agent

class Server(wire.Listener):
    def talk(self, connection):
        connection.sendall(b"served")

server = Server("127.0.0.1", 0, b"secret")
waits, held = socket.socket(), []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    while True:
        held.append(os.dup(0))
except OSError:
    waits.connect(("127.0.0.1", server.port))
time.sleep(1.0)
for each in held:
    os.close(each)
for client in (waits, socket.create_connection(("127.0.0.1", server.port))):
    wire.greet_server(client, wire.run_key(b"secret"))
    assert wire.receive(client, 6) == b"served"
server.close()
for thread in threading.enumerate():
    if thread.name == "Server":
        thread.join(60)
        assert not thread.is_alive(), "it accepts until it is closed"
"""


def test_a_server_that_ran_out_of_descriptors_accepts_again_once_it_has_some() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUNS_OUT_OF_DESCRIPTORS],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def connected(port: int) -> list[tuple[str, float]]:
    """A client's connections to a server: each timer's kind and the seconds left."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    there = [row[5] for row in rows if row[3] == "01" and int(row[2].partition(":")[2], 16) == port]
    hertz = os.sysconf("SC_CLK_TCK")
    return [
        (kind, int(left, 16) / hertz) for kind, _, left in (timer.partition(":") for timer in there)
    ]


def serves(far: Setting, monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """The server's ends of all connections from now on."""
    talk, served = far.server.talk, list[socket.socket]()
    monkeypatch.setattr(
        far.server, "talk", lambda connection: (served.append(connection), talk(connection))
    )
    return served


def test_the_server_ends_a_connection_that_is_idle(
    far: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.serve.blocks.folder.IDLE_TIMEOUT_S", 0.1)
    with socket.create_connection(("127.0.0.1", far.server.port)) as client:
        wire.greet_server(client, wire.run_key(SECRET))
        client.settimeout(60)
        assert client.recv(1) == b""


def test_a_connection_that_ended_while_it_was_idle_says_nothing_against_its_host(
    far: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serves(far, monkeypatch)
    first, second, third = far.block(8), far.block(8, first=8), far.block(8, first=16)
    # Two at the same time, so that two connections are idle then.
    assert far.fetch(first, second)[1] == [True, True]
    for _ in range(3):
        while served:
            served.pop().shutdown(socket.SHUT_RDWR)  # as after the server's timeout
        until(lambda: not connected(far.server.port))
        far.hosts.done(first.node, [first.block])
        columns, came = far.fetch(second, third)
        assert came == [True, True] and columns["__id"].tolist() == [*range(8, 24)]
    assert not far.notes
    assert {path.name for path in far.folder.roots[0].iterdir()} == {second.block, third.block}


def test_the_kernel_probes_an_idle_connection_before_firewalls_forget_it(far: Setting) -> None:
    far.fetch(far.block(4))
    ((kind, left_s),) = connected(far.server.port)
    assert kind == "02" and 30 < left_s <= 60, "the timer of keepalive probes"


def test_a_host_that_is_silent_on_a_used_connection_is_avoided_without_another_wait(
    far: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.serve.blocks.client.SILENCE_TIMEOUT_S", 1.0)
    served = serves(far, monkeypatch)
    far.fetch(far.block(4))
    stuck = BlockSlice("0" * 24, 0, 4, "far", 4)
    os.mkfifo(far.folder.roots[0] / stuck.block)  # the server waits until somebody writes into it
    assert far.fetch(stuck)[1] == [False]
    assert len(served) == 1, "it is not asked again over another connection"
    (far.folder.roots[0] / stuck.block).write_bytes(b"")
    assert len(far.notes) == 1 and "stopped responding" in far.notes[0]


def test_a_block_that_the_host_does_not_have_says_nothing_against_the_host(far: Setting) -> None:
    block = far.block(4)
    far.folder.remove([block.block])
    request = far.hosts.ask(block)
    assert request is not None
    with pytest.raises(FileNotFoundError, match="is not on this host"):
        request.receive(BatchBuilder(BufferPool(pinned=False), 4, schema_of(columns_of(1))), 0)
    assert far.fetch(far.block(4))[1] == [True] and not far.notes


def transport(far: Setting, moved: Any, timeout_s: float) -> Transport:
    found = Transport(
        lambda: Directory("test", SECRET, {}), moved, "far", pinned=False, timeout_s=timeout_s
    )
    found.folder = lambda: far.folder  # type: ignore[method-assign]
    return found


def test_a_block_that_will_not_come_is_an_error_that_says_why(far: Setting) -> None:
    lost, schema = far.block(4)._replace(node=""), schema_of(columns_of(1))

    def refuses(part: BlockSlice, missing: bool) -> BlockSlice:
        raise Failure("DataError", text="too many records are bad").error()

    with pytest.raises(DataError, match="too many records are bad"):
        transport(far, refuses, timeout_s=120).fetch([lost], schema)
    with pytest.raises(DataError, match=r"did not come within 1 s .*: being made again"):
        transport(far, lambda part, missing: part, timeout_s=1).fetch([lost], schema)


def test_a_view_of_a_block_outlives_its_file(far: Setting) -> None:
    block = far.block(4)
    columns = far.folder.columns(block.block)
    far.folder.remove([block.block])
    assert columns["__id"].tolist() == [0, 1, 2, 3]


def test_a_block_for_which_shared_memory_has_no_room_lies_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = BlockFolder("test", "far")
    folder.roots = [tmp_path / "memory" / "blocks", tmp_path / "disk"]
    folder.roots[0].parent.mkdir()
    monkeypatch.setattr("stoker.serve.blocks.folder.SHARE", 1.0)
    name = folder.write(columns_of(4))
    assert (tmp_path / "disk" / name).exists()
    assert folder.columns(name)["__id"].tolist() == [0, 1, 2, 3]
    folder.remove([name])
    assert not (tmp_path / "disk" / name).exists()


USES_ITS_MEMORY_AGAIN = """
import os, sys, time
from pathlib import Path
import numpy as np
from stoker.serve.blocks import folder as module

module.SHARE = 0.0
folder = module.BlockFolder("test", "far")
folder.roots = [Path(sys.argv[1]) / "memory", Path(sys.argv[1]) / "disk"]
write = lambda value: folder.write({"rows": np.full((2048, 1024), value, np.uint8)})
files = lambda: sorted(path.suffix for path in folder.roots[0].iterdir())
alike = lambda rows, value: bool((rows == value).all())

first = folder.take(write(1))["rows"]
first[0] = 9
view = first[1000:1001]
del first
second = write(2)
folder.recycle([second])  # as the taker's is still in use, the only spare
third, fourth = write(3), write(4)
assert alike(view, 1) and alike(folder.columns(third)["rows"], 3) and alike(folder.columns(fourth)["rows"], 4)
assert files() == ["", "", ".taken"], files()
del view
assert files() == ["", "", ".spare"], "the last view is gone"
fifth = write(5)
assert alike(folder.columns(fifth)["rows"], 5), "also where the taker had written"
small = folder.write({"rows": np.zeros(10, np.uint8)})
folder.recycle([small])
assert files() == ["", "", ""], "a small file is not worth it"

shared = folder.take(fifth)["rows"]
if not (child := os.fork()):
    while not (Path(sys.argv[1]) / "written").exists():
        time.sleep(0.01)
    os._exit(0 if alike(shared, 5) else 1)
del shared
folder.recycle([third])
for value in range(6, 16):
    write(value)
(Path(sys.argv[1]) / "written").touch()
assert os.waitpid(child, 0)[1] == 0, "a fork's memory has changed"

lost = write(17)
if not (child := os.fork()):
    kept = folder.take(lost)
    os._exit(0)
os.waitpid(child, 0)
assert ".taken" in files()
last = write(18)
assert ".taken" not in files(), "of a process that has ended"
module.MOST_TAKEN = 0
try:
    folder.take(last)
except OSError:
    assert alike(folder.columns(last)["rows"], 18), "it is copied then"
else:
    raise AssertionError("each mapping takes a file descriptor")

spare = write(19)
folder.recycle([spare])
assert ".spare" in files()
module.SHARE = 1.0
folder.write({"rows": np.zeros((9000, 1024), np.uint8)})
assert ".spare" not in files(), "spares leave when there is no room"
"""


def test_memory_of_a_block_is_written_again_only_when_nobody_reads_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", USES_ITS_MEMORY_AGAIN, str(tmp_path)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_folder_of_another_user_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = BlockFolder("test", "far")
    folder.roots = [tmp_path]
    monkeypatch.setattr("os.getuid", lambda: -1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        folder.write(columns_of(4))
    assert not [*tmp_path.iterdir()]


def test_memory_is_used_again_only_when_nobody_holds_a_view_of_it() -> None:
    buffers = BufferPool(pinned=False)
    array = buffers.empty((64, 1000, 3), np.uint8)
    address = array.ctypes.data
    view = array[3:5]
    del array
    other = buffers.empty((64, 1000, 3), np.uint8)
    assert other.ctypes.data != address
    del view
    assert buffers.empty((63, 1000, 3), np.uint8).ctypes.data == address
    buffers._allocate = None  # type: ignore[assignment, method-assign]
    for _ in range(100):
        buffers.empty((64, 1000, 3), np.uint8)


@pytest.mark.parametrize(
    ("answered_s_ago", "listens", "lost"),
    [(300, False, True), (300, True, False), (5, False, False)],
)
def test_a_host_is_lost_when_neither_its_agent_nor_its_kernel_answers(
    far: Setting, answered_s_ago: float, listens: bool, lost: bool
) -> None:
    if not listens:
        far.server.close()
    server, answered = Server(None, "127.0.0.1", far.server.port), time.monotonic() - answered_s_ago
    assert _Agent(None, None, answered, server).is_lost() == lost
