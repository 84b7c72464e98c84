"""The links of a job with servers: where a server listens, and how workers and other servers find it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from mpitrain.job.own_addresses import addresses
from mpitrain.job.role import Role
from mpitrain.serve.keys import WorkerKey, make_keys, parse_key, read_keys
from mpitrain.serve.link import ServerLink
from mpitrain.serve.worker_link import WorkerLink
from mpitrain.world import World

# Returns the links of a worker to the servers besides the first one, which has told their ports.
LinksToOthers: TypeAlias = Callable[[Sequence[int]], list[WorkerLink]]


class _Place(NamedTuple):
    """Where a server listens; a number of -1: this rank is no server."""

    number: int
    port: str
    key: str
    addresses: Sequence[str]


def environment_of(role: Role) -> dict[str, Any] | None:
    """Return what the launcher has found of code and packages for this process; None: another launcher started it."""
    return json.loads(Path(role.environment).read_text()) if role.environment else None


class Bound(NamedTuple):
    """What a server has.

    Attributes:
        link: for workers, and on the first server for the others.
        first: a list with the link of a shard to the first server; [] for the first server itself.
        secret: of the servers; "": mpiexec has started all that have their keys.
    """

    link: ServerLink
    first: list[WorkerLink]
    secret: str


def bound(role: Role, everyone: World | None, most_bytes: int) -> Bound:
    """Return the links of a server. Collective over `everyone`, with `connected` on the workers."""
    if everyone is None:
        keys, plain = read_keys(Path(role.key)), role.plain
        link = ServerLink(role.addresses[0], keys, most_bytes, plain=plain)
        first = [WorkerLink(role.addresses[1:], keys.worker, most_bytes, plain=bool(plain))] if role.number else []
        return Bound(link, first, keys.among_servers)
    keys = make_keys()
    link = ServerLink("127.0.0.1:*" if everyone.num_nodes == 1 else "*:*", keys, most_bytes)
    port = link.address.rpartition(":")[2]
    places = everyone.allgather(_Place(role.number, port, keys.worker.text, addresses()))
    return Bound(link, _links(everyone, places, [0], most_bytes) if role.number else [], "")


def connected(role: Role, everyone: World | None, most_bytes: int) -> tuple[WorkerLink, LinksToOthers]:
    """Return the link of a worker to the first server, and what makes those to the others.

    Collective over `everyone`, with `bound` on the servers.
    """
    if everyone is None:
        key, plain = parse_key(Path(role.key).read_text(), role.key), bool(role.plain)
        first = WorkerLink(role.addresses, key, most_bytes, plain=plain)
        return first, lambda ports: _links_beside(first, ports, key, most_bytes, plain=plain)
    places = everyone.allgather(_Place(-1, "", "", addresses()))
    (first,) = _links(everyone, places, [0], most_bytes)
    return first, lambda ports: _links(everyone, places, range(1, 1 + len(ports)), most_bytes)


def _links_beside(
    first: WorkerLink, ports: Sequence[int], key: WorkerKey, most_bytes: int, *, plain: bool
) -> list[WorkerLink]:
    """Return links to the servers at these ports of the host where the first one was found. All have its keys."""
    host = f"[{first.host}]" if ":" in first.host else first.host
    places = [f"{host}:{port}" for port in ports]
    with ExitStack() as stack:
        links = []
        for number, place in enumerate(places, 1):
            links.append(WorkerLink([place], key, most_bytes, plain=plain, name=f"server {number} at {place}"))
            stack.callback(links[-1].close)  # if a later one cannot be made
        stack.pop_all()
        return links


def _links(everyone: World, places: Sequence[_Place], numbers: Sequence[int], most_bytes: int) -> list[WorkerLink]:
    """Return links to these servers in order; `places` are those of the ranks."""
    own = addresses()
    with ExitStack() as stack:
        links = []
        for rank, place in sorted(enumerate(places), key=lambda entry: entry[1].number):
            if place.number not in numbers:
                continue
            if everyone.node_rank == everyone.node_ranks[rank]:
                reached = ["127.0.0.1"]
            else:  # an address that this host has too, such as that of docker0, leads back to this host
                reached = [address for address in place.addresses if address not in own] + [everyone.hosts[rank]]
            key = parse_key(place.key, f"the key of {everyone.name(rank)}")
            name = f"server {place.number} on {everyone.hosts[rank]} (rank {rank})"
            links.append(WorkerLink([f"{address}:{place.port}" for address in reached], key, most_bytes, name=name))
            stack.callback(links[-1].close)
        stack.pop_all()
        return links
