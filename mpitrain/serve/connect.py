"""The links of a job with servers: where a server listens, and how a worker finds it."""

from __future__ import annotations

from mpitrain.job.role import Role
from mpitrain.serve.link import ServerLink, WorkerLink
from mpitrain.world import World


def bound(role: Role, everyone: World | None, most_bytes: int) -> ServerLink:
    """Return the link of a server. Collective over `everyone`."""
    if everyone is None:
        return ServerLink(role.addresses[0], None, most_bytes)
    link = ServerLink("127.0.0.1:*", None, most_bytes)
    everyone.broadcast([link.address])
    return link


def connected(role: Role, everyone: World | None, most_bytes: int) -> WorkerLink:
    """Return the link of a worker. Collective over `everyone`."""
    addresses = role.addresses if everyone is None else everyone.broadcast()
    return WorkerLink(addresses, None, most_bytes)
