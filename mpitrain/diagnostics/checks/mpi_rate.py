"""The speed of a sum over all nodes, against the slowest way between two of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpitrain.diagnostics.check import Ask, Check, Finding, NotHereError, NotSeenError, Seen
from mpitrain.diagnostics.collect import ClusterStep, PairStep
from mpitrain.diagnostics.jobs import run_job

_SECONDS = 60
_SLOW = 0.25  # part of the slowest way's rate; a library's ring reaches about half, if cores are not the limit


def bus_bytes_per_second(size_bytes: int, seconds: float, num_ranks: int) -> float:
    """Return the bytes per second that each way must carry in each direction with any algorithm, as in nccl-tests."""
    return size_bytes / seconds * 2 * (num_ranks - 1) / num_ranks


def _rate(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    if len(seen.target.hosts) < 2:
        raise NotHereError("there is one node")
    job = seen.whole("allreduce")
    measured = [word for word in job["said"].get("0", []) if "size_bytes" in word]
    if not measured:
        raise NotSeenError(f"the job printed nothing, and ended with code {job['code']}: {job['error_text']}")
    ways = [one["bytes_per_second"] for one in seen.whole("ways").values() if "bytes_per_second" in one]
    if not ways:
        raise NotSeenError("the ways between the nodes were not measured")
    num_machines = next((word["num_machines"] for word in job["said"]["0"] if "num_machines" in word), len(names))
    if num_machines < len(names):
        raise NotHereError("several nodes are one machine, whose processors all ranks share")
    best = max(bus_bytes_per_second(one["size_bytes"], one["seconds"], len(names)) for one in measured)
    if best < _SLOW * min(ways):
        observed = (
            f"Allreduce moves {best / 2**20:.3g} MiB/s on each way; the slowest way has {min(ways) / 2**20:.3g} MiB/s"
        )
        yield Finding("warn", (), observed, f"{_SLOW:.0%} of it, or more")


ASKS: tuple[Ask, ...] = ()
PAIRS: dict[str, PairStep] = {}
CLUSTER: dict[str, ClusterStep] = {"allreduce": lambda cluster: run_job(cluster, "allreduce", _SECONDS)}
CHECKS = (
    Check(
        "PRF02",
        "a sum over all nodes uses the network",
        "bench",
        "cluster",
        _rate,
        uses=("allreduce", "ways", "programs", "shell"),
        looks="Allreduce of 1, 16 and 64 MiB with mpi4py, the best of 4; bus bandwidth as in nccl-tests, against "
        "the slowest way of PRF01.",
        why="MPI may have taken another interface, or a slower transport, than the best one of the nodes.",
        remedy="mpitrain check-cluster --only NET01 --only NET02; and compare with UCX_TLS=tcp,self",
        needs=("MPI02", "MPI03", "PRF01"),
        needs_all=True,
        fault="recorded rates of a slow sum",
    ),
)
