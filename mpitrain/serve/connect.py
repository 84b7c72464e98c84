"""The links of a job with servers: where a server listens, and how a worker finds it."""

from __future__ import annotations

from mpitrain.job.job import Job
from mpitrain.serve.link import ServerLink, WorkerLink


def bound(job: Job, most_bytes: int) -> tuple[ServerLink, int]:
    """Return the link of a server, and how many workers will surely come. Collective over `job.everyone`."""
    everyone = job.everyone
    if everyone is None:
        return ServerLink(job.role.addresses[0], None, most_bytes), 0
    link = ServerLink("127.0.0.1:*", None, most_bytes)
    everyone.broadcast([link.address])
    return link, everyone.size - everyone.context.servers


def connected(job: Job, most_bytes: int) -> WorkerLink:
    """Return the link of a worker. Collective over `job.everyone`."""
    addresses = job.role.addresses
    if job.everyone is not None:
        addresses = job.everyone.broadcast()
    return WorkerLink(addresses, None, most_bytes)
