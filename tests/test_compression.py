"""The contract of every codec of the registry, by Numba and by NumPy; a new one inherits all of it."""

from __future__ import annotations

import sys
import threading
import tracemalloc

import numpy
import pytest

from codec_values import (
    COMPILED,
    FORMS,
    INPUTS,
    LARGEST,
    NEEDS_NUMBA,
    QUANTISED,
    any_bits,
    decode,
    encode,
    random,
    same_bits,
)
from mpitrain.compression import CODECS, factory_of, make_codec
from mpitrain.compression.codec import Codec
from mpitrain.compression.kernels import can_compile
from mpitrain.errors import ConfigError, GradientError
from mpitrain.server.gradients import read_gradients


@pytest.fixture(params=COMPILED)
def compiled(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=FORMS)
def codec(request: pytest.FixtureRequest, compiled: bool) -> Codec:
    return factory_of(request.param)(compiled)


@pytest.mark.parametrize("codec", [*FORMS, "top_k:0.02:1"], indirect=True)
@pytest.mark.parametrize("name", INPUTS)
def test_encode_decode_and_add(codec: Codec, name: str) -> None:
    """The error is what is missing; it may overwrite the values, or be left out. `add` is one addition of what is
    decoded, and what was decoded is encoded without an error."""
    values = INPUTS[name].copy()
    wire, error = encode(codec, values)
    assert same_bits(values, INPUTS[name])
    assert codec.is_valid(wire, values)
    decoded = decode(codec, wire, values.size)
    total = random(values.size)
    with numpy.errstate(all="ignore"):
        missing = numpy.where(numpy.isfinite(decoded), values - decoded, numpy.float32(0))
        expected = total + decoded
    assert same_bits(error, missing)
    assert numpy.isfinite(error).all()
    assert not numpy.isfinite(decoded[~numpy.isfinite(values)]).any()
    codec.add(wire, total)
    assert same_bits(total, expected)
    again, nothing = encode(codec, decoded)
    assert same_bits(again, wire)
    assert not nothing.any()
    alone = numpy.empty_like(wire)
    for left_out in (None, values):
        codec.encode(values, alone, left_out)
        assert same_bits(alone, wire)
    assert same_bits(values, error)


@pytest.mark.parametrize("count", [1, 63, 1000, 200003])
def test_the_error_is_as_large_as_is_said(codec: Codec, count: int) -> None:
    """The values are all of one magnitude. No claim is far above the error found."""
    values = numpy.random.default_rng(count).uniform(-1, 1, count).astype(numpy.float32)
    _, error = encode(codec, values)
    bound = codec.relative_error * numpy.abs(values).max()
    assert numpy.abs(error).max() <= bound
    if count >= 1000:
        assert numpy.abs(error).max() >= bound / 4


def test_it_is_said_whether_what_is_finite_becomes_infinite(codec: Codec) -> None:
    wire, _ = encode(codec, numpy.array([LARGEST], numpy.float32))
    assert codec.may_overflow == (not numpy.isfinite(decode(codec, wire, 1)).all())


def test_the_wire_is_shorter_than_the_values(codec: Codec) -> None:
    sizes = [codec.wire_bytes(count) for count in range(2000)]
    assert sizes[0] == 0
    assert sizes == sorted(sizes)
    assert sizes[-1] < 0.75 * 4 * 1999


@NEEDS_NUMBA
@pytest.mark.parametrize("codec_name", dict.fromkeys([*FORMS, *(f"top_k:{setting}" for setting in QUANTISED)]))
@pytest.mark.parametrize("name", [*INPUTS, "1"])
def test_numba_and_numpy_give_the_same_bits(codec_name: str, name: str) -> None:
    values = INPUTS[name] if name in INPUTS else any_bits(int(name))
    fast, twin = factory_of(codec_name)(True), factory_of(codec_name)(False)
    wire, error = encode(fast, values)
    twin_wire, twin_error = encode(twin, values)
    assert same_bits(wire, twin_wire)
    assert same_bits(error, twin_error)
    assert same_bits(decode(fast, wire, values.size), decode(twin, wire, values.size))
    total, twin_total = random(values.size), random(values.size)
    fast.add(wire, total)
    twin.add(wire, twin_total)
    assert same_bits(total, twin_total)


def test_residuals_make_up_for_the_errors(codec: Codec) -> None:
    """Each step adds the error of the step before. The sum of what was sent stays within the error of one step."""
    values = random(1000) / numpy.float32(2.0**28)
    residual, sent = numpy.zeros_like(values), numpy.zeros(values.size)
    for _ in range(100):
        residual += values
        wire, residual = encode(codec, residual)
        sent += decode(codec, wire, values.size)
    missing = 100 * values.astype(numpy.float64) - sent
    assert numpy.abs(missing - residual).max() <= 1e-4 * numpy.abs(values).max()


