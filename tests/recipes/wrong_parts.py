"""A sink that fails at every event, and a strategy under which each rank would train by itself."""

from __future__ import annotations

from typing import Any

from stoker.events.sinks import Sink


class Broken(Sink):
    def __init__(self, run_dir: Any, config: Any) -> None: ...

    def take(self, event: dict[str, Any]) -> None:
        raise OSError("no room")


def alone(model: Any, device: Any) -> Any:
    return model.to(device)
