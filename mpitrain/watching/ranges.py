"""Short text for several ranks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise


def rank_ranges(ranks: Iterable[int]) -> str:
    """Return the short form of increasing ranks: (0, 1, 2, 5) -> "0-2,5", and (0, 1) -> "0,1"."""
    ranks = list(ranks)
    breaks = [0] + [i + 1 for i, (a, b) in enumerate(pairwise(ranks)) if b != a + 1] + [len(ranks)]
    runs = [ranks[begin:end] for begin, end in pairwise(breaks)]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
