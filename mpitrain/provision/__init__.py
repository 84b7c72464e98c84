"""Turn machines into a cluster: make first contact with them, and run the playbooks of `cluster/` on them."""
