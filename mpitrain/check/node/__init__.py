"""The code that runs on the nodes. It is sent there as text, with mpitrain/facts.py, and needs Python 3.8.

It imports only its siblings and that file. Python 3.8 has no `str.removeprefix`, no `Path.readlink`, no `zoneinfo`.
"""
