"""This rank's GPU, and the array module with which it computes.

The GPU is the one that `mpitrain run --hosts a/cuda:0-3x2` gave to the rank. Without that, its number is the local rank
modulo the number of GPUs. If there are more ranks than GPUs, ranks share a GPU. This is allowed, and reported once.
Only the modules of this package import CuPy, and only when they need a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy

from mpitrain.errors import ConfigError, DeviceError, MpitrainError, everywhere
from mpitrain.reading import whole
from mpitrain.world.world import World

# The variables in which launchers give the local rank: Open MPI; MPICH and Intel MPI; Slurm; Cray; MVAPICH.
_LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
    "PALS_LOCAL_RANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
)
# If less memory than this is free (a quarter of a small GPU), kernels, streams and the first arrays do not fit.
_LEAST_FREE_BYTES = 2**28


@dataclass(frozen=True)
class Gpu:
    """This rank's GPU.

    Attributes:
        number: CUDA's number of the GPU in this process, after CUDA_VISIBLE_DEVICES.
        name: the name of the model.
        identity: equal on two ranks of a node if and only if they are on the same GPU.
        ranks: the ranks on this GPU, including this one.
    """

    number: int
    name: str
    identity: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"GPU {self.number} ({self.name})"

    @contextmanager
    def current(self) -> Iterator[None]:
        """A context in which the GPU is this thread's current device. A new thread begins on device 0."""
        with cupy_module().cuda.Device(self.number):  # a new object, because it remembers the previous device
            yield

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of its memory."""
        free, total = cupy_module().cuda.Device(self.number).mem_info
        return int(free), int(total)


_bound: Gpu | None = None


def cupy_module() -> Any:
    """Import and return CuPy. Only for code that has a GPU; see `bind`."""
    import cupy

    return cupy


def bound() -> Gpu | None:
    """Return the GPU that `bind` returned in this process; None: there is none."""
    return _bound


def bind(world: World) -> Gpu:
    """Return this rank's GPU, and make it current in this thread. Collective. Later calls only make it current again.

    Raises:
        DeviceError: some rank has no CuPy, no driver or one that is too old, not the GPU that it was given, or hardly
            any free memory on it. Raised on every rank; it names the lowest such rank.
    """
    global _bound  # noqa: PLW0603 - a process works on one GPU
    gpu, problem = _bound, ""
    if gpu is None:
        try:
            gpu = open_gpu(world.context.device(world.rank), world.local_rank)
        except DeviceError as error:
            problem = str(error)
    everybody = world.allgather((problem, gpu.identity if gpu else ""))
    raise_first(world, [problem for problem, _ in everybody])
    assert gpu is not None
    if _bound is None:
        places = [(world.node_ranks[rank], identity) for rank, (_, identity) in enumerate(everybody)]
        place_of_this = places[world.rank]
        ranks = tuple(rank for rank, place in enumerate(places) if place == place_of_this)
        _bound = Gpu(gpu.number, gpu.name, gpu.identity, ranks)
        _say_shared(world, places)
    cupy_module().cuda.Device(_bound.number).use()
    return _bound


def own_gpu(world: World) -> Gpu | None:
    """Return this rank's GPU. None: there is no usable one, which `bind` reports on every rank. Not collective."""
    if _bound is not None:
        return _bound
    try:
        return open_gpu(world.context.device(world.rank), world.local_rank)
    except DeviceError:
        return None


def raise_first(world: World, problems: list[str]) -> None:
    """Raise the same DeviceError on every rank if a rank has a problem. `problems` are in rank order, "" for none."""
    for rank, problem in enumerate(problems):
        if problem:
            raise everywhere(DeviceError(f"{world.name(rank)}: {problem}"))


