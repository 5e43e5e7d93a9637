"""Language models of transformers on minirlvr.py's loop: policies, tasks, measures. Needs requirements-hf.txt."""
