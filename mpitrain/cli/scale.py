"""`mpitrain scale JOB +c -b`: change the hosts of a running job."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mpitrain.cli.changing import add_job_argument, change
from mpitrain.cli.launching import add_inventory_argument
from mpitrain.errors import ConfigError

HELP = "let hosts join and leave a running job"
PAGE = "how-to/fault-tolerance.md"

_EPILOG = """\
+HOST lets a host join, and -HOST lets one leave. After the next copy of its state
in memory, the job continues on its new hosts, from the same step. A host that
joins is compared with the others, as at a start. Without devices, it gets as many
ranks as the largest number on a host of the job. Options come before JOB.

Run this on a node of the cluster, or where `mpitrain run` runs.

  mpitrain scale 1a2b3c4d +node3
  mpitrain scale 1a2b3c4d +node3/cuda:0-1,node4/cuda:0
  mpitrain scale 1a2b3c4d +node3 -node2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "mpitrain scale [-i FILE] JOB (+HOST | -HOST)..."
    parser.epilog = _EPILOG
    add_inventory_argument(parser)
    add_job_argument(parser, "the id of the job, which `mpitrain ps` shows")
    # argparse would treat -HOST as an option.
    parser.add_argument("changes", nargs=argparse.REMAINDER, metavar="+HOST, -HOST", help="hosts that join and leave")


def run(arguments: argparse.Namespace) -> int:
    """Request the change. Return 0 if the job accepts."""
    return change(arguments, wish_of(arguments.changes))


def wish_of(changes: Sequence[str]) -> dict[str, object]:
    """Return the request (launch/control.py) for words such as +c and -b.

    Raises:
        ConfigError: a word is none of these, or they contradict each other.
    """
    if not changes:
        raise ConfigError("nothing changes; name hosts: +HOST lets a host join, -HOST lets it leave")
    for word in changes:
        if word[:1] not in ("+", "-"):
            raise ConfigError(f"{word!r} has no sign: +{word} lets a host join, -{word} lets it leave")
        if word in ("+", "-"):
            raise ConfigError(f"{word} names no host; write {word}HOST without a space")
        if word.startswith("--"):
            raise ConfigError(f"{word} comes after JOB, where hosts are; options come before JOB")
    joining = ",".join(word[1:] for word in changes if word[0] == "+")
    leaving = ",".join(word[1:] for word in changes if word[0] == "-")
    joins, leaves = _hosts(joining, "+"), _hosts(leaving, "-")
    if any(leaves.values()):
        raise ConfigError(
            f"-{leaving} names devices or numbers of ranks, but only a whole host can leave; name hosts alone"
        )
    if both := [host for host in joins if host in leaves]:
        raise ConfigError(f"+{both[0]} and -{both[0]} contradict each other; name a host once")
    return {**({"leave": list(leaves)} if leaves else {}), **({"join": joining} if joins else {})}


def _hosts(text: str, sign: str) -> dict[str, tuple[str, ...]]:
    from mpitrain.launch.placement import parse_hosts

    try:
        return parse_hosts(text) if text else {}
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"in --hosts {text}", f"in {sign}{text}")) from None
