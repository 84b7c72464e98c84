"""Find what is wrong with this machine, or with a cluster's nodes: agents collect facts, pure functions judge them.

check.py      what a check is, its findings, what was seen, and what judges share: comparisons of nodes, repair commands
target.py     which nodes, which user, which share: from the inventory and group_vars; how ssh logs in to them
agent.py      questions to a node's agent, whose code (node/*.py) goes there as text;  connect.py  its login by ssh
collect.py    logins, questions to all nodes, rounds of pairs;  jobs.py  small MPI jobs of ranks.py: what was seen
checks/*.py   one subject each: what to look at, and the judges of what was seen;  the registry is checks/__init__.py
run.py        from start to end: which checks, verdicts in every place, and which failure is the cause of which
report.py     output for people and for programs, and the description of a check;  doctor.py  this machine alone

`mpitrain check-cluster` makes all checks. `mpitrain doctor` makes the checks that apply to a single machine
(`Check.alone`), and needs only the standard library.
"""
