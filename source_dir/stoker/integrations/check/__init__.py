"""Script's process: observe torch's DataLoader in a training script that stays as it is."""
