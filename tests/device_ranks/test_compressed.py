"""Gradients that are coded on a GPU: the bits of the host's exchange, in the means and in what is left out."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy
import pytest

from mpitrain import GradientReducer, Parameter, World
from mpitrain.compression import CODECS
from mpitrain.cuda.sequential import DeviceSequential
from mpitrain.errors import DataError, DeviceError, NonFiniteError
from mpitrain.reducer.exchange import CompressedExchange
from mpitrain.reducer.slot import Slot
from tests.added.halves import halves
from tests.ranks.common import assert_same_bits, error_on_all, skip_alone
from tests.ranks.placements import PLACEMENTS, placed
from tests.ranks.test_compressed import inputs

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
FLOAT32 = numpy.dtype(numpy.float32)
WITHOUT_KERNELS = sorted({"halves", *(name for name, make in CODECS.items() if not make(False).device_code)})
WITH_KERNELS = sorted({*CODECS} - {*WITHOUT_KERNELS})


def with_transport(world: World, name: str) -> World:
    return world.replaced(config=replace(world.config, transport=name))


def steps(there: World, exchange: CompressedExchange, slot: Slot, numbers: range) -> bytes:
    """Make steps in two parts, like buckets, the last one first; weights differ; one value is NaN. Return the mean."""
    flat = slot.flat
    middle = flat.size // 3
    for step in numbers:
        values = inputs(there.rank, step, flat.size)
        if step == 1 and there.rank == there.size - 1:
            values[-1:] = numpy.nan
        flat[...] = values if isinstance(flat, numpy.ndarray) else cupy.asarray(values)
        share = (there.rank + 1) / (there.size * (there.size + 1) / 2)
        for handle in [exchange.mean(slot, part, share) for part in (slice(middle, None), slice(0, middle))]:
            handle.wait()
    return (flat if isinstance(flat, numpy.ndarray) else flat.get()).tobytes()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("codec", WITH_KERNELS)
@pytest.mark.parametrize("count", [0, 1, 2, 7, 1001, 150_001])
def test_the_bits_of_the_host(world: World, codec: str, placement: str, count: int) -> None:
    """The longest is several pieces, in which blocks do not end where pieces do."""
    there = placed(world, placement)
    on_host, on_device = CompressedExchange(there, codec), CompressedExchange(there, codec)
    host = on_host.allocate(count, FLOAT32)
    device = on_device.allocate(count, FLOAT32, on_device=True)
    assert steps(there, on_device, device, range(3)) == steps(there, on_host, host, range(3))
    assert_same_bits(there, device.flat.get())
    here, expected = device.left_out(), host.left_out()
    assert isinstance(here, numpy.ndarray)
    assert here.tobytes() == expected.tobytes()
    if there.num_nodes > 1 and count > 1000:
        assert isinstance(device.residual, cupy.ndarray)
        assert sum(there.allgather(int(numpy.count_nonzero(here))))


@pytest.mark.parametrize("codec", ["bf16", "int4"])
def test_from_a_gpu_to_the_host_and_back(world: World, codec: str) -> None:
    """Residuals move between host and device arrays. The run has the bits of one that stayed in its place."""
    there = placed(world, "dealt out over 2 nodes")
    whole = CompressedExchange(there, codec)
    stayed = whole.allocate(3001, FLOAT32)
    expected = steps(there, whole, stayed, range(6))
    left_out = None
    for turn, on_device in enumerate((True, False, True)):
        exchange = CompressedExchange(there, codec)
        slot = exchange.allocate(3001, FLOAT32, on_device=on_device)
        if turn:
            slot.restore(left_out)
        with cupy.cuda.Stream(non_blocking=True):
            found = steps(there, exchange, slot, range(2 * turn, 2 * turn + 2))
        left_out = slot.left_out() if turn else cupy.asarray(slot.left_out())
        with pytest.raises(DataError, match=r"float32 \(2,\), the residual of the slot is float32 \(3001,\)"):
            slot.restore(numpy.zeros(2, numpy.float32))
    assert found == expected
    assert left_out.tobytes() == stayed.left_out().tobytes()


@pytest.mark.parametrize("threaded", [False, True], ids=["called", "threaded"])
def test_a_reducers_gradients(world: World, threaded: bool) -> None:
    """Over four steps nothing is lost: what came out and what is still kept add up to what went in."""
    there, count = placed(world, "dealt out over 2 nodes"), 70_001
    parameters = [Parameter(name, (count,), FLOAT32) for name in "ab"]
    reducer = GradientReducer(
        there,
        parameters,
        exchange=lambda own: CompressedExchange(own, "int8"),
        bucket_bytes=1000,
        threaded=threaded,
        on_device=True,
    )
    came_out, went_in = numpy.zeros(2 * count), numpy.zeros(2 * count)
    for step in range(4):
        parts = [inputs(rank, step, 2 * count) for rank in range(world.size)]
        reducer.begin(1.0)
        for index in (1, 0):
            reducer.ready(index, cupy.asarray(parts[world.rank][index * count : (index + 1) * count]))
        reducer.finish()
        mean = reducer.flats[FLOAT32].get()
        assert_same_bits(world, mean)
        came_out += mean
        went_in += sum(part.astype(numpy.float64) for part in parts) / world.size
    residual = reducer.state()["residual"] if there.num_nodes > 1 else {name: numpy.zeros(count) for name in "ab"}
    kept = world.sum(numpy.concatenate([residual[name] for name in "ab"]).astype(numpy.float64))
    numpy.testing.assert_allclose(came_out + kept, went_in, rtol=0, atol=4 * 40 * world.size * 2.0**-22)


@pytest.mark.skipif("emulated" not in cupy.__version__, reason="counts in the emulation")
def test_a_step_never_waits_for_the_gpu(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host only looks at events: whether wires have come down, and for the vote."""
    there = placed(world, "dealt out over 2 nodes")
    parameters = [Parameter(name, (40_001,), FLOAT32) for name in "ab"]
    reducer = GradientReducer(
        there, parameters, exchange=lambda own: CompressedExchange(own, "int8"), bucket_bytes=1000, on_device=True
    )
    mine = [cupy.full(40_001, world.rank + 1, FLOAT32) for _ in parameters]
    gc.collect()  # what other tests have left waits for the GPU when it ends
    waits: list[str] = []
    for _ in range(2):  # in the first one kernels are compiled
        with monkeypatch.context() as patch:
            for kind, name in ((cupy.cuda.Stream, "_drain"), (cupy.cuda.Event, "synchronize")):
                patch.setattr(kind, name, lambda *_, name=name: waits.append(name))
            reducer.begin(1.0)
            for index, gradient in enumerate(mine):
                reducer.ready(index, gradient)
            reducer.finish()
    assert waits == []
    numpy.testing.assert_allclose(reducer.flats[FLOAT32].get(), (world.size + 1) / 2, rtol=1e-6)


