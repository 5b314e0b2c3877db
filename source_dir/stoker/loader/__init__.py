"""The drop-in for scripts: torch's DataLoader, with its records loaded on all CPUs of a cluster."""
