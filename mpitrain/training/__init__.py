"""The training loop, its hooks, and the record of a run: meters, and the writers of their numbers."""
