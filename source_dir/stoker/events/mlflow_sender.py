"""Head, or laptop for a replay: sends a run's events to MLflow without ever delaying training.

`events.jsonl` is the queue: a thread reads new lines and sends them in batches; `mlflow.json` stores the
position up to which the server has them. While the server does not answer, nothing is lost: the position
stays, and the rest is sent when it answers again, at the end of the run, or later by
`submit.py replay RUN`.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stoker
from stoker.config.redaction import redact
from stoker.config.schema import Config, MlflowConfig
from stoker.events import mlflow_run
from stoker.events.kinds import Event, HostCpu, event_of
from stoker.events.mlflow_run import MlflowRun
from stoker.events.runs import flat_config
from stoker.events.scalars import Scalars
from stoker.events.sinks import Sink
from stoker.events.summary import Summary
from stoker.place import COMMIT_FILE, Place
from stoker.storage.checkpoint_store import Store, open_store

SEND_EVERY_S = 2.0
RETRY_EVERY_S = 15.0
INTERRUPTED_S = 20.0
"""Limit after an interruption, whatever `close_timeout_s` says: the instance may be reclaimed."""
STATE = "mlflow.json"
ELSEWHERE = ("sagemaker.", "vertex.", "slurm.", "rehearsal.")
"""Sections that are irrelevant for other backends."""


@dataclass
class State:
    """Head: the content of `mlflow.json`."""

    run_id: str | None = None
    sent: int = 0
    """Bytes of events.jsonl accepted by the server."""
    model_version: str | None = None
    model_sent: bool = False

    @classmethod
    def parse(cls, text: str, uri: str, experiment: str) -> State:
        """Head: the state left by an earlier start; empty if it wrote to another server or experiment."""
        try:
            content = json.loads(text)
        except ValueError:
            return cls()
        if (content.pop("uri", None), content.pop("experiment", None)) != (uri, experiment):
            return cls()
        return cls(**content)

    def text(self, uri: str, experiment: str) -> str:
        """Head: the reverse of `parse`."""
        return json.dumps({"uri": uri, "experiment": experiment, **vars(self)}, indent=1)


class MlflowSender(Sink):
    """Head: one per run; all communication with the server happens in its thread."""

    def __init__(
        self,
        settings: MlflowConfig,
        name: str,
        run_dir: Path,
        tags: dict[str, str],
        model_dir: Path | None = None,
        kept: Store | None = None,
        *,
        tell: Callable[[str], None],
    ) -> None:
        """
        Args:
            settings: `tracking.mlflow`, with a uri.
            name: of the job; the experiment's name if `settings` has none.
            run_dir: contains events.jsonl and config.yaml.
            tags: of the run, in addition to `settings.tags`.
            model_dir: folder of the exported model; None: no model is sent.
            kept: storage of the checkpoints, which outlives this host: the run's id is stored there, too.
            tell: receives lines for the user, from any thread.
        """
        self.tell = tell
        self.settings, self.run_dir, self.model_dir = settings, run_dir, model_dir
        # Shown and written, with secrets removed; the client gets `settings.uri`.
        self.uri, self.experiment = str(redact(settings.uri)), settings.experiment or name
        self.tags = {**tags, **redact(settings.tags)}
        self.kept = kept
        self.kept_id: str | None = None
        """The run's id stored with the checkpoints."""
        self.state = self._state_in(open_store(str(run_dir)))
        if kept is not None:
            self.kept_id = self._state_in(kept).run_id
            self.state.run_id = self.state.run_id or self.kept_id
        self.scalars = Scalars()
        self.run: MlflowRun | None = None
        self.failing: str | None = None
        """The last error; None while the server accepts data."""
        self.done = False
        """Whether the server has everything, including the end of the run."""
        self._closing = threading.Event()
        self._summary: Summary | None = None
        self._read_before()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    def start(self) -> None:
        """Start sending."""
        mlflow_run.prepare_client(self.settings.timeout_s)
        self._thread.start()

    def close(self, summary: Summary) -> None:
        """Send the rest, the model, the files and the final status, for at most `close_timeout_s`.

        Args:
            summary: complete; gets the run's address, and is written again with it.
        """
        self._summary = summary
        self._closing.set()
        limit = self.settings.close_timeout_s
        if summary.status == "interrupted":
            limit = min(limit, INTERRUPTED_S)
        self._thread.join(limit)
        if self._thread.is_alive():
            self.failing = f"not done within {limit:.0f} s"
        if not self.done:
            self.tell(
                f"MLflow at {self.uri} lacks part of this run ({self.failing}); nothing is lost; send it"
                f" later: python launcher/submit.py replay {shlex.quote(str(self.run_dir))}"
            )

    def about(self) -> dict[str, Any]:
        """For `summary.tracking`: where to find the run; without run_id and url until the server answers."""
        about = {
            "uri": self.uri,
            "experiment": self.experiment,
            "run_id": self.state.run_id,
            "url": self.run.url if self.run else None,
            "registered_model": self.settings.registered_model if self.state.model_version else None,
            "model_version": self.state.model_version,
        }
        return {"mlflow": {key: value for key, value in about.items() if value is not None}}

    def _work(self) -> None:
        pause = SEND_EVERY_S
        while True:
            closing = self._closing.wait(pause)
            try:
                self._send()
                if closing and self._summary is not None:
                    self._end(self._summary)
                self._answers()
                pause = SEND_EVERY_S
            except Exception as error:
                self._fails(error)
                pause = RETRY_EVERY_S
            if closing:
                return

    def _fails(self, error: Exception) -> None:
        text = " ".join(str(error).split()) or type(error).__name__
        text = f"{type(error).__name__}: {text}" if len(text) < 300 else text[:300]
        if self.failing is None and not self._closing.is_set():
            self.tell(f"MLflow at {self.uri} does not accept data ({text}); training continues")
        self.failing = text

    def _answers(self) -> None:
        if self.failing is not None:
            self.tell(f"MLflow at {self.uri} answers again; missing data has been sent")
        self.failing = None

    def _opened(self) -> MlflowRun:
        if self.run is None:
            run = mlflow_run.open_run(
                self.settings,
                self.experiment,
                self.settings.run_name or self.run_dir.name,
                self.state.run_id,
                self.tags,
            )
            if run.run_id != self.state.run_id:
                self.state = State(run.run_id)
                self._save()
            backend = self.tags.get("stoker.backend", "")
            params = flat_config(self.run_dir)
            run.set_params({k: v for k, v in params.items() if not k.startswith(ELSEWHERE) or backend in k})
            self.run = run
        return self.run

    def _state_in(self, store: Store) -> State:
        try:
            return State.parse(store.read_note(STATE), self.uri, self.experiment)
        except OSError:
            return State()

    def _save(self) -> None:
        text = self.state.text(self.uri, self.experiment)
        open_store(str(self.run_dir)).write_note(STATE, text)
        if self.kept is not None and self.kept_id != self.state.run_id:
            # The checkpoint folder is created with the first checkpoint; until then, try again later.
            with contextlib.suppress(OSError):
                self.kept.write_note(STATE, text)
                self.kept_id = self.state.run_id

    def _read_before(self) -> None:
        """Feed the counters with the events of an earlier start, which were sent already."""
        for _, event in self._events(0, self.state.sent):
            self.scalars.of(event)

    def _events(self, start: int, end: int | None = None) -> list[tuple[int, Event]]:
        """Complete lines of events.jsonl as (position of the next line, event)."""
        try:
            with (self.run_dir / "events.jsonl").open("rb") as file:
                file.seek(start)
                content = file.read() if end is None else file.read(end - start)
        except OSError:
            return []
        found, place = [], start
        for line in content.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            place += len(line)
            with contextlib.suppress(ValueError):  # a kill may have cut a line, to which a restart appended
                found.append((place, event_of(json.loads(line))))
        return found

    def _send(self) -> None:
        """Send everything in events.jsonl that the server does not have."""
        run = self._opened()
        batch: list[tuple[str, float, int, int]] = []
        place = self.state.sent
        for after, event in self._events(self.state.sent):
            if not isinstance(event, HostCpu) or self.settings.system_metrics:
                at = round(1000 * event.time)
                values = self.scalars.of(event)
                batch += [(name, float(value), at, self.scalars.step) for name, value in values.items()]
            place = after
            if len(batch) >= mlflow_run.METRICS_PER_BATCH:
                self._taken(run, batch, place)
                batch = []
        if place != self.state.sent:
            self._taken(run, batch, place)

    def _taken(self, run: MlflowRun, batch: list[tuple[str, float, int, int]], place: int) -> None:
        try:
            run.log(batch)
        except Exception as error:
            if mlflow_run.is_unknown(error):
                # The server has lost its runs: the next attempt creates a new one and sends everything.
                self.run, self.state, self.scalars = None, State(), Scalars()
            if not mlflow_run.is_refused(error):
                raise
            self.tell(f"MLflow refuses {len(batch)} metrics up to step {batch[-1][3]}: {error}"[:300])
        self.state.sent = place
        self._save()

    def _end(self, summary: Summary) -> None:
        run = self._opened()
        now = round(1000 * time.time())
        best = {f"best/{name}": value for name, value in summary.metrics.best.items()}
        run.log((name, value, now, summary.steps) for name, value in best.items())
        run.set_tags(mlflow_run.end_tags(summary))
        exported = any(e.get("format") == "torch_export" and not e.get("error") for e in summary.exports)
        if summary.status == "succeeded" and exported and self.model_dir and not self.state.model_sent:
            if (self.model_dir / "model.pt2").is_file():
                self.state.model_version = run.log_model(self.model_dir, self.settings.registered_model)
                self.state.model_sent = True
                self._save()
            else:
                self.tell("MLflow: the model is on the host of train worker 0, so it is not sent")
        summary.tracking |= self.about()
        summary.write(self.run_dir)
        run.log_files(self.run_dir)
        run.end(summary.status)
        self.done = True


