"""What every transport refuses, and which transports a world may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest

from mpitrain import World
from mpitrain.allreduce import make_algorithm
from mpitrain.cuda import peers
from mpitrain.cuda.sequential import DeviceSequential
from mpitrain.cuda.transports import TRANSPORTS, make_transport
from mpitrain.errors import ConfigError, DeviceError, MismatchError
from tests.ranks.common import error_on_all, skip_alone
from tests.ranks.placements import placed

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        pytest.param(lambda: numpy.ones(10), "takes a CuPy array on GPU .*, not a NumPy array on the host", id="host"),
        pytest.param(lambda: [1.0], "takes a CuPy array on GPU .*, not list", id="list"),
        pytest.param(lambda: cupy.ones(10)[::2], "one-dimensional, contiguous array", id="strided"),
        pytest.param(lambda: cupy.ones((2, 5)), "one-dimensional, contiguous array", id="two dimensions"),
        pytest.param(lambda: cupy.ones(3, bool), "cannot sum bool", id="bool"),
    ],
)
def test_refuses_what_it_cannot_sum_in_place(transport: DeviceSequential, make: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        transport.start(make())


def test_refuses_another_gpus_array(transport: DeviceSequential) -> None:
    if cupy.cuda.runtime.getDeviceCount() == 1:
        pytest.skip("there is one GPU")
    mine = transport.place.gpu.number
    with cupy.cuda.Device((mine + 1) % cupy.cuda.runtime.getDeviceCount()):
        flat = cupy.ones(3)
    with pytest.raises(ValueError, match=rf"GPU {mine} .*this rank's; the array is on GPU {flat.device.id}"):
        transport.start(flat)


def test_the_hosts_algorithms_refuse_device_arrays(world: World) -> None:
    with pytest.raises(ValueError, match=r"takes a NumPy array, not cupy.*make_transport"):
        make_algorithm(world, "ring").start(cupy.ones(3))


def test_transports_that_cannot_be_made(world: World) -> None:
    with pytest.raises(ConfigError, match=f"no transport 'pear'; known: {', '.join(sorted(TRANSPORTS))}"):
        make_transport(world, "pear")
    skip_alone(world)
    text = error_on_all(world, MismatchError, lambda: make_transport(world, "peer" if world.rank == 1 else "staged"))
    assert f"{world.name(1)}: peer; {world.name(0)}: staged" in text
    text = error_on_all(world, DeviceError, lambda: make_transport(placed(world, "alone on each node"), "peer"))
    assert "the transport peer is not possible here" in text
    assert "no two ranks are on one node" in text


@pytest.mark.parametrize("length", [0, 2])
def test_bytes_of_all_mates_none_too(world: World, length: int) -> None:
    mates = peers.Mates(world.comm, tuple(range(world.size)), world.rank, 77)
    received: list[list[bytes]] = []

    def steps() -> Iterator[float | None]:
        received.append((yield from peers.exchange(mates, bytes([world.rank, 1])[:length])))

    world.control.wait(steps(), "exchange bytes")
    assert received == [[bytes([rank, 1])[:length] for rank in range(world.size)]]
