"""`--write-env`: one file with the measured network settings of every library, which `mpitrain run` reads."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.diagnostics.check import NotSeenError, Seen
from mpitrain.errors import ClusterError
from mpitrain.launch.interfaces import pin
from mpitrain.launch.libraries import Vendor

# Variables of all vendors go in, because each program reads only its own.
_VENDORS: tuple[Vendor, ...] = ("mpich", "impi", "openmpi")


def variables(seen: Seen) -> dict[str, str]:
    """The variables that hold for all nodes, as `mpitrain run` would set them for each MPI.

    If interfaces have different names on different nodes, only networks are written.

    Raises:
        ClusterError: a node was not seen, or no network holds for all nodes.
    """
    facts: dict[str, Mapping[str, Any]] = {}
    for name in seen.target.names:
        try:
            network = seen.node(name, "network")
        except NotSeenError as error:
            raise ClusterError(f"no variables can be written: the network of {name} is not known: {error}") from None
        facts[name] = {"routes": network["routes"], "rdma": bool(network["rdma"])}
    if len(facts) == 1:
        raise ClusterError("no variables can be written: there is one node, which has no way to others")
    common: dict[str, str] = {}
    note = ""
    for vendor in _VENDORS:
        pinning = pin(facts, list(facts), vendor, {})
        common |= pinning.common
        note = pinning.note
    if not common:
        raise ClusterError(f"no variables can be written: {note}")
    return common


def write_variables(path: Path, seen: Seen) -> None:
    """Write `variables` as NAME=value lines, which a shell takes as well: `set -a; . FILE`.

    Raises:
        ClusterError: they are not known, or the file cannot be written.
    """
    names = ", ".join(seen.target.names)
    lines = [
        f"# The network between {names}, as `mpitrain check-cluster --write-env` saw it.",
        "# For jobs: mpitrain run --env-file FILE, or MPITRAIN_ENV_FILE=FILE; in a shell: set -a; . FILE; set +a",
        *(f"{name}={shlex.quote(value)}" for name, value in sorted(variables(seen).items())),
    ]
    try:
        path.write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise ClusterError(f"{path} cannot be written: {error.strerror}") from None
