"""What a node says of its network and its ssh: interfaces, routes, keys, settings; and tries of the way to another."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shlex
import socket
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpitrain.diagnostics.cluster.node import children

_SETTINGS = "/etc/ssh/sshd_config.d"
_CONNECT_SECONDS = 3.0
_ECHOES = 20
_LARGE_BYTES = 1 << 17
_NO_ANSWER = re.compile(r"100% packet loss|, 0 received")
# What ssh writes to stderr, and what kind of failure that is.
_SSH_SAYS = (
    ("unprotected private key|bad permissions", "mode"),
    ("identification has changed|host key verification failed|no .* host key is known", "host key"),
    ("permission denied", "key"),
    ("could not resolve|name or service not known", "name"),
    ("timed out", "timeout"),
    ("connection refused", "refused"),
    ("no route to host|network is unreachable", "unreachable"),
    ("connection reset|connection closed|kex_exchange_identification", "reset"),
)


def network(wish: dict[str, Any]) -> dict[str, Any]:
    """The interfaces, and the route to each of `peers` (name -> address)."""
    interfaces = {}
    for link in _ip_json("address"):
        name = link["ifname"]
        folder = "/sys/class/net/" + name
        speed = children.text(folder + "/speed").strip()
        interfaces[name] = {
            "is_up": "UP" in link["flags"],
            "is_running": "LOWER_UP" in link["flags"],
            "mtu_bytes": link["mtu"],
            "addresses": [
                "{}/{}".format(one["local"], one["prefixlen"]) for one in link.get("addr_info", []) if "local" in one
            ],
            # Made anew every day, to hide who it is.
            "temporary": [one["local"] for one in link.get("addr_info", []) if one.get("temporary")],
            "speed_mbit": int(speed) if speed.isdigit() else None,
            "duplex": children.text(folder + "/duplex").strip(),
        }
    return {
        "interfaces": interfaces,
        "routes": {name: _route(address, interfaces) for name, address in wish["peers"].items()},
        "rdma": sorted(path.name for path in Path("/sys/class").glob("infiniband/*")),
        "firewall": _firewall(),
    }


def _ip_json(*arguments: str) -> list[dict[str, Any]]:
    code, out, _err = children.run(["ip", "-j", *arguments])
    if code == 127:
        raise OSError("there is no program ip: it is in the package iproute2")
    try:
        return [entry for entry in json.loads(out or "[]") if entry]
    except ValueError:
        return []


def _route(address: str, interfaces: dict[str, Any]) -> dict[str, str]:
    """By which interface the peer is reached, from which address and network; empty where there is no route."""
    for route in _ip_json("route", "get", address)[:1]:
        name, source = route.get("dev", ""), route.get("prefsrc", "")
        found = {"interface": name, "source": source, "gateway": route.get("gateway", "")}
        for own in interfaces.get(name, {}).get("addresses", []):
            if own.split("/")[0] == source:
                found["network"] = str(ipaddress.ip_interface(own).network)
        return found
    return {}


def _firewall() -> str:
    """What filters packets here, as far as it can be seen; empty if nothing does."""
    if re.search(r"^ENABLED=yes", children.text("/etc/ufw/ufw.conf"), re.M):
        return "ufw"
    if children.output("systemctl", "is-active", "firewalld").strip() == "active":
        return "firewalld"
    rules = children.as_root("nft", "list", "ruleset") or ""
    return "nftables" if re.search(r"\b(drop|reject)\b", rules) else ""


def counters(wish: dict[str, Any]) -> dict[str, dict[str, int]]:
    """By how much each interface's counters of errors rose within `seconds`."""
    before = _counters()
    time.sleep(wish["seconds"])
    after = _counters()
    return {
        name: {what: count - before[name][what] for what, count in found.items()}
        for name, found in after.items()
        if name in before
    }


def _counters() -> dict[str, dict[str, int]]:
    names = ("rx_errors", "tx_errors", "rx_crc_errors", "collisions")
    return {
        folder.name: {name: int(children.text(f"{folder}/statistics/{name}") or 0) for name in names}
        for folder in Path("/sys/class/net").iterdir()
        if (folder / "statistics").is_dir()
    }


