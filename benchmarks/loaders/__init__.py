"""Laptop: loaders that do the same work, each run in a separate process by `benchmarks.end_to_end`."""
