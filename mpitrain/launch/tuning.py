"""Settings of MPI and of the C library that `mpitrain run` makes, because without them the Python wheels are slow.

A table: what is set, when, to what, and why. What the user has set stays. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mpitrain.launch.libraries import Vendor


@dataclass(frozen=True)
class Conditions:
    """What the settings depend on."""

    vendor: Vendor
    num_hosts: int
    has_rdma: bool  # InfiniBand, RoCE and the like, on any host
    is_oversubscribed: bool  # more ranks than cores, on any host
    glibc: tuple[int, int]  # version; (0, 0) where the C library is another one, or not known


@dataclass(frozen=True)
class Setting:
    """One environment variable of all ranks."""

    name: str
    value: str
    when: Callable[[Conditions], bool]
    why: str
    source: str


def _is_over_tcp(conditions: Conditions) -> bool:
    return conditions.num_hosts > 1 and not conditions.has_rdma


def _takes_large_thresholds(conditions: Conditions) -> bool:
    # Older ones refuse a threshold above 32 MB; the other variable would then make large arrays slower, not faster.
    return conditions.glibc >= (2, 36)


_KEEP = (
    "memory of 32 MB and more is otherwise given back to the system when it is freed, and every page of it is faulted "
    "in anew on the next call: MPI's buffers for a long allreduce, NumPy's results"
)

SETTINGS = (
    Setting(
        "UCX_RNDV_THRESH",
        "inf",
        lambda conditions: conditions.vendor == "mpich" and _is_over_tcp(conditions),
        "with UCX over TCP, large messages by rendezvous go one way at a time; sent at once, both ways. A message that "
        "nobody has asked for yet is then kept in the receiver's memory",
        "https://github.com/openucx/ucx/pull/10275 (why it is not the default: that memory)",
    ),
    Setting(
        "OMPI_MCA_btl_tcp_flags",
        "send",
        lambda conditions: conditions.vendor == "openmpi" and _is_over_tcp(conditions),
        "by default large messages are put into the receiver's memory, which over TCP goes one way at a time",
        "https://docs.open-mpi.org/en/v5.0.x/tuning-apps/networking/tcp.html",
    ),
    Setting(
        "OMPI_MCA_btl",
        "^ofi",
        lambda conditions: conditions.vendor == "openmpi" and not conditions.has_rdma,
        "MPI_Init otherwise opens libfabric too, which over TCP nothing uses: 1.2 s in place of 0.2 (openmpi 5.0.11)",
        "https://docs.open-mpi.org/en/v5.0.x/tuning-apps/networking/ofi.html",
    ),
    Setting(
        "OMPI_MCA_mpi_yield_when_idle",
        "1",
        lambda conditions: conditions.vendor == "openmpi" and conditions.is_oversubscribed,
        "a rank that waits spins by default, on the core that another one needs",
        "https://github.com/open-mpi/ompi/pull/7168",
    ),
    Setting(
        "MALLOC_MMAP_THRESHOLD_",
        str(2**32),
        _takes_large_thresholds,
        _KEEP,
        "https://man7.org/linux/man-pages/man3/mallopt.3.html",
    ),
    Setting(
        "MALLOC_TRIM_THRESHOLD_",
        str(2**33),
        _takes_large_thresholds,
        _KEEP,
        "https://man7.org/linux/man-pages/man3/mallopt.3.html",
    ),
)


def settings(conditions: Conditions, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to set under these `conditions`, without those that the user's environment, `environ`, has."""
    return {one.name: one.value for one in SETTINGS if one.name not in environ and one.when(conditions)}


def glibc_version(text: str | None) -> tuple[int, int]:
    """(2, 36) from "glibc 2.36", as os.confstr("CS_GNU_LIBC_VERSION") gives it; (0, 0) for all else."""
    name, _, version = (text or "").partition(" ")
    parts = version.split(".")[:2]
    if name != "glibc" or len(parts) < 2 or not all(part.isdecimal() for part in parts):
        return 0, 0
    return int(parts[0]), int(parts[1])
