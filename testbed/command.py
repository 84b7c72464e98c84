"""`scripts/testbed`: several real nodes on this machine, to try mpitrain and to break things."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpitrain.cli.terminal_text import print_object
from mpitrain.errors import ConfigError, MpitrainError
from testbed.bed import Bed, down
from testbed.bed_record import STATE, BedRecord, bed_names, only_bed, read_record, read_records
from testbed.chaos import command
from testbed.controller import environment, inside, link_group_vars
from testbed.host import require_root
from testbed.lifecycle import build, find, up
from testbed.snapshots import forget_snapshot, snapshot_names

_EPILOG = """\
The nodes are containers that boot: each has its own systemd, sshd, users, /etc
and network. With --full they are virtual machines with their own kernels
(User-mode Linux), which are slower, and have a real NFS server and client. The
nodes have no access to other networks; packages and wheels come from this
machine. Needs root, and Debian.

  sudo scripts/testbed up 4
  sudo scripts/testbed run ansible-playbook cluster/setup.yml
  sudo scripts/testbed ssh node2 hostname
  sudo scripts/testbed break drop node2 --ports 22
  sudo scripts/testbed heal all
  sudo scripts/testbed down

`chaos` makes faults in a job that runs, on a test bed or on real hosts.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `scripts/testbed` with `argv` (default: this process's arguments). Return the exit code.

    2 is wrong use (an unknown option, a name that is not there); 1 is any other error.
    """
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.act(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of the output has gone (`| head`). Python would report that again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("scripts/testbed: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except MpitrainError as error:
        print(f"scripts/testbed: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/testbed",
        description="Make several real nodes on this machine, to try mpitrain and to break things.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--name", metavar="BED", help="the test bed, if there are several")
    common.add_argument("--state", type=Path, default=STATE, metavar="DIR", help=f"folder of images and beds ({STATE})")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, summary: str) -> argparse.ArgumentParser:
        description = f"{summary[0].upper()}{summary[1:]}."
        new = actions.add_parser(name, help=summary, description=description, parents=[common], allow_abbrev=False)
        new.set_defaults(act=_ACTIONS[name])
        return new

    new = action("up", "make a test bed and wait until its nodes are up")
    new.add_argument("num_nodes", nargs="?", type=int, metavar="N", help="number of nodes")
    new.add_argument("--full", action="store_true", help="nodes with their own kernels (User-mode Linux)")
    new.add_argument("--snapshot", metavar="NAME", help="start from disks that `save` kept")
    new.add_argument("--delay-microseconds", type=int, default=0, metavar="US", help="delay of every cable, each way")
    build = action("build", "install the required packages and make the nodes' image; `up` does it too")
    build.add_argument("--full", action="store_true", help="also make what `up --full` needs")
    old = action("down", "take a test bed down")
    old.add_argument("--all", action="store_true", help="take all test beds down")
    status = action("status", "show the test beds, their nodes and what is broken")
    status.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    login = action("ssh", "log in on a node, or run a line of shell there")
    login.add_argument("node", metavar="NODE")
    login.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    run_ = action("run", "run a command of this machine in the test bed's network")
    run_.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    breaker = action("break", "break something on nodes; `heal` undoes it")
    breaker.add_argument("fault", choices=sorted(_FAULTS), metavar="FAULT", help=", ".join(sorted(_FAULTS)))
    breaker.add_argument("nodes", nargs="+", metavar="NODE")
    breaker.add_argument("--ports", help="for drop and reject: 22, or 111,2049,50000-50300")
    breaker.add_argument("--rate", help="for shape: 1gbit, 100mbit")
    breaker.add_argument("--mtu-bytes", type=int, metavar="BYTES", help="for mtu: 576 to 9000; the network's is 1500")
    breaker.add_argument("--seconds", type=float, help="for clock: how far ahead, or back if below 0")
    breaker.add_argument("--delay-microseconds", type=int, metavar="US", help="for delay (full beds): each way")
    heal = action("heal", "undo everything that was broken")
    heal.add_argument("nodes", nargs="+", metavar="NODE", help="nodes, or all")
    save = action("save", "keep the disks of a test bed, for up --snapshot")
    save.add_argument("snapshot", metavar="NAME")
    forget = action("forget", "remove a snapshot")
    forget.add_argument("snapshot", metavar="NAME")
    chaos = actions.add_parser(
        "chaos",
        help=command.HELP,
        description=f"{command.HELP[0].upper()}{command.HELP[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    chaos.set_defaults(act=command.run)
    command.add_arguments(chaos)
    return parser


def _up(arguments: argparse.Namespace) -> int:
    # A second signal, while an incomplete bed is being removed, ends this process; `down` does the rest.
    signal.signal(signal.SIGTERM, _interrupt)
    if arguments.num_nodes is None and arguments.snapshot is None:
        raise ConfigError("name the number of nodes, as in `sudo scripts/testbed up 4`")
    bed = up(
        arguments.num_nodes,
        full=arguments.full,
        name=arguments.name,
        snapshot=arguments.snapshot,
        delay_microseconds=arguments.delay_microseconds,
        state=arguments.state,
        say=_say,
    )
    _show(bed)
    return 0


def _interrupt(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise KeyboardInterrupt


def _build(arguments: argparse.Namespace) -> int:
    print(arguments.state / "images" / build(full=arguments.full, state=arguments.state, say=_say))
    return 0


def _down(arguments: argparse.Namespace) -> int:
    require_root()
    if arguments.all and arguments.name:
        raise ConfigError("--all and --name exclude each other; give one")
    names = bed_names(arguments.state) if arguments.all else [arguments.name or only_bed(arguments.state)]
    for name in names:
        down(arguments.state, name)
    return 0


def _status(arguments: argparse.Namespace) -> int:
    require_root()
    records = [read_record(arguments.state, arguments.name)] if arguments.name else read_records(arguments.state)
    if arguments.json:
        beds = [document for record in records if (document := _document(record)) is not None]
        print_object({"beds": beds, "snapshots": snapshot_names(arguments.state)})
        return 0
    if not records:
        print("there is no test bed; make one: sudo scripts/testbed up 4")
    for record in records:
        try:
            if record.ready:
                _show(Bed(record))
            else:
                print(f"{record.name}: coming up, or interrupted (then: scripts/testbed down --name {record.name})")
        except ConfigError:
            print(f"{record.name}: going down")
    if kept := snapshot_names(arguments.state):
        print(f"snapshots: {', '.join(kept)}")
    return 0


def _ssh(arguments: argparse.Namespace) -> int:
    bed = _find(arguments)
    bed.record.checked(arguments.node.rpartition("@")[2])
    _execute(bed, ["ssh", arguments.node, *arguments.words])
    return 1  # not reached: ssh has replaced this process


def _run(arguments: argparse.Namespace) -> int:
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    if not words:
        raise ConfigError("name a command, for example: scripts/testbed run ansible-playbook cluster/setup.yml")
    _execute(_find(arguments), words)
    return 1  # not reached


def _execute(bed: Bed, words: list[str]) -> None:
    link_group_vars(bed.record, Path.cwd())
    command = inside(bed.record, words)
    sys.stdout.flush()
    os.execvpe(command[0], command, environment(bed.record, os.environ))


def _break(arguments: argparse.Namespace) -> int:
    bed = _find(arguments)
    option, needs_value = _FAULTS[arguments.fault]
    for other in ("ports", "rate", "mtu_bytes", "seconds", "delay_microseconds"):
        given = getattr(arguments, other) is not None
        if given and other != option:
            raise ConfigError(f"{arguments.fault} takes no --{other.replace('_', '-')}")
        if other == option and needs_value and not given:
            raise ConfigError(f"{arguments.fault} needs --{other.replace('_', '-')}")
    for node in arguments.nodes:
        bed.record.checked(node)
    for node in arguments.nodes:
        method: Callable[..., None] = getattr(bed, arguments.fault)
        method(node, *([getattr(arguments, option)] if option else []))
    _show(bed)
    return 0


def _heal(arguments: argparse.Namespace) -> int:
    bed = _find(arguments)
    nodes = bed.names if arguments.nodes == ["all"] else arguments.nodes
    for node in nodes:
        bed.record.checked(node)
    for node in nodes:
        bed.heal(node)
    _show(bed)
    return 0


def _save(arguments: argparse.Namespace) -> int:
    _find(arguments).save(arguments.snapshot)
    return 0


def _forget(arguments: argparse.Namespace) -> int:
    require_root()
    forget_snapshot(arguments.state, arguments.snapshot)
    return 0


def _find(arguments: argparse.Namespace) -> Bed:
    return find(arguments.name, state=arguments.state)


def _document(record: BedRecord) -> dict[str, Any] | None:
    """Return what --json prints of a bed; None: it is going down."""

    content = {"name": record.name, "full": record.full, "ready": record.ready, "snapshot": record.snapshot}
    content |= {"delay_microseconds": record.delay_microseconds, "inventory": str(record.inventory)}
    if not record.ready:
        return {**content, "nodes": []}
    try:
        bed = Bed(record)
        nodes = [
            {"name": node, "address": bed.address(node), "state": _state(bed, node), "broken": dict(bed.faults(node))}
            for node in bed.names
        ]
    except ConfigError:
        return None
    return {**content, "nodes": nodes}


def _state(bed: Bed, node: str) -> str:
    faults = bed.faults(node)
    return "off" if "kill" in faults else "frozen" if "freeze" in faults else "up" if bed.is_up(node) else "not up"


def _show(bed: Bed) -> None:
    record = bed.record
    kind = "User-mode Linux" if record.full else "containers"
    delay = f", cables of {record.delay_microseconds} us" if record.delay_microseconds else ""
    start = f", from snapshot {record.snapshot}" if record.snapshot else ""
    print(f"{bed.name}: {record.num_nodes} nodes ({kind}){delay}{start}; inventory {bed.inventory}")
    for node in bed.names:
        faults = bed.faults(node)
        broken = ", ".join(f"{fault} {value}".strip() for fault, value in faults.items())
        print(f"  {node}  {bed.address(node):<15}  {_state(bed, node)}{f'; broken: {broken}' if broken else ''}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# The fault's method of Bed, and the option with its value.
_FAULTS: dict[str, tuple[str, bool]] = {
    "kill": ("", False),
    "freeze": ("", False),
    "cut": ("", False),
    "reboot": ("", False),
    "drop": ("ports", True),
    "reject": ("ports", True),
    "shape": ("rate", True),
    "delay": ("delay_microseconds", True),
    "mtu": ("mtu_bytes", True),
    "clock": ("seconds", True),
}
_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "up": _up,
    "build": _build,
    "down": _down,
    "status": _status,
    "ssh": _ssh,
    "run": _run,
    "break": _break,
    "heal": _heal,
    "save": _save,
    "forget": _forget,
}
