"""A training script of the user's own, run as it is on every train worker.

head: ScriptWork (work.py)  →  Supervisor (an actor): events, stops, who failed first
          │ Ray Train: rendezvous.py chooses MASTER_ADDR and MASTER_PORT
train worker: run_script (worker.py)  →  Child (process.py): the script, with torchrun's environment
"""