def run_tags(recipe: str, backend: str, code: Path) -> dict[str, str]:
    """Head: tags that identify a run's code and place.

    Args:
        recipe: its import path, or a script's name.
        backend: where it runs.
        code: the staged source, which records its git commit.
    """
    tags = {
        "mlflow.source.name": recipe,
        "mlflow.source.type": "JOB",
        "stoker.version": stoker.__version__,
        "stoker.backend": backend,
    }
    with contextlib.suppress(OSError):
        tags["mlflow.source.git.commit"] = (code / COMMIT_FILE).read_text().strip()
    return tags


def start_sender(
    config: Config, place: Place, kept: Store, tell: Callable[[str], None]
) -> list[MlflowSender]:
    """Head: start sending a run to MLflow, if configured.

    Args:
        config: the job.
        place: its folders; config.yaml is already written.
        kept: storage of its checkpoints.
        tell: receives lines for the user, from any thread.
    """
    if not config.tracking.mlflow.uri:
        return []
    tags = run_tags(config.script or config.recipe, place.backend, Path(stoker.__file__).resolve().parents[1])
    settings, folders = config.tracking.mlflow, (place.run_dir, tags, place.model_dir)
    sender = MlflowSender(settings, config.name, *folders, kept, tell=tell)
    sender.start()
    return [sender]
