"""A recipe that fails where PyTorch lets the rest of the network in while it trains."""

from __future__ import annotations

import os
import socket
from typing import Any

import psutil
from rows import Counting


class Listening(Counting):
    def training_step(self, model: Any, batch: Any) -> Any:
        import torch.distributed as dist

        assert dist.is_initialized()
        listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
        everywhere = [each for each in listening if not each.ip.strip("0.:")]
        assert len(everywhere) <= 1, f"besides Ray's own: {everywhere}"
        if dist.get_world_size() == 1:
            assert "MASTER_PORT" not in os.environ
        else:
            address = next(a for a in ("127.0.0.1", "127.0.0.2") if a != os.environ["MASTER_ADDR"])
            try:
                socket.create_connection((address, int(os.environ["MASTER_PORT"])), 5).close()
            except ConnectionRefusedError:
                pass
            else:
                raise AssertionError("the store listens on every address")
        return super().training_step(model, batch)
