"""Script's process: observes torch's DataLoader in an unchanged training script."""
