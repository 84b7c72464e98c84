"""One outcome for all ranks: a test that fails on one rank has failed, and the next test starts together."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import mpitrain
from mpitrain.errors import MismatchError

from .reducers import driven, reducer  # noqa: F401 - fixtures of the tests of the reducer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # for the models

# So many times in a row may the other ranks still be in a test that has ended here.
MOST_MISMATCHES = 3


@pytest.fixture(scope="session")
def world() -> mpitrain.World:
    """The world of the job, with the name of its size."""
    return mpitrain.init()


@pytest.fixture
def shared(world: mpitrain.World) -> Iterator[Path]:
    """An empty directory, the same one on every rank."""
    made = tempfile.mkdtemp(prefix="mpitrain-") if world.is_root else None
    path = Path(world.broadcast_object(made))
    yield path
    if world.is_root:
        shutil.rmtree(path)


@pytest.fixture
def a_slow_disk_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hook wait for every save that is due: on a busy machine, some writes outlast its patience."""
    monkeypatch.setattr("mpitrain.training.hooks.checkpoint._PATIENCE_SECONDS", float("inf"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    world = mpitrain.init()
    if report.when != "call" or world.size == 1:
        return report
    mine = str(report.longrepr) if report.failed else None
    for _ in range(MOST_MISMATCHES):
        try:
            # The name is unique, so that this call meets no allgather of a test, and no end of another test.
            texts = world._gather(mine, f"end of {item.nodeid}")
            break
        except MismatchError as error:  # other ranks were still in the test, which the error has ended
            last = error
    else:
        pytest.exit(f"the ranks do not come to the end of the same test: {last}", returncode=1)
    for rank, text in enumerate(texts):
        if text is not None and not report.failed:
            report.outcome = "failed"
            report.longrepr = f"{world.name(rank)}:\n{text}"
    return report
