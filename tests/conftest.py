"""Being here, it puts this folder on sys.path: every test may `from jobs import run_command`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from jobs import REPOSITORY
from mpitrain.testbed import STATE, forget_snapshot, up


def pytest_configure() -> None:
    """Leave by SIGTERM as by Ctrl-C: fixtures are torn down, so that no bed of nodes outlives the tests."""
    if not {"PMI_RANK", "PMIX_RANK"} & os.environ.keys():  # a rank may be in the middle of an MPI call: it just ends
        signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    pytest.exit("SIGTERM", returncode=128 + number)


@pytest.fixture(scope="session")
def provisioned() -> Iterator[str]:
    """The name of a snapshot of four nodes that the playbooks have set up; made once for all tests that start there."""
    name = f"tests{os.getpid()}"
    with up(4, name=name) as bed:
        line = ["ansible-playbook", "cluster/setup.yml"]
        done = bed.run(line, timeout_seconds=600, cwd=REPOSITORY)
        assert done.returncode == 0, done.stdout + done.stderr
        bed.save(name)
    try:
        yield name
    finally:
        forget_snapshot(STATE, name)
