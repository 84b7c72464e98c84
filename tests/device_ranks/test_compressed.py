"""Gradients of a GPU in a codec's form, or as PowerSGD's factors: the bits of the host's, in means and residuals."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from mpitrain import GradientReducer, Parameter, World
from mpitrain.compression import CODECS
from mpitrain.errors import DataError, DeviceError, NonFiniteError
from mpitrain.reducer.exchange import Exchange, make_exchange
from mpitrain.reducer.slot import Slot
from tests.added.halves import halves
from tests.ranks.common import assert_same_bits, error_on_all, skip_alone
from tests.ranks.placements import placed
from tests.ranks.test_compressed import inputs
from tests.ranks.test_low_rank import COUNT, TENSORS

from .transports import FLOAT32, placements

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
WITHOUT_KERNELS = sorted({"halves", *(name for name, make in CODECS.items() if not make(False).device_code)})
WITH_KERNELS = sorted({*CODECS} - {*WITHOUT_KERNELS})
# The longest is several pieces, in which blocks do not end where pieces do.
COUNTS = [(count, (), count // 3) for count in (0, 1, 2, 7, 1001, 150_001)]
# The cut lies between tensors.
OF_TENSORS = [(COUNT, TENSORS, 1211), (1, [("b", (1,))], 0), (0, (), 0)]


@pytest.fixture(autouse=True)
def host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is at least one codec without kernels."""
    monkeypatch.setitem(CODECS, "halves", CODECS.get("halves", halves))


def steps(there: World, exchange: Exchange, slot: Slot, numbers: range, cut: int) -> bytes:
    """Make steps in two parts, like buckets, the last one first; weights differ; one value is NaN. Return the mean."""
    flat = slot.flat
    for step in numbers:
        values = inputs(there.rank, step, flat.size)
        if step == 1 and there.rank == there.size - 1:
            values[-1:] = numpy.nan
        flat[...] = values if isinstance(flat, numpy.ndarray) else cupy.asarray(values)
        share = (there.rank + 1) / (there.size * (there.size + 1) / 2)
        for handle in [exchange.mean(slot, part, share) for part in (slice(cut, None), slice(0, cut))]:
            handle.wait()
    return (flat if isinstance(flat, numpy.ndarray) else flat.get()).tobytes()


def bits_of_factors(slot: Slot) -> dict[object, bytes]:
    return {key: factor.tobytes() for key, factor in (slot.factors or {}).items()}


@placements
@pytest.mark.parametrize("name", [*WITH_KERNELS, "power_sgd:2"])
def test_the_bits_of_the_host(world: World, name: str, placement: str) -> None:
    there = placed(world, placement)
    for count, tensors, cut in OF_TENSORS if name.startswith("power") else COUNTS:
        on_host, on_device = make_exchange(there, compression=name), make_exchange(there, compression=name)
        host = on_host.allocate(count, FLOAT32, tensors=tensors)
        device = on_device.allocate(count, FLOAT32, on_device=True, tensors=tensors)
        for numbers in (range(2), range(2, 5)):
            found = steps(there, on_device, device, numbers, cut)
            expected = steps(there, on_host, host, numbers, cut)
            assert_same_bits(there, device.flat.get())
            if tensors and there.num_nodes == 1:  # a transport has an order of additions of its own
                numpy.testing.assert_allclose(*(numpy.frombuffer(one, FLOAT32) for one in (found, expected)), rtol=1e-5)
                continue
            assert found == expected
            assert device.left_out().tobytes() == host.left_out().tobytes()
            assert bits_of_factors(device) == bits_of_factors(host)
        if there.num_nodes > 1 and count > 1000:
            assert isinstance(device.residual, numpy.ndarray if tensors else cupy.ndarray)
            assert sum(there.allgather(int(numpy.count_nonzero(device.left_out()))))


