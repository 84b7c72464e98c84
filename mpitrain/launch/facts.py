"""The facts of a host before the job starts: its routes to the others, its folders, what its Python finds.

Runs on every host, sent there as text (see agent.py). So it imports only modules that come with it, and must run with
old Pythons. Actions that may block forever, such as a look at a folder of a dead NFS server, run in a child with a
deadline.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpitrain.facts import addresses, patience, rdma_devices
from mpitrain.facts import routes as routes_of
from mpitrain.launch.processes import start_child
from mpitrain.reading import MessageLines

# For PyTorch's store and JAX's coordinator.
_NUM_PORTS = 2

# Deadlines on a machine that is not busy. A busy one gets up to twice as long, which watch.FACTS_SECONDS allows for.
_PATH_SECONDS = 5.0
_ROUTE_SECONDS = 5.0
_PROBE_SECONDS = 25.0
_MOST_PATIENCE = 2.0
_TELL_SECONDS = 30.0

# The start of a Python takes 50 ms of a busy machine, and a restart waits for it. So a Python only says what is wrong.
_LOOK = 'ls -fH -- "$2" > /dev/null 2>&1 && echo there || exec "$0" -S -c "$1" "$2"'
_LOOK_AT_PATH = """
import os, sys
path = sys.argv[1]
try:
    (os.listdir if os.path.isdir(path) else os.stat)(path)
    print("there")
except OSError as error:
    while not os.path.exists(os.path.dirname(path)):
        path = os.path.dirname(path)
    above = os.path.dirname(path)
    if os.path.exists(path):
        print("error", path, error.strerror, sep="\\n")
    elif os.listdir(above):
        print("missing", path, sep="\\n")
    else:
        print("empty", above, sep="\\n")
