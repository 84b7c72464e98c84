"""arithmetic.h, which is in every kernel, compiled for the CPU and compared with NumPy bit by bit."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest

from mpitrain.compression import CODECS
from mpitrain.compression.int4 import INT4_BLOCK_VALUES
from mpitrain.compression.int8 import BLOCK_VALUES
from mpitrain.optim.optimizers import SGD, Adam, AdamW

HERE = Path(__file__).parent
KERNELS = Path(__file__).parents[2] / "mpitrain/cuda/kernels"
MANY = 2_000_003
BFLOAT16 = numpy.dtype(ml_dtypes.bfloat16)
SHORT = {"bf16": (BFLOAT16, 0x7FC0), "fp16": (numpy.dtype("float16"), 0x7E00)}
WIDE = {"float": numpy.dtype("float32"), "double": numpy.dtype("float64")}
OPERATIONS = {"add": numpy.add, "subtract": numpy.subtract, "multiply": numpy.multiply, "divide": numpy.divide}

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Any:
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    command = ["g++", "-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    done = subprocess.run(
        [*command, f"-I{KERNELS}", str(HERE / "arithmetic_shim.cpp"), "-o", str(library)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


@pytest.fixture(autouse=True)
def infinities_and_nan_are_values() -> Iterator[None]:
    with numpy.errstate(all="ignore"):
        yield


def call(shim: Any, name: str, *arrays: numpy.ndarray, out: Any) -> numpy.ndarray:
    result = numpy.empty(arrays[0].size, out)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*arrays, result)]
    getattr(shim, name)(*pointers, ctypes.c_longlong(result.size))
    return result


def any_bits(dtype: numpy.dtype, seed: int) -> numpy.ndarray:
    """Every kind of number of that dtype: subnormal ones, infinities, NaN of all kinds."""
    return numpy.frombuffer(numpy.random.default_rng(seed).bytes(MANY * dtype.itemsize), dtype)


def special() -> numpy.ndarray:
    """float32: zeros, ends of ranges, and values halfway between two of a shorter format with their neighbours."""
    upper = numpy.arange(2**15, dtype=numpy.uint32) << 16
    halves = [upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001)]
    positive = numpy.concatenate(halves)
    return numpy.concatenate([positive, positive | numpy.uint32(0x80000000)]).view(numpy.float32)


def ordinary(dtype: numpy.dtype, seed: int) -> numpy.ndarray:
    """Pairs of these meet in range, also near the subnormal numbers."""
    generator = numpy.random.default_rng(seed)
    scale = 2.0 ** generator.integers(-150 if dtype.itemsize > 2 else -20, 20, MANY)
    return (generator.standard_normal(MANY) * scale).astype(dtype)


def assert_same(found: numpy.ndarray, expected: numpy.ndarray) -> None:
    """The bits are the same. The kind of NaN differs between CPUs."""
    assert found.dtype == expected.dtype
    nan = numpy.isnan(expected)
    assert (numpy.isnan(found) == nan).all()
    bits = numpy.dtype(f"u{found.itemsize}")
    assert (found.view(bits) == expected.view(bits))[~nan].all()


@pytest.mark.parametrize("name", SHORT)
def test_to_16_bits(shim: Any, name: str) -> None:
    dtype, nan = SHORT[name]
    for values in (any_bits(WIDE["float"], 1), special(), ordinary(WIDE["float"], 2)):
        found = call(shim, f"float_to_{name}", values, out=numpy.uint16)
        expected = values.astype(dtype).view(numpy.uint16)
        expected[numpy.isnan(values)] = nan
        assert (found == expected).all()
        missing = call(shim, f"cast_error_{name}", values, found, out=numpy.float32)
        back = found.view(dtype).astype(numpy.float32)
        assert_same(missing, numpy.where(numpy.isfinite(back), values - back, numpy.float32(0)))


@pytest.mark.parametrize("name", SHORT)
def test_from_16_bits_all_of_them(shim: Any, name: str) -> None:
    dtype, nan = SHORT[name]
    words = numpy.arange(2**16, dtype=numpy.uint16)
    found = call(shim, f"{name}_to_float", words, out=numpy.float32)
    assert_same(found, words.view(dtype).astype(numpy.float32))
    # The codecs' own NaN, with its bits.
    assert found.view(numpy.uint32)[nan] == 0x7FC00000
    finite = call(shim, f"finite_{name}", words, out=numpy.uint8)
    assert (finite == numpy.isfinite(words.view(dtype))).all()


@pytest.mark.parametrize("name", WIDE)
def test_operations(shim: Any, name: str) -> None:
    dtype = WIDE[name]
    for a, b in ((any_bits(dtype, 3), any_bits(dtype, 4)), (ordinary(dtype, 5), ordinary(dtype, 6))):
        for operation, function in OPERATIONS.items():
            assert_same(call(shim, f"{operation}_{name}", a, b, out=dtype), function(a, b))
        assert_same(call(shim, f"root_{name}", a, out=dtype), numpy.sqrt(a))
        assert (call(shim, f"finite_{name}", a, out=numpy.uint8) == numpy.isfinite(a)).all()


def test_wider_and_back(shim: Any) -> None:
    values = any_bits(WIDE["float"], 18)
    assert_same(call(shim, "float_to_double", values, out=numpy.float64), values.astype(numpy.float64))
    wide = any_bits(WIDE["double"], 19)
    assert_same(call(shim, "double_to_float", wide, out=numpy.float32), wide.astype(numpy.float32))


def test_nearest(shim: Any) -> None:
    values = numpy.random.default_rng(7).uniform(-200, 200, MANY).astype(numpy.float32)
    values[:2000] = numpy.arange(-1000, 1000) / 2  # ties
    assert (call(shim, "nearest_float", values, out=numpy.int32) == numpy.rint(values)).all()


@pytest.mark.parametrize("name", SHORT)
def test_sums_and_products_of_16_bits(shim: Any, name: str) -> None:
    dtype, _ = SHORT[name]
    for a, b in ((any_bits(dtype, 8), any_bits(dtype, 9)), (ordinary(dtype, 10), ordinary(dtype, 11))):
        assert_same(call(shim, f"add_{name}", a, b, out=dtype), a + b)
        factor = any_bits(WIDE["float"], 12)
        expected = (a.astype(numpy.float32) * factor).astype(dtype)
        assert_same(call(shim, f"scale_{name}", a, factor, out=dtype), expected)


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_integers_wrap(shim: Any, bits: int) -> None:
    for kind in ("u", "i"):
        dtype = numpy.dtype(f"{kind}{bits // 8}")
        a, b = any_bits(dtype, 13), any_bits(dtype, 14)
        assert (call(shim, f"add_u{bits}", a, b, out=dtype) == a + b).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_blocks(shim: Any, name: str) -> None:
    """The blocks are those of the host's codec of that name, for values of all magnitudes."""
    block = BLOCK_VALUES if name == "int8" else INT4_BLOCK_VALUES
    generator = numpy.random.default_rng(15)
    magnitude = 2.0 ** generator.integers(-149, 128, MANY // block + 1).repeat(block)[:MANY]
    spread = (generator.standard_normal(MANY) * magnitude).astype(numpy.float32)
    for values in (spread, any_bits(WIDE["float"], 16), special()):
        scales = numpy.empty(-(-values.size // block), numpy.float32)
        codes, back, error = (numpy.empty(values.size, dtype) for dtype in ("i4", "f4", "f4"))
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (values, scales, codes, back, error)]
        getattr(shim, f"blocks_{name}")(*pointers, ctypes.c_longlong(values.size))
        codec = CODECS[name](False)
        wire, missing = numpy.empty(codec.wire_bytes(values.size), numpy.uint8), numpy.empty_like(values)
        codec.encode(values, wire, missing)
        expected = numpy.empty_like(values)
        codec.decode(wire, expected)
        assert scales.tobytes() == wire[: scales.nbytes].tobytes()
        packed = wire[scales.nbytes :]
        if name == "int8":
            assert (codes == packed.view(numpy.int8)).all()
        else:
            both = [call(shim, half, packed, out=numpy.int32) for half in ("low", "high")]
            assert (codes == numpy.stack(both, axis=1).ravel()[: codes.size]).all()
        assert back.tobytes() == expected.tobytes()
        assert error.tobytes() == missing.tobytes()


def states(dtype: numpy.dtype, count: int) -> list[numpy.ndarray]:
    """Parameters, gradients and two states, the second one not negative; some subnormal, infinite or NaN."""
    generator = numpy.random.default_rng(17)
    made = [
        (generator.standard_normal(count) * 2.0 ** generator.integers(-20, 5, count)).astype(dtype) for _ in range(4)
    ]
    made[3] = numpy.abs(made[3])
    made[1][:4] = [numpy.inf, -numpy.inf, numpy.nan, 0]
    made[1][4:1000] *= dtype.type(numpy.finfo(dtype).tiny)
    return made


def run_step(shim: Any, name: str, arrays: list[numpy.ndarray], settings: numpy.ndarray) -> None:
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*arrays, settings)]
    getattr(shim, name)(*pointers, ctypes.c_longlong(arrays[0].size))


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize(
    ("momentum", "nesterov", "decay"), [(0.0, False, 0.0), (0.9, False, 0.0), (0.9, True, 0.01), (0.0, False, 0.1)]
)
def test_sgd_steps(shim: Any, name: str, momentum: float, nesterov: bool, decay: float) -> None:
    dtype, rate = WIDE[name], 0.1
    parameters, gradients, velocity, _ = states(dtype, 500_003)
    optimizer = SGD(rate, momentum=momentum, nesterov=nesterov, weight_decay=decay)
    expected = parameters.copy()
    optimizer.start(expected, [slice(0, expected.size)])
    if momentum:
        optimizer.restore({"velocity": velocity, "step": 3})
    layout = numpy.dtype([(one, dtype) for one in ("rate", "momentum", "decay")] + [("nesterov", "?")], align=True)
    settings = numpy.array((rate, momentum, decay, nesterov), layout)
    for _ in range(2):
        optimizer.update(gradients.copy())
        run_step(shim, f"sgd_{name}", [parameters, gradients, velocity], settings)
    assert_same(parameters, expected)
    if momentum:
        assert_same(velocity, optimizer.state()["velocity"])


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("decay", [None, 0.01])
def test_adam_steps(shim: Any, name: str, decay: float | None) -> None:
    dtype, rate, (beta1, beta2), epsilon = WIDE[name], 1e-3, (0.9, 0.999), 1e-8
    arrays = states(dtype, 500_003)
    parameters, gradients, first, second = arrays
    made = {"betas": (beta1, beta2), "epsilon": epsilon}
    optimizer = Adam(rate, **made) if decay is None else AdamW(rate, weight_decay=decay, **made)
    expected = parameters.copy()
    optimizer.start(expected, [slice(0, expected.size)])
    optimizer.restore({"first": first, "second": second, "step": 4})
    for step in (5, 6):
        optimizer.update(gradients.copy())
        correction = 1 / math.sqrt(1 - beta2**step)
        keep = 1 - rate * (decay or 0.0)
        values = (beta1, 1 - beta1, beta2, 1 - beta2, correction, epsilon, rate / (1 - beta1**step), keep)
        run_step(shim, f"adam_{name}", arrays, numpy.array(values, dtype))
    assert_same(parameters, expected)
    assert_same(first, optimizer.state()["first"])
    assert_same(second, optimizer.state()["second"])