def test_a_mean_beyond_the_wire(world: World) -> None:
    """Finite gradients have an infinite mean on every rank. The reducer clears its residuals and goes on."""
    skip_alone(world)
    there = placed(world, "alone on each node")
    reducer = GradientReducer(
        there,
        [Parameter("a", (2,), FLOAT32)],
        exchange=lambda own: CompressedExchange(own, "fp16"),
        on_device=True,
    )
    for value in (1.0, 1e5, 1.0):
        reducer.begin(1.0)
        reducer.ready(0, cupy.full(2, value, numpy.float32))
        if value == 1e5:
            assert "the mean gradient of a is too large for the compression" in error_on_all(
                world, NonFiniteError, reducer.finish
            )
        else:
            reducer.finish()
            assert (reducer.gradients[0].get() == 1).all()


# -- which transport carries it --------------------------------------------------------------------


def test_through_the_host_where_it_is_asked_for(world: World) -> None:
    """Ranks of a node that add up on the host code there; the result is as exact."""
    there = with_transport(placed(world, "dealt out over 2 nodes"), "staged")
    exchange = CompressedExchange(there, "int8")
    slot = exchange.allocate(3000, FLOAT32, on_device=True)
    flat = slot.flat
    value = 127.0 * (world.rank + 1)
    flat.fill(value)
    exchange.mean(slot, slice(None), 1 / world.size).wait()
    numpy.testing.assert_allclose(flat.get(), 127 * (world.size + 1) / 2, rtol=1e-6)
    on_device = there.num_nodes == world.size > 1
    assert isinstance(slot.residual, cupy.ndarray) == on_device


