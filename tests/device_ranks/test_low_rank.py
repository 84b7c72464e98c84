"""PowerSGD of gradients on a GPU goes through the host: its bits in means, what is left out, and factors."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy
import pytest

from mpitrain import GradientReducer, Parameter, World
from mpitrain.errors import ConfigError, DeviceError, MismatchError, NonFiniteError
from mpitrain.reducer.exchange import make_exchange
from mpitrain.reducer.low_rank import LowRankExchange
from mpitrain.reducer.slot import Slot
from tests.ranks.common import assert_same_bits, error_on_all, skip_alone
from tests.ranks.placements import PLACEMENTS, placed
from tests.ranks.test_low_rank import COUNT, TENSORS

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
FLOAT32 = numpy.dtype(numpy.float32)
# Matrices at multiples of 16 bytes, of several blocks of rows, and of rows that are longer than the lanes of a sum.
ALIGNED = [("w", (70, 132)), ("bias", (12,)), ("kernel", (16, 3, 4, 4))]
NUM_ALIGNED = 70 * 132 + 12 + 16 * 48


def inputs(rank: int, step: int, count: int) -> numpy.ndarray:
    return numpy.random.default_rng((rank, step)).standard_normal(count).astype(numpy.float32)


def steps(there: World, exchange: LowRankExchange, slot: Slot, numbers: range, cut: int = 0) -> bytes:
    """Make steps in two parts, the last one first; weights differ; a value of the third is NaN. Return the mean."""
    flat = slot.flat
    for step in numbers:
        values = inputs(there.rank, step, flat.size)
        if step == 2 and there.rank == there.size - 1:
            values[flat.size // 5 : flat.size // 5 + 1] = numpy.nan
        flat[...] = values if isinstance(flat, numpy.ndarray) else cupy.asarray(values)
        share = (there.rank + 1) / (there.size * (there.size + 1) / 2)
        for handle in [exchange.mean(slot, part, share) for part in (slice(cut, None), slice(0, cut))]:
            handle.wait()
    return (flat if isinstance(flat, numpy.ndarray) else flat.get()).tobytes()


def bits_of_factors(slot: Slot) -> dict[object, bytes]:
    assert slot.factors is not None
    return {key: factor.tobytes() for key, factor in slot.factors.items()}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("rank", [1, 4, 6])
@pytest.mark.parametrize(("tensors", "count"), [(TENSORS, COUNT), (ALIGNED, NUM_ALIGNED), ([("b", (1,))], 1), ((), 0)])
def test_the_bits_of_the_host(world: World, placement: str, rank: int, tensors: list, count: int) -> None:
    """Five steps, the third of which is not a number; the cut lies between tensors."""
    there = placed(world, placement)
    name, cut = f"power_sgd:{rank}", {COUNT: 1211, NUM_ALIGNED: 70 * 132}.get(count, 0)
    on_host, on_device = LowRankExchange(there, name), LowRankExchange(there, name)
    host = on_host.allocate(count, FLOAT32, tensors=tensors)
    device = on_device.allocate(count, FLOAT32, on_device=True, tensors=tensors)
    for numbers in (range(2), range(2, 3), range(3, 5)):
        found, expected = steps(there, on_device, device, numbers, cut), steps(there, on_host, host, numbers, cut)
        if there.num_nodes == 1:  # a transport has an order of additions of its own
            numpy.testing.assert_allclose(*(numpy.frombuffer(one, FLOAT32) for one in (found, expected)), rtol=1e-5)
            continue
        assert found == expected
        assert_same_bits(there, device.flat.get())
        assert device.left_out().tobytes() == host.left_out().tobytes()
        assert bits_of_factors(device) == bits_of_factors(host)
    if there.num_nodes > 1 and count > 1000:
        assert numpy.count_nonzero(device.left_out()) > 1000
        assert set(bits_of_factors(device)) == {"w", "kernel"}


def test_a_line_says_that_the_host_makes_the_products(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    skip_alone(world)
    exchange = LowRankExchange(placed(world, "alone on each node"), "power_sgd:2")
    for _ in range(2):
        exchange.allocate(NUM_ALIGNED, FLOAT32, on_device=True, tensors=ALIGNED)
    said = capfd.readouterr().out.count(
        "compression power_sgd:2 has no kernels for GPUs: gradients are coded on the host"
    )
    assert said == (1 if world.is_root else 0)


def test_a_cut_through_tensors(world: World) -> None:
    """A part of a matrix is sent as it is."""
    skip_alone(world)
    exchange = LowRankExchange(placed(world, "alone on each node"), "power_sgd:2")
    slot = exchange.allocate(NUM_ALIGNED, FLOAT32, on_device=True, tensors=ALIGNED)
    slot.flat.fill(world.rank + 1)
    exchange.mean(slot, slice(0, 5001), 1.0).wait()
    found = slot.flat.get()
    assert (found[:5001] == world.size * (world.size + 1) / 2).all()
    assert (found[5001:] == world.rank + 1).all()


def test_from_a_gpu_to_the_host_and_back(world: World) -> None:
    """What is left out and the factors move between host and device. The run has the bits of one that stayed."""
    skip_alone(world)
    there = placed(world, "dealt out over 2 nodes" if world.size > 2 else "alone on each node")
    whole = LowRankExchange(there, "power_sgd:2")
    stayed = whole.allocate(COUNT, FLOAT32, tensors=TENSORS)
    expected = steps(there, whole, stayed, range(3, 9))
    left_out, factors = None, {}
    for turn, on_device in enumerate((True, False, True)):
        exchange = LowRankExchange(there, "power_sgd:2")
        slot = exchange.allocate(COUNT, FLOAT32, on_device=on_device, tensors=TENSORS)
        assert slot.factors is not None
        slot.factors.update(factors)
        if turn:
            slot.restore(left_out)
        with cupy.cuda.Stream(non_blocking=True):
            found = steps(there, exchange, slot, range(3 + 2 * turn, 5 + 2 * turn))
        left_out, factors = slot.left_out(), dict(slot.factors)
    assert found == expected
    assert left_out.tobytes() == stayed.left_out().tobytes()


def made(there: World, on_device: bool, threaded: bool | None = None) -> GradientReducer:
    return GradientReducer(
        there,
        [Parameter(name, shape, FLOAT32) for name, shape in TENSORS],
        exchange=lambda own: make_exchange(own, compression="power_sgd:2"),
        bucket_bytes=4096,
        threaded=threaded,
        on_device=on_device,
    )


@pytest.mark.parametrize("threaded", [False, True], ids=["called", "threaded"])
def test_a_reducers_gradients(world: World, threaded: bool) -> None:
    """Several buckets, weights, and a resume: the bits of the host."""
    skip_alone(world)
    there = placed(world, "dealt out over 2 nodes")
    reducers = {on_device: made(there, on_device, threaded) for on_device in (True, False)}
    assert reducers[True].num_buckets > 1

    def step(on_device: bool, number: int) -> bytes:
        reducer = reducers[on_device]
        reducer.begin(1.0 + there.rank)
        values = reducer.layout.views({FLOAT32: inputs(there.rank, number, COUNT)})
        for index in reversed(range(len(values))):
            reducer.ready(index, cupy.asarray(values[index]) if on_device else values[index])
        reducer.finish()
        flat = reducer.flats[FLOAT32]
        return (flat.get() if on_device else flat).tobytes()

    for number in range(3):
        assert step(True, number) == step(False, number)
    states = {on_device: (reducers[on_device].state(), reducers[on_device].factors()) for on_device in reducers}
    assert states[True][0]["place"] == states[False][0]["place"]
    for on_device, (state, factors) in states.items():
        reducers[on_device].close()
        other = reducers[on_device] = made(there, on_device, threaded)
        theirs = states[not on_device]
        assert {name: one.tobytes() for name, one in factors.items()} == {
            name: one.tobytes() for name, one in theirs[1].items()
        }
        other.restore_factors(factors)
        other.restore(theirs[0] if on_device else state)
    assert step(True, 3) == step(False, 3)


@pytest.mark.skipif("emulated" not in cupy.__version__, reason="counts in the emulation")
def test_a_step_never_waits_for_the_gpu(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host only looks at events: whether factors have come down, and for the vote."""
    skip_alone(world)
    reducer = made(placed(world, "alone on each node"), on_device=True)
    mine = [cupy.asarray(part) for part in reducer.layout.views({FLOAT32: inputs(world.rank, 0, COUNT)})]
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
    assert reducer.flats[FLOAT32].get().any()


