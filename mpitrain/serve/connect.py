"""The links of a job with servers: where a server listens, and how a worker finds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpitrain.job.role import Role
from mpitrain.serve.keys import make_keys, parse_key, read_keys
from mpitrain.serve.link import ServerLink
from mpitrain.serve.worker_link import WorkerLink
from mpitrain.world import World


def environment_of(role: Role) -> dict[str, Any] | None:
    """Return what the launcher has found of code and packages for this process; None: another launcher started it."""
    return json.loads(Path(role.environment).read_text()) if role.environment else None


def bound(role: Role, everyone: World | None, most_bytes: int) -> ServerLink:
    """Return the link of a server. Collective over `everyone`."""
    if everyone is None:
        return ServerLink(role.addresses[0], read_keys(Path(role.key)), most_bytes, plain=role.plain)
    keys = make_keys()
    link = ServerLink("127.0.0.1:*", keys, most_bytes)
    everyone.broadcast([link.address, keys.worker.text])
    return link


def connected(role: Role, everyone: World | None, most_bytes: int) -> WorkerLink:
    """Return the link of a worker. Collective over `everyone`."""
    if everyone is None:
        key = parse_key(Path(role.key).read_text(), role.key)
        return WorkerLink(role.addresses, key, most_bytes, plain=bool(role.plain))
    address, text = everyone.broadcast()
    return WorkerLink([address], parse_key(text, "the key of the server's rank"), most_bytes)
