"""Machines and networks that go wrong, on a bed of nodes: the matrix of `mpitrain check-cluster`."""
