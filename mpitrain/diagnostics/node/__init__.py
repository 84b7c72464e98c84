"""What runs on the nodes, sent there as text: imports nothing of ours but its siblings; Python 3.8 will do."""