def test_a_transport_that_carries_no_codec(world: World) -> None:
    skip_alone(world)
    apart = placed(world, "alone on each node")
    for name in ("aware", "nccl"):
        exchange = CompressedExchange(with_transport(apart, name), "bf16")
        text = error_on_all(world, DeviceError, lambda its=exchange: its.allocate(3, FLOAT32, on_device=True))
        assert text.startswith(f"the transport {name} is not possible here")
        assert "use auto, peer or staged with compression bf16" in text
    exchange = CompressedExchange(with_transport(apart, "peer"), "bf16")
    text = error_on_all(world, DeviceError, lambda: exchange.allocate(3, FLOAT32, on_device=True))
    assert "no two ranks are on one node" in text


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
    exchange = CompressedExchange(there, "bf16")
    slot = exchange.allocate(1000, FLOAT32, on_device=True)
    flat = slot.flat
    said = capfd.readouterr().out
    assert ("mpitrain: compression bf16 on the host, like the sums in a node: " in said) == world.is_root
    flat.fill(1)
    exchange.mean(slot, slice(None), 1.0).wait()
    assert (flat.get() == world.size).all()


@pytest.mark.skipif("emulated" not in cupy.__version__, reason="a real GPU cannot be filled for a test")
def test_no_memory_for_what_is_left_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has no memory after it has made its bucket. All ranks raise the error."""
    skip_alone(world)
    exchange = CompressedExchange(placed(world, "alone on each node"), "int8")
    assert isinstance(exchange._on_device, DeviceSequential)
    if world.rank == world.size - 1:
        gc.collect()
        used = cupy.cuda._used[cupy.cuda.Device().id]
        monkeypatch.setenv("EMULATED_GPU_BYTES", str(used + 6 * 2**20))
    text = error_on_all(world, DeviceError, lambda: exchange.allocate(2**20, FLOAT32, on_device=True))
    assert text.startswith(f"{world.name(world.size - 1)}: ")
    assert "has no 4,194,304 bytes for what a codec leaves out" in text


# -- a codec without kernels -----------------------------------------------------------------------


@pytest.fixture
def host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The codecs that run on the host only. There is at least one."""
    monkeypatch.setitem(CODECS, "halves", CODECS.get("halves", halves))


@pytest.mark.parametrize("placement", ["dealt out over 2 nodes", "alone on each node"])
@pytest.mark.parametrize("codec", WITHOUT_KERNELS)
def test_a_codec_without_kernels_is_used_on_the_host(
    world: World, host_only: None, codec: str, placement: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A codec without kernels trains parameters on the GPU with the bits of parameters on the host. One line says where
    gradients are coded."""
    skip_alone(world)
    there = placed(world, placement)
    parameters = [Parameter(name, (3001,), FLOAT32) for name in "ab"]
    means: list[bytes] = []
    for on_device in (True, False):
        xp = cupy if on_device else numpy
        reducer = GradientReducer(
            there,
            parameters,
            exchange=lambda own: CompressedExchange(own, codec),
            bucket_bytes=1000,
            on_device=on_device,
        )
        weights = xp.zeros(6002, FLOAT32)
        for step in range(4):
            values = inputs(world.rank, step, 6002)
            reducer.begin(1.0)
            for index in (1, 0):
                reducer.ready(index, xp.asarray(values[index * 3001 : (index + 1) * 3001]))
            reducer.finish()
            weights -= reducer.flats[FLOAT32]
        means.append((weights.get() if on_device else weights).tobytes())
    assert means[0] == means[1]
    said = capfd.readouterr().out.count(f"compression {codec} has no kernels for GPUs: gradients are coded on the host")
    assert said == (1 if world.is_root else 0)


@pytest.mark.parametrize("codec", WITHOUT_KERNELS)
def test_peer_cannot_use_a_codec_without_kernels(world: World, host_only: None, codec: str) -> None:
    skip_alone(world)
    exchange = CompressedExchange(with_transport(placed(world, "alone on each node"), "peer"), codec)
    text = error_on_all(world, DeviceError, lambda: exchange.allocate(3, FLOAT32, on_device=True))
    assert f"compression {codec} is made on the host; use auto or staged with it" in text
