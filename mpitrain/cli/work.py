"""`mpitrain work`: start a script as a worker of a server, on any machine and at any time."""

from __future__ import annotations

import argparse
import os

from mpitrain.cli.launching import add_script_arguments, script_of
from mpitrain.config import KEY
from mpitrain.errors import ConfigError

HELP = "start a script as a worker of a server"
PAGE = "how-to/parameter-server.md"

_EPILOG = """\
`mpitrain serve` prints the whole line. Give the script the server's arguments.
A worker is refused if its code, its packages, its Python, its data or the
shapes of its parameters differ from the server's. Arguments themselves are not
compared, so one that changes only the loss is not noticed.

The key comes from MPITRAIN_KEY. On the server's machine, and on those that share
its home folder, it need not be given: it is in ~/.local/state/mpitrain.

A worker that cannot reach its server says why, and tries again until it has
heard nothing for MPITRAIN_HANG_SECONDS (600). So it may be started before the
server, and outlives a restart of the server. With several addresses it looks
for the server at each of them, one after the other.

It ends with exit code 0 when the training is over, and what stands in the script
behind the training is done by the server alone. Ctrl-C ends it at any time; its
samples go to other workers.

  MPITRAIN_KEY=... mpitrain work node1:5000 train.py --epochs 5
  mpitrain work node1:5000,node2:5000 train.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    parser.add_argument("--plain", action="store_true", help="do not encrypt, as the server with --plain")
    parser.add_argument(
        "addresses", metavar="HOST:PORT", help="where the server is, or may be: a:5000 or a:5000,b:5000"
    )
    add_script_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Replace this process by the script. Return an exit code only if that fails."""
    from mpitrain.context import JobContext, ServeTask
    from mpitrain.launch.served import become, environment_here, handed_over, path_of, told
    from mpitrain.server.security import LOOPBACK, check_way
    from mpitrain.server.wire import the_zmq
    from mpitrain.server.worker_link import parse_address

    places = [parse_address(address.strip()) for address in arguments.addresses.split(",")]
    program, script = script_of(arguments)
    the_zmq()
    key = _key([port for _, port in places])
    if arguments.plain:
        for host, _ in places:
            check_way(host)
    before = JobContext.read(os.environ)
    # `mpitrain serve --hosts` gives devices to its own workers, and the marks by which `mpitrain ps` knows them.
    given = before if before.serve.kind == "worker" else JobContext()
    context = JobContext(
        job=given.job,
        launcher=given.launcher,
        devices=given.devices,
        serve=ServeTask(
            "worker",
            address=",".join(address.strip() for address in arguments.addresses.split(",")),
            key=path_of(handed_over(key)),
            plain=LOOPBACK if arguments.plain else "",
        ),
    )
    become(told(context, environment_here(script))[0], program)


def _key(ports: list[int]) -> str:
    """Return the text of the key, from the environment or from the file of a server with one of these ports."""
    from mpitrain.server.security import key_file, parse_key, read_keys

    if text := os.environ.get(KEY, ""):
        return parse_key(text, KEY).text
    for port in ports:
        if key_file(port).exists():
            return read_keys(key_file(port)).worker.text
    raise ConfigError(
        f"there is no key: {KEY} is not set, and there is no {key_file(ports[0])}; copy the whole line that `mpitrain "
        "serve` prints"
    )
