"""The rank's numbers, and Horovod's queries about its build."""

from __future__ import annotations

from mpitrain.horovod.process_sets import current
from mpitrain.reducer.driver import allows_threads

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "is_homogeneous",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "size",
]


def rank() -> int:
    """Return the number of this process in the job."""
    return current().world.rank


def size() -> int:
    """Return the number of ranks in the job."""
    return current().world.size


def local_rank() -> int:
    """Return the number of this process among those on its node."""
    return current().world.local_rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return current().world.local_size


def cross_rank() -> int:
    """Return the number of this node among those that have a rank with this local rank."""
    return _nodes().index(current().world.node_rank)


def cross_size() -> int:
    """Return the number of nodes that have a rank with this local rank."""
    return len(_nodes())


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of ranks."""
    nodes = current().world.node_ranks
    return len({nodes.count(node) for node in nodes}) == 1


def mpi_threads_supported() -> bool:
    """Return whether MPI can be called from several threads."""
    current()
    return bool(allows_threads())


def mpi_built() -> bool:
    """Return True: messages go over MPI."""
    return True


mpi_enabled = mpi_built


def gloo_built() -> bool:
    """Return False: Gloo is not used here."""
    return False


gloo_enabled = ccl_built = ddl_built = cuda_built = rocm_built = gloo_built


def nccl_built() -> int:
    """Return 0: NCCL is not used here."""
    return 0


def _nodes() -> list[int]:
    """The nodes that have a rank with this rank's local rank."""
    world = current().world
    return [node for node in range(world.num_nodes) if world.node_ranks.count(node) > world.local_rank]
