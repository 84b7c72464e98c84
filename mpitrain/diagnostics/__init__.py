"""Find what is wrong with this machine, or with the nodes of a cluster: agents look, pure functions judge.

check.py      what a check is, its findings, and what was seen
target.py     which nodes, which user, which share: from the inventory and group_vars;  here.py  this machine alone
agent.py      questions to a node's agent, which bundle.py puts together from node/*.py;  connect.py  its login by ssh
collect.py    logins, questions to all nodes, rounds of pairs;  jobs.py  small MPI jobs: what was seen
checks/*.py   one subject each: what to look at, and the judges of what was seen;  the registry is checks/__init__.py
judge.py      verdicts in every place, and which failure is the cause of which
report.py, facts.py, document.py    output for people and for programs;  explain.py  describes a check

`mpitrain check-cluster` makes all checks. `mpitrain doctor` makes the checks that apply to a single machine
(`Check.alone`), and needs only the standard library.
"""