def open_gpu(given: str, local_rank: int) -> Gpu:
    """Return a usable GPU, and make it current in this thread. Not collective.

    Args:
        given: the value of Config.device, such as "cuda:1"; "": choose by the local rank.
        local_rank: the local rank of this process.

    Raises:
        DeviceError: the GPU cannot be used. The error gives the reason and what to do.
    """
    if given == "cpu":
        raise DeviceError("--hosts gave this rank no GPU (cpu), but one is requested; give all ranks a GPU, or none")
    try:
        cupy = cupy_module()
    except ImportError as error:
        raise DeviceError(f"CuPy cannot be imported ({error}); pip install cupy-cuda13x") from None
    runtime = cupy.cuda.runtime
    try:
        count = _num_gpus(runtime)
        number = int(given.removeprefix("cuda:")) if given else local_rank % count
        if number >= count:
            raise DeviceError(
                f"this rank was given {given}, but CUDA sees {count} GPU(s) here, 0 to {count - 1}"
                f"{_visible()}; name others in --hosts"
            )
        device = cupy.cuda.Device(number)
        device.use()
        properties = runtime.getDeviceProperties(number)
        name = properties["name"].decode()
        free, total = device.mem_info
        identity = f"{device.pci_bus_id} {properties.get('uuid', b'')!r}"  # slices of a GPU share its address
    except runtime.CUDARuntimeError as error:
        raise DeviceError(
            f"CUDA cannot use the GPU: {error}; see nvidia-smi: another process may have taken all its memory"
        ) from None
    if free < min(_LEAST_FREE_BYTES, total // 4):
        raise DeviceError(
            f"GPU {number} ({name}) has {free:,} of {total:,} bytes free; other processes have the rest. "
            "nvidia-smi lists them: end them, or name another GPU in --hosts"
        )
    return Gpu(number, name, identity)


def _num_gpus(runtime: Any) -> int:
    """Return the number of GPUs that CUDA sees, at least 1. Importing CuPy proves nothing, because that works without a
    GPU."""
    driver, needed = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if driver == 0:
        raise DeviceError("there is no NVIDIA driver on this machine; install one, or compute on the CPU")
    if driver // 1000 < needed // 1000:
        raise DeviceError(
            f"the NVIDIA driver is for CUDA {version(driver)}, CuPy for CUDA {version(needed)}; install a newer "
            f"driver, or the CuPy for this driver: pip install cupy-cuda{driver // 1000}x"
        )
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise DeviceError(f"CUDA sees no GPU{_visible()}: {error}; see nvidia-smi") from None
    if count == 0:
        raise DeviceError(f"CUDA sees no GPU{_visible()}; see nvidia-smi")
    return count


def version(number: int) -> str:
    """Return CUDA's version number in its usual form: 13.0 for 13000."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _visible() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"


def _say_shared(world: World, places: list[tuple[int, str]]) -> None:
    """Report once which ranks share a GPU."""
    if not world.is_root:
        return
    for place in dict.fromkeys(places):
        ranks = [rank for rank, other in enumerate(places) if other == place]
        if len(ranks) > 1:
            print(
                f"mpitrain: ranks {', '.join(map(str, ranks))} share one GPU on {world.hosts[ranks[0]]}: "
                "they take turns, and each needs its own memory",
                file=sys.stderr,
                flush=True,
            )


def array_module(world: World, device: str = "auto") -> ModuleType:
    """Return numpy, or cupy with this rank's GPU made current; the same on all ranks. Collective.

    `device` is "host", "cuda" or "auto". "auto" follows the devices in `--hosts`; if there are none, it is cuda if
    every rank has a usable GPU.

    Raises:
        ConfigError: `device` has another value.
        DeviceError: GPUs are requested, but some rank cannot have one. Raised on every rank.
        MismatchError: the ranks pass different values of `device`.
    """
    if device not in ("auto", "host", "cuda"):
        raise ConfigError(f"device={device!r}; allowed are auto, host and cuda")
    world.agree("choose the array module", [device])
    given = {device.partition(":")[0] for device in world.context.devices}
    if device == "host" or (device == "auto" and given == {"cpu"}):
        return numpy
    try:
        bind(world)
    except DeviceError:
        if device == "cuda" or given:
            raise
        return numpy
    module: ModuleType = cupy_module()
    return module


def local_rank_of(environ: Mapping[str, str]) -> int | None:
    """Return the local rank from the launcher's variables; None if they do not give it."""
    numbers = (whole(environ.get(name, ""), 0, 2**31 - 1) for name in _LOCAL_RANKS)
    return next((number for number in numbers if number is not None), None)


def choose_early(given: str, transport: str, environ: Mapping[str, str]) -> None:
    """Make this rank's GPU current before MPI starts, because a CUDA-aware MPI keeps the GPU that is current then.

    This happens only if the settings name GPUs. `bind` reports what is wrong with them, on all ranks.

    Args:
        given: this rank's device from the launcher; "" if it gave none.
        transport: the setting `transport`.
        environ: the environment with the launcher's variables.
    """
    local_rank = local_rank_of(environ)
    if given.startswith("cuda:") or (not given and transport == "aware" and local_rank is not None):
        try:
            open_gpu(given, local_rank or 0)
        except MpitrainError:
            return
