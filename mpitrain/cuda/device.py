"""Which array module a rank computes with, and on which device."""

from __future__ import annotations

from types import ModuleType

import numpy

from mpitrain.errors import ConfigError
from mpitrain.world import World


def array_module(world: World, device: str = "auto") -> ModuleType:
    """numpy, or cupy with this rank's GPU made current: local rank modulo the number of GPUs.

    Every rank calls it. `device` is "host", "cuda", or "auto": cuda where every rank has CuPy and a GPU.

    Raises:
        ConfigError: another `device`; or "cuda" where a rank has no CuPy or no usable GPU. On every rank.
    """
    if device not in ("auto", "host", "cuda"):
        raise ConfigError(f"device={device!r}; allowed are auto, host and cuda")
    problem = None if device == "host" else _why_not_cuda()
    problems = world.allgather(problem)
    lacking = [rank for rank, found in enumerate(problems) if found]
    if device == "host" or (lacking and device == "auto"):
        return numpy
    if lacking:
        error = ConfigError(f"{world.name(lacking[0])}: device='cuda' but {problems[lacking[0]]}")
        error.known_everywhere = True
        raise error
    import cupy

    cupy.cuda.Device(world.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
    module: ModuleType = cupy
    return module


def _why_not_cuda() -> str | None:
    """Why CuPy cannot compute here, or None. Importing it proves nothing: it imports without a GPU too."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed; pip install cupy-cuda13x"
    return None if cupy.is_available() else "CuPy finds no usable GPU; see nvidia-smi"
