"""Short text for several ranks, both ways."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

_MOST = 100_000  # numbers that a text may name, one that it names twice counted twice


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
    num_named = 0
    for part in text.split(","):
        bounds = re.fullmatch(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?", part, re.ASCII)
        if bounds is None:
            raise ValueError(
                f"{text[:80]!r} names no ranks; allowed are numbers below 100,000 and their ranges, as in 0-2,5"
            )
        first, last = int(bounds[1]), int(bounds[2] or bounds[1])
        if last < first:
            raise ValueError(
                f"{text[:80]!r} has the range {first}-{last}; write the lower number first: {last}-{first}"
            )
        num_named += last - first + 1
        if num_named > _MOST:
            raise ValueError(f"{text[:80]!r} names more than {_MOST:,} numbers; name each rank once")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)
