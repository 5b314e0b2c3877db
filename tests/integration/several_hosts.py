"""Jobs on the cluster of three nodes and a late fourth, in a process of their own; prints what happened.

A process belongs to one cluster only, and that of the tests is another. `STOKER_TEST_NODES` says where it is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RECIPES = str(HERE.parent / "recipes")
sys.path[:0] = [str(HERE.parent.parent), str(HERE), RECIPES]
os.environ["PYTHONPATH"] = os.pathsep.join([RECIPES, os.environ.get("PYTHONPATH", "")])

import numpy as np  # noqa: E402
from streaming import Train  # noqa: E402

from stoker.config.schema import Config  # noqa: E402
from stoker.errors import CacheError, DataError  # noqa: E402
from stoker.protocol import BlockSlice  # noqa: E402
from stoker.read.host_cache import CacheSpec  # noqa: E402
from stoker.read.sources import cut_indices, record_id  # noqa: E402
from stoker.serve.blocks import agents  # noqa: E402
from stoker.serve.blocks.folder import BlockFolder  # noqa: E402
from stoker.serve.shards import order_of  # noqa: E402
from tests.fakes.ray_nodes import RayNodes  # noqa: E402
from tests.waiting import until  # noqa: E402

SEED = 3
HOST = "stoker.host"
LOST_RECORDS, DRAINED_RECORDS, FULL_RECORDS, GIVEN_UP_RECORDS = 3000, 6_000, 10_000, 8_000


def job(
    params: dict[str, Any],
    batch: int = 10,
    block: int = 10,
    epochs: int = 1,
    recipe: str = "timed:Timed",
    **data: Any,
) -> Config:
    return Config.model_validate(
        {
            "recipe": recipe,
            "params": params,
            "data": {"block_records": block, **data},
            "train": {"epochs": epochs, "batch_size": batch},
            "seed": SEED,
        }
    )


def made_by(train: Train) -> dict[str, int]:
    import ray

    names = {node["NodeID"]: node["Labels"][HOST] for node in ray.nodes()}
    return {names[node]: count for node, count in train.figures()["tasks_by_node"].items()}


def met(*hosts: str) -> str:
    """For the parameter `meet`: none of these hosts does all the work because its processes start first."""
    import ray

    folder = Path(tempfile.mkdtemp())
    for node in ray.nodes():
        if node["Alive"] and node["Labels"][HOST] in hosts:
            (folder / node["NodeID"]).mkdir()
    assert len([*folder.iterdir()]) == len(hosts)
    return str(folder)


def placement() -> dict[str, Any]:
    """Blocks by host while enough is ready, and while training always waits for data."""
    train = Train(job({"records": 60_000, "ms": 10}, batch=100))
    # Until eight steps are ready everybody works, and a task holds several shards.
    until(
        lambda: sum(made_by(train).values()) > 240 and {"cpu-1", "cpu-2"} <= made_by(train).keys()
    )
    before = Counter(made_by(train))
    until(lambda: (Counter(made_by(train)) - before).total() > 120)
    enough = Counter(made_by(train)) - before
    steps, ids, helped = train.steps("train", 0), list[int](), made_by(train).get("gpu-0", 0)

    def made() -> Counter[str]:
        for _ in range(
            8
        ):  # asking takes long on a busy machine, and training is to be faster than the CPUs
            ids.extend(next(steps))
        return Counter(made_by(train))

    # The host that trains has been asked to help.
    until(lambda: made()["gpu-0"] > helped)
    before = made()
    until(lambda: (made() - before).total() > 150)
    found = {"enough": enough, "hungry": made() - before, "each_once": len(ids) == len(set(ids))}
    train.close()
    return found


def slow_sample() -> dict[str, Any]:
    """Where a slow record of the first shard comes, in any order and in the exact one."""
    shards = cut_indices(400, 10, order_of(SEED, 0))
    seeded = [record_id(str(i)) for shard in shards for i in shard.items]
    slow = shards[0].items[0]
    found: dict[str, Any] = {}
    for order in ("any", "exact"):
        with tempfile.NamedTemporaryFile(delete=False) as count:
            params = {
                "records": 400,
                "ms": 10,
                "slow": slow,
                "slow_until": 350,
                "count": count.name,
            }
        train = Train(job(params, order=order))
        ids = [i for step in train.steps("train", 0) for i in step]
        found[order] = {
            "at": ids.index(record_id(str(slow))),
            "seeded": ids == seeded,
            "whole": sorted(ids) == sorted(seeded),
        }
        train.close()
    return found


def lost_server() -> dict[str, Any]:
    import ray
    import torch

    from stoker.serve.blocks.client import open_transport
    from stoker.train.feed import Feed

    # Little is fetched ahead, and much is left when the server is killed.
    kinds: dict[str, Any] = {"preprocess_on": ["cpu"], "prefetch_s": 0.001}
    params = {"records": LOST_RECORDS, "ms": 10, "kb": 8, "meet": met("cpu-1", "cpu-2")}
    config = job(params, batch=50, block=25, **kinds)
    train = Train(config)
    servers = until(lambda: ready_servers(train))
    until(lambda: len(made_by(train)) == 2 and min(made_by(train).values()) >= 10)
    device = torch.device("cpu")
    transport = open_transport(train.coordinator, config.data, device)
    stream = Feed(
        coordinator=train.coordinator,
        attempt=0,
        device=device,
        transport=transport,
        data=config.data,
    )
    batches = iter(stream)
    values: list[int] = []
    tails: list[list[int]] = []

    def take(batch: Any) -> None:
        values.extend(batch["x"][:, 0].tolist())
        rows = zip(
            batch["index"].tolist(),
            batch["tail"].tolist(),
            batch["tail_length"].tolist(),
            strict=True,
        )
        tails.extend([index, *tail[:length]] for index, tail, length in rows)

    for batch in islice(batches, 10):
        take(batch)
    before = dict(transport.bytes_by)
    lost = servers[sorted(servers)[0]].agent
    ray.kill(lost)
    until(lambda: died(lost))
    for batch in batches:
        take(batch)
    used = (stream.rows, stream.id_sum, 0)
    books = ray.get(train.coordinator.epoch_done.remote(0, "train", 0, 0, used), timeout=180)
    found = {
        "before": before,
        "after": dict(transport.bytes_by),
        "books": books,
        "values": sorted(values) == sorted(i % 251 for i in range(LOST_RECORDS)),
        "tails": sorted(tails) == [[i] + [i] * (i % 5) for i in range(LOST_RECORDS)],
        "notes": [event["text"] for event in train.events("note")],
    }
    train.close()
    return found


def died(agent: Any) -> bool:
    import ray

    try:
        ray.get(agent.__ray_ready__.remote(), timeout=5)
    except ray.exceptions.RayActorError:
        return True
    except ray.exceptions.GetTimeoutError:
        return False
    return False


def dying_agents() -> dict[str, Any]:
    """The agent of one host dies, and so does the one that comes after it."""
    train = Train(job({"records": 200, "ms": 1}, batch=50, block=25))
    node = min(until(lambda: ready_servers(train)))
    ports, notes = kill_agents(train, {node}, times=2)
    ports.append(until(lambda: servers_of(train).get(node)).port)
    ids = [i for step in train.steps("train", 0) for i in step]
    sampled = until(lambda: [e for e in train.events("host_cpu") if node in e["hosts"]])
    train.close()
    return {"ports": ports, "notes": notes, "rows": len(set(ids)), "sampled": bool(sampled)}


def given_up() -> dict[str, Any]:
    """Agents of all CPU hosts die until nobody starts them again, while much is to be made."""
    import ray

    params = {"records": GIVEN_UP_RECORDS, "ms": 5, "kb": 32}
    train = Train(job(params, batch=50, block=25, preprocess_on=["gpu", "cpu"]))
    hosts = {
        n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Labels"][HOST] in ("cpu-1", "cpu-2")
    }
    _, notes = kill_agents(train, hosts, times=4)
    until(lambda: not hosts & at_work(train))
    before, ids = Counter(made_by(train)), list[int]()
    for step in train.steps("train", 0):
        ids += step
        train.portions.clear()
    found = {
        "notes": notes,
        "made": Counter(made_by(train)) - before,
        "each_once": len(ids) == len(set(ids)),
    }
    found["books"] = train.reconcile("train", 0, ids)
    train.close()
    return found


def inside(train: Train, look: Callable[[Any], Any]) -> Any:
    """What the service knows and tells nobody."""
    import ray

    def call(service: Any) -> Any:
        with service.shared.changed:
            return look(service)

    return ray.get(train.coordinator.__ray_call__.remote(call), timeout=120)


def at_work(train: Train) -> set[str]:
    """The nodes of hosts that may get work or have some."""
    found: set[str] = inside(
        train,
        lambda service: {
            *service.shared.pool.hosts,
            *(item.node for item in service.attempt.planner.active.values()),
        },
    )
    return found


@dataclass(frozen=True)
class Hangs(CacheSpec):
    """In other processes, the root of this cache comes only when a file is gone."""

    maker: int = field(default_factory=os.getpid)

    def root(self) -> Path:
        while os.getpid() != self.maker and Path(self.run).exists():
            time.sleep(0.1)
        raise CacheError("no cache")


def silent_agents() -> dict[str, Any]:
    """No agent answers in time, then all do. On the head, there is none."""
    import ray

    agents.AGENT_START_S = 4.0
    notes, died, ended = list[str](), list[str](), set[str]()
    hosts = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    hosts -= {ray.get_runtime_context().get_node_id()}
    with tempfile.NamedTemporaryFile() as file:
        of_all = agents.Agents(
            lambda used: None,
            Hangs("disk", run=file.name),
            notes.append,
            emptied=lambda: ended,
            died=died.append,
        )
        of_all.start()
        until(lambda: {*died} == hosts)
        agents.AGENT_START_S = 120.0
    served = bool(until(lambda: of_all.directory().servers.keys() == hosts))
    ended.update(hosts)  # so that no agent stays
    until(lambda: not of_all.nodes)
    return {"notes": notes, "died": set(died) == hosts, "served": served}


def servers_of(train: Train) -> dict[str, Any]:
    import ray

    found: dict[str, Any] = ray.get(train.coordinator.servers.remote(), timeout=120).servers
    return found


def kill_agents(train: Train, nodes: set[str], times: int) -> tuple[list[int], list[str]]:
    """The ports of the agents that were killed, and the run's notes meanwhile."""
    import ray

    ports: list[int] = []
    notes: list[str] = []

    def alive() -> list[Any]:
        servers = servers_of(train)
        found = [
            servers[node] for node in nodes & servers.keys() if servers[node].port not in ports
        ]
        return found if len(found) == len(nodes) else []

    def died() -> int:
        notes.extend(event["text"] for event in train.events("note"))
        return sum("died" in text for text in notes)

    for _ in range(times):
        for server in until(alive):
            ports.append(server.port)
            ray.kill(server.agent)
        until(lambda: died() >= len(ports))
    gone = until(lambda: not {server.port for server in servers_of(train).values()} & set(ports))
    assert gone, "a dead agent is no server"
    return ports, notes


