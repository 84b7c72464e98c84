"""nccl: NVIDIA's own library, through CuPy, if it is installed and every rank has its own GPU.

    rank 0: GPU a --+                      one ring or tree, chosen by NCCL for the links that it finds:
    rank 1: GPU b --+-- NCCL               NVLink, PCIe, InfiniBand, TCP
    rank 2: GPU c --+

Worked, two ranks with 1 2 and 10 20: one call on each rank's communication stream; both then have 11 22.

The call only queues work on the stream, so the CPU continues at once. MPI only transfers NCCL's id of the job.

Cost a rank: with NCCL's ring 2(p-1)/p of the buffer's bytes sent and received. All ranks have the same bits, as each
sum is made in one place and copied. NCCL does not sum 16-bit integers. Its own settings are the NCCL_* variables.

Source: NVIDIA, NCCL user guide, ncclAllReduce; cupy.cuda.nccl.
"""

from __future__ import annotations

import importlib
import warnings
import weakref
from typing import Any

import numpy

from mpitrain.allreduce.algorithm import BFLOAT16, Progress
from mpitrain.arrays import Array
from mpitrain.cuda.device import cupy_module, raise_first
from mpitrain.cuda.sequential import DevicePlace, DeviceSequential, outlived_by, refuse
from mpitrain.world.world import World

# Some of NCCL's names came with later versions.
_DTYPES = {
    numpy.dtype(numpy.int8): "NCCL_INT8",
    numpy.dtype(numpy.uint8): "NCCL_UINT8",
    numpy.dtype(numpy.int32): "NCCL_INT32",
    numpy.dtype(numpy.uint32): "NCCL_UINT32",
    numpy.dtype(numpy.int64): "NCCL_INT64",
    numpy.dtype(numpy.uint64): "NCCL_UINT64",
    numpy.dtype(numpy.float16): "NCCL_FLOAT16",
    numpy.dtype(numpy.float32): "NCCL_FLOAT32",
    numpy.dtype(numpy.float64): "NCCL_FLOAT64",
    BFLOAT16: "NCCL_BFLOAT16",
}


def nccl(world: World, place: DevicePlace | None = None) -> DeviceSequential:
    """Through NCCL. See Algorithm for the contract; arrays are CuPy's, of the dtypes that NCCL sums.

    Raises:
        DeviceError: some rank has no GPU, CuPy finds no NCCL, ranks share a GPU, or NCCL cannot connect them. On every
            rank.
    """
    place = place or DevicePlace(world)
    refuse(world, "nccl", outlived_by(world) or _why_not(place))
    library = _library()
    communicator = _connect(world, place, library)
    dtypes = {dtype: getattr(library, nccl_name) for dtype, nccl_name in _DTYPES.items() if hasattr(library, nccl_name)}

    def steps(flat: Array, _residual: Array | None = None) -> Progress:
        pointer = flat.data.ptr
        dtype = dtypes[flat.dtype]
        communicator.allReduce(pointer, pointer, flat.size, dtype, library.NCCL_SUM, place.stream.ptr)
        yield from ()

    made = DeviceSequential(world, place, "nccl", steps, dtypes=tuple(dtypes))
    # A communicator takes memory of the GPU. It ends with its last reference, like an unclosed one, or with the World.
    destroy = weakref.finalize(made, communicator.destroy)
    destroy.atexit = False  # NCCL may be gone by then
    world.owned.append(destroy)
    return made


def _why_not(place: DevicePlace) -> str:
    if not _library().available:
        return "CuPy finds no NCCL; pip install nvidia-nccl-cu13"
    if len(place.gpu.ranks) > 1:
        return (
            f"ranks {', '.join(map(str, place.gpu.ranks))} share one GPU, but NCCL needs one for each rank; "
            "use peer, or fewer ranks"
        )
    return ""


def _library() -> Any:
    """cupy.cuda.nccl; it can be imported without NCCL, and then warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns too; the error below says the same
        return importlib.import_module(f"{cupy_module().__name__}.cuda.nccl")


def _connect(world: World, place: DevicePlace, library: Any) -> Any:
    """NCCL's own connections between the ranks."""
    problem, identity, made = "", (), None
    try:
        identity = library.get_unique_id() if world.is_root else ()
    except library.NcclError as error:
        problem = str(error)
    raise_first(world, world.allgather(problem))
    identity = world.broadcast_object(identity)
    try:
        with place.gpu.current():
            made = library.NcclCommunicator(world.size, identity, world.rank)
    except library.NcclError as error:
        problem = f"NCCL cannot connect the ranks: {error}; NCCL_DEBUG=INFO says more"
    refuse(world, "nccl", problem)
    return made
