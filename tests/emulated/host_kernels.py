"""Kernels on the CPU: a CUDA C++ text, compiled by g++, with every thread of every block run (cuda_on_host.h).

It checks indexing, barriers, alignment and the arguments of a launch. It is no proof that there are no races between
blocks, nor of anything about speed.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy

HEADER = Path(__file__).with_name("cuda_on_host.h")
CHECKS = "alignment,null,shift,signed-integer-overflow,bounds"
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-fvisibility=default", "-w"]
_KERNEL = re.compile(r"__global__\s+void\s+(\w+)\s*\(")


class CompilationError(Exception):
    """The text does not compile; the message is the compiler's log."""


class LaunchError(RuntimeError):
    """A kernel did something that it must not; the message says which thread, where and what."""


class _Argument(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_char), ("bytes", ctypes.c_int), ("pointed_to", ctypes.c_int)]


def compiler() -> str | None:
    """g++, or None where there is none."""
    return shutil.which("g++")


class HostModule:
    """The kernels of one text."""

    def __init__(self, code: str, options: Sequence[str] = ()) -> None:
        """`options` as for NVRTC: those that define macros count, the others mean nothing here.

        Raises:
            CompilationError: with the compiler's log.
        """
        self._library = ctypes.CDLL(str(_built(code, [one for one in options if one.startswith("-D")])))

    def kernel(self, name: str) -> Callable[[tuple[int, ...], tuple[int, ...], Sequence[Any], int], None]:
        """What launches `name`, and returns when it has run: (grid, block, arguments, shared_mem).

        An argument is a NumPy array where the kernel takes a pointer (None: a null pointer); an array of one element of
        a structured dtype where it takes a structure; else a NumPy scalar, or an int for long long, a float for double.

        Raises:
            AttributeError: there is no such kernel.
        """
        launch: Any = getattr(self._library, f"host_launch_{name}")
        launch.restype = ctypes.c_char_p
        describe: Any = getattr(self._library, f"host_arguments_{name}")
        describe.restype = ctypes.POINTER(_Argument)
        count = getattr(self._library, f"host_count_{name}")()
        expected = [describe()[number] for number in range(count)]

        def run(grid: tuple[int, ...], block: tuple[int, ...], arguments: Sequence[Any], shared_mem: int = 0) -> None:
            if len(arguments) != count:
                raise TypeError(f"{name} takes {count} arguments, not {len(arguments)}")
            if shared_mem:
                raise NotImplementedError(f"{name}: shared memory by size is not emulated")
            grid_of, block_of = _three(name, "grid", grid, 2**31 - 1), _three(name, "block", block, 1024)
            if block_of[0] * block_of[1] * block_of[2] > 1024:
                raise ValueError(f"{name}: a block of {block} threads; a device takes up to 1024")
            kept = [
                _plain(f"{name}, argument {number}", value, what)
                for number, (value, what) in enumerate(zip(arguments, expected, strict=True))
            ]
            values = (ctypes.c_void_p * max(count, 1))(*(one.ctypes.data for one in kept))
            error = launch((ctypes.c_uint * 3)(*grid_of), (ctypes.c_uint * 3)(*block_of), values)
            if error is not None:
                raise LaunchError(f"{name}: {error.decode()}")

        return run


def _three(name: str, what: str, sizes: tuple[int, ...], most: int) -> list[int]:
    found = [*sizes, 1, 1][:3]
    if len(sizes) > 3 or not all(0 < size <= most for size in found):
        raise ValueError(f"{name}: {what} is {sizes}; allowed are up to three numbers from 1 to {most}")
    return found


def _plain(where: str, value: Any, expected: Any) -> numpy.ndarray:
    """The argument's bytes, as a launch hands them over. A device would take any bytes for what they are not."""
    kind, num_bytes = expected.kind.decode(), expected.bytes
    if kind == "p":
        if value is None:
            return numpy.zeros(1, numpy.uint64)
        if not isinstance(value, numpy.ndarray):
            raise TypeError(f"{where}: {type(value).__name__} for a pointer")
        if expected.pointed_to not in (0, value.itemsize):
            raise TypeError(f"{where}: {value.dtype} for a pointer to {expected.pointed_to} bytes")
        return numpy.array(value.__array_interface__["data"][0], numpy.uint64)
    if kind == "s":
        if not isinstance(value, numpy.ndarray) or value.size != 1 or value.itemsize != num_bytes:
            raise TypeError(f"{where}: {value!r} for a structure of {num_bytes} bytes")
        return value
    if isinstance(value, bool):
        value = numpy.bool_(value)
    elif isinstance(value, int):
        value = numpy.int64(value)
    elif isinstance(value, float):
        value = numpy.float64(value)
    allowed = {"b": "b", "f": "f", "i": "iu", "u": "iu"}[kind]
    if not isinstance(value, numpy.generic) or value.dtype.kind not in allowed or value.itemsize != num_bytes:
        raise TypeError(f"{where}: {value!r} ({type(value).__name__}) for a number of {num_bytes} bytes, kind {kind}")
    return numpy.array(value)


def _built(code: str, defines: list[str]) -> Path:
    """The library made from the text, by its content; made once on this machine for each user."""
    if compiler() is None:
        raise CompilationError("there is no g++ to compile kernels for the host")
    options = [*FLAGS, *defines]
    headers = [path.read_text() for path in sorted(HEADER.parent.glob("*.h"))]
    key = "\0".join([code, *headers, CHECKS, *options])
    cache = Path(tempfile.gettempdir()) / f"mpitrain-host-kernels-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    if cache.stat().st_uid != os.getuid():
        raise CompilationError(f"{cache} belongs to another user")
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    library = cache / f"{name}.so"
    if library.exists():
        return library
    # One rank compiles, and the others wait for it.
    with (cache / f"{name}.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=cache) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library
        source, expanded, made = (Path(folder, name) for name in ("kernels.cu", "kernels.cpp", "kernels.so"))
        source.write_text(f'#include "{HEADER}"\n#line 1 "kernels.cu"\n{code}\n')
        _run(["g++", "-x", "c++", "-E", *options, str(source), "-o", str(expanded)])
        # __global__ is no macro until here, so that the kernels can be found where macros make them.
        text = expanded.read_text()
        kernels = list(dict.fromkeys(_KERNEL.findall(text)))
        text = text.replace("__global__", "") + "".join(f"\n{_entry(name)}" for name in kernels)
        expanded.write_text(text)
        made_object = Path(folder, "kernels.o")
        # Linked without -fsanitize: the header has its own handlers, and needs no library.
        compile_it = ["g++", "-x", "c++-cpp-output", "-c", f"-fsanitize={CHECKS}", *options]
        _run([*compile_it, str(expanded), "-o", str(made_object)])
        _run(["g++", "-shared", str(made_object), "-o", str(made)])
        made.replace(library)
    return library


def _entry(name: str) -> str:
    signature = f"on_host::Signature<decltype(&{name})>"
    return (
        f'extern "C" int host_count_{name}() {{ return {signature}::count; }}\n'
        f'extern "C" const on_host::Argument *host_arguments_{name}() {{ return {signature}::arguments; }}\n'
        f'extern "C" const char *host_launch_{name}(const unsigned *grid, const unsigned *block, void **values) {{\n'
        f"    return on_host::launch(&{signature}::call<&{name}>, grid, block, values);\n}}"
    )


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise CompilationError(done.stderr)