def ready_servers(train: Train) -> dict[str, Any]:
    import ray

    head = ray.get_runtime_context().get_node_id()
    servers: dict[str, Any] = ray.get(train.coordinator.servers.remote(), timeout=120).servers
    return (
        {node: server for node, server in servers.items() if node != head}
        if len(servers) == 3
        else {}
    )


def made_on_the_head() -> dict[str, Any]:
    """All blocks are made on the head, and another host trains, over sockets and over Ray."""
    import ray

    configs = [
        job({"records": 200, "ms": 1}, preprocess_on=["gpu"], transport=transport)
        for transport in ("direct", "ray")
    ]
    train = Train(configs[0])
    trainer = ray.remote(num_cpus=0, label_selector={HOST: "cpu-1"})(all_ids)
    ids = ray.get(trainer.remote(train.coordinator, configs), timeout=180)
    run = ray.get(train.coordinator.servers.remote(), timeout=120).run
    folder = BlockFolder(run, ray.get_runtime_context().get_node_id())
    own = [BlockSlice(folder.write({"x": np.arange(4)}), 0, 4, folder.node, 4) for _ in range(2)]
    takes = ray.remote(num_cpus=0, label_selector={HOST: "cpu-1"})(take_and_drop)
    ray.get(takes.remote(train.coordinator, configs[1], own), timeout=180)
    left = [part for part in own if any((root / part.block).exists() for root in folder.roots)]
    train.close()
    return {
        "whole": sorted(ids) == sorted(record_id(str(i)) for i in range(200)),
        "left": len(left),
    }


