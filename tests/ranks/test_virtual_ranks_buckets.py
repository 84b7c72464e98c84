"""Virtual ranks in a reducer with several dtypes and many small buckets, with and without a thread."""

from __future__ import annotations

from functools import partial

import numpy
import pytest

from mpitrain import GradientReducer, World
from mpitrain.reducer.exchange import make_exchange
from mpitrain.world.shard import part_of

from .reducers import PARAMETERS, SMALL, gradients_of
from .virtual_trainings import alone

WEIGHTS = [3, 3, 3, 2, 2, 1, 0]  # in samples, by virtual rank
EMPTY = WEIGHTS.index(0)


def means_of(world: World, *, threaded: bool) -> list[tuple[float, float, dict[str, bytes]]]:
    """Of three steps. Each virtual rank hands in its gradients in an order of its own."""
    reducer = GradientReducer(
        world,
        PARAMETERS,
        exchange=partial(make_exchange, reduction="exact"),
        bucket_bytes=SMALL,
        threaded=threaded,
        virtual_ranks=len(WEIGHTS),
    )
    own = part_of(len(WEIGHTS), world.rank, world.size)
    numbers = range(own.start, own.stop)
    made = []
    for step in range(3):
        reducer.begin([WEIGHTS[number] for number in numbers], 2.0 if step % 2 else 1.0)
        for number in numbers:
            gradients = gradients_of(number, step)
            for index in numpy.random.default_rng((step, number, world.rank)).permutation(len(PARAMETERS)).tolist():
                gradient = gradients[index]
                reducer.ready(index, numpy.full_like(gradient, numpy.nan) if number == EMPTY else gradient)
            loss = numpy.nan if number == EMPTY else number + 0.1
            if number != numbers[-1]:
                reducer.next_pass(loss)
        means = reducer.finish(loss)
        made.append((means.loss, means.weight, {str(dtype): flat.tobytes() for dtype, flat in reducer.flats.items()}))
    reducer.close()
    return made


@pytest.mark.parametrize("threaded", [False, True], ids=["called", "threaded"])
def test_means_are_those_of_one_rank(world: World, threaded: bool) -> None:
    made = means_of(world, threaded=threaded)
    assert made == means_of(alone(world), threaded=False)
    assert all(numpy.isfinite(loss) and weight == sum(WEIGHTS) for loss, weight, _ in made)
    for _, _, flats in made:
        assert numpy.isfinite(numpy.frombuffer(flats["float32"], "f4")).all()
