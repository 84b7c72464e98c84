"""Forecasts of speed: the cost of collectives here, and the speed of a training on a cluster.

The bench measures over all ranks of a job; `mpitrain bench` starts them, `python -m mpitrain.forecast.bench` is one:

bench_options.py    the options, checked before any rank starts
bench.py            one rank: the cells of the table, and what is written
operations.py       OPERATIONS: how each operation is set up, run and checked, and its least cost
on_gpus.py          sums of buffers on GPUs
rounds.py           variants side by side: alternating rounds, medians, spread; values with known sums
cluster_profile.py  the link, every pair, memory and codecs, for the profile that the models below take
bench_table.py      the result for people, for programs, and as a picture

The simulator runs the allreduce algorithms of mpitrain over links in simulated time, with arrays that have no contents:
nothing is added, copied or sent, but each message and each addition takes its time.

machines.py         nodes, links and racks: equal ones, of a profile, or of a file
events.py           simulated time
sums.py             the algorithms on simulated ranks
ring_times.py       the times of a ring's messages without events
training.py         steps of synchronous training
serving.py          servers and workers

`mpitrain plan` asks it about a script whose steps were measured, or about a training that is described:

rehearse.py         what a rank of a plan runs: the script, under a Rehearsal
measured_steps.py   the steps of a script on each host
ways.py             the ways to exchange that are compared
planner.py          Planner: measured computation, simulated sums; the strategy `auto` asks it too. What a plan says
scaling.py          what it says of a described training, or of servers and workers
saves.py            how often to save on machines that fail
report.py           tables and pictures
"""
