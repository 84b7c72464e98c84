"""What an exchange between nodes costs by the profile of a cluster, and what follows: which algorithm, what buckets.

Latency a, rate B of a link, m nodes, N bytes; a link is shared by the lanes of a node.

    inside a node   (k-1)/L N (1/add + 1/copy)   k ranks, of which L add a part each, and hand it to the k-1 others
    ring    2 (m-1) a + 2 (m-1)/m N/B
    direct  2 a       + 2 (m-1)/m N/B x 1.04, where m > 2: many senders share a receiver's link less evenly (measured)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpitrain.profile import Profile

_UNEVEN = 0.04
_DEFAULT_BUCKET_BYTES = 4 * 2**20
# Where a profile does not say. Measured (docs/log.md): below, MPI's own call is faster than anything made of messages
# from Python.
_NATIVE_INSIDE_BYTES, _NATIVE_BETWEEN_BYTES = 16 * 1024, 256 * 1024
_PYTHON_SECONDS = 200e-6  # what direct takes more than MPI's own where there is no latency


def seconds(algorithm: str, num_bytes: int, profile: Profile, num_nodes: int, lanes: int = 1) -> float:
    """The predicted time of `ring` or `direct` for `num_bytes` a lane."""
    wire = 2 * (num_nodes - 1) / num_nodes * num_bytes / _rate(profile, lanes)
    if algorithm == "ring":
        return 2 * (num_nodes - 1) * profile.latency_seconds + wire
    return 2 * profile.latency_seconds + wire * (1 + _UNEVEN * (num_nodes > 2))


def predicted(num_bytes: int, profile: Profile, ranks_per_node: Sequence[int]) -> float:
    """Seconds that `num_bytes`, too many for MPI's own allreduce, take in all: inside the nodes and between them."""
    nodes, lanes = len(ranks_per_node), min(ranks_per_node)
    a_byte = 1 / profile.add_bytes_per_second + 1 / profile.copy_bytes_per_second
    inside = (max(ranks_per_node) - 1) / lanes * num_bytes * a_byte
    if nodes == 1:
        return inside
    part = num_bytes // lanes
    algorithm = "ring" if part >= ring_from_bytes(profile, nodes, lanes) else "direct"
    return inside + seconds(algorithm, part, profile, nodes, lanes)


def ring_from_bytes(profile: Profile, num_nodes: int, lanes: int = 1) -> int:
    """From so many bytes a lane on, the ring is the faster one. On two nodes both take two latencies: always."""
    if num_nodes <= 2:
        return 0
    latencies = (2 * (num_nodes - 1) - 2) * profile.latency_seconds
    lost_a_byte = _UNEVEN * 2 * (num_nodes - 1) / num_nodes / _rate(profile, lanes)
    return round(latencies / lost_a_byte)


def native_below_bytes(profile: Profile, num_nodes: int) -> int:
    """Below so many bytes MPI's own allreduce is taken. If not measured: it pays 2 log2 m latencies, direct two."""
    if profile.native_below_bytes is not None:
        return profile.native_below_bytes
    if num_nodes == 1:
        return _NATIVE_INSIDE_BYTES
    more = 2 * (math.ceil(math.log2(num_nodes)) - 1) * profile.latency_seconds
    return _NATIVE_BETWEEN_BYTES if more < _PYTHON_SECONDS else 0


def bucket_bytes(profile: Profile, num_nodes: int) -> int:
    """Buckets so large that latencies take a twentieth of the time, and no larger: the last one cannot be hidden."""
    if not profile.is_measured or num_nodes == 1:
        return _DEFAULT_BUCKET_BYTES
    link = max((max(row) for row in profile.links), default=profile.bytes_per_second)
    needed = 20 * num_nodes * profile.latency_seconds * link
    return round(min(max(needed, 2**20), 64 * 2**20))


def pays(codec: str, profile: Profile, lanes: int) -> bool:
    """Whether a codec that halves the bytes takes less than half of the time that it saves on the wire."""
    rate = dict(profile.codecs).get(codec, 0.0)
    return profile.is_measured and rate > 4 * _rate(profile, lanes)


def compression(profile: Profile, num_nodes: int, lanes: int) -> str:
    """What compression=auto stands for."""
    return "bf16" if num_nodes > 1 and pays("bf16", profile, lanes) else "none"


def _rate(profile: Profile, lanes: int) -> float:
    return profile.bytes_per_second / lanes
