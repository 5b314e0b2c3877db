"""Laptop: loaders that do the same work, each run in a process of its own by `benchmarks.end_to_end`."""
