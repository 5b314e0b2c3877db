"""However a chain worker ends, others make what it had not made: the coordinator, without Ray's processes."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from typing import Any

import pytest
from test_planner import PROCESSES, RECORDS, Shards

from stoker.config.schema import Config
from stoker.protocol import BlockReport, Made, Process, Server
from stoker.read.sources import record_id
from stoker.serve import service
from stoker.serve.actor import Coordinator
from stoker.serve.blocks.agents import _Agent
from stoker.serve.passes import Passes

GROUPS = [6, 6, 6]
ROWS = RECORDS * sum(GROUPS)


class Uncounted(Shards):
    """As tar shards elsewhere: only reading them tells how many records they have."""

    def count(self) -> Any:
        return None


class NoAgents:
    run, nodes = "run", frozenset[str]()

    def __init__(self, *_: Any, **__: Any) -> None: ...


def node(name: str, gpus: int = 0) -> dict[str, Any]:
    resources = {"CPU": 1 + gpus, "GPU": gpus}
    return {
        "NodeID": name,
        "Alive": True,
        "Labels": {},
        "Resources": resources,
        "NodeManagerHostname": name,
    }


@pytest.fixture
def draining() -> set[str]:
    return set()


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch, draining: set[str]) -> Coordinator:
    monkeypatch.setattr(service, "Agents", NoAgents)
    monkeypatch.setattr(service, "draining_nodes", lambda: set(draining))
    monkeypatch.setattr(service, "CLAIM_WAIT_S", 0.0)
    data = {"block_records": RECORDS, "shuffle": False}
    config = Config.model_validate(
        {"recipe": "none:None", "data": data, "train": {"epochs": 1, "batch_size": RECORDS}}
    )
    passes = Passes(config, {"train": Uncounted(GROUPS)}, {"train": b""})
    given = {
        "config": config,
        "node": "head",
        "budget_bytes": 10**6,
        "most_waiting": 4,
    }
    made = Coordinator(passes, {"train": None}, passes.identity("f"), **given)
    monkeypatch.setattr(made, "start_engine", lambda me: None)
    monkeypatch.setattr(made, "_rescue", lambda nodes: None)
    made._rescuer = threading.Thread()
    made.begin(None, 0, 1, 0)
    return made


class Worker:
    def __init__(self, head: Coordinator, host: str, worker: str = "", token: str = "") -> None:
        self.head = head
        self.me = Process(worker or f"w{next(PROCESSES)}", host, token or f"{next(PROCESSES)}")
        head.begin_lease(self.me, "its handle")

    def claim(self) -> bool:
        """Ask for work; whether the lease goes on."""
        for _ in range(2):
            self.reply = self.head.claim(self.me, ["train"], None)
            if self.reply.claim or not self.reply.go_on:
                break
            for pass_ in self.head.attempt.open.values():
                if pass_.coming is not None:  # shards are listed by another thread
                    pass_.coming.result(60)
        work = self.reply.claim.work if self.reply.claim else ()
        self.todo = [(w.number, nth) for w in work for nth in range(w.skip, GROUPS[w.number])]
        return self.reply.go_on

    def make(self) -> bool:
        assert self.reply.claim is not None
        number, nth = self.todo.pop(0)
        ids = sum(record_id(f"{number}/{nth}/{i}") for i in range(RECORDS))
        last = nth == GROUPS[number] - 1
        report = BlockReport(number, nth, last, RECORDS, 0.01, RECORDS, ids, bytes_out=10)
        return self.head.block_made(
            self.me, self.reply.claim.number, Made(report, f"{number}/{nth}")
        ).go_on

    def work(self) -> None:
        while self.claim() and self.reply.claim:
            while self.todo and self.make():
                pass


def trained(head: Coordinator) -> tuple[int, dict[str, Any]]:
    """All steps as one train worker, then the account: rows, and what it says."""
    seen: list[str] = []
    for step in itertools.count():
        given = head.next(0, "train", 0, 0, step)
        if given is None:
            break
        seen += [f"{part.block}/{i}" for part in given.blocks for i in range(part.start, part.stop)]
    used = len(seen), sum(map(record_id, seen)) % 2**63, 0
    return len(set(seen)), head.epoch_done(0, "train", 0, 0, used)


def test_a_pass_is_over_when_its_last_block_has_come(head: Coordinator) -> None:
    head._look_once([node("A")], time.monotonic())
    worker = Worker(head, "A")
    worker.work()
    (pass_,) = head.attempt.open.values()
    assert pass_.complete() and pass_ not in head.attempt.planner.passes


def test_nobody_is_late_by_what_nobody_could_do_while_the_machine_stood_still(
    head: Coordinator,
) -> None:
    now = time.monotonic()
    head._look_once([node("A"), node("B")], now)
    Worker(head, "A").claim()
    waits = Worker(head, "B")
    assert head._look_once([node("A"), node("B")], now + 5000) == []
    assert waits.me.worker in head.hosts.workers and not head.shared.pool.avoided
    found = [
        head._look_once([node("A"), node("B")], now + 5000 + second) for second in range(1, 400)
    ]
    assert ["its handle"] in found, "it does hang"


@pytest.mark.parametrize("restarted_on", ["A", "B"])
def test_a_worker_that_shall_leave_and_dies_at_work_leaves_that_to_others(
    head: Coordinator, draining: set[str], restarted_on: str
) -> None:
    now = time.monotonic()
    head._look_once([node("A"), node("B")], now)
    dying, other = Worker(head, "A"), Worker(head, "B")
    dying.claim()
    dying.make()
    draining.add("A")  # its host is announced to be taken away
    head._look_once([node("A"), node("B")], now + 1)
    again = Worker(head, restarted_on, dying.me.worker)
    assert not again.claim()
    other.work()
    head._look_once([node("B")], now + 2)
    other.work()
    rows, counts = trained(head)
    assert rows == counts["trained"] == ROWS


def test_a_host_that_counted_as_lost_and_answers_again_makes_nothing_twice(
    head: Coordinator,
) -> None:
    now = time.monotonic()
    head._look_once([node("A"), node("B")], now)
    silent, other = Worker(head, "A"), Worker(head, "B")
    silent.claim()
    silent.make()
    head._look_once([node("B")], now + 1)
    other.work()
    head._look_once([node("A"), node("B")], now + 2)
    assert not silent.make(), "its shard is another's"
    assert not silent.claim(), "its lease is over"
    Worker(head, "A", silent.me.worker, silent.me.token).work()
    other.work()
    rows, counts = trained(head)
    assert rows == counts["trained"] == ROWS


@pytest.mark.parametrize(
    "answered_s_ago, listens, lost", [(300, False, True), (300, True, False), (5, False, False)]
)
def test_a_host_is_lost_when_neither_its_agent_nor_its_kernel_answers(
    answered_s_ago: float, listens: bool, lost: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if not listens:
            listener.close()
        agent = _Agent(
            None, None, time.monotonic() - answered_s_ago, Server(None, "127.0.0.1", port)
        )
        assert agent.is_lost() == lost


def test_a_process_whose_lease_was_broken_off_at_work_has_not_made_it(head: Coordinator) -> None:
    head._look_once([node("A")], time.monotonic())
    first = Worker(head, "A")
    first.claim()
    first.make()
    # A call failed, which ended the lease; Ray Data has another one for the same process.
    Worker(head, "A", first.me.worker, first.me.token).work()
    rows, counts = trained(head)
    assert rows == counts["trained"] == ROWS


def test_a_late_call_of_a_dead_process_takes_nothing_from_the_one_in_its_place(
    head: Coordinator,
) -> None:
    head._look_once([node("A")], time.monotonic())
    dead = Worker(head, "A")
    living = Worker(head, "A", dead.me.worker)
    living.claim()
    assert not dead.claim()
    while living.todo:
        assert living.make() or not living.todo
    living.work()
    rows, counts = trained(head)
    assert rows == counts["trained"] == ROWS
