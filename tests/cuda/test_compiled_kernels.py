"""Every kernel, compiled for every kind of device by NVRTC, which needs neither a device nor a driver.

Registers and spills are what ptxas says in NVRTC's log (--ptxas-options=-v).
"""

from __future__ import annotations

import ctypes
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import metadata
from typing import Any

import pytest

from mpitrain.cuda.kernels import launch

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
USUAL = "sm_90"  # the others by `scripts/test --nightly`
# With these, 4 blocks of 256 threads or more are on a processor at a time.
MOST_REGISTERS = 64
# CuPy adds the last one to whatever it is given.
OPTIONS = [*launch.OPTIONS, "-ftz=true"]


def found_library() -> str | None:
    """libnvrtc of the wheel nvidia-cuda-nvrtc, whatever its version calls its folder."""
    for name in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if re.fullmatch(r"libnvrtc\.so\.\d+", file.name):
                return str(file.locate())
    return None


LIBRARY = found_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="nvidia-cuda-nvrtc is not installed")


@cache
def nvrtc() -> Any:
    return ctypes.CDLL(LIBRARY)


def text(program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    assert getattr(nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    buffer = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc(), f"nvrtcGet{what}")(program, buffer) == 0
    return buffer.value.decode()


def compile_text(source: str, architecture: str) -> tuple[int, str, str]:
    """NVRTC's status, its log, and the PTX where the architecture is a virtual one (compute_...)."""
    options = [f"-arch={architecture}", *OPTIONS]
    if architecture.startswith("sm_"):
        options.append("--ptxas-options=-v")
    program = ctypes.c_void_p()
    assert nvrtc().nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None) == 0
    try:
        listed = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc().nvrtcCompileProgram(program, len(options), listed)
        ptx = text(program, "PTX") if status == 0 and architecture.startswith("compute_") else ""
        return status, text(program, "ProgramLog"), ptx
    finally:
        nvrtc().nvrtcDestroyProgram(ctypes.byref(program))


@pytest.fixture(scope="module")
def logs(request: pytest.FixtureRequest) -> dict[tuple[str, str], tuple[int, str, str]]:
    """Compile every file for every architecture that a test asks for, on all cores: NVRTC releases Python's lock."""
    asked = {item.callspec.params.get("architecture") for item in request.session.items if hasattr(item, "callspec")}
    architectures = [*(one for one in ARCHITECTURES if one in asked), "compute_90"]
    wanted = [(file, architecture) for file in launch.FILES for architecture in architectures]
    with ThreadPoolExecutor() as pool:
        made = pool.map(lambda one: compile_text(launch.source(one[0]), one[1]), wanted)
        return dict(zip(wanted, made, strict=True))


@pytest.mark.parametrize(
    "architecture", [pytest.param(one, marks=[pytest.mark.nightly] * (one != USUAL)) for one in ARCHITECTURES]
)
@pytest.mark.parametrize("file", launch.FILES)
def test_registers_and_spills(logs: Any, file: str, architecture: str) -> None:
    status, log, _ = logs[file, architecture]
    assert status == 0, log
    found = re.findall(
        r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers",
        log,
        re.DOTALL,
    )
    assert found, log
    for name, compiled_for, stack, stored, loaded, registers in found:
        assert compiled_for == architecture
        assert (stack, stored, loaded) == ("0", "0", "0"), name
        assert int(registers) <= MOST_REGISTERS, name
    assert "warning" not in log, log


@pytest.mark.parametrize("file", launch.FILES)
def test_float32_operations_are_neither_joined_nor_flush_subnormal_numbers(logs: Any, file: str) -> None:
    _, _, ptx = logs[file, "compute_90"]
    assert ".entry" in ptx
    assert re.findall(r"\bfma\.\S+|\bmad\.\S*f32\S*", ptx) == []
    assert ".ftz" not in ptx
    arithmetic = r"\b(?:add|sub|mul|div|sqrt|rcp|abs|neg|min|max)\.\S*f32\b"
    assert [one for one in re.findall(arithmetic, ptx) if ".rn.f32" not in one] == []


def test_memory_is_moved_by_16_bytes(logs: Any) -> None:
    for file in launch.FILES:
        _, _, ptx = logs[file, "compute_90"]
        for entry in ptx.split(".entry ")[1:]:
            name = entry.split("(")[0]
            if name in ("norm_total", "clip_factor", "norm_bf16", "norm_fp16"):
                continue  # one number each; four numbers of 2 bytes
            assert re.search(r"(ld|st)\.global\S*\.(v4\.[fbu]32|v2\.[fbu]64)", entry), name


def test_a_text_that_does_not_compile() -> None:
    status, log, _ = compile_text('extern "C" __global__ void f() { nothing(); }', "sm_90")
    assert status != 0
    assert 'identifier "nothing" is undefined' in log


def test_what_the_options_would_do_otherwise() -> None:
    """CuPy's -ftz=true reaches CUDA's own functions: why arithmetic.h has PTX by name."""
    kernel = 'extern "C" __global__ void f(float *x) { x[0] = __fadd_rn(x[1], x[2]); }'
    assert "add.rn.ftz.f32" in compile_text(kernel, "compute_90")[2]
