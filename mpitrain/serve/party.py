"""A process of a job with servers: what it has in common with the others, and what each does."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mpitrain.adapters.adapter import Adapter, divided_of
from mpitrain.compression.codec import Codec
from mpitrain.exchange.division import sizes_of
from mpitrain.job.role import Role
from mpitrain.serve.attendance import ServerRules
from mpitrain.serve.connect import bound, connected, environment_of
from mpitrain.serve.jobs import JobQueue
from mpitrain.serve.pace import JobPace
from mpitrain.serve.passes import server_pass
from mpitrain.serve.server import JobServer
from mpitrain.serve.shard import ShardServer
from mpitrain.serve.source import JobSource, source_of
from mpitrain.serve.store import ParameterStore, divisions_of, layout_of
from mpitrain.serve.worker import JobWorker
from mpitrain.world import World


@dataclass(frozen=True)
class Party:
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
        """Whether there are processes that end with the first run and that nobody starts again: ranks or servers."""
        return self.everyone is not None or self.role.num_servers > 1

    @property
    def most_bytes(self) -> int:
        """The most bytes of arrays in a message."""
        layouts = (layout_of(self.adapter.parameters()).parameters, self.adapter.layout)
        return max(sum(one.count * one.dtype.itemsize for one in layout) for layout in layouts)

    def facts(self, source: JobSource) -> list[str]:
        """Return what servers and workers must have in common, in lines."""
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


def first_server(
    party: Party,
    source: JobSource,
    queue: JobQueue,
    pace: JobPace,
    carried: Mapping[str, Any],
    *,
    corrects_staleness: bool,
) -> JobServer:
    """Return the server that hands out jobs. Collective over `everyone`, with `work` and `serve_part` on the others.

    Args:
        queue, pace: of the mode.
        carried: gradients by parameter name, which are added to those of the first update.
        corrects_staleness: see ServerRules.
    """
    role, config = party.role, party.world.config
    link, _, secret = bound(role, party.everyone, party.most_bytes)
    rules = ServerRules(
        life=secrets.token_hex(8),
        facts=party.facts(source),
        environment=environment_of(role),
        optimizer=party.optimizer,
        secret=secret,
        codec=party.codec,
        corrects_staleness=corrects_staleness,
        stall_seconds=config.stall_seconds,
        hang_seconds=config.hang_seconds,
        expected=role.num_workers,
        say=party.say,
    )
    store = ParameterStore(party.adapter, 0, role.num_servers)
    return JobServer(
        link,
        store,
        queue,
        pace,
        party.adapter,
        rules,
        host=party.where,
        num_servers=role.num_servers,
        carried=store.layout.flats_of(carried),
    )


def tell_division(role: Role, adapter: Adapter) -> NoReturn:
    """Write how the servers divide the parameters, a text for each of them, and end this process: `--show` asks so."""
    _, parameters = divisions_of(adapter, role.num_servers)
    Path(role.division).write_text(json.dumps([size.line() for size in sizes_of(parameters)]))
    with suppress(OSError):
        sys.stdout.flush()
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(0)  # any other end waits for threads of the script, such as one that reads data


def work(party: Party, data: Any) -> None:
    """Be a worker until the run is over. Raises as ServedStrategy.work."""
    source, config = source_of(data), party.world.config
    hello: dict[str, Any] = {"host": party.world.host, "name": "", "facts": party.facts(source)}
    if (environment := environment_of(party.role)) is not None:
        hello["environment"] = environment
    if party.everyone is not None:
        hello["name"] = party.world.name()
    link, others = connected(party.role, party.everyone, party.most_bytes)
    with closing(link):
        worker = JobWorker(
            link,
            others,
            party.adapter,
            source,
            party.codec,
            hello,
            stall_seconds=config.stall_seconds,
            hang_seconds=config.hang_seconds,
            say=party.say,
        )
        with closing(worker):
            worker.work()


def serve_part(party: Party, data: Any) -> None:
    """Be a further server until the run is over. Raises as ShardServer.serve."""
    role, where = party.role, party.where
    link, (first,), secret = bound(role, party.everyone, party.most_bytes)
    hello = {"server": role.number, "where": where, "optimizer": party.optimizer}
    hello |= {"port": int(link.address.rpartition(":")[2]), "pass": server_pass(secret, role.number)}
    try:
        ShardServer(
            link,
            first,
            ParameterStore(party.adapter, role.number, role.num_servers),
            divided_of(party.adapter),
            party.codec,
            {**hello, "facts": party.facts(source_of(data))},
            num_servers=role.num_servers,
            hang_seconds=party.world.config.hang_seconds,
            name=f"server {role.number} on {where}",
        ).serve()
    finally:
        link.close()
        first.close()