def take_and_drop(coordinator: Any, config: Config, parts: list[BlockSlice]) -> None:
    import torch

    from stoker.serve.blocks.client import open_transport

    transport = open_transport(coordinator, config.data, torch.device("cpu"))
    for part in parts:
        transport.rows(part)
        transport.drop(part)


def all_ids(coordinator: Any, configs: list[Config]) -> list[int]:
    """Of steps that come over one transport and the other, by turns."""
    import ray
    import torch

    from stoker.protocol import ID_COLUMN
    from stoker.serve.blocks.client import open_transport

    transports = [
        open_transport(coordinator, config.data, torch.device("cpu")) for config in configs
    ]
    ids: list[int] = []
    for step in range(20):
        transport = transports[step % 2]
        answer = ray.get(coordinator.ahead.remote(0, "train", 0, 0, step, 1, step), timeout=180)
        if isinstance(answer, str):
            raise DataError(answer)
        (portion,) = answer
        for part in portion.blocks:
            columns, start, stop, _ = transport.rows(part)
            ids += columns[ID_COLUMN][start:stop].tolist()
    return ids


def cached() -> dict[str, Any]:
    """Two hosts that keep their own half of the records, over three epochs."""
    config = job(
        {"records": 4200, "kb": 1, "ms": 10, "random": False, "meet": met("cpu-1", "cpu-2")},
        batch=100, block=64, epochs=3, preprocess_on=["cpu"], cache="memory",
    )  # fmt: skip
    train = Train(config)
    for epoch in range(3):
        ids = [i for step in train.steps("train", epoch) for i in step]
        assert len(set(ids)) == 4200, len(set(ids))
        train.reconcile("train", epoch, ids)
    found = {"passes": train.events("cache")}
    train.close()
    return found


