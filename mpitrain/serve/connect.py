"""The links of a job with servers: where a server listens, and how workers and other servers find it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.job.own_addresses import addresses
from mpitrain.job.role import Role
from mpitrain.serve.keys import make_keys, parse_key, read_keys
from mpitrain.serve.link import ServerLink
from mpitrain.serve.worker_link import WorkerLink
from mpitrain.world import World


class _Place(NamedTuple):
    """Where a server listens; a number of -1: this rank is no server."""

    number: int
    port: str
    key: str
    addresses: Sequence[str]


def environment_of(role: Role) -> dict[str, Any] | None:
    """Return what the launcher has found of code and packages for this process; None: another launcher started it."""
    return json.loads(Path(role.environment).read_text()) if role.environment else None


def bound(role: Role, everyone: World | None, most_bytes: int) -> tuple[ServerLink, list[WorkerLink]]:
    """Return the link of a server. If it is a shard, return also a list with the link to the first server.

    Collective over `everyone`, with `connected` on the workers.
    """
    if everyone is None:
        return ServerLink(role.addresses[0], read_keys(Path(role.key)), most_bytes, plain=role.plain), []
    keys = make_keys()
    link = ServerLink("127.0.0.1:*" if everyone.num_nodes == 1 else "*:*", keys, most_bytes)
    port = link.address.rpartition(":")[2]
    places = everyone.allgather(_Place(role.number, port, keys.worker.text, addresses()))
    return link, _links(everyone, places, [0], most_bytes) if role.number else []


def connected(role: Role, everyone: World | None, most_bytes: int) -> list[WorkerLink]:
    """Return the links of a worker to the servers. Collective over `everyone`, with `bound` on the servers."""
    if everyone is None:
        key = parse_key(Path(role.key).read_text(), role.key)
        return [WorkerLink(role.addresses, key, most_bytes, plain=bool(role.plain))]
    places = everyone.allgather(_Place(-1, "", "", addresses()))
    return _links(everyone, places, range(role.num_servers), most_bytes)


def _links(everyone: World, places: Sequence[_Place], numbers: Sequence[int], most_bytes: int) -> list[WorkerLink]:
    """Return links to these servers in order; `places` are those of the ranks."""
    own, links = addresses(), []
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
    return links
