"""Laptop: what `--on slurm` needs: the batch script, Slurm's commands, and checks against the cluster."""
