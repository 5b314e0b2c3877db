"""Every host: what a run leaves behind: events, metrics, its summary; and runs side by side."""

from stoker.tracking.runs import runs_dataframe

__all__ = ["runs_dataframe"]
