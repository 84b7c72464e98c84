"""A process of a job with servers: its facts that must agree with the others, its connections, and its role."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mpitrain.adapters.adapter import Adapter, divided_of
from mpitrain.compression.codec import Codec
from mpitrain.errors import ConfigError
from mpitrain.own_addresses import addresses
from mpitrain.reading import read_text
from mpitrain.reducer.division import sizes_of
from mpitrain.role import Role
from mpitrain.server.coordinator import Coordinator
from mpitrain.server.parameters import ParameterShard, divisions_of, layout_of
from mpitrain.server.registry import ServerRules
from mpitrain.server.security import WorkerKey, make_keys, parse_key, read_keys, server_token
from mpitrain.server.server_link import ServerLink
from mpitrain.server.shard import ShardServer
from mpitrain.server.work_units import ConsistencyMode, WorkQueue
from mpitrain.server.worker import GradientWorker, IndexedSource, LinksToOthers, source_of
from mpitrain.server.worker_link import Patience, WorkerLink
from mpitrain.world.world import World


@dataclass(frozen=True)
class Participant:
    """One process.

    Attributes:
        everyone: with `mpitrain run --servers`, the World of all ranks; else None.
        world: of this process alone.
        codec: of gradients.
        optimizer: class and settings, if there are several servers.
    """

    role: Role
    everyone: World | None
    world: World
    adapter: Adapter
    codec: Codec | None
    optimizer: str

    @property
    def where(self) -> str:
        """The host, with the rank if it has one."""
        return self.world.host if self.everyone is None else f"{self.world.host} (rank {self.everyone.rank})"

    @property
    def name(self) -> str:
        """Rank and host."""
        return (self.everyone or self.world).name()

    @property
    def ends_with_run(self) -> bool:
        """Whether there are processes that end with the first run and are not restarted: ranks or servers."""
        return self.everyone is not None or self.role.num_servers > 1

    @property
    def most_bytes(self) -> int:
        """The most bytes of arrays in a message."""
        layouts = (layout_of(self.adapter.parameters()).parameters, self.adapter.layout)
        return max(sum(one.count * one.dtype.itemsize for one in layout) for layout in layouts)

    def facts(self, source: IndexedSource) -> list[str]:
        """Return lines that must be equal in servers and workers."""
        from mpitrain import __version__

        state, scale = source.state(), "with" if self.adapter.loss_scale else "without"
        parameters = layout_of(self.adapter.parameters()).parameters
        return [
            f"mpitrain {__version__}",
            f"compression={self.world.config.compression}, {scale} loss scale",
            *(f"{name}={state[name]}" for name in ("num_samples", "seed", "shuffle")),
            *(f"gradient {parameter}" for parameter in self.adapter.layout),
            *(f"parameter {parameter}" for parameter in parameters),
        ]

    def say(self, text: str) -> None:
        """Print a line."""
        self.world.print(f"mpitrain: {text}")

    @property
    def patience(self) -> Patience:
        """The time limits for other processes."""
        config = self.world.config
        return Patience(stall_seconds=config.stall_seconds, hang_seconds=config.hang_seconds, say=self.say)


def first_server(
    participant: Participant,
    source: IndexedSource,
    queue: WorkQueue,
    mode: ConsistencyMode,
    carried: Mapping[str, Any],
    *,
    corrects_staleness: bool,
) -> Coordinator:
    """Return the server that hands out units. Collective over `everyone`, with `work` and `serve_part` on the others.

    Args:
        queue, mode: of the mode.
        carried: gradients by parameter name, which are added to those of the first update.
        corrects_staleness: see ServerRules.
    """
    role, config = participant.role, participant.world.config
    link, _, secret = bound(role, participant.everyone, participant.most_bytes)
    rules = ServerRules(
        life=secrets.token_hex(8),
        facts=participant.facts(source),
        environment=environment_of(role),
        optimizer=participant.optimizer,
        secret=secret,
        corrects_staleness=corrects_staleness,
        stall_seconds=config.stall_seconds,
        hang_seconds=config.hang_seconds,
        expected=role.num_workers,
        say=participant.say,
    )
    own = ParameterShard(participant.adapter, 0, role.num_servers, participant.codec)
    return Coordinator(
        link,
        own,
        queue,
        mode,
        participant.adapter,
        rules,
        host=participant.where,
        num_servers=role.num_servers,
        carried=own.layout.flats_of(carried),
    )


def tell_division(role: Role, adapter: Adapter) -> NoReturn:
    """Write how the servers divide the parameters, a text for each, and end this process, as `--dry-run` requests."""
    _, parameters = divisions_of(adapter, role.num_servers)
    Path(role.division).write_text(json.dumps([size.line() for size in sizes_of(parameters)]))
    with suppress(OSError):
        sys.stdout.flush()
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(0)  # any other end waits for threads of the script, such as one that reads data


def work(participant: Participant, data: Any) -> None:
    """Be a worker until the run is over. Raises as ServedStrategy.work."""
    source = source_of(data)
    hello: dict[str, Any] = {"host": participant.world.host, "name": "", "facts": participant.facts(source)}
    if (environment := environment_of(participant.role)) is not None:
        hello["environment"] = environment
    if participant.everyone is not None:
        hello["name"] = participant.world.name()
    link, others = connected(participant.role, participant.everyone, participant.most_bytes)
    with closing(link):
        worker = GradientWorker(
            link,
            others,
            participant.adapter,
            source,
            participant.codec,
            hello,
            participant.patience,
        )
        with closing(worker):
            worker.work()


def serve_part(participant: Participant, data: Any) -> None:
    """Be a further server until the run is over. Raises as ShardServer.serve."""
    role, where = participant.role, participant.where
    link, (first,), secret = bound(role, participant.everyone, participant.most_bytes)
    hello = {"server": role.number, "where": where, "optimizer": participant.optimizer}
    hello |= {"port": int(link.address.rpartition(":")[2]), "token": server_token(secret, role.number)}
    try:
        ShardServer(
            link,
            first,
            ParameterShard(participant.adapter, role.number, role.num_servers, participant.codec),
            divided_of(participant.adapter),
            {**hello, "facts": participant.facts(source_of(data))},
            participant.patience,
            num_servers=role.num_servers,
            name=f"server {role.number} on {where}",
        ).serve()
    finally:
        link.close()
        first.close()


# -- connections ------------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where a server listens; number -1: this rank is not a server."""

    number: int
    port: str
    key: str
    addresses: Sequence[str]


