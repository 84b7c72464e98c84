"""tests/kernel_cases on the CPU: the kernels as g++ compiles them, every thread of every block."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from mpitrain.cuda import kernels
from mpitrain.cuda.kernels import launch

pytest.register_assert_rewrite("kernel_cases")
from kernel_cases import *  # noqa: E402, F403 - the tests

EMULATED = Path(__file__).parents[1] / "emulated"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


def forget() -> dict[str, Any]:
    """CuPy, the emulated or the real one, and what was made with it."""
    for made in (launch._modules, launch._kernels, launch._num_processors):
        made.clear()
    names = [name for name in sys.modules if name == "host_kernels" or name.split(".")[0] == "cupy"]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture(scope="module")
def cupy() -> Iterator[Any]:
    """The emulated CuPy, in this process, for as long as the tests of this file run."""
    before = forget()
    sys.path.insert(0, str(EMULATED))
    try:
        import cupy

        yield cupy
    finally:
        sys.path.remove(str(EMULATED))
        forget()
        sys.modules.update(before)


def test_another_device(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_GPUS", "2")
    with cupy.cuda.Device(1):
        there = cupy.zeros(10, numpy.float32)
    with pytest.raises(ValueError, match=r"total is on device 1, but the current device is 0; .*Device\(1\)"):
        kernels.add(there, cupy.zeros(10, numpy.float32))
    with cupy.cuda.Device(1):
        kernels.add(there, there)


@pytest.mark.nightly  # it looks at all of them
def test_more_than_2_to_the_31_elements(cupy: Any) -> None:
    """The memory is not there: pages that are only read take none."""
    from host_kernels import HostModule

    count = 2**31 + 9
    values = numpy.zeros(count, numpy.uint16)
    values[-1] = 0x7FC0
    flag = numpy.zeros(1, numpy.int32)
    HostModule(launch.source("bucket.cu")).kernel("all_finite_bf16")((4,), (256,), (values, flag, count))
    assert flag.tolist() == [1]


def test_nothing_is_done_before_somebody_waits(cupy: Any) -> None:
    """The emulation is as late as a device. Memory that is freed meanwhile stays unchanged until then."""
    total = cupy.zeros(1000, numpy.float32)
    kernels.pack([cupy.ones(400, numpy.float32), cupy.ones(600, numpy.float32)], total)
    for _ in range(20):
        numpy.full(600, 7, numpy.float32)
    assert total._host.sum() == 0
    assert total.get().sum() == 1000
