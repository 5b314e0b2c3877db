"""A real MLflow server on loopback, with SQLite and a folder for artefacts; it can be stopped and started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import requests

from stoker.hosts.raynode import free_port

START_S = 300.0


class MlflowServer:
    def __init__(self, folder: Path, served: bool = True) -> None:
        """
        Args:
            folder: of its database and artefacts.
            served: it hands out artefacts itself; else clients use the folder, as they use a cloud's storage.
        """
        self.folder, self.served = folder, served
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        where = "--artifacts-destination" if self.served else "--default-artifact-root"
        options = {
            "--backend-store-uri": f"sqlite:///{self.folder / 'mlflow.db'}",
            where: str(self.folder / "artifacts"),
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--workers": "1",
        }
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "mlflow", "server"),
                    *[word for pair in options.items() for word in pair],
                    *([] if self.served else ["--no-serve-artifacts"]),
                ],
                cwd=self.folder,
                env={**os.environ, **quiet},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if requests.get(f"{self.uri}/health", timeout=2).ok:
                    return
            except requests.RequestException:
                time.sleep(0.2)
        raise RuntimeError((self.folder / "server.log").read_text()[-2000:])

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, 9)
            self.process.wait()
            self.process = None

    def ask(self, call: str, **body: Any) -> dict[str, Any]:
        url = f"{self.uri}/api/2.0/mlflow/{call}"
        answer = (
            requests.post(url, json=body, timeout=120)
            if call.endswith("search")
            else requests.get(url, params=body, timeout=120)
        )
        answer.raise_for_status()
        content: dict[str, Any] = answer.json()
        return content

    def runs(self, experiment: str) -> list[dict[str, Any]]:
        found = self.ask("experiments/get-by-name", experiment_name=experiment)
        ids = [found["experiment"]["experiment_id"]]
        runs: list[dict[str, Any]] = self.ask("runs/search", experiment_ids=ids).get("runs", [])
        return runs

    def history(self, run: dict[str, Any], metric: str) -> list[tuple[int, float]]:
        call = self.ask(
            "metrics/get-history", run_id=run["info"]["run_id"], metric_key=metric, max_results=5000
        )
        return [(int(m["step"]), float(m["value"])) for m in call.get("metrics", [])]


def latest(run: dict[str, Any]) -> dict[str, float]:
    return {m["key"]: float(m["value"]) for m in run["data"]["metrics"]}


def pairs(run: dict[str, Any], what: str) -> dict[str, str]:
    return {entry["key"]: entry["value"] for entry in run["data"][what]}
