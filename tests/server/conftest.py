"""Commands of a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Commands


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with Commands(tmp_path) as made:
        yield made
