"""python -m uccl_ep_train.doctor: finds what would keep a job from running here, and the remedy.

Alone it checks this machine, under torchrun or srun every rank and all of them together; docs/launch.md has
the commands. `findings.py` says how a check is made: `look` on each rank, `judge` where all results are.
"""
