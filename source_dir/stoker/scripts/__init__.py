"""Runs the user's training script unchanged on every train worker.

head: ScriptWork (script_work.py)  →  Supervisor (an actor): events, stops, first failure
          │ Ray Train: train/trainer.py opens the store at MASTER_ADDR
train worker: run_script (rank.py)  →  Child: the script, with torchrun's environment
"""