@pytest.mark.parametrize("name", ["bf16", "int4", "power_sgd:2"])
def test_from_a_gpu_to_the_host_and_back(world: World, name: str) -> None:
    """Residuals and factors move between host and device. The run has the bits of one that stayed in its place."""
    skip_alone(world)
    there = placed(world, "dealt out over 2 nodes")
    whole = make_exchange(there, compression=name)
    stayed = whole.allocate(COUNT, FLOAT32, tensors=TENSORS)
    expected = steps(there, whole, stayed, range(6), 1211)
    left_out, factors = None, {}
    for turn, on_device in enumerate((True, False, True)):
        exchange = make_exchange(there, compression=name)
        slot = exchange.allocate(COUNT, FLOAT32, on_device=on_device, tensors=TENSORS)
        if slot.factors is not None:
            slot.factors.update(factors)
        if turn:
            slot.restore(left_out)
        with cupy.cuda.Stream(non_blocking=True):
            found = steps(there, exchange, slot, range(2 * turn, 2 * turn + 2), 1211)
        left_out, factors = slot.left_out() if turn else cupy.asarray(slot.left_out()), dict(slot.factors or {})
        with pytest.raises(DataError, match=rf"float32 \(2,\), the residual of the slot is float32 \({COUNT},\)"):
            slot.restore(numpy.zeros(2, numpy.float32))
    assert found == expected
    assert left_out.tobytes() == stayed.left_out().tobytes()


def made(there: World, name: str, on_device: bool, threaded: bool | None = None) -> GradientReducer:
    """A reducer of several buckets."""
    parameters = [Parameter(own, shape, FLOAT32) for own, shape in [*TENSORS, ("long", (9001,))]]
    return GradientReducer(
        there,
        parameters,
        exchange=lambda own: make_exchange(own, compression=name),
        bucket_bytes=4096,
        threaded=threaded,
        on_device=on_device,
    )


