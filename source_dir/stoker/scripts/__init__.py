"""Runs the user's training script unchanged on every train worker.

head: ScriptWork (work.py)  →  Supervisor (an actor): events, stops, first failure
          │ Ray Train: training/rendezvous.py opens the store at MASTER_ADDR
train worker: run_script (worker.py)  →  Child (process.py): the script, with torchrun's environment
"""
