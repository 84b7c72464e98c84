"""One outcome for all ranks: a test that fails on one rank has failed, and the next test starts together."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

import mpitrain
from mpitrain.errors import MismatchError


@pytest.fixture(scope="session")
def world() -> mpitrain.World:
    """The world of the job, with the name of its size."""
    return mpitrain.init()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    world = mpitrain.init()
    if report.when != "call" or world.size == 1:
        return report
    mine = str(report.longrepr) if report.failed else None
    while True:
        try:
            texts = world.allgather(mine)
            break
        except MismatchError:  # the others were still in the test; that has ended it for them too
            continue
    for rank, text in enumerate(texts):
        if text is not None and not report.failed:
            report.outcome = "failed"
            report.longrepr = f"{world.name(rank)}:\n{text}"
    return report
