"""`mpitrain serve`: start a script as the server of a job that workers can join and leave at any time."""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from mpitrain.cli.launching import add_inventory_argument, add_script_arguments, positive, script_of
from mpitrain.config import KEY
from mpitrain.errors import ConfigError
from mpitrain.reading import shown, whole
from mpitrain.units import add_renamed

if TYPE_CHECKING:
    from mpitrain.launch.placement import Placement

HELP = "start a script as a server, whose workers come and go"

PAGE = "how-to/parameter-server.md"

_EPILOG = """\
The script must train with mt.ParameterServer. Start workers on any machine and at
any time with the line that this command prints; it holds a secret. All that is
sent is encrypted, but with --plain. The exit code is the script's.

  mpitrain serve train.py --epochs 5
  mpitrain serve --hosts node1/cuda:0-3x2,node2/cpu train.py
"""

_PORT, _LAST_PORT = 5000, 65535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "mpitrain serve [OPTION]... SCRIPT [ARGUMENT]..."
    parser.epilog = _EPILOG
    parser.add_argument("--port", type=_port, default=_PORT, metavar="P", help=f"listen at this port ({_PORT})")
    parser.add_argument("--servers", type=positive, default=1, metavar="K", help="K servers divide the parameters (1)")
    parser.add_argument("--hosts", metavar="A,B", help="start workers there too: a,b or a/cuda:0-3x2,b/cpux4")
    add_inventory_argument(parser)
    parser.add_argument(
        "--plain", default="", metavar="INTERFACE", help="do not encrypt; listen at this interface only"
    )
    parser.add_argument(
        "--dry-run", action="store_true", dest="show", help="print the commands and the servers' parts; train nothing"
    )
    add_renamed(parser, show="--dry-run")
    add_script_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Start the server. Return its exit code."""
    import secrets

    from mpitrain.context import JobContext, ServeTask
    from mpitrain.launch.processes import launcher_name
    from mpitrain.launch.served import become, environment_here, told
    from mpitrain.launch.serving import Serving, serve, show
    from mpitrain.server.security import address_of, key_file, keys_of
    from mpitrain.server.wire import the_zmq

    program, script = script_of(arguments)
    the_zmq()
    ports = range(arguments.port, arguments.port + arguments.servers)
    if ports[-1] > _LAST_PORT:
        raise ConfigError(
            f"{len(ports)} servers take the ports {ports[0]} to {ports[-1]}, but the last valid port is "
            f"{_LAST_PORT}; give a lower --port"
        )
    address = address_of(arguments.plain) if arguments.plain else "*"
    placement = _placement(arguments)
    plain = ["--plain"] if arguments.plain else []
    host = address if arguments.plain else socket.gethostname()
    line = shlex.join(["mpitrain", "work", *plain, f"{host}:{arguments.port}", *program])
    # Without encryption the workers must come by the tunnel, and otherwise by the network of the hosts.
    own = address if arguments.plain or placement is None else placement.addresses.get(placement.own, "127.0.0.1")
    serving = Serving(
        program=program,
        script=script,
        ports=ports,
        placement=placement,
        address=f"[{own}]:{arguments.port}" if ":" in own else f"{own}:{arguments.port}",
        # -P: the working folder may have a json.py other than Python's.
        work=["-P", "-m", "mpitrain", "work", *plain],
    )
    if arguments.show:
        show(serving, line)
        return 0
    for port in ports:
        _refuse_used(address, port)
    path = key_file(arguments.port)
    key = {KEY: keys_of(path).worker.text}
    listens = f"the server will listen at port {ports[0]}"
    if len(ports) > 1:
        listens = f"{len(ports)} servers will listen at ports {ports[0]} to {ports[-1]}"
    print(
        f"mpitrain: {listens}. This line starts a worker, and holds a secret:\n\n    {KEY}={key[KEY]} {line}\n",
        file=sys.stderr,
        flush=True,
    )
    context = JobContext(
        job=secrets.token_hex(4),
        launcher=launcher_name(os.getpid()),
        servers=len(ports) if len(ports) > 1 else 0,
        serve=ServeTask("server", 0, f"{address}:{arguments.port}", str(path), plain=arguments.plain),
    )
    first, descriptor = told(context, environment_here(script))
    if placement is None and len(ports) == 1:
        become(first, program)
    first_address = f"{'127.0.0.1' if address == '*' else address}:{ports[0]}"
    others = [
        replace(
            context,
            serve=replace(context.serve, kind="shard", number=number, address=f"{address}:{port},{first_address}"),
        )
        for number, port in enumerate(ports[1:], 1)
    ]
    return serve(serving, [first, *others], descriptor, key)


def _placement(arguments: argparse.Namespace) -> Placement | None:
    """Return the placement of the known workers; None: there are none."""
    from mpitrain.launch.hosts import place_ranks
    from mpitrain.launch.placement import parse_hosts

    if arguments.hosts is None:
        if arguments.inventory is not None:
            raise ConfigError("-i says what the names in --hosts stand for; add --hosts A,B, or leave it out")
        return None
    has_devices = any(parse_hosts(arguments.hosts).values())
    return place_ranks(arguments.hosts, arguments.inventory, None, None if has_devices else 1)


def _refuse_used(host: str, port: int) -> None:
    """Refuse a port at which another program listens: the script starts its server only later."""
    from mpitrain.server.wire import cannot_listen

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if host == "*" else host, port))
        except OSError as error:
            raise cannot_listen(f"{host}:{port}", error) from None


def _port(text: str) -> int:
    number = whole(text, 1, _LAST_PORT)
    if number is None:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a port; allowed are 1 to {_LAST_PORT}")
    return number