def test_memory_that_is_not_aligned_or_read_only(codec: Codec) -> None:
    values = random(1000) / numpy.float32(2.0**28)
    values.flags.writeable = False
    wire, error = encode(codec, values)
    odd = numpy.empty(wire.size + 1, numpy.uint8)[1:]
    codec.encode(values, odd)
    assert same_bits(odd, wire)
    odd.flags.writeable = False
    total = decode(codec, odd, values.size)
    assert same_bits(total, decode(codec, wire, values.size))
    codec.add(odd, total)
    assert (numpy.abs(total - 2 * values) <= 2.001 * numpy.abs(error)).all()


def test_no_memory_is_taken_for_a_piece(codec: Codec) -> None:
    values = random(65536)
    wire, error = encode(codec, values)

    def work() -> None:
        codec.encode(values, wire, error)
        codec.decode(wire, values)
        codec.add(wire, values)

    work()  # the first time all is compiled
    tracemalloc.start()
    try:
        work()
        assert tracemalloc.get_traced_memory()[1] < values.nbytes / 2
    finally:
        tracemalloc.stop()


def test_arrays_that_do_not_fit(codec: Codec) -> None:
    values = numpy.zeros(10, numpy.float32)
    wire = numpy.zeros(codec.wire_bytes(10), numpy.uint8)
    wrong_values = [values.astype(float), values.reshape(2, 5), numpy.zeros(20, numpy.float32)[::2]]
    for wrong in wrong_values:
        for call in (
            codec.encode,
            lambda one, other: codec.decode(other, one),
            lambda one, other: codec.add(other, one),
        ):
            with pytest.raises(ValueError, match=f"{codec.name}: values are .* must be float32, one-dimensional"):
                call(wrong, wire)
    for wrong in (wire[1:], wire.view(numpy.int8), wire.repeat(2)[::2]):
        with pytest.raises(ValueError, match=rf"the wire of 10 values is .* must be uint8 \({wire.size},\)"):
            codec.encode(values, wrong)
        with pytest.raises(ValueError, match="the wire of 10 values"):
            codec.add(wrong, values)
    with pytest.raises(ValueError, match=r"error is float32 \(9,\); it must be float32 \(10,\)"):
        codec.encode(values, wire, values[1:])


@NEEDS_NUMBA
@pytest.mark.parametrize("name", FORMS)
def test_others_run_meanwhile(name: str) -> None:
    """The compiled loops release Python's lock, so another thread runs before they end."""
    codec = make_codec(name)
    values = numpy.zeros(2**24, numpy.float32)
    wire = numpy.zeros(codec.wire_bytes(values.size), numpy.uint8)
    calls = {
        "encode": lambda: codec.encode(values, wire, values),
        "decode": lambda: codec.decode(wire, values),
        "add": lambda: codec.add(wire, values),
    }
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # from now on, a thread runs until it releases the lock by itself
    try:
        for what, call in calls.items():
            assert any(runs_beside(call) for _ in range(20)), what
        assert not runs_beside(lambda: sum(range(100000)))
    finally:
        sys.setswitchinterval(interval)


def runs_beside(call: object) -> bool:
    """True if this thread runs while another one is in `call`. On a busy machine this thread may come too late."""
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        call()  # type: ignore[operator]
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    early = not ended.is_set()
    thread.join()
    return early


@pytest.mark.parametrize("name", FORMS)
def test_by_name(name: str) -> None:
    codec = make_codec(name)
    assert codec.name == name
    assert codec.compiled == (can_compile() and factory_of(name)(True).compiled)  # some codecs are only in NumPy


@pytest.mark.parametrize("name", FORMS)
def test_without_numba(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    codec = make_codec(name)
    assert not codec.compiled
    wire, _ = encode(codec, numpy.full(1, 3, numpy.float32))
    assert decode(codec, wire, 1).tolist() == [3]


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=f"there is no codec 'int2'; known: {', '.join(sorted(CODECS))}"):
        make_codec("int2")


@pytest.mark.parametrize(("place", "value"), [(0, 4096), (-1, 4), (-1, 65535)])
def test_places_that_do_not_exist(compiled: bool, place: int, value: int) -> None:
    """A whole block and a short one of four values. Compiled code would write to the memory behind them."""
    codec = CODECS["top_k"](compiled)
    values = random(4096 + 4)
    wire, _ = encode(codec, values)
    wire[-2 * 42 :].view(numpy.uint16)[place] = value
    assert not codec.is_valid(wire, values)
    with pytest.raises(GradientError, match="gradients of top_k came for places that do not exist"):
        read_gradients([wire], {numpy.dtype(numpy.float32): slice(10, 10 + 4096 + 4)}, codec)
