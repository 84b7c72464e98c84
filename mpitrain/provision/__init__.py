"""Machines made into a cluster: first contact with them, and the playbooks of `cluster/` run on them."""
