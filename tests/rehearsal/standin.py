"""A driver to stand in for the real one: it runs Ray tasks on every host and can be told to fail.

It replaces `stoker/entry/driver.py` and `stoker/entry/job_checks.py` in the staged copy only; hosts, Ray
and the bootstrap are real.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from typing import Any

from stoker.place import Outcome

_stop = ""


def values(resolved: Any) -> dict[str, Any]:
    """The parameters: text of the command line keeps to the types of a recipe, which this has none of."""
    from yaml import safe_load

    return {key: safe_load(str(value)) for key, value in resolved.config.params.items()}


def check(resolved: Any) -> None: ...


def check_chains(opened: None) -> None: ...


def request_stop(reason: str) -> None:
    global _stop
    _stop = reason


def run(resolved: Any, place: Any, opened: None) -> Outcome:
    import ray

    params = values(resolved)
    behaviour = params.get("behaviour", "succeed")
    print("driver: running", flush=True)
    if behaviour == "raise":
        raise RuntimeError("the recipe raised this")
    if behaviour == "exit":
        sys.exit(3)
    if behaviour == "fail":
        return Outcome(1, "loss is NaN at step 12")
    if behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)

    @ray.remote(num_cpus=1, scheduling_strategy="SPREAD", max_retries=5)
    def work(number: int, seconds: float) -> tuple[int, str, str]:
        import socket

        time.sleep(seconds)
        return number, socket.gethostname(), ray.get_runtime_context().get_node_id()

    task_s, number = params.get("task_s", 0.1), params.get("tasks", 12)
    tasks = [work.remote(i, task_s) for i in range(number)]
    done: list[tuple[int, str, str]] = []
    while tasks:
        ready, tasks = ray.wait(tasks, timeout=0.5)
        done += ray.get(ready)
        if ready:
            print(f"driver: task {len(done)} done", flush=True)
        if not tasks and _awaited(params, {node for *_, node in done}):
            tasks = [work.remote(number + i, task_s) for i in range(12)]
            number += 12
        if _stop:
            place.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            (place.checkpoint_dir / "state.json").write_text(json.dumps({"done": len(done)}))
            return Outcome(143, f"stopped: {_stop}")
    until = time.monotonic() + params.get("then_s", 0)
    while time.monotonic() < until and not _stop:
        time.sleep(0.2)
    hosts = [
        {
            "group": n["Labels"].get("stoker-group"),
            "host": n["Labels"].get("stoker.host"),
            "cpus": n["Resources"].get("CPU", 0),
            "alive": n["Alive"],
        }
        for n in ray.nodes()
    ]
    result = {
        "numbers": sorted(number for number, *_ in done),
        "tasks_by_host": dict(Counter(host for _, host, _ in done)),
        "hosts": hosts,
        "expected_hosts": list(place.expected_hosts),
        "place": place.name,
        "learning_rate": resolved.config.train.lr,
        "origins": resolved.origins,
        "dashboard": _dashboard() if resolved.config.cluster.dashboard else None,
        "measured": _measure() if params.get("measure") else None,
        "refused_client": _client_without_token(place) if params.get("client") else None,
    }
    place.run_dir.mkdir(parents=True, exist_ok=True)
    (place.run_dir / "result.json").write_text(json.dumps(result))
    place.model_dir.mkdir(parents=True, exist_ok=True)
    (place.model_dir / "weights").write_bytes(b"w")
    return Outcome(0)


def _dashboard() -> dict[str, int | str]:
    """Its answers on the loopback interface with and without the token, and on the host's own address."""
    import ray
    import requests

    token = {"Authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"}
    own = ray.util.get_node_ip_address()

    def answer(host: str, headers: dict[str, str]) -> int | str:
        url = f"http://{host}:8265/nodes?view=summary"
        try:
            return requests.get(url, headers=headers, timeout=120).status_code
        except requests.ConnectionError:
            return "refused"

    asked = {"token": ("127.0.0.1", token), "none": ("127.0.0.1", {}), "own address": (own, token)}
    return {name: answer(host, headers) for name, (host, headers) in asked.items()}


def _awaited(params: dict[str, Any], used: set[str]) -> bool:
    """Whether hosts have still to do a task, or to be lost."""
    import ray

    nodes = ray.nodes()
    alive = {node["NodeID"] for node in nodes if node["Alive"]}
    working, lost = len(alive & used), len(nodes) - len(alive)
    return working < params.get("until_hosts", 0) or lost < params.get("until_lost", 0)


def _measure() -> dict[str, float]:
    """Seconds that a CPU host needs for sending 10 MiB to the head."""
    import ray

    @ray.remote(num_cpus=1, label_selector={"stoker-group": "cpu"})
    def block() -> bytes:
        return os.urandom(10 * 2**20)

    there = block.remote()
    ray.wait([there], fetch_local=False, timeout=300)
    started = time.monotonic()
    ray.get(there, timeout=300)
    return {"fetch_s": time.monotonic() - started}


def _client_without_token(place: Any) -> str:
    """What a Ray client gets that runs on another host and holds no token."""
    import ray

    address = ray.get_runtime_context().gcs_address

    @ray.remote(num_cpus=0, label_selector={"stoker-group": "cpu"})
    def client(address: str) -> str:
        import socket
        import subprocess

        clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        clean["HOME"] = "/tmp/nobody"
        code = f"import ray; ray.init(address={address!r}); print('IN', ray.nodes())"
        done = subprocess.run(
            [sys.executable, "-c", code], env=clean, capture_output=True, text=True, timeout=240
        )
        return f"{socket.gethostname()} {done.returncode} {done.stdout[-300:]} {done.stderr[-600:]}"

    return str(ray.get(client.remote(address), timeout=300))
