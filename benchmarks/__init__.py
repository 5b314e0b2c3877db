"""Laptop: measurements against peers, as ratios within one run. `make bench`."""