def drained(nodes: RayNodes) -> dict[str, Any]:
    """A host joins a running job, and is announced to be taken away, and later is: it holds needed blocks."""
    import ray

    # A quarter of the stores takes a quarter of the records, so work is left for a host that starts slowly.
    params = {"records": DRAINED_RECORDS, "ms": 10, "kb": 96}
    config = job(params, batch=20, block=20, preprocess_on=["cpu", "spot"])
    train = Train(config)
    number = nodes.start("spot")  # late
    name = f"spot-{number}"
    (node,) = (n["NodeID"] for n in ray.nodes() if n["Labels"][HOST] == name)
    until(
        lambda: chain_workers_on(nodes, node)
    )  # else all work may be done before they ask for some
    steps, ids, events = train.steps("train", 0), list[int](), list[dict[str, Any]]()

    def noted() -> bool:
        events.extend(ray.get(train.coordinator.drain.remote(), timeout=120))
        return any("about to be taken away" in event.get("text", "") for event in events)

    def step_until(true: Callable[[], Any]) -> bool:
        def step() -> Any:
            time.sleep(0.1)
            ids.extend(next(steps, []))
            return true()

        return bool(until(step))

    found: dict[str, Any] = {"used": step_until(lambda: made_by(train).get(name, 0) > 4)}
    ray_command(nodes, "drain-node", f"--node-id={node}", "--reason=DRAIN_NODE_REASON_PREEMPTION",
                "--reason-message=spot", "--deadline-remaining-seconds=900")  # fmt: skip
    found["noted"] = bool(until(noted))
    found["emptied"] = bool(until(lambda: not chain_workers_on(nodes, node)))
    made, at = made_by(train)[name], sum(made_by(train).values())
    found["others"] = step_until(lambda: sum(made_by(train).values()) > at + 10)
    found["more"] = made_by(train)[name] - made
    # Its agent ends when no block is needed from it.
    found["rescued"] = bool(
        until(lambda: node not in ray.get(train.coordinator.servers.remote()).servers)
    )
    for _ in range(3):  # with what train workers have taken before, they let go of its last blocks
        ids.extend(next(steps, []))
        train.portions.clear()
    nodes.lose(number)
    for step in steps:
        ids.extend(step)
    found["books"] = train.reconcile("train", 0, ids)
    found["each_once"] = len(ids) == len(set(ids)) == DRAINED_RECORDS
    found["again"] = train.events("work_repeated")
    train.close()
    return found


