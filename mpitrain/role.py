"""The role of a process in a job with servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mpitrain.context import JobContext
from mpitrain.errors import ConfigError

_Kind: TypeAlias = Literal["server", "shard", "worker"]
_KINDS: dict[str, _Kind] = {"server": "server", "shard": "shard", "worker": "worker"}


@dataclass(frozen=True)
class Role:
    """The role of one process.

    Attributes:
        kind: a server holds parameters and hands out units, a worker computes gradients. A shard is a further server,
            which holds a part of the parameters. "": the ranks are equal.
        addresses: where a server listens, or where a worker may find the first one, as HOST:PORT. A shard has its own
            address, followed by that of the first server. None: servers exchange their addresses over MPI.
        key: the file with the servers' keys, or with the key of a worker; "": the key also comes over MPI.
        environment: the file with the code and packages of this process, as JSON; "": they are not compared.
        division: the file to which this process writes how servers divide its parameters, before it ends; "": it
            trains.
        plain: the network interface of a connection without encryption; "": all bytes are encrypted.
        num_workers: for a server: the number of workers that were started with it and will certainly connect; 0: not
            known.
        num_servers: the number of servers, including the first; 0: a worker, which learns it from the first server.
        number: of this server; the first one is 0.
    """

    kind: Literal["", "server", "shard", "worker"] = ""
    addresses: tuple[str, ...] = ()
    key: str = ""
    environment: str = ""
    division: str = ""
    plain: str = ""
    num_workers: int = 0
    num_servers: int = 1
    number: int = 0


def role_of(context: JobContext, rank: int, node_ranks: Sequence[int]) -> Role:
    """Return the role of a rank. `node_ranks` are the numbers of the ranks' nodes, by rank.

    Raises:
        ConfigError: no rank is left for a worker, or the launcher has named an unknown role. Raised on every rank.
    """
    if context.serve.kind:
        if context.serve.kind not in _KINDS:
            allowed = ", ".join(_KINDS)
            raise ConfigError(f"the launcher has told this process to be a {context.serve.kind!r}; allowed: {allowed}")
        kind = _KINDS[context.serve.kind]
        return Role(
            kind,
            tuple(filter(None, context.serve.address.split(","))),
            context.serve.key,
            context.serve.environment,
            context.serve.division,
            context.serve.plain,
            num_servers=0 if kind == "worker" else max(1, context.servers),
            number=context.serve.number,
        )
    if not context.servers:
        return Role()
    size = len(node_ranks)
    if size <= context.servers:
        raise ConfigError(
            f"{size} ranks with {context.servers} servers leave none for workers; start at least {context.servers + 1}"
        )
    servers, num_workers = server_ranks(node_ranks, context.servers), size - context.servers
    if rank not in servers:
        return Role("worker", num_servers=context.servers)
    number = servers.index(rank)
    return Role("shard" if number else "server", num_workers=num_workers, num_servers=context.servers, number=number)


def server_ranks(node_ranks: Sequence[int], num_servers: int) -> list[int]:
    """Return the ranks that are servers, in order: the first rank of each node, then the second, and so on.

    So each server has a node's network link to itself, as long as there are enough nodes.
    """
    place = [node_ranks[:rank].count(node) for rank, node in enumerate(node_ranks)]
    return sorted(range(len(node_ranks)), key=lambda rank: (place[rank], node_ranks[rank], rank))[:num_servers]
