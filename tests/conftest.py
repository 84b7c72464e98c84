"""Being here, it puts this folder on sys.path: every test may `from jobs import run_command`."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import HealthCheck, settings

from jobs import BATCH_SYSTEMS
from mpitrain.errors import LaunchError
from nodes.beds import cluster_bed
from testbed import Bed, find
from testbed.host import require_inotify

# The fixtures that bring a bed up, and how many nodes the tests may have at once in all.
BEDS = {"bed", "bare", "image", "set_up"}
MOST_NODES = 20
ENOUGH_INOTIFY = 1024

IS_RANK = bool({"PMI_RANK", "PMIX_RANK"} & os.environ.keys())
if not IS_RANK:  # the job of a batch system that the tests run in is none of theirs
    for _name in [name for name in os.environ if name.startswith(BATCH_SYSTEMS)]:
        del os.environ[_name]

# On a busy machine an example may take any time. The tests are not about time.
settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")


def pytest_configure(config: pytest.Config) -> None:
    """Leave by SIGTERM as by Ctrl-C: fixtures are torn down, so that no bed of nodes outlives the tests.

    What commands keep of their results (mpitrain/state_files.py) goes to a folder of these tests.
    """
    if not IS_RANK:  # a rank may be in the middle of an MPI call: it just ends
        signal.signal(signal.SIGTERM, _leave)
        folder = tempfile.TemporaryDirectory(prefix="mpitrain-tests-state-")
        config.add_cleanup(folder.cleanup)
        os.environ["XDG_STATE_HOME"] = folder.name


def _leave(number: int, frame: FrameType | None) -> None:
    # Another one would end what is being torn down. (Ignored, it would be ignored by all programs that this starts.)
    signal.signal(number, lambda *_: None)
    pytest.exit("SIGTERM", returncode=128 + number)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let this machine hold the beds, also beside others; where that may not be, say so once for each test."""
    items.sort(key=lambda item: item.path.name == "test_teardown.py")  # it takes the cluster of the others apart
    on_bed = [item for item in items if BEDS & set(getattr(item, "fixturenames", ()))]
    if not on_bed:
        return
    # Beds are made of namespaces and containers.
    if reason := too_few_inotify() if os.geteuid() == 0 else "a bed of nodes needs root":
        for item in on_bed:
            item.add_marker(pytest.mark.skip(reason=reason))


def too_few_inotify() -> str:
    """Raise Debian's limit of inotify instances, for good: another run may rely on it. Why not, where that fails."""
    with contextlib.suppress(OSError):  # a container's own view of it may be read-only
        limit = Path("/proc/sys/fs/inotify/max_user_instances")
        if int(limit.read_text()) < ENOUGH_INOTIFY:
            limit.write_text(str(ENOUGH_INOTIFY))
    try:
        require_inotify(MOST_NODES)
    except LaunchError as error:
        return str(error)
    return ""


@pytest.fixture(scope="session")
def set_up() -> Iterator[tuple[Bed, str]]:
    """The one cluster of these tests, and what its set-up has printed. TEST_BED names a developer's own, which stays.

    tests/cluster/test_teardown.py takes it apart, so that file must come last.
    """
    if given := os.environ.get("TEST_BED"):
        yield find(given), ""
        return
    with cluster_bed(f"nodes{os.getpid()}") as made:
        yield made


@pytest.fixture(scope="session")
def bed(set_up: tuple[Bed, str]) -> Bed:
    """The bed of that cluster: node1 to node4 are set up, node5 is bare."""
    return set_up[0]
