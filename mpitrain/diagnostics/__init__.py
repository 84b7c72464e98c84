"""What is wrong with this machine, or with the nodes of a cluster: looked at by an agent, judged by pure functions.

check.py      what a check is, what it finds, and what was seen
target.py     which nodes, which user, which share: from the inventory and group_vars;  here.py  this machine alone
agent.py      questions to a node's agent, which bundle.py puts together from node/*.py;  connect.py  its login by ssh
collect.py    logins, questions to all nodes, rounds of pairs;  jobs.py  small MPI jobs: what was seen
checks/*.py   one subject each: what is asked, and the judges of what was seen;  the registry is checks/__init__.py
judge.py      verdicts in every place, and what is the cause of what
report.py, facts.py, document.py    for people, for programs;  explain.py  what a check is

`mpitrain check-cluster` makes all checks. `mpitrain doctor` makes those that say something of a machine by itself
(`Check.alone`), and needs the standard library alone.
"""