def lost_while_full(nodes: RayNodes) -> dict[str, Any]:
    """A host is lost in the middle of long shards, while no more blocks may be made, in both orders.

    What is read after that cannot be read at first.
    """
    number = nodes.start("full")
    name = f"full-{number}"
    params = {"records": FULL_RECORDS, "ms": 1, "kb": 32, "shard": 400}
    kinds: dict[str, Any] = {"batch": 50, "recipe": "timed:Long", "preprocess_on": ["cpu", "full"]}
    failed = [Path(tempfile.mkdtemp()) / "failed" for _ in range(2)]
    hosts = "cpu-1", "cpu-2", name
    trains = [
        Train(job(params | {"failed": str(folder), "meet": met(*hosts)}, order=order, **kinds))
        for order, folder in zip(("any", "exact"), failed, strict=True)
    ]

    def is_full(train: Train) -> bool:
        return name in made_by(train) and inside(
            train, lambda service: rests(service.attempt.planner)
        )

    def rests(planner: Any) -> bool:
        return not planner.active and planner._held_bytes() >= planner.shared.budget_bytes

    full = [bool(until(lambda train=train: is_full(train))) for train in trains]
    made = [sum(made_by(train).values()) for train in trains]
    for folder in failed:
        folder.mkdir()
    nodes.lose(number)
    found: dict[str, Any] = {"full": full, "made": made, "books": [], "each_once": [], "notes": []}
    for train, folder in zip(trains, failed, strict=True):
        ids: list[int] = []
        for step in train.steps("train", 0):
            ids += step
            train.portions.clear()
        found["books"].append(train.reconcile("train", 0, ids))
        found["each_once"].append(len(ids) == len(set(ids)) == FULL_RECORDS)
        found["notes"].append([event["text"] for event in train.events("note")])
        train.close()
        shutil.rmtree(folder.parent)
    return found


def ray_command(nodes: RayNodes, *words: str) -> None:
    done = subprocess.run(
        ["ray", *words, f"--address={nodes.gcs}"],
        env=nodes.environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def chain_workers_on(nodes: RayNodes, node: str) -> list[Any]:
    from ray.util.state import list_actors

    alive = list_actors(nodes.dashboard, filters=[("node_id", "=", node), ("state", "=", "ALIVE")])
    return [actor for actor in alive if "MapWorker" in actor.class_name]


def lost_alone(nodes: RayNodes) -> dict[str, Any]:
    """A job may preprocess only on one host, and it leaves."""
    import ray

    number = nodes.start("extra")
    alone = Train(
        job({"records": 10_000, "ms": 20}, batch=40, preprocess_on=["extra"], stall_timeout_s=10)
    )
    steps = alone.steps("train", 0)
    for _ in range(4):
        next(steps)
    found: dict[str, Any] = {"alone": made_by(alone)}
    nodes.lose(number)
    try:
        for _ in steps:
            pass
    except (AssertionError, DataError, ray.exceptions.RayError) as error:
        found["said"] = str(error)
    alone.close()
    return found


def main() -> None:
    nodes = RayNodes.entered(json.loads(os.environ["STOKER_TEST_NODES"]))
    import ray

    ray.init(address=nodes.gcs, log_to_driver=False)
    found: dict[str, Any] = {}
    scenes: dict[str, Callable[[], dict[str, Any]]] = {
        "placement": placement,
        "slow_sample": slow_sample,
        "made_on_the_head": made_on_the_head,
        "lost_server": lost_server,
        "dying_agents": dying_agents,
        "silent_agents": silent_agents,
        "given_up": given_up,
        "cached": cached,
        "drained": lambda: drained(nodes),
        "lost_while_full": lambda: lost_while_full(nodes),
        "lost_alone": lambda: lost_alone(nodes),
    }
    try:
        for name, scene in scenes.items():
            if len(sys.argv) > 1 and name not in sys.argv[1:]:
                continue
            started = time.monotonic()
            found[name] = scene() | {"seconds": round(time.monotonic() - started, 1)}
            print(name, found[name], file=sys.stderr, flush=True)
    finally:
        ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
