"""The cost of messages and memory on one cluster: measured once, kept in a file, used to choose algorithms and
sizes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.reading import json_of, parsed, read_text, shown, shown_text
from mpitrain.typed import made

SCHEMA = 2
_MOST_BYTES = 96 << 20  # one of 512 nodes has 20 MB


@dataclass(frozen=True)
class Profile:
    """Costs between the nodes of a cluster.

    Attributes:
        origin: where the numbers come from, for messages.
        latency_seconds: of a message of one byte between two nodes, one way.
        bytes_per_second: rate of a link in one direction, the median over links.
        links: the same by sender and receiver, in the order of `nodes`; empty if it was not measured.
        nodes: host names.
        codecs: by codec name, the bytes of float32 that one rank encodes, adds and decodes per second.
        add_bytes_per_second, copy_bytes_per_second: of float32 that a rank adds in place, or copies, while all ranks of
            its node do the same.
        native_below_bytes: below this size, MPI's own allreduce was faster; None if it was not measured.
    """

    origin: str
    latency_seconds: float
    bytes_per_second: float
    links: tuple[tuple[float, ...], ...] = ()
    nodes: tuple[str, ...] = ()
    codecs: tuple[tuple[str, float], ...] = ()
    add_bytes_per_second: float = 4e9
    copy_bytes_per_second: float = 5e9
    native_below_bytes: int | None = None

    @property
    def is_measured(self) -> bool:
        """False for the default numbers that are used without a file."""
        return bool(self.nodes)


# Gigabit Ethernet between ordinary machines, at TCP's throughput; memory rates are also those of an ordinary machine.
DEFAULT = Profile("default: Gigabit Ethernet", 50e-6, 117e6)


def fingerprint(hosts: Sequence[str], node_ranks: Sequence[int], mpi: str) -> dict[str, Any]:
    """The values that identify a profile's cluster and the layout of ranks on it.

    Args:
        hosts: host name of every rank.
        node_ranks: node of every rank.
        mpi: the MPI library, with its version.
    """
    nodes = sorted((hosts[node_ranks.index(node)], node_ranks.count(node)) for node in set(node_ranks))
    return {"hosts": [name for name, _ in nodes], "ranks_per_node": [number for _, number in nodes], "mpi": mpi}


def library_name(text: str) -> str:
    """The MPI library and its version in one line, from what MPI_Get_library_version gives."""
    # MPICH's text continues for pages, Open MPI's after a comma; both end with a zero byte.
    return " ".join(text.splitlines()[0].partition(",")[0].strip("\0").split())


def to_json(measured: dict[str, Any], nodes: Sequence[str], here: dict[str, Any], versions: dict[str, Any]) -> str:
    """The file's text. `measured` is what bench.measure.measure_cluster returns, its links in the order of `nodes`."""
    content = {"schema": SCHEMA, "fingerprint": here, "versions": versions, "nodes": list(nodes), "measured": measured}
    return json.dumps(content, indent=2) + "\n"


def measure_anew(path: str, here: dict[str, Any]) -> str:
    """The command that measures a profile of these hosts, with the same number of ranks on each. `here` is their
    fingerprint."""
    hosts, numbers = here["hosts"], here["ranks_per_node"]
    if len(hosts) == 1:
        words = ["--hosts", "localhost", "-n", str(numbers[0])]
    elif len(set(numbers)) == 1:
        words = ["--hosts", ",".join(hosts), "--ppn", str(numbers[0])]
    else:
        words = ["--hosts", ",".join(f"{host}/cpux{number}" for host, number in zip(hosts, numbers, strict=True))]
    return "Measure again: " + shlex.join(["mpitrain", "bench", *words, "--save-profile", path])


def read_profile(path: Path, advice: str = "`mpitrain bench --save-profile FILE` writes one", begin: str = "") -> str:
    """The text of a profile that a user has named.

    Raises:
        ConfigError: it cannot be read; the text begins with `begin`, and ends with the advice.
    """
    return read_text(
        path, lambda said: ConfigError(f"{begin}{said}. {advice}"), called=f"the profile {path}", most_bytes=_MOST_BYTES
    )


@dataclass(frozen=True)
class _Fingerprint:
    hosts: list[str]
    ranks_per_node: list[int]
    mpi: str


@dataclass(frozen=True)
class _ProfileFile:
    fingerprint: _Fingerprint
    nodes: list[str]
    measured: dict[str, Any]
    versions: dict[str, Any]
    schema: int