"""


def collect(wish: dict[str, Any], probe: str) -> dict[str, Any]:
    """Return the facts of this host.

    `wish` has `paths`, `python` (the job's), `script`, `variables` (those of the job that matter to Python), and
    `peers`: the addresses of the other hosts by name.
    """
    facts: dict[str, Any] = {"hostname": socket.gethostname(), "paths": look_at_paths(wish["paths"])}
    facts["cores"] = len(os.sched_getaffinity(0))
    facts["rdma"] = bool(rdma_devices())
    facts["routes"] = routes(wish["peers"])
    facts["devices"] = devices()
    facts["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES")  # a batch system may have set it for this host
    if all(state == ["there"] for state in facts["paths"].values()):
        facts["environment"] = environment(wish["python"], wish["script"], wish["variables"], probe)
    return facts


def hold_ports(wanted: int, count: int = _NUM_PORTS) -> tuple[list[socket.socket], list[int]]:
    """Return sockets that hold so many ports for ranks, and the ports; then `wanted`, if that is taken here.

    Until the sockets are closed, the system gives these ports to nobody who asks for any port. A rank can listen there
    all the same: both set SO_REUSEADDR, and nobody listens here (socket(7)). `wanted` is not held; 0: none is.
    """
    held, ports = [], []
    for port in (*[0] * count, *([wanted] if wanted else [])):
        one = socket.socket()
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("", port))
        except OSError:
            one.close()
            ports.append(port)
            continue
        if port:
            one.close()
        else:
            held.append(one)
            ports.append(one.getsockname()[1])
    return held, ports


def look_at_paths(paths: list[str]) -> dict[str, list[str]]:
    """Return for each path ["there"], ["missing", first missing part], ["empty", folder], ["hangs"] or an error."""
    looking = {path: _start(["sh", "-c", _LOOK, sys.executable, _LOOK_AT_PATH, path]) for path in paths}
    states = {}
    for path, child in looking.items():
        output = _outputs(child, _PATH_SECONDS * patience(_MOST_PATIENCE))
        states[path] = ["hangs"] if output is None else output[0].splitlines() or ["error", path, "cannot be looked at"]
    return states


def routes(peers: dict[str, str]) -> dict[str, dict[str, str]]:
    """Return how this host reaches each peer, in the form of mpitrain.facts; leave out what the system does not report.

    If the peer's address is one of this host's own, `taken` says where, in the words of `ip address`.
    """
    links = _ip_json(["address"])
    taken = {own.partition("/")[0]: f"{own} dev {link['ifname']}" for link in links for own in addresses(link)}
    by_peer = routes_of({name: _ip_json(["route", "get", peer]) for name, peer in peers.items()}, links)
    for name, peer in peers.items():
        if by_peer[name] and peer in taken and not ipaddress.ip_address(peer).is_loopback:
            by_peer[name]["taken"] = taken[peer]
    return {name: route for name, route in by_peer.items() if route}


def devices() -> dict[str, list[str]]:
    """Return the network interfaces, with their networks, and the RDMA devices; empty if the system reports none."""
    by_name = {
        link["ifname"]: [str(ipaddress.ip_interface(own).network) for own in addresses(link)]
        for link in _ip_json(["address"])
    }
    return {**by_name, **{name: [] for name in rdma_devices()}} if by_name else {}


def environment(
    python: str,
    script: str,
    variables: dict[str, str],
    probe: str,
    most_seconds: float = 0.0,
    tell: Callable[[float], None] = lambda waited: None,
) -> dict[str, Any]:
    """Return what the job's Python finds on this host with these variables, or {"error": reason}.

    It has `most_seconds`; 0: as long as others wait for the facts of a host. `tell` is called with the seconds so far,
    every 30 s.
    """
    # Run in the script's folder: the script itself looks for modules there first.
    settings = {"cwd": str(Path(script).parent), "env": {**os.environ, **variables}, "stderr": subprocess.PIPE}
    seconds = most_seconds or _PROBE_SECONDS * patience(_MOST_PATIENCE)
    output = _outputs(_start([python, "-c", probe, script], **settings), seconds, tell)
    if output is None:
        return {"error": f"{python} did not answer within {seconds:.3g} s"}
    said, words = list(MessageLines().take(output[0].encode() + b"\n")), output[1].strip().splitlines()
    if not said:  # other lines are of a start file of this Python
        return {"error": "{} failed: {}".format(python, words[-1] if words else "it said nothing")}
    return {**said[0], **(said[1] if len(said) > 1 else {"mpi_error": "the process that loaded it ended"})}


def _ip_json(arguments: list[str]) -> list[dict[str, Any]]:
    """Return the output of `ip`; nothing if it fails or is not installed."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"  # `ip` may be there, outside an ordinary user's PATH
    ip = _start(["ip", "-j", *arguments], env={**os.environ, "PATH": path})
    output = _outputs(ip, _ROUTE_SECONDS * patience(_MOST_PATIENCE))
    try:
        entries = json.loads(output[0] or "[]") if output else []
    except ValueError:
        return []
    return [entry for entry in entries if entry]


def _start(command: list[str], **settings: Any) -> subprocess.Popen[bytes] | None:
    try:
        return start_child(command, **{"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, **settings})
    except OSError:
        return None


def _outputs(
    child: subprocess.Popen[bytes] | None,
    timeout_seconds: float,
    tell: Callable[[float], None] = lambda waited: None,
) -> tuple[str, str] | None:
    """Return both output streams of a child; None if it did not end in time. A child that cannot be killed stays."""
    if child is None:
        return "", ""
    begun = time.monotonic()
    while (waited := time.monotonic() - begun) < timeout_seconds:
        if waited >= _TELL_SECONDS:
            tell(waited)
        try:
            # Not wait(): a child whose output does not fit into a pipe would never end.
            stdout, stderr = child.communicate(timeout=min(timeout_seconds - waited, _TELL_SECONDS))
        except subprocess.TimeoutExpired:
            continue
        return stdout.decode(errors="replace"), (stderr or b"").decode(errors="replace")
    os.killpg(child.pid, signal.SIGKILL)  # it may be a shell that waits for another program
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.communicate(timeout=1.0)
    return None
