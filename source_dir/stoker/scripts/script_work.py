"""Head: the work of a script job."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from stoker.config.schema import Config
from stoker.events.sinks import Tracking
from stoker.figures import count_of
from stoker.hosts.topology import NODE_LABEL
from stoker.place import LAUNCH_DIR_VARIABLE, RunPlace
from stoker.scripts.script_checks import script_command_line
from stoker.train.recipe_work import count_workers
from stoker.train.resume import own_place, refuse_unshared


class ScriptWork:
    """Runs a script on every train worker; what a `RecipeWork` is for a recipe."""

    loop = "stoker.scripts.rank:run_script"
    torch_config = "stoker.train.trainer:ScriptConfig"

    def __init__(self, config: Config, place: RunPlace, tracking: Tracking) -> None:
        import ray

        self.config, self.place = config, place
        self.head = ray.get_runtime_context().get_node_id()
        self.workers, self.use_gpu = count_workers(config, ray.cluster_resources())
        self.where, self.synced = own_place(config, place)
        refuse_unshared(config, self.where, place.train_group, self.use_gpu)

    def start_coordinator(self) -> Any:
        import ray

        from stoker.scripts.supervisor import Supervisor

        actor = ray.remote(Supervisor).options(num_cpus=0, label_selector={NODE_LABEL: self.head})
        scales = self.config.cluster.cpu_hosts.max > 0
        supervisor = actor.remote(Path(str(self.config.script)).name, self.workers, scales)
        supervisor.watch_hosts.remote()
        return supervisor

    def opening_line(self) -> str:
        workers = count_of(self.workers, f"{'GPU' if self.use_gpu else 'CPU'} train worker")
        return f"{script_command_line(self.config)}; starting it on {workers} …"

    def notes(self) -> list[str]:
        folder = Path(self.where)
        files = count_of(there := len(list(folder.iterdir())) if folder.is_dir() else 0, "file")
        return [f"{files} from before in {folder}: stoker.checkpoint_dir()"] if there else []

    def settings(self) -> dict[str, Any]:
        local = self.place.name == "local"
        return {
            "job": f"{self.place.run_dir.name}-{secrets.token_hex(4)}",
            "run_dir": str(self.place.run_dir),
            "lasting": str(self.place.lasting or self.place.run_dir),
            "head": self.head,
            "checkpoint_dir": self.where,
            "model_dir": str(self.place.model_dir),
            # Relative paths in the script resolve as they did where the command was typed.
            "folder": os.environ.get(LAUNCH_DIR_VARIABLE) if local else None,
            "channels": self.config.params,
        }

    def leaves_model(self) -> bool:
        return self.place.model_dir.is_dir() and any(self.place.model_dir.iterdir())
