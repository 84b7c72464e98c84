"""Streams, arrays that do not fit, and kernels that do not compile."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from mpitrain.cuda import kernels
from mpitrain.cuda.kernels import launch
from mpitrain.errors import KernelError


def test_a_stream(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    total, arrived = cupy.ones(1000, numpy.float32), cupy.ones(1000, numpy.float32)
    out = cupy.zeros(1, numpy.float64)
    cupy.cuda.Device().synchronize()
    with stream:
        kernels.add(total, arrived)
        kernels.squared_norm(total, out)
    stream.synchronize()
    assert out.get().tolist() == [4000.0]


def test_what_does_not_fit(cupy: Any) -> None:
    flat = cupy.zeros(10, numpy.float32)
    wrong = {
        "total is a ndarray; it must be a cupy.ndarray": lambda: kernels.add(numpy.zeros(10, numpy.float32), flat),
        "arrived is float64": lambda: kernels.add(flat, cupy.zeros(10, numpy.float64)),
        r"arrived is float32 \(9,\) .* of 10 elements": lambda: kernels.add(flat, flat[1:]),
        "total is bool": lambda: kernels.add(cupy.zeros(3, bool), cupy.zeros(3, bool)),
        r"arrived is float32 \(10,\) with strides \(8,\)": lambda: kernels.add(
            flat, cupy.zeros(20, numpy.float32)[::2]
        ),
        r"total is float32 \(2, 5\)": lambda: kernels.add(flat.reshape(2, 5), flat),
        "there are no parts": lambda: kernels.sum_of([], flat),
        "part 1 is float32": lambda: kernels.sum_of([flat, flat[1:]], flat),
        "there are 16 copies; at most 15": lambda: kernels.sum_of([flat], flat, copies=[flat] * 16),
        "copy 0 is float32": lambda: kernels.sum_of([flat], flat, copies=[flat[1:]]),
        "the arrays have 20 elements together; flat has 10": lambda: kernels.pack([flat, flat], flat),
        "array 0 is float32": lambda: kernels.pack([flat], cupy.zeros(10, numpy.float64)),
        "flag is float32": lambda: kernels.all_finite(flat, flat[:1]),
        "there is no codec 'int3' on the device; known: bf16, fp16, int4, int8": lambda: kernels.encode(
            "int3", flat, flat
        ),
        "wire is uint8": lambda: kernels.decode("bf16", cupy.zeros(19, numpy.uint8), flat),
        "wire begins at address .* multiple of 4": lambda: kernels.decode(
            "bf16", cupy.zeros(22, numpy.uint8)[2:], flat
        ),
        "error is": lambda: kernels.encode("bf16", flat, cupy.zeros(20, numpy.uint8), flat[1:]),
        "total begins at address": lambda: kernels.add(cupy.zeros(41, numpy.uint8)[1:].view(numpy.float32), flat),
        "momentum is 0.9 and velocity not given": lambda: kernels.sgd(flat, flat, rate=1.0, momentum=0.9),
        "step is 0": lambda: kernels.adam(flat, flat, flat, flat, step=0, rate=1.0),
        "decayed range": lambda: kernels.decay_bounds([slice(0, 5), slice(4, 6)], flat),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_kernels_that_do_not_compile(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "source", lambda file: 'extern "C" __global__ void f() { nothing(); }')
    monkeypatch.setattr(launch, "_modules", {})
    monkeypatch.setattr(launch, "_kernels", {})
    flat = cupy.zeros(10, numpy.float32)
    with pytest.raises(KernelError, match=r"(?s)bucket\.cu does not compile; .*The compiler's message:.*nothing"):
        kernels.add(flat, flat)
