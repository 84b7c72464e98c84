"""Measurements over all ranks of a job; `mpitrain bench` starts the ranks, `python -m mpitrain.bench` is one of them.

options.py         the options, checked before any rank starts
operations.py      OPERATIONS: how each operation is set up, run and checked, and its least cost
data.py            values with known sums, and the count of wrong elements
rounds.py          variants side by side: alternating rounds, medians, spread
link.py            the link between nodes: its interface, its rate, the bytes that crossed it
sweep.py           the cells of a table: every operation, size and dtype, with all variants in each
point_to_point.py  latency and bandwidth of every pair
measure.py         the properties of a cluster that a cost model needs
table.py, summary.py, plot.py  the result for people, for programs, and as a picture
"""
