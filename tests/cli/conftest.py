"""Fixtures that several files of tests share."""

from cluster_project import project

__all__ = ["project"]
