"""Being here, it puts this folder on sys.path: every test may `from jobs import run_command`."""

from __future__ import annotations

import os
import signal
from types import FrameType

import pytest


def pytest_configure() -> None:
    """Leave by SIGTERM as by Ctrl-C: fixtures are torn down, so that no bed of nodes outlives the tests."""
    if not {"PMI_RANK", "PMIX_RANK"} & os.environ.keys():  # a rank may be in the middle of an MPI call: it just ends
        signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    pytest.exit("SIGTERM", returncode=128 + number)
