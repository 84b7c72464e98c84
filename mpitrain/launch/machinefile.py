"""Read the file of hosts of another launcher, as `mpiexec` and batch systems write it.

node1 slots=4     # Open MPI's
node2:2           # MPICH's and Intel MPI's
node3             # one rank; a host in several lines, as in PBS's file, has as many
"""

from __future__ import annotations

import re
from pathlib import Path

from mpitrain.errors import ConfigError

_LINE = re.compile(r"(?P<host>[A-Za-z0-9][A-Za-z0-9._-]*)(:(?P<number>\d+)|\s+slots\s*=\s*(?P<slots>\d+))?")


def hosts_of(path: Path) -> str:
    """Return the hosts of the file at `path` in the form of --hosts: `node1:4,node2:2,node3:1`.

    If every host has one line and no number, they come without numbers: `node1,node2`.

    Raises:
        ConfigError: the file cannot be read, names no host, or has a line of another form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    slots: dict[str, int] = {}
    has_numbers = False
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        parts = _LINE.fullmatch(text)
        if parts is None:
            hint = "; an Ansible inventory is given by -i" if text.startswith("[") else ""
            raise ConfigError(
                f"--hostfile {path}, line {number}: {text!r} is none of HOST, HOST:N and HOST slots=N{hint}"
            )
        given = parts["number"] or parts["slots"]
        has_numbers |= given is not None or parts["host"] in slots
        slots[parts["host"]] = slots.get(parts["host"], 0) + int(given or 1)
    if not slots:
        raise ConfigError(f"--hostfile {path} names no host; allowed are lines HOST, HOST:N and HOST slots=N")
    return ",".join(f"{host}:{count}" if has_numbers else host for host, count in slots.items())