def test_the_error_names_rank_and_parameter(world: World) -> None:
    skip_alone(world)
    reducer = made(placed(world, "alone on each node"), on_device=True)

    def step(value: float) -> bytes:
        reducer.begin(1.0)
        for index, part in enumerate(reducer.gradients):
            gradient = cupy.ones(part.shape, FLOAT32)
            if index == 1 and world.rank == world.size - 1:
                gradient.fill(value)
            reducer.ready(index, gradient)
        reducer.finish()
        return bytes(reducer.flats[FLOAT32].get().tobytes())

    first = step(2)
    text = error_on_all(world, NonFiniteError, lambda: step(numpy.nan))
    assert world.name(world.size - 1) in text
    assert "w" in text
    assert step(2) == first  # nothing of the steps before is left
    # Finite, but the sum of a row is not.
    assert "the mean gradient of w is too large for the compression" in error_on_all(
        world, NonFiniteError, lambda: step(3e38)
    )


def test_factors_that_differ_are_an_error_on_every_rank(world: World) -> None:
    skip_alone(world)
    there = placed(world, "alone on each node")
    exchange = LowRankExchange(there, "power_sgd:2")
    slot = exchange.allocate(COUNT, FLOAT32, on_device=True, tensors=TENSORS)
    steps(there, exchange, slot, range(1))
    assert slot.factors is not None
    if there.rank == there.size - 1:
        slot.factors["w"] = slot.factors["w"] * numpy.float32(1.5)
    text = error_on_all(there, MismatchError, lambda: exchange.mean(slot, slice(None), 1.0).wait())
    assert "different factors" in text


