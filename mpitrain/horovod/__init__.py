"""Horovod's calls on our transport, for scripts that were written for Horovod."""
