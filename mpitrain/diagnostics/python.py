"""The Python packages that do the arithmetic, and the GPUs that they can use."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpitrain.diagnostics.finding import Finding, ask

# In children: a broken CUDA installation may end the process that imports CuPy, and doctor itself stays small.
_NUMPY_PROBE = """
import json, numpy
from threadpoolctl import threadpool_info
blas = [[p["internal_api"], p["version"], p["num_threads"]] for p in threadpool_info() if p["user_api"] == "blas"]
print(json.dumps([numpy.__version__, blas]))
"""
_CUPY_PROBE = """
import json, sys
try:
    import cupy
except ModuleNotFoundError:
    print(json.dumps([None, False]))
    sys.exit()
print(json.dumps([cupy.__version__, cupy.is_available() and cupy.arange(3).sum().item() == 3]))
"""
_GPU_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


@dataclass(frozen=True)
class Facts:
    """Packages and GPUs."""

    python: str
    executable: str
    numpy: str | None
    numpy_error: str
    blas: list[list[Any]]  # name, version, threads that it would use
    cupy: str | None  # its version; None where it is not installed
    cupy_works: bool
    cupy_error: str
    gpus: list[str] = field(default_factory=list)
    gpu_error: str = ""  # why nvidia-smi does not answer, where there is a driver

    def lines(self) -> list[tuple[str, str]]:
        """For people."""
        blas = ", ".join(f"{name} {version} ({threads} threads)" for name, version, threads in self.blas)
        cupy = f"{self.cupy}, {'works' if self.cupy_works else 'no usable GPU'}" if self.cupy else "not installed"
        lines = [
            ("Python", f"{self.python}, {self.executable}"),
            ("NumPy", f"{self.numpy}, {blas or 'BLAS unknown'}" if self.numpy else self.numpy_error),
        ]
        lines.append(("CuPy", cupy))
        lines += [(f"GPU {index}", gpu) for index, gpu in enumerate(self.gpus)] or [("GPUs", "none")]
        return lines


def collect() -> Facts:
    """Look at the packages and GPUs."""
    numpy_output, numpy_error = ask([sys.executable, "-c", _NUMPY_PROBE], timeout_seconds=60.0)
    numpy, blas = json.loads(numpy_output) if numpy_output else (None, [])
    cupy_output, cupy_error = ask([sys.executable, "-c", _CUPY_PROBE], timeout_seconds=60.0)
    cupy, cupy_works = json.loads(cupy_output) if cupy_output else ("installed", False)
    gpus, gpu_error = ask(_GPU_QUERY, timeout_seconds=20.0)
    return Facts(
        python=platform.python_version(),
        executable=sys.executable,
        numpy=numpy,
        numpy_error=numpy_error,
        blas=blas,
        cupy=cupy,
        cupy_works=cupy_works,
        cupy_error=cupy_error,
        gpus=[line.strip() for line in (gpus or "").splitlines() if line.strip()],
        gpu_error=gpu_error if Path("/proc/driver/nvidia/version").exists() else "",
    )


def judge(facts: Facts) -> list[Finding]:
    """What keeps the arithmetic from working, or from using the GPUs."""
    pip = f"{facts.executable} -m pip install"
    findings = []
    if not facts.numpy:
        findings.append(
            Finding(
                "fail",
                f"NumPy cannot be used: {facts.numpy_error}",
                "Every gradient passes through NumPy or CuPy arrays.",
                f"{pip} --force-reinstall numpy threadpoolctl",
            )
        )
    if facts.gpu_error:
        findings.append(
            Finding(
                "fail",
                f"an NVIDIA driver is loaded, but nvidia-smi says: {facts.gpu_error}",
                "After an upgrade of the driver the GPUs cannot be used until the old kernel module is gone.",
                "sudo reboot",
            )
        )
    if facts.gpus and not facts.cupy:
        findings.append(
            Finding(
                "warn",
                f"{len(facts.gpus)} GPU(s), but no CuPy",
                "NumPy models run on the CPU only.",
                f"{pip} cupy-cuda13x",
            )
        )
    if facts.gpus and facts.cupy and not facts.cupy_works:
        findings.append(
            Finding(
                "warn",
                f"CuPy {facts.cupy} does not work with the GPU: {facts.cupy_error or 'it sees none'}",
                "Models run on the CPU only; mostly CuPy is for another version of CUDA than the driver.",
                f"{facts.executable} -c 'import cupy; cupy.show_config()'",
            )
        )
    return findings
