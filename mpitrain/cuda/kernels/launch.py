"""The launch of a kernel: sources, compilation, grids, and checks of the arrays."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from mpitrain.arrays import Array, is_device_array, namespace
from mpitrain.errors import KernelError

THREADS = 256  # per block; stride.h has the same number
# This many blocks fill a multiprocessor of any device, which has at most 2048 threads. More blocks would only wait.
BLOCKS_PER_PROCESSOR = 8
# CuPy adds -ftz=true, which arithmetic.h is written for.
OPTIONS = ("-std=c++17", "--fmad=false")
FILES = ("bucket.cu", "codec.cu", "norm.cu", "optimizer.cu")

_modules: dict[tuple[int, str], Any] = {}
_kernels: dict[tuple[int, str, str], Any] = {}


@cache
def source(file: str) -> str:
    """Return the text of `file`, with the headers of this folder in place of their #include, each once."""
    included: set[str] = set()

    def text(name: str) -> str:
        if name in included:
            return ""
        included.add(name)
        source = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
        return re.sub(
            r'^#include "(\w+\.h)"$', lambda line: text(line[1]), source.replace("#pragma once\n", ""), flags=re.M
        )

    return text(file)


def launch(file: str, name: str, blocks: int, arguments: Sequence[Any], like: Array, threads: int = THREADS) -> None:
    """Run the kernel on the current stream; `like` is any device array.

    Raises:
        KernelError: the file's kernels do not compile.
    """
    cupy = namespace(like)
    device = cupy.cuda.runtime.getDevice()
    kernel = _kernels.get((device, file, name))
    if kernel is None:
        kernel = _kernels[device, file, name] = _module(cupy, device, file).get_function(name)
    kernel((blocks,), (threads,), tuple(arguments))


def _module(cupy: Any, device: int, file: str) -> Any:
    """Compile the file's kernels for the current device, once per process and device."""
    if (device, file) not in _modules:
        module = cupy.RawModule(code=source(file), options=OPTIONS)
        try:
            module.compile()
        except cupy.cuda.compiler.CompileException as error:
            raise KernelError(
                f"{socket.gethostname()}, device {device}: mpitrain/cuda/kernels/{file} does not compile; "
                f"CuPy {cupy.__version__}, options {' '.join(OPTIONS)}. Is CuPy made for this driver's CUDA "
                f"version? The compiler's message:\n{error}"
            ) from error
        _modules[device, file] = module
    return _modules[device, file]


def blocks_for(items: int, like: Array) -> int:
    """Return the number of blocks for this many items, one per thread at a time: enough for all, or to fill the
    device."""
    return max(1, min(-(-items // THREADS), BLOCKS_PER_PROCESSOR * _processors(namespace(like))))


_num_processors: dict[int, int] = {}


def _processors(cupy: Any) -> int:
    device = cupy.cuda.runtime.getDevice()
    if device not in _num_processors:
        _num_processors[device] = int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])
    return _num_processors[device]


def check(argument: str, array: Array, dtypes: Sequence[str], size: int | None = None, ndim: int | None = 1) -> str:
    """Check that a kernel can work on the array, and return the name of its dtype.

    Raises:
        ValueError: it is not a contiguous array of one of `dtypes` on the current device, with `size` elements if
        given.
    """
    if not is_device_array(array):
        raise ValueError(f"{argument} is a {type(array).__name__}; it must be a cupy.ndarray, on the device")
    dtype = str(array.dtype)
    wrong = (
        dtype not in dtypes
        or (ndim is not None and array.ndim != ndim)
        or (size is not None and array.size != size)
        or not array.flags.c_contiguous
    )
    if wrong:
        shape = "any size" if size is None else f"{size} elements"
        dimensions = "" if ndim is None else "one-dimensional, " if ndim == 1 else f"{ndim}-dimensional, "
        raise ValueError(
            f"{argument} is {dtype} {array.shape} with strides {array.strides}; it must be {' or '.join(dtypes)}, "
            f"{dimensions}contiguous, of {shape}"
        )
    current = namespace(array).cuda.runtime.getDevice()
    if array.data.device_id != current:
        raise ValueError(
            f"{argument} is on device {array.data.device_id}, but the current device is {current}; "
            f"use it under `with cupy.cuda.Device({array.data.device_id})`"
        )
    check_aligned(argument, array, array.itemsize)
    return dtype


def check_aligned(argument: str, array: Array, num_bytes: int) -> None:
    """Raise ValueError unless the array begins at a multiple of this many bytes."""
    if array.data.ptr % num_bytes:
        raise ValueError(
            f"{argument} begins at address {array.data.ptr:#x}; {array.dtype} of this kind must begin at a multiple of "
            f"{num_bytes} bytes. Cut it from its buffer at a multiple of 16"
        )
