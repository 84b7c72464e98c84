"""Which GPU is this rank's, and which array module it computes with.

The GPU is the one that `mpitrain run --hosts a/cuda:0-3x2` gave to the rank, else the local rank modulo the number of
GPUs, so that ranks share a GPU where there are more ranks than GPUs. That is allowed, and said once. CuPy is imported
here and in this package's other modules only, when they are asked for a GPU.
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
from mpitrain.world import World

# Where launchers say which process of its machine this one is: Open MPI; MPICH and Intel MPI; Slurm; Cray; MVAPICH.
_LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
    "PALS_LOCAL_RANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
)
# Less free memory than this (a quarter of a small GPU) holds no kernels, streams and first arrays.
_LEAST_FREE_BYTES = 2**28


@dataclass(frozen=True)
class Gpu:
    """This rank's GPU.

    Attributes:
        number: as CUDA counts in this process, after CUDA_VISIBLE_DEVICES.
        name: the model's.
        identity: equal on two ranks of a node exactly where they are on the same GPU.
        ranks: those that are on this GPU, this one included.
    """

    number: int
    name: str
    identity: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"GPU {self.number} ({self.name})"

    @contextmanager
    def current(self) -> Iterator[None]:
        """A block in which it is this thread's current device: a new thread begins on 0."""
        with cupy_module().cuda.Device(self.number):  # a new object: it keeps the device before in itself
            yield

    def memory(self) -> tuple[int, int]:
        """Free and all bytes of its memory."""
        free, total = cupy_module().cuda.Device(self.number).mem_info
        return int(free), int(total)


_bound: Gpu | None = None


def cupy_module() -> Any:
    """CuPy, imported now if it was not. Only for code that has a GPU: see `bind`."""
    import cupy

    return cupy


def bind(world: World) -> Gpu:
    """This rank's GPU, made current in this thread. Collective; after the first time it changes nothing but that.

    Raises:
        DeviceError: some rank has no CuPy, no driver or one that is too old, not the GPU that it was given, or hardly
            any free memory on it. On every rank, naming the lowest such rank.
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


def raise_first(world: World, problems: list[str]) -> None:
    """Raise the same DeviceError on every rank if there is a problem; `problems` are the ranks', "" for none."""
    for rank, problem in enumerate(problems):
        if problem:
            raise everywhere(DeviceError(f"{world.name(rank)}: {problem}"))


def open_gpu(given: str, local_rank: int) -> Gpu:
    """A GPU that can be used, made current in this thread. Not collective.

    Args:
        given: what Config.device says: "cuda:1"; "" for one by the local rank.
        local_rank: of this process.

    Raises:
        DeviceError: it cannot be used; says why and what to do.
    """
    if given == "cpu":
        raise DeviceError("--hosts gave this rank no GPU (cpu), but a GPU is requested; give all ranks a GPU, or none")
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
                f"it was given {given}, and CUDA sees {count} GPU(s) here, 0 to {count - 1}"
                f"{_visible()}; name others in --hosts"
            )
        device = cupy.cuda.Device(number)
        device.use()
        properties = runtime.getDeviceProperties(number)
        name = properties["name"].decode()
        free, total = device.mem_info
        identity = f"{device.pci_bus_id} {properties.get('uuid', b'')!r}"  # slices of one GPU have one address
    except runtime.CUDARuntimeError as error:
        raise DeviceError(
            f"CUDA cannot use the GPU: {error}; see nvidia-smi, another process may have all its memory"
        ) from None
    if free < min(_LEAST_FREE_BYTES, total // 4):
        raise DeviceError(
            f"GPU {number} ({name}) has {free:,} of {total:,} bytes free; other processes have the rest. "
            "nvidia-smi lists them: end them, or name another GPU in --hosts"
        )
    return Gpu(number, name, identity)


def _num_gpus(runtime: Any) -> int:
    """How many CUDA sees, above 0. Importing CuPy proves nothing: it imports without a GPU too."""
    driver, needed = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if driver == 0:
        raise DeviceError("there is no NVIDIA driver on this machine; install one, or compute on the CPU")
    if driver // 1000 < needed // 1000:
        raise DeviceError(
            f"the NVIDIA driver is for CUDA {version(driver)}, CuPy for CUDA {version(needed)}; install a newer "
            f"driver, or the CuPy for this one: pip install cupy-cuda{driver // 1000}x"
        )
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise DeviceError(f"CUDA sees no GPU{_visible()}: {error}; see nvidia-smi") from None
    if count == 0:
        raise DeviceError(f"CUDA sees no GPU{_visible()}; see nvidia-smi")
    return count


def version(number: int) -> str:
    """CUDA's number of a version in its usual form: 13.0 for 13000."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _visible() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"


def _say_shared(world: World, places: list[tuple[int, str]]) -> None:
    """Once: which ranks share a GPU."""
    if not world.is_root:
        return
    for place in dict.fromkeys(places):
        ranks = [rank for rank, other in enumerate(places) if other == place]
        if len(ranks) > 1:
            print(
                f"mpitrain: ranks {', '.join(map(str, ranks))} share one GPU on {world.hosts[ranks[0]]}: "
                "they take turns, and each needs memory of its own",
                file=sys.stderr,
                flush=True,
            )


def array_module(world: World, device: str = "auto") -> ModuleType:
    """numpy, or cupy with this rank's GPU made current, on all ranks alike. Collective.

    `device` is "host", "cuda", or "auto": what `--hosts` says of devices; where it says nothing, cuda if every rank has
    a GPU that can be used.

    Raises:
        ConfigError: another `device`.
        DeviceError: GPUs are asked for and some rank cannot have one. On every rank.
        MismatchError: the ranks give different `device`.
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
    """Which process of its machine this one is, from what the launcher left behind; None where it does not say."""
    return next((int(text) for name in _LOCAL_RANKS if (text := environ.get(name, "")).isdecimal()), None)


def choose_early(given: str, transport: str, environ: Mapping[str, str]) -> None:
    """Make this rank's GPU current before MPI starts: a CUDA-aware MPI keeps to the one that is current then.

    Only where the settings name GPUs. What is wrong with them is said by `bind`, on all ranks.

    Args:
        given: this rank's device, as the launcher gave it; "" where it did not.
        transport: the setting.
        environ: where the launcher left the local rank.
    """
    local_rank = local_rank_of(environ)
    if given.startswith("cuda:") or (not given and transport == "aware" and local_rank is not None):
        try:
            open_gpu(given, local_rank or 0)
        except MpitrainError:
            return
