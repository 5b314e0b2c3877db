"""The storm: a job on emulated hosts under seeded faults, and what it has to show at the end."""
