"""Head: TensorBoard event files, written with TensorBoard's own writer, which does not import PyTorch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event as BoardEvent
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary as Values
from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from stoker.events.kinds import Event, Resumed
from stoker.events.runs import flat_config
from stoker.events.sinks import Scalars, Sink
from stoker.events.summary import Summary

COMPARED = ("params.", "train.", "data.", "seed")
"""Sections shown as TensorBoard hyperparameters."""


class Board(Sink):
    """A run's curves, its configuration as text, and its hyperparameters with its metrics."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.scalars = Scalars()
        self.writer = EventFileWriter(str(run_dir / "tensorboard"))
        try:
            config = (run_dir / "config.yaml").read_text(encoding="utf-8")
        except OSError:
            return
        # Four spaces make a code block; a fence could be closed by the text.
        self._write(text("config/text_summary", "".join(f"    {line}\n" for line in config.splitlines())), 0)

    def _write(self, value: Any, step: int, at: float | None = None) -> None:
        event = BoardEvent(wall_time=at or time.time(), step=step, summary=Values(value=[value]))
        self.writer.add_event(event)

    def on_event(self, event: Event) -> None:
        for name, value in self.scalars.of(event).items():
            self._write(Values.Value(tag=name, simple_value=value), self.scalars.step, event.time)
        if isinstance(event, Resumed):
            # Points after the checkpoint are drawn again.
            start = SessionLog(status=SessionLog.START)
            self.writer.add_event(BoardEvent(wall_time=time.time(), step=event.step + 1, session_log=start))

    def close(self, summary: Summary) -> None:
        """Write the hyperparameters, for TensorBoard's table of runs, and close the file."""
        try:
            config = {k: v for k, v in flat_config(self.run_dir).items() if k.startswith(COMPARED)}
            for value in hyperparameters(config, list(summary.metrics.last)):
                self._write(value, 0)
        finally:
            self.writer.close()


def text(tag: str, content: str) -> Any:
    """A text, which TensorBoard renders as Markdown."""
    plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[content.encode()], tensor_shape=shape)
    return Values.Value(tag=tag, metadata=plugin, tensor=tensor)


def hyperparameters(config: dict[str, Any], metrics: list[str]) -> list[Any]:
    names = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=name)) for name in metrics]
    start = plugin_data_pb2.SessionStartInfo()
    for key, value in config.items():
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[key].number_value = value
        else:
            start.hparams[key].string_value = str(value)
    infos = [api_pb2.HParamInfo(name=key) for key in config]
    parts = {
        metadata.EXPERIMENT_TAG: {"experiment": api_pb2.Experiment(hparam_infos=infos, metric_infos=names)},
        metadata.SESSION_START_INFO_TAG: {"session_start_info": start},
    }
    found = []
    for tag, part in parts.items():
        data = plugin_data_pb2.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **part)
        plugin = SummaryMetadata.PluginData(
            plugin_name=metadata.PLUGIN_NAME, content=data.SerializeToString()
        )
        found.append(Values.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin)))
    return found
