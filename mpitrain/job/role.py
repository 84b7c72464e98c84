"""What a process does in a job with servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mpitrain.errors import ConfigError
from mpitrain.job.context import JobContext


@dataclass(frozen=True)
class Role:
    """The part of one process.

    Attributes:
        kind: a server holds parameters and hands out jobs, a worker computes gradients. "": the ranks are equal.
        addresses: where the server listens, or where a worker finds servers, as HOST:PORT; none where servers tell
            their addresses over MPI.
        key: the file with the server's keys, or with the key of a worker; "": the key comes over MPI too.
        environment: the file with the code and packages of this process, as JSON; "": they are not compared.
        plain: the network interface of a connection without encryption; "": all bytes are encrypted.
        num_workers: for a server: how many workers were started with it, and will surely come; 0: not known.
    """

    kind: Literal["", "server", "worker"] = ""
    addresses: tuple[str, ...] = ()
    key: str = ""
    environment: str = ""
    plain: str = ""
    num_workers: int = 0


def role_of(context: JobContext, rank: int, size: int) -> Role:
    """Return the role of a rank of a job of `size` ranks.

    Raises:
        ConfigError: no role is left for a worker, or the launcher has named an unknown role. Raised on every rank.
    """
    if context.serves:
        if context.serves not in ("server", "worker"):
            raise ConfigError(f"the launcher has told this process to be a {context.serves!r}; allowed: server, worker")
        kind: Literal["server", "worker"] = "server" if context.serves == "server" else "worker"
        addresses = tuple(filter(None, context.serve_address.split(",")))
        return Role(kind, addresses, context.serve_key, context.serve_environment, context.serve_plain)
    if not context.servers:
        return Role()
    if size <= context.servers:
        raise ConfigError(
            f"{size} ranks with {context.servers} servers leave none for workers; start at least {context.servers + 1}"
        )
    return Role("server" if rank < context.servers else "worker", num_workers=size - context.servers)