def test_what_it_does_not_take(world: World) -> None:
    skip_alone(world)
    there = placed(world, "alone on each node")
    for name in ("aware", "nccl", "peer"):
        exchange = LowRankExchange(there.replaced(config=replace(there.config, transport=name)), "power_sgd")
        text = error_on_all(
            world, DeviceError, lambda its=exchange: its.allocate(3, FLOAT32, on_device=True, tensors=[("a", (3,))])
        )
        assert text.startswith(f"the transport {name} is not possible here")
        assert "compression power_sgd is made on the host; use auto or staged with it" in text
    with pytest.raises(ConfigError, match="takes float32 gradients; the model has gradients of float64"):
        LowRankExchange(there, "power_sgd").allocate(3, numpy.dtype(numpy.float64), on_device=True)


@pytest.mark.skipif("emulated" not in cupy.__version__, reason="a real GPU cannot be filled for a test")
def test_no_memory_on_one_rank(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks raise the error, and say how much memory it was, and for what."""
    skip_alone(world)
    exchange = LowRankExchange(placed(world, "alone on each node"), "power_sgd:64")
    exchange.allocate(1, FLOAT32, on_device=True, tensors=[("b", (1,))])
    if world.rank == world.size - 1:
        gc.collect()
        used = cupy.cuda._used[cupy.cuda.Device().id]
        monkeypatch.setenv("EMULATED_GPU_BYTES", str(used + 2**20))
    tensors = [("w", (4096, 128))]
    text = error_on_all(world, DeviceError, lambda: exchange.allocate(2**19, FLOAT32, on_device=True, tensors=tensors))
    assert text.startswith(f"{world.name(world.size - 1)}: ")
    assert "2,097,152 bytes for a bucket" in text


def test_no_page_locked_memory_on_one_rank(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks raise the error."""
    skip_alone(world)
    exchange = LowRankExchange(placed(world, "alone on each node"), "power_sgd:2")
    exchange.allocate(1, FLOAT32, on_device=True, tensors=[("b", (1,))])

    def refused(num_bytes: int) -> None:
        raise cupy.cuda.runtime.CUDARuntimeError(2)

    if world.rank == world.size - 1:
        monkeypatch.setattr(cupy.cuda, "alloc_pinned_memory", refused)
    text = error_on_all(world, DeviceError, lambda: exchange.allocate(9, FLOAT32, on_device=True))
    assert text.startswith(f"{world.name(world.size - 1)}: ")
    assert "cannot allocate 36 bytes of page-locked memory" in text
