"""One step in one pass: the bits of the host's optimizers."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from mpitrain.cuda import kernels
from mpitrain.cuda.kernels import Fused
from mpitrain.optim.optimizers import SGD, Adam, AdamW

from .common import FLOATS, Lying, assert_same, numbers

RANGES = [slice(0, 2), slice(5, 7), slice(7, 100), slice(102, 103), slice(255, 300), slice(1000, 40_000)]
SHAPES = [(size, offset) for size in (0, 1, 3, 6, 257, 4099, 40_003) for offset in (0, 1)]


def state_of(dtype: numpy.dtype, size: int) -> list[numpy.ndarray]:
    """Parameters, gradients and two states of an optimizer; some gradients are subnormal."""
    made = [numbers(dtype, size, 20 + number) for number in range(4)]
    made[3] = numpy.abs(made[3])
    made[1][2000:3000] *= dtype.type(numpy.finfo(dtype).tiny)
    return made


def within(size: int) -> list[slice]:
    return [slice(part.start, min(part.stop, size)) for part in RANGES if part.start < size]


@pytest.mark.parametrize("dtype", FLOATS[2:], ids=str)
@pytest.mark.parametrize(
    ("momentum", "nesterov", "decay"), [(0.0, False, 0.0), (0.9, False, 0.1), (0.9, True, 0.01), (0.0, False, 0.1)]
)
def test_sgd(cupy: Any, dtype: numpy.dtype, momentum: float, nesterov: bool, decay: float) -> None:
    for size, offset in SHAPES:
        parameters, gradients, velocity, _ = state_of(dtype, size)
        ranges = within(size) if size != 6 else []  # at one size nothing decays
        optimizer = SGD(0.1, momentum=momentum, nesterov=nesterov, weight_decay=decay)
        expected = parameters.copy()
        optimizer.start(expected, ranges)
        if momentum:
            optimizer.restore({"velocity": velocity, "step": 0})
        on_device = [Lying(cupy, one, offset) for one in (parameters, gradients, velocity)]
        fused = Fused(decayed=kernels.decay_bounds(ranges, on_device[0].array))
        for _ in range(2):
            optimizer.update(gradients.copy())
            kernels.sgd(
                on_device[0].array,
                on_device[1].array,
                on_device[2].array if momentum else None,
                rate=0.1,
                momentum=momentum,
                nesterov=nesterov,
                weight_decay=decay,
                fused=fused,
            )
        assert_same(on_device[0].get(), expected)
        assert_same(on_device[1].get(), gradients)
        assert_same(on_device[2].get(), optimizer.state()["velocity"] if momentum else velocity)


@pytest.mark.parametrize("dtype", FLOATS[2:], ids=str)
@pytest.mark.parametrize("decay", [None, 0.0, 0.01])
def test_adam(cupy: Any, dtype: numpy.dtype, decay: float | None) -> None:
    for size, offset in SHAPES:
        parameters, gradients, first, second = state_of(dtype, size)
        optimizer = Adam(0.01) if decay is None else AdamW(0.01, weight_decay=decay)
        expected = parameters.copy()
        optimizer.start(expected, within(size))
        optimizer.restore({"first": first, "second": second, "step": 2})
        on_device = [Lying(cupy, one, offset) for one in (parameters, gradients, first, second)]
        arrays = [one.array for one in on_device]
        fused = Fused(decayed=kernels.decay_bounds(within(size), arrays[0]))
        for step in (3, 4):
            optimizer.update(gradients.copy())
            if decay is None:
                kernels.adam(*arrays, step=step, rate=0.01, fused=fused)
            else:
                kernels.adamw(*arrays, step=step, rate=0.01, weight_decay=decay, fused=fused)
        assert_same(on_device[0].get(), expected)
        assert_same(on_device[2].get(), optimizer.state()["first"])
        assert_same(on_device[3].get(), optimizer.state()["second"])


def test_all_decay_where_no_ranges_are_given(cupy: Any) -> None:
    parameters, gradients, *_ = state_of(numpy.dtype("float32"), 1003)
    optimizer = SGD(0.1, weight_decay=0.5)
    expected = parameters.copy()
    optimizer.start(expected, [slice(0, 1003)])
    optimizer.update(gradients.copy())
    on_device = cupy.asarray(parameters)
    kernels.sgd(on_device, cupy.asarray(gradients), rate=0.1, weight_decay=0.5)
    assert_same(on_device.get(), expected)


def test_a_gradient_that_is_not_finite_changes_nothing(cupy: Any) -> None:
    before = state_of(numpy.dtype("float32"), 9)
    before[1][[0, 5, 8]] = numpy.nan, numpy.inf, -numpy.inf
    for call in (
        lambda parameters, gradients, first, _: kernels.sgd(parameters, gradients, first, rate=0.1, momentum=0.9),
        lambda *arrays: kernels.adamw(*arrays, step=1, rate=0.1, weight_decay=0.1),
    ):
        on_device = [cupy.asarray(one) for one in before]
        call(*on_device)
        for one, found in zip(before[::2], on_device[::2], strict=True):
            changed = found.get() != one
            assert not changed[[0, 5, 8]].any() and changed[[1, 2, 3, 4, 6, 7]].all()


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("dtype", FLOATS[2:], ids=str)
def test_a_part_of_a_server_steps_as_on_the_host(cupy: Any, dtype: numpy.dtype, clip_norm: float | None) -> None:
    """Parts begin anywhere, and may be empty. Clipping is by a norm that other servers have a share in."""
    size = 4099
    parameters, gradients, *_ = state_of(dtype, size)
    for part in (slice(0, 0), slice(3, 700), slice(700, size)):
        made = []
        for values, given in ((parameters.copy(), gradients), (cupy.asarray(parameters), cupy.asarray(gradients))):
            optimizer = AdamW(0.01, weight_decay=0.1, clip_norm=clip_norm)
            optimizer.start(values, within(size))
            optimizer.update_only(part, lambda norm: 2.0 * round(norm, 3))
            for _ in range(2):
                optimizer.update(given[part].copy())
            made.append((values, optimizer.state()["first"], optimizer.gradient_norm()))
        (values, first, norm), (on_device, first_on_device, norm_on_device) = made
        assert_same(on_device.get(), values)
        assert_same(first_on_device.get(), first)
        assert norm == norm_on_device
        assert (norm is None) == (clip_norm is None)
