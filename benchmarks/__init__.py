"""Laptop: benchmarks against peers, reported as ratios within one run: `make bench`."""
