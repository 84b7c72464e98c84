"""Optimizers over a part of the parameters: the bits of the whole, and the norm of all parts."""

from itertools import pairwise

import numpy
import pytest
from four_parameters import DECAYED_RANGES, SIZE, STEPS, draws, flat

from mpitrain.errors import ConfigError
from mpitrain.optim.optimizers import SGD, AdamW


@pytest.mark.parametrize("bounds", [[0, 31, SIZE], [0, 0, 1, SIZE], [0, SIZE]])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(lambda step: 0.1 / (1 + step), momentum=0.9, weight_decay=0.1),
        lambda: AdamW(lambda step: 0.1 / (1 + step), weight_decay=0.1),
    ],
)
def test_parts_have_the_bits_of_the_whole(make, dtype, bounds):
    """Each part has an optimizer of its own, and only the first one's schedule counts. The rest of it stays."""
    start, *gradients = draws(5)
    whole, values = make(), flat(start, dtype)
    whole.start(values, DECAYED_RANGES)
    parts = [slice(begin, end) for begin, end in pairwise(bounds)]
    optimizers, copies = [make() for _ in parts], [flat(start, dtype) for _ in parts]
    for optimizer, part, copy in zip(optimizers, parts, copies, strict=True):
        optimizer.start(copy, DECAYED_RANGES)
        optimizer.update_only(part, float)
    for step in gradients:
        expected = whole.update(flat(step, dtype))
        plan = optimizers[0].plan_update()
        for optimizer, part in zip(optimizers, parts, strict=True):
            optimizer.follow_plan(plan)
            assert optimizer.update(flat(step, dtype)[part]) == expected
    for optimizer, part, copy in zip(optimizers, parts, copies, strict=True):
        assert copy[part].tobytes() == values[part].tobytes()
        others = [name for name in whole.state() if name != "step"]
        for name in others:
            assert optimizer.state()[name][part].tobytes() == whole.state()[name][part].tobytes()
        untouched = flat(start, dtype)
        untouched[part] = copy[part]
        assert copy.tobytes() == untouched.tobytes()
        assert optimizer.state()["step"] == STEPS


def test_a_part_is_clipped_by_the_norm_of_all():
    """The norm of the part is 5, that of all 10, and the limit 2: the gradients are divided by 5."""
    optimizer, values = SGD(1.0, clip_norm=2.0), numpy.zeros(4)
    asked = []

    def norm_of_all(norm):
        asked.append(norm)
        return 10.0

    optimizer.start(values, [])
    optimizer.update_only(slice(1, 3), norm_of_all)
    optimizer.update(numpy.array([3.0, 4.0]))
    assert asked == [5.0]
    assert optimizer.gradient_norm() == 10.0
    numpy.testing.assert_allclose(values, [0, -0.6, -0.8, 0], rtol=1e-15)


def test_the_norm_of_all_parts_is_asked_where_it_is_measured():
    optimizer = SGD(1.0)
    optimizer.start(numpy.zeros(4), [])
    optimizer.update_only(slice(2, 4), lambda norm: norm + 1)
    optimizer.update(numpy.array([3.0, 4.0]))
    assert optimizer.gradient_norm() is None
    optimizer.measure_gradient_norm()
    plan = optimizer.plan_update()
    assert plan["measures_norm"]
    optimizer.follow_plan(plan)
    optimizer.update(numpy.array([3.0, 4.0]))
    assert optimizer.gradient_norm() == 6.0


def test_a_part_takes_gradients_of_its_own_size():
    optimizer = SGD(1.0)
    optimizer.start(numpy.zeros(4), [])
    optimizer.update_only(slice(0, 3), float)
    with pytest.raises(ConfigError, match=r"gradients are float64\(4,\); allowed, as the parameters: float64\(3,\)"):
        optimizer.update(numpy.zeros(4))
