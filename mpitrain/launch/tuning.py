"""Settings of MPI and of the C library that `mpitrain run` makes, because the Python wheels are slow without them.

A table: what is set, when, to what, and why. Settings of the user stay. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mpitrain.launch.libraries import Vendor


@dataclass(frozen=True)
class Conditions:
    """What the settings depend on."""

    vendor: Vendor | None  # None: no MPI is needed
    num_hosts: int
    has_rdma: bool  # InfiniBand, RoCE and the like, on at least one host
    is_oversubscribed: bool  # more ranks than cores, on at least one host
    glibc: tuple[int, int]  # version; (0, 0) if unknown, or another C library


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
    # Older versions refuse a threshold above 32 MB; then the other variable would slow large arrays down.
    return conditions.glibc >= (2, 36)


_KEEP = (
    "otherwise a free of 32 MB and more returns the memory to the system, and the next call faults in every page anew: "
    "in MPI's buffers for a long allreduce, and in NumPy's results"
)

SETTINGS = (
    Setting(
        "UCX_RNDV_THRESH",
        "inf",
        lambda conditions: conditions.vendor == "mpich" and _is_over_tcp(conditions),
        "by default, UCX over TCP moves large rendezvous messages one way at a time; sent at once, both ways. "
        "The receiver then stores messages that no receive call has asked for yet",
        "https://github.com/openucx/ucx/pull/10275 (not the default because of that memory)",
    ),
    Setting(
        "OMPI_MCA_btl_tcp_flags",
        "send",
        lambda conditions: conditions.vendor == "openmpi" and _is_over_tcp(conditions),
        "by default the sender writes large messages into the receiver's memory, over TCP one way at a time",
        "https://docs.open-mpi.org/en/v5.0.x/tuning-apps/networking/tcp.html",
    ),
    Setting(
        "OMPI_MCA_btl",
        "^ofi",
        lambda conditions: conditions.vendor == "openmpi" and not conditions.has_rdma,
        "otherwise MPI_Init also opens libfabric, which nothing uses over TCP: 1.2 s instead of 0.2 s (openmpi 5.0.11)",
        "https://docs.open-mpi.org/en/v5.0.x/tuning-apps/networking/ofi.html",
    ),
    Setting(
        "OMPI_MCA_mpi_yield_when_idle",
        "1",
        lambda conditions: (
            conditions.vendor == "openmpi" and (conditions.is_oversubscribed or _is_over_tcp(conditions))
        ),
        "by default a waiting rank spins on a core that another process needs. To yield costs 1 us a call, which is "
        "little over TCP",
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
    """Return the variables to set under these `conditions`, without those in the user's environment `environ`."""
    return {one.name: one.value for one in SETTINGS if one.name not in environ and one.when(conditions)}


def glibc_version(text: str | None) -> tuple[int, int]:
    """Return (2, 36) from "glibc 2.36", the form of os.confstr("CS_GNU_LIBC_VERSION"); (0, 0) for other text."""
    name, _, version = (text or "").partition(" ")
    parts = version.split(".")[:2]
    if name != "glibc" or len(parts) < 2 or not all(part.isdecimal() for part in parts):
        return 0, 0
    return int(parts[0]), int(parts[1])