def from_json(text: str, path: str, here: dict[str, Any] | None = None) -> Profile:
    """The profile in a file's text. `here` is the fingerprint that it must have; None: any.

    Raises:
        ConfigError: it is damaged, of another format, or of another cluster than `here`.
    """
    called = f"the profile {path}"
    advice = measure_anew(path, here) if here else "`mpitrain bench --save-profile FILE` writes one"

    def refusal(said: str) -> ConfigError:
        return ConfigError(f"{said}. {advice}")

    content = json_of(text, refusal, called)
    if (schema := content.get("schema")) != SCHEMA and type(schema) is int:
        raise refusal(f"{called} has format {schema}; this version reads {SCHEMA}")
    file: _ProfileFile = parsed(lambda: made(_ProfileFile, content), refusal, called, "is damaged")
    for name, value in (here or {}).items():
        if (of_file := getattr(file.fingerprint, name)) != value:
            raise refusal(f"{called} is of another cluster: {name} {shown_text(str(of_file))}, here {value}")
    profile: Profile = parsed(lambda: _profile(file, path), refusal, called, "is damaged")
    return profile


def _profile(file: _ProfileFile, path: str) -> Profile:
    nodes, measured = tuple(file.nodes), file.measured
    here_too: dict[str, Any] = {  # also on one node
        "codecs": tuple((str(name), _slowest(rates)) for name, rates in measured["codecs"].items()),
        "add_bytes_per_second": _rate(measured["add_bytes_per_second"]),
        "copy_bytes_per_second": _rate(measured["copy_bytes_per_second"]),
        "native_below_bytes": _limit(measured["native_below_bytes"]),
    }
    if not nodes or sorted(nodes) != file.fingerprint.hosts:
        raise ValueError("its nodes are not those of its fingerprint")
    latency_us, links = measured["latency_between_nodes_us"], measured["link_bytes_per_second"]
    if len(nodes) == 1 and latency_us is None and links is None:  # no link between nodes
        return replace(DEFAULT, origin=path, nodes=nodes, **here_too)
    if {len(row) for row in links} != {len(nodes)} or len(links) != len(nodes):
        raise ValueError("its links do not fit its nodes")
    rows = tuple(tuple(0.0 if i == j else _rate(rate) for j, rate in enumerate(row)) for i, row in enumerate(links))
    rates = sorted(rate for i, row in enumerate(rows) for j, rate in enumerate(row) if i != j)
    return Profile(path, _measured(latency_us, 1e-3, 1e9) * 1e-6, rates[len(rates) // 2], rows, nodes, **here_too)


def _slowest(rates: dict[str, Any]) -> float:
    """The rate of encoding, adding and decoding in turn, each on half of the bytes."""
    return 1 / sum(1 / _rate(rates[f"{operation}_bytes_per_second"]) for operation in ("encode", "add", "decode"))


def _rate(value: object) -> float:
    """Bytes per second, from one to a thousand times the rate of the fastest memory."""
    return _measured(value, 1.0, 1e16)


def _measured(value: object, lowest: float, highest: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
        raise ValueError(f"{shown(value)} is not a number from {lowest:g} to {highest:g}")
    return float(value)


def _limit(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{shown(value)} is not a number of bytes")
    return value


def ring_order(nodes: Sequence[str], profile: Profile) -> list[int]:
    """The nodes' indices in the order of a ring whose slowest link is as fast as the search finds.

    A greedy search from every start: the next node is the remaining one with the fastest link. Without measured links,
    the order is unchanged.
    """
    if not profile.links or len(nodes) < 4:  # with three nodes, all rings are equal up to direction
        return list(range(len(nodes)))
    place = [profile.nodes.index(name) for name in nodes]

    def rate(a: int, b: int) -> float:
        return profile.links[place[a]][place[b]]

    best: tuple[float, list[int]] = (0.0, [])
    for start in range(len(nodes)):
        order, left = [start], set(range(len(nodes))) - {start}
        while left:
            order.append(max(sorted(left), key=lambda node: rate(order[-1], node)))
            left.remove(order[-1])
        slowest = min(rate(a, b) for a, b in zip(order, order[1:] + order[:1], strict=True))
        # Links that differ by noise must not shuffle the ring.
        if slowest > best[0] * 1.05:
            best = (slowest, order)
    given = min(rate(a, (a + 1) % len(nodes)) for a in range(len(nodes)))
    return best[1] if best[0] > given * 1.05 else list(range(len(nodes)))
