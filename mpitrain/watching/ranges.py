"""Short text for several ranks, both ways."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise


def rank_ranges(ranks: Iterable[int]) -> str:
    """Return the short form of increasing ranks: (0, 1, 2, 5) -> "0-2,5", and (0, 1) -> "0,1"."""
    ranks = list(ranks)
    breaks = [0] + [i + 1 for i, (a, b) in enumerate(pairwise(ranks)) if b != a + 1] + [len(ranks)]
    runs = [ranks[begin:end] for begin, end in pairwise(breaks)]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def ranks_in(text: str) -> frozenset[int]:
    """Return the ranks that a text such as "0-2,5" names.

    Raises:
        ValueError: it names none, or is something else.
    """
    ranks: set[int] = set()
    for part in text.split(","):
        bounds = re.fullmatch(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?", part, re.ASCII)
        if bounds is None:
            raise ValueError(
                f"{text[:80]!r} names no ranks; allowed are numbers below 100,000 and their ranges, as in 0-2,5"
            )
        ranks |= set(range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1))
    return frozenset(ranks)
