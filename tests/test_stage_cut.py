"""Where layers are cut so that the slowest piece takes the least time: against all cuts there are."""

from __future__ import annotations

from itertools import combinations

import numpy
import pytest

from mpitrain.adapters.staged import LayerCost
from mpitrain.errors import ConfigError
from mpitrain.strategies.stage_cut import balanced_cut, costs_of_stages, table_of


def slowest(layers: list[range], seconds: numpy.ndarray) -> float:
    """Of the pieces, with the seconds of each layer on each stage."""
    return max(sum(seconds[number % len(seconds)][layer] for layer in piece) for number, piece in enumerate(layers))


@pytest.mark.parametrize("num_layers", [1, 2, 5, 8])
@pytest.mark.parametrize(("num_stages", "num_pieces"), [(1, 1), (2, 1), (3, 1), (2, 2), (5, 1)])
def test_no_other_cut_is_better(num_layers: int, num_stages: int, num_pieces: int) -> None:
    """With whole numbers, so that sums are exact; with layers that take nothing, and layers without parameters."""
    rng = numpy.random.default_rng(num_layers)
    count = num_stages * num_pieces
    for _ in range(10):
        seconds = rng.integers(0, 9, (num_stages, num_layers)).astype(float)
        trained = [int(value) for value in rng.integers(0, 4, num_layers)]
        costs = [[LayerCost(one, size, 0) for one, size in zip(row, trained, strict=True)] for row in seconds.tolist()]
        allowed = []
        for ends in combinations(range(1, num_layers), count - 1):
            cut = [range(begin, end) for begin, end in zip((0, *ends), (*ends, num_layers), strict=True)]
            if all(any(trained[layer] for layer in piece) for piece in cut):
                allowed.append(cut)
        if allowed:
            found = balanced_cut(costs, num_pieces)
            assert found in allowed
            assert slowest(found, seconds) == min(slowest(cut, seconds) for cut in allowed)
        else:
            with pytest.raises(ConfigError, match=f"{num_layers} layers cannot be cut into {count} pieces that have"):
                balanced_cut(costs, num_pieces)


@pytest.mark.parametrize("large", [0, 9])
def test_one_large_layer_leaves_the_others_equal(large: int) -> None:
    """It decides alone how long a step takes, and no stage gets all other layers."""
    costs = [[LayerCost(30.0 if number == large else 1.0, 1, 0) for number in range(10)]] * 4
    assert sorted(len(piece) for piece in balanced_cut(costs, 1)) == [1, 3, 3, 3]


def test_the_slowest_pipeline_counts() -> None:
    """Two pipelines of two stages: rank 3 has a slow processor, so its stage gets fewer layers."""
    of_rank = [[LayerCost(speed, 8, 0)] * 6 for speed in (1.0, 1.0, 1.0, 2.0)]
    costs = costs_of_stages(of_rank, 2)
    assert [row[0].seconds for row in costs] == [1.0, 2.0]
    assert balanced_cut(costs, 1) == [range(4), range(4, 6)]


def test_the_table() -> None:
    costs = [[LayerCost(0.001 * (number + 1), 2**20 * number + 2**19, 2**18) for number in range(4)]] * 2
    assert table_of([range(1), range(1, 2), range(2, 3), range(3, 4)], costs) == (
        "layer  stage        ms  parameters MiB  activations MiB\n"
        "    0      0     1.000            0.50             0.25\n"
        "    1      1     2.000            1.50             0.25\n"
        "    2      0     3.000            2.50             0.25\n"
        "    3      1     4.000            3.50             0.25\n"
        "  all      0     4.000            3.00             0.50\n"
        "  all      1     6.000            5.00             0.50"
    )
