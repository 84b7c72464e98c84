"""Measurements over all ranks of a job; `mpitrain bench` starts the ranks, `python -m mpitrain.bench` is one of them.

options.py         what can be asked for, checked before any rank starts
operations.py      OPERATIONS: how each one is set up, run and checked, and what it costs at least
data.py            values whose sums are known, and the elements that came out wrong
rounds.py          variants side by side: alternating rounds, medians, spread
link.py            the link between nodes: which interface, its rate, the bytes that crossed it
sweep.py           the cells of a table: every operation, size and dtype, all variants in each
point_to_point.py  latency and bandwidth of every pair
measure.py         what a cost model needs to know of a cluster
table.py, summary.py, plot.py  for people, for programs, as a picture
"""
