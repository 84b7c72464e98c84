"""The links of a job with servers: where a server listens, and how a worker finds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpitrain.job.own_addresses import addresses
from mpitrain.job.role import Role
from mpitrain.serve.keys import make_keys, parse_key, read_keys
from mpitrain.serve.link import ServerLink
from mpitrain.serve.worker_link import WorkerLink
from mpitrain.world import World


def environment_of(role: Role) -> dict[str, Any] | None:
    """Return what the launcher has found of code and packages for this process; None: another launcher started it."""
    return json.loads(Path(role.environment).read_text()) if role.environment else None


def bound(role: Role, everyone: World | None, most_bytes: int) -> ServerLink:
    """Return the link of a server. Collective over `everyone`, with `connected` on the workers."""
    if everyone is None:
        return ServerLink(role.addresses[0], read_keys(Path(role.key)), most_bytes, plain=role.plain)
    keys = make_keys()
    link = ServerLink("127.0.0.1:*" if everyone.num_nodes == 1 else "*:*", keys, most_bytes)
    port = link.address.rpartition(":")[2]
    everyone.allgather((port, keys.worker.text, addresses()))
    return link


def connected(role: Role, everyone: World | None, most_bytes: int) -> WorkerLink:
    """Return the link of a worker. Collective over `everyone`, with `bound` on the server."""
    if everyone is None:
        key = parse_key(Path(role.key).read_text(), role.key)
        return WorkerLink(role.addresses, key, most_bytes, plain=bool(role.plain))
    (port, text, of_server), *_ = everyone.allgather(("", "", addresses()))
    if everyone.node_rank == everyone.node_ranks[0]:
        reached = ["127.0.0.1"]
    else:  # an address that this host has too, such as that of docker0, leads back to this host
        own = addresses()
        reached = [address for address in of_server if address not in own] + [everyone.hosts[0]]
    key = parse_key(text, f"the key of {everyone.name(0)}")
    return WorkerLink([f"{address}:{port}" for address in reached], key, most_bytes)