def ports(_wish: dict[str, Any]) -> dict[str, str]:
    """The TCP ports that something listens on, each with the program, where that can be seen."""
    found = {}
    for line in (children.as_root("ss", "-Hltnp") or children.output("ss", "-Hltn")).splitlines():
        fields = line.split()
        program = re.search(r'"([^"]+)",pid=(\d+)', line)
        found[fields[3].rpartition(":")[2]] = "{} (pid {})".format(*program.groups()) if program else ""
    return found


def ssh_server(wish: dict[str, Any]) -> dict[str, Any]:
    """What sshd's settings come to: for all, for the shared `user`, for root; and who "sets" each: [file, value]."""
    found: dict[str, Any] = {"is_known": True, "sets": {}}
    who = {"all": [], "user": ["-C", "user={user},host={peer},addr={peer}".format(**wish)]}
    who["root"] = ["-C", "user=root,host={peer},addr={peer}".format(**wish)]
    for name, options in who.items():
        out = children.as_root("sshd", "-T", *options)
        if out is None:
            return {"is_known": False}
        found[name] = dict((line.split(" ", 1) + [""])[:2] for line in out.splitlines())
    files = sorted(Path(_SETTINGS).glob("*.conf")) + [Path("/etc/ssh/sshd_config")]
    for path in files:
        for line in (children.as_root("cat", str(path)) or "").splitlines():
            word, _, value = line.strip().partition(" ")
            if word and not word.startswith("#"):
                found["sets"].setdefault(word.lower(), []).append([str(path), value.strip()])
    return found


def ssh_keys(wish: dict[str, Any]) -> dict[str, Any]:
    """The private keys that this user offers on the way to `peer`."""
    asked = children.output("ssh", "-G", wish["peer"])
    paths = [Path(line.split(" ", 1)[1]).expanduser() for line in asked.splitlines() if line.startswith("identityfile")]
    found = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        words = children.output("ssh-keygen", "-lf", str(path)).split()
        found.append(
            {
                "path": str(path),
                "mode": f"{stat.S_IMODE(status.st_mode):04o}",
                "is_own": status.st_uid == os.getuid(),
                "is_readable": os.access(str(path), os.R_OK),
                "bits": int(words[0]) if words else 0,
                "fingerprint": words[1] if words else "",
                "kind": words[-1].strip("()") if words else "",
            }
        )
    home = Path.home()
    places = [place for place in (home, home / ".ssh") if place.exists()]
    loose = [str(place) for place in places if place.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)]
    return {"offers": [str(path) for path in paths], "keys": found, "writable_by_others": loose}


def log_in(wish: dict[str, Any]) -> dict[str, Any]:
    """`ssh peer true` as jobs do it."""
    started = time.monotonic()
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", wish["peer"], "true"]
    try:
        code, _out, err = children.run(command, 8.0)
    except children.SlowError:
        return {"failed": "timeout", "found": "the login hangs", "seconds": time.monotonic() - started}
    seconds = time.monotonic() - started
    if code == 0:
        return {"failed": "", "found": "", "seconds": seconds}
    kind = next((kind for pattern, kind in _SSH_SAYS if re.search(pattern, err, re.I)), "other")
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    return {"failed": kind, "found": lines[-1] if lines else f"exit code {code}", "seconds": seconds}


def listen(wish: dict[str, Any]) -> int:
    """Take a connection at a port for `seconds`: of `range` (low, high) if one is given and free; returns the port."""
    low, high = wish.get("range") or (0, -1)
    family, *_, own = socket.getaddrinfo(wish["address"], None, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family)
    for port in [*range(low, high + 1), 0]:
        with suppress(OSError):
            server.bind((own[0], port, *own[2:]))
            break
    server.listen(8)
    server.settimeout(wish["seconds"])
    threading.Thread(target=_serve, args=(server,), daemon=True).start()
    port_number: int = server.getsockname()[1]
    return port_number


def _serve(server: socket.socket) -> None:
    """One connection: of what comes, `e` + bytes are sent back, `s` + a length are swallowed and acknowledged."""
    with server, suppress(OSError):
        connection, _ = server.accept()
        with connection:
            connection.settimeout(10.0)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            mode = connection.recv(1)
            buffer = bytearray(1 << 20)
            while mode == b"e":
                data = connection.recv(1 << 16)
                if not data:
                    return
                connection.sendall(data)
            while mode == b"s":
                left = int.from_bytes(receive(connection, 8), "big")
                while left:
                    count = connection.recv_into(buffer, min(left, len(buffer)))
                    if not count:
                        return
                    left -= count
                connection.sendall(b"k")


