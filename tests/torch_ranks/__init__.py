"""Tests that run on every rank of a job at once: `mpiexec -n 3 python -m tests.torch_ranks`."""
