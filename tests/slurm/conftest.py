"""A real Slurm for the tests of this folder; they are skipped where it is not installed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_daemons import Slurm, why_not


@pytest.fixture(scope="package")
def slurm() -> Iterator[Slurm]:
    """Three nodes, which are this machine."""
    if reason := why_not():
        pytest.skip(reason)
    # A short path: munged's socket is in it.
    with tempfile.TemporaryDirectory(prefix="mpitrain-slurm-") as folder, Slurm(Path(folder)) as slurm:
        yield slurm