class Bound(NamedTuple):
    """The connections of a server.

    Attributes:
        link: for workers, and on the first server for the others.
        first: a list with the link of a shard to the first server; [] for the first server itself.
        secret: of the servers; "": mpiexec started all processes that have the keys.
    """

    link: ServerLink
    first: list[WorkerLink]
    secret: str


def bound(role: Role, everyone: World | None, most_bytes: int) -> Bound:
    """Return the links of a server. Collective over `everyone`, with `connected` on the workers."""
    if everyone is None:
        keys, plain = read_keys(Path(role.key)), role.plain
        link = ServerLink(role.addresses[0], keys, most_bytes, plain=plain)
        first = _Target(role.addresses[1:], keys.worker, "the first server")
        return Bound(link, _links([first] * bool(role.number), most_bytes, plain=bool(plain)), keys.among_servers)
    keys = make_keys()
    link = ServerLink("127.0.0.1:*" if everyone.num_nodes == 1 else "*:*", keys, most_bytes)
    port = link.address.rpartition(":")[2]
    places = everyone.allgather(_Place(role.number, port, keys.worker.text, addresses()))
    return Bound(link, _links(_to_ranks(everyone, places, [0]), most_bytes) if role.number else [], "")


def connected(role: Role, everyone: World | None, most_bytes: int) -> tuple[WorkerLink, LinksToOthers]:
    """Return the link of a worker to the first server, and a function that makes the links to the others.

    Collective over `everyone`, with `bound` on the servers.
    """
    if everyone is None:
        key, plain = parse_key(read_text(role.key, ConfigError), role.key), bool(role.plain)
        first = WorkerLink(role.addresses, key, most_bytes, plain=plain)

        def beside(ports: Sequence[int]) -> list[WorkerLink]:
            """Return links to these ports on the host where the first server was found. All servers have its keys."""
            host = f"[{first.host}]" if ":" in first.host else first.host
            places = [f"{host}:{port}" for port in ports]
            targets = [_Target([place], key, f"server {number} at {place}") for number, place in enumerate(places, 1)]
            return _links(targets, most_bytes, plain=plain)

        return first, beside
    places = everyone.allgather(_Place(-1, "", "", addresses()))
    (first,) = _links(_to_ranks(everyone, places, [0]), most_bytes)
    return first, lambda ports: _links(_to_ranks(everyone, places, range(1, 1 + len(ports))), most_bytes)


class _Target(NamedTuple):
    """A server to connect to: its possible addresses, its proof, and its name."""

    addresses: Sequence[str]
    key: WorkerKey
    name: str


def _to_ranks(everyone: World, places: Sequence[_Place], numbers: Sequence[int]) -> list[_Target]:
    """Return these servers in order; `places` are those of the ranks."""
    own, targets = addresses(), []
    for rank, place in sorted(enumerate(places), key=lambda entry: entry[1].number):
        if place.number not in numbers:
            continue
        if everyone.node_rank == everyone.node_ranks[rank]:
            reached = ["127.0.0.1"]
        else:  # an address that this host also has, such as that of docker0, would lead back to this host
            reached = [address for address in place.addresses if address not in own] + [everyone.hosts[rank]]
        key = parse_key(place.key, f"the key of {everyone.name(rank)}")
        name = f"server {place.number} on {everyone.hosts[rank]} (rank {rank})"
        targets.append(_Target([f"{address}:{place.port}" for address in reached], key, name))
    return targets


def _links(targets: Sequence[_Target], most_bytes: int, *, plain: bool = False) -> list[WorkerLink]:
    with ExitStack() as stack:
        links = []
        for target in targets:
            links.append(WorkerLink(target.addresses, target.key, most_bytes, plain=plain, name=target.name))
            stack.callback(links[-1].close)  # if a later one cannot be made
        stack.pop_all()
        return links


def environment_of(role: Role) -> dict[str, Any] | None:
    """Return the code and packages that the launcher found for this process; None: another launcher started it."""
    return json.loads(Path(role.environment).read_text()) if role.environment else None
