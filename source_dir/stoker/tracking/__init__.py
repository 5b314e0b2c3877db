"""Every host: the outputs of a run (events, metrics, summary), and comparison of runs."""

from stoker.tracking.runs import runs_dataframe

__all__ = ["runs_dataframe"]
