"""Results computed from measured times."""

from __future__ import annotations

import pytest

from mpitrain.forecast.cluster_profile import crossover


@pytest.mark.parametrize(
    ("faster", "limit"),
    [
        ([False, False, False], 0),
        ([True, False, False], 8192),
        ([True, True, False], 32768),
        ([True, True, True], 131072),
        ([False, True, False], 32768),  # what disturbed the first one
    ],
)
def test_crossover(faster: list[bool], limit: int) -> None:
    assert crossover(dict(zip((4096, 16384, 65536), faster, strict=True))) == limit