@placements
@pytest.mark.parametrize(
    ("name", "threaded"), [("int8", False), *((name, True) for name in ("int8", *WITHOUT_KERNELS, "power_sgd:2"))]
)
def test_a_reducers_gradients(
    world: World, name: str, threaded: bool, placement: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Weights, several buckets, and a resume from the other's state: the bits of a reducer on the host. A codec without
    kernels is used on the host, and one line says so."""
    skip_alone(world)
    there = placed(world, placement)
    reducers = {on_device: made(there, name, on_device, threaded) for on_device in (True, False)}
    assert reducers[True].num_buckets > 1

    def step(on_device: bool, number: int) -> bytes:
        reducer = reducers[on_device]
        reducer.begin(1.0 + there.rank)
        values = reducer.layout.views({FLOAT32: inputs(there.rank, number, COUNT + 9001)})
        for index in reversed(range(len(values))):
            reducer.ready(index, cupy.asarray(values[index]) if on_device else values[index])
        reducer.finish()
        flat = reducer.flats[FLOAT32]
        assert isinstance(flat, cupy.ndarray) == on_device
        return (flat.get() if on_device else flat).tobytes()

    for number in range(3):
        assert step(True, number) == step(False, number)
    said = capfd.readouterr().out.count(f"compression {name} has no kernels for GPUs: gradients are coded on the CPU")
    assert said == (1 if world.is_root and name != "int8" else 0)
    states = {on_device: (reducer.state(), reducer.factors()) for on_device, reducer in reducers.items()}
    assert states[True][0]["place"] == states[False][0]["place"]
    assert bool(states[True][1]) == name.startswith("power")
    for on_device in states:
        reducers[on_device].close()
        reducers[on_device] = made(there, name, on_device, threaded)
        state, factors = states[not on_device]
        reducers[on_device].restore_factors(factors)
        reducers[on_device].restore(state)
    assert step(True, 3) == step(False, 3)


@pytest.mark.parametrize(("name", "huge"), [("fp16", 1e5), ("power_sgd:2", 3e38)])
def test_what_is_not_finite(world: World, name: str, huge: float) -> None:
    """Finite gradients have an infinite mean on every rank; a NaN has a rank and a parameter. The reducer clears its
    residuals and continues."""
    skip_alone(world)
    reducer = made(placed(world, "alone on each node"), name, on_device=True)

    def step(value: float) -> bytes:
        reducer.begin(1.0)
        for index, part in enumerate(reducer.gradients):
            is_odd = index == 1 and (world.rank == world.size - 1 or value == huge)
            reducer.ready(index, cupy.full(part.shape, value if is_odd else 1, FLOAT32))
        reducer.finish()
        numpy.testing.assert_allclose(reducer.gradients[0].get(), 1, rtol=1e-6)
        return bytes(reducer.flats[FLOAT32].get().tobytes())

    first = step(1.0)
    text = error_on_all(world, NonFiniteError, lambda: step(huge))
    assert "the mean gradient of w is too large for the compression" in text
    assert step(1.0) == first
    text = error_on_all(world, NonFiniteError, lambda: step(numpy.nan))
    assert text.startswith(f"{world.name(world.size - 1)}: the gradient of w holds NaN or infinity")
    assert step(1.0) == first


# -- which transport carries it --------------------------------------------------------------------


def with_transport(world: World, name: str) -> World:
    return world.replaced(config=replace(world.config, transport=name))


def test_through_the_host_where_it_is_asked_for(world: World) -> None:
    """Ranks of a node that add up on the host code there; the result is as exact."""
    there = with_transport(placed(world, "dealt out over 2 nodes"), "staged")
    exchange = make_exchange(there, compression="int8")
    slot = exchange.allocate(3000, FLOAT32, on_device=True)
    flat = slot.flat
    value = 127.0 * (world.rank + 1)
    flat.fill(value)
    exchange.mean(slot, slice(None), 1 / world.size).wait()
    numpy.testing.assert_allclose(flat.get(), 127 * (world.size + 1) / 2, rtol=1e-6)
    on_device = there.num_nodes == world.size > 1
    assert isinstance(slot.residual, cupy.ndarray) == on_device


@pytest.mark.parametrize(
    ("name", "transport"),
    [
        *((name, transport) for name in ("bf16", "power_sgd") for transport in ("aware", "nccl", "peer")),
        *((name, "peer") for name in WITHOUT_KERNELS),
    ],
)
def test_a_transport_that_does_not_carry_it(world: World, name: str, transport: str) -> None:
    skip_alone(world)
    exchange = make_exchange(with_transport(placed(world, "alone on each node"), transport), compression=name)
    text = error_on_all(world, DeviceError, lambda: exchange.allocate(3, FLOAT32, on_device=True))
    assert text.startswith(f"the transport {transport} is not possible here")
    if name != "bf16":
        assert f"compression {name} runs on the CPU; use auto or staged with it" in text
    elif transport == "peer":
        assert "no two ranks are on one node" in text
    else:
        assert "use auto, peer or staged with compression bf16" in text


def test_auto_says_that_the_host_codes(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The host codes if another rank cannot open the memory of a GPU."""
    there = placed(world, "dealt out over 2 nodes")
    if world.size < 3:
        pytest.skip("needs two ranks on a node, and another node")

    def refused(handle: bytes, flags: int = 0) -> int:
        raise cupy.cuda.runtime.CUDARuntimeError(201)

    monkeypatch.setattr(cupy.cuda.runtime, "ipcOpenMemHandle", refused)
    exchange = make_exchange(there, compression="bf16")
    slot = exchange.allocate(1000, FLOAT32, on_device=True)
    said = capfd.readouterr().out
    assert ("mpitrain: compression bf16 on the CPU, like the sums in a node: " in said) == world.is_root
    slot.flat.fill(1)
    exchange.mean(slot, slice(None), 1.0).wait()
    assert (slot.flat.get() == world.size).all()
