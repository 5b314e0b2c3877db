"""Runs the user's training script unchanged on every train worker.

head: ScriptWork  →  Supervisor, an actor (supervisor.py): events, stops, first failure
          │ Ray Train: train/trainer.py opens the store at MASTER_ADDR
train worker: run_script (rank.py)  →  Child: the script, with torchrun's environment
"""
