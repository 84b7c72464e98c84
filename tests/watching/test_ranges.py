"""Short text for several ranks, both ways."""

from __future__ import annotations

import pytest

from mpitrain.watching.ranges import rank_ranges, ranks_in


@pytest.mark.parametrize("ranks", [[0], [0, 1], [0, 1, 2], [3, 5, 6, 7, 8, 99_999], list(range(100_000))])
def test_there_and_back(ranks: list[int]) -> None:
    assert sorted(ranks_in(rank_ranges(ranks))) == ranks


def test_spaces_and_ranks_named_twice() -> None:
    assert ranks_in(" 5 , 0 - 2,1-3") == {0, 1, 2, 3, 5}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no ranks"),
        ("1,", "names no ranks"),
        ("-1", "names no ranks"),
        ("100000", "names no ranks"),
        ("0,5-2", "has the range 5-2; write the lower number first: 2-5"),
        ("0-99999,0", "names more than 100,000 numbers"),
        ("0-99999," * 500, "names more than 100,000 numbers"),
    ],
)
def test_what_names_no_ranks(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ranks_in(text)
