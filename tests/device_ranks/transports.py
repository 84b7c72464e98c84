"""A transport of each kind, and the arrays that the tests send with it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy
import pytest

from mpitrain import World
from mpitrain.arrays import Array
from mpitrain.cuda.sequential import DeviceSequential
from mpitrain.cuda.transports import TRANSPORTS, make_transport
from mpitrain.errors import DeviceError
from tests.ranks.common import assert_equal, expected_sum, pattern
from tests.ranks.placements import PLACEMENTS

FLOAT32 = numpy.dtype(numpy.float32)
# The largest length is several pieces in every transport, and one slab of the transport peer.
LENGTHS = (0, 1, 2, 3, 7, 1000, 100003)
LONG = 2_500_007
FIRST = next(iter(PLACEMENTS))  # on two ranks, as in CI, every placement is this one
placements = pytest.mark.parametrize(
    "placement",
    [pytest.param(one, marks=[pytest.mark.nightly] * (number > 0)) for number, one in enumerate(PLACEMENTS)],
)
emulated = pytest.mark.skipif("EMULATED_GPUS" not in os.environ, reason="a real GPU is not filled, lost or counted")


def made(world: World, name: str) -> DeviceSequential:
    try:
        return make_transport(world, name)
    except DeviceError as error:
        assert error.known_everywhere
        pytest.skip(str(error))


@pytest.fixture(params=sorted(TRANSPORTS), scope="module")
def transport(request: pytest.FixtureRequest, world: World) -> Iterator[DeviceSequential]:
    yield made(world, request.param)


def fill(world: World, flat: Array) -> Array:
    flat.set(pattern(flat.size, world.rank).astype(flat.dtype))
    return flat


def expect(world: World, flat: Array, factor: int = 1) -> None:
    expected = expected_sum(flat.size, world.size).astype(flat.dtype)
    assert_equal(flat.get(), expected * numpy.array(factor, flat.dtype))


def both_kinds(transport: DeviceSequential, length: int, dtype: numpy.dtype) -> list[Array]:
    """An array in the transport's own memory, and one in CuPy's pool."""
    import cupy  # every test of this folder is skipped where CuPy is missing

    return [transport.allocate(length, dtype), cupy.empty(length, dtype)]