def receive(connection: socket.socket, count: int) -> bytes:
    """Exactly that many bytes."""
    data = b""
    while len(data) < count:
        part = connection.recv(min(count - len(data), 1 << 16))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data


def connect(address: str, port: int, mode: bytes) -> socket.socket:
    """A connection to what `listen` opened."""
    connection = socket.create_connection((address, port), _CONNECT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(mode)
    return connection


def reach(wish: dict[str, Any]) -> dict[str, Any]:
    """Whether a connection to `port` comes about, how long small messages take there and back, and if large ones do."""
    found: dict[str, Any] = {"connect": "ok", "found": ""}
    try:
        try:
            connection = connect(wish["address"], wish["port"], b"e")
        except (TimeoutError, socket.timeout):  # noqa: UP041 (as below): one try proves nothing
            connection = connect(wish["address"], wish["port"], b"e")
    except (TimeoutError, socket.timeout):  # noqa: UP041 (the same from Python 3.10 only)
        return {"connect": "timeout", "found": f"twice no answer within {_CONNECT_SECONDS:g} s"}
    except ConnectionRefusedError as error:
        return {"connect": "refused", "found": error.strerror}
    except OSError as error:
        return {"connect": "unreachable", "found": error.strerror or str(error)}
    with connection:
        try:
            found["round_trips_seconds"] = [round_trip(connection, 64) for _ in range(_ECHOES)]
        except OSError as error:
            return {"connect": "lost", "found": str(error)}
        # Sent by a thread: what comes back must be taken meanwhile.
        sender = threading.Thread(target=_send, args=(connection, bytes(_LARGE_BYTES)), daemon=True)
        sender.start()
        found["large_bytes"] = 0
        with suppress(OSError):
            while found["large_bytes"] < _LARGE_BYTES:
                found["large_bytes"] += len(connection.recv(1 << 16)) or _LARGE_BYTES
        found["large_is_complete"] = found["large_bytes"] == _LARGE_BYTES
    return found


def round_trip(connection: socket.socket, count: int) -> float:
    """How long `count` bytes take there and back."""
    started = time.perf_counter()
    connection.sendall(bytes(count))
    receive(connection, count)
    return time.perf_counter() - started


def _send(connection: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        connection.sendall(data)


def ping(wish: dict[str, Any]) -> dict[str, Any]:
    """Whether packets of the route's full size (`mtu_bytes`) get there whole, and if not, whether small ones do."""
    payload_bytes = wish["mtu_bytes"] - (48 if ":" in wish["address"] else 28)  # without the headers of IP and ICMP
    large = _ping(wish["address"], payload_bytes, 1)
    if large is False:  # one may get lost
        large = _ping(wish["address"], payload_bytes, 2)
    small = True if large else _ping(wish["address"], 56, 2)
    return {"large": large, "small": small}


def _ping(address: str, payload_bytes: int, count: int) -> bool | None:
    """Whether any comes back; None where it cannot be tried."""
    options = ["-n", "-M", "do", "-i", "0.3", "-W", "1", "-c", str(count), "-s", str(payload_bytes)]
    code, out, _err = children.run(["ping", *options, address], count * 2.0 + 1.0)
    return None if code == 127 or "packets transmitted" not in out else not _NO_ANSWER.search(out)


def variables(_wish: dict[str, Any]) -> dict[str, str]:
    """What a login shell of this user has in its environment to choose networks and ports."""
    shell = os.environ.get("SHELL", "/bin/sh")
    out = children.output(shell, "-lc", shlex.join(["env", "-0"]))
    found = dict(entry.split("=", 1) for entry in out.split("\0") if "=" in entry)
    chosen = re.compile(r"(UCX|FI|OMPI_MCA|PRTE_MCA|I_MPI|HYDRA|NCCL|GLOO|MPIEXEC)_\w+")
    return {name: value for name, value in found.items() if chosen.fullmatch(name)}


CALLS = {
    "network": network,
    "counters": counters,
    "ports": ports,
    "ssh server": ssh_server,
    "ssh keys": ssh_keys,
    "log in": log_in,
    "listen": listen,
    "reach": reach,
    "ping": ping,
    "variables": variables,
}
