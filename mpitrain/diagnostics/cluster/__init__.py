"""What is wrong with a cluster: looked at over one login a node, judged by pure functions.

target.py     which nodes, which user, which share: from the inventory and group_vars
connect.py    the login, strict, and the questions over it;  node/*.py is what runs there
collect.py    logins, questions to all nodes, rounds of pairs, jobs: what was seen
checks/*.py   one subject each: what is asked, and the judges of what was seen
judge.py      verdicts in every place, and what is the cause of what
report.py, document.py, fold.py   for people, for programs
"""
