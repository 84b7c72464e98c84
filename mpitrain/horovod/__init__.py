"""Runs Horovod scripts after changing one import: `import mpitrain.horovod.torch as hvd`. See docs/how-to/horovod.md.

Ranks may submit tensors under names in any order. Rank 0 of each process set notes which rank has submitted which call
(negotiation.py). It tells all ranks to execute, in one order, the calls that all of them have submitted
(named_channel.py).
"""
