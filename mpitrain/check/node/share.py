"""The shared folder as this node sees it. Only children with a deadline access it, because an access may hang."""

from __future__ import annotations

import json
import re
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from mpitrain import facts
from mpitrain.check.node import children
from mpitrain.check.node.machine import resolve

_TOUCH_SECONDS = 5.0
_VISIBLE_SECONDS = 5.0
_NFS_PORT = 2049
_NFS_PROGRAM = 100003
_CALL_SECONDS = 6.0

# Each script runs in its own Python with the folder as its first argument, and prints one JSON value.
_BEGIN = """
import errno, json, os, sys, time
share, *rest = sys.argv[1:]
started = time.monotonic()
def tell(value):
    print(json.dumps(value), flush=True)
"""
_KIND = """
try:
    os.stat(os.path.join(share, "."))  # this brings an automount to mount
    tell({"kind": "folder" if os.path.isdir(share) else "file", "why": ""})
except OSError as error:
    tell({"kind": "missing" if error.errno == errno.ENOENT else "folder", "why": error.strerror})
"""
_LIST = """
try:
    os.listdir(share)
    tell({"seconds": time.monotonic() - started, "why": ""})
except OSError as error:
    tell({"seconds": time.monotonic() - started, "why": error.strerror, "code": errno.errorcode.get(error.errno, "")})
"""
_ROOM = """
room = os.statvfs(share)
tell({"bytes": room.f_blocks * room.f_frsize, "free_bytes": room.f_bavail * room.f_frsize, "files": room.f_files,
      "free_files": room.f_favail})
"""
# Each run has its own folder directly in the shared folder. The first run to end would remove a common parent folder.
_WRITE = """
folder = os.path.join(share, ".mpitrain-check-" + rest[0])
content = os.urandom(2048).hex()
done = "making a folder"
why, code = "", ""
try:
    os.mkdir(folder)
    path = os.path.join(folder, "file")
    done = "writing a file"
    with open(path, "x") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    done = "reading it back"
    with open(path) as file:
        if file.read() != content:
            why = "other content than was written"
    done = "removing it" if not why else done
    os.unlink(path)
except OSError as error:
    why, code = error.strerror, errno.errorcode.get(error.errno, "")
for remove, what in ((os.unlink, os.path.join(folder, "file")), (os.rmdir, folder)):
    try:
        remove(what)
    except OSError:
        pass
tell({"doing": done, "why": why, "code": code, "uid": os.geteuid()})
"""
_STEP = """
action, run, token = rest
folder = os.path.join(share, ".mpitrain-check-" + run)
path = os.path.join(folder, "token")
def content():
    with open(path) as file:
        return file.read()
if action == "begin":
    os.mkdir(folder)
    tell("")
elif action == "miss":  # from now on this node may believe for a while that there is no such file
    tell(os.path.exists(path))
elif action == "write":
    with open(path, "x") as file:
        file.write(token)
        file.flush()
        os.fsync(file.fileno())
    tell("")
elif action == "wait":
    by_name = listed = None
    while time.monotonic() - started < SECONDS and (by_name is None or listed is None):
        if by_name is None and os.path.exists(path):
            by_name = time.monotonic() - started
        if listed is None and "token" in os.listdir(folder):
            listed = time.monotonic() - started
            same = content() == token
        time.sleep(0.02)
    tell({"by_name_seconds": by_name, "listed_seconds": listed, "is_same": listed is not None and same})
elif action == "end":
    for remove, what in ((os.unlink, path), (os.rmdir, folder)):
        try:
            remove(what)
        except OSError:
            pass
    tell("")
""".replace("SECONDS", str(_VISIBLE_SECONDS - 1.5))


def _ask(script: str, *arguments: str, seconds: float = _TOUCH_SECONDS, as_root: bool = False) -> Any:
    """Run one of the scripts. Return {"slow": seconds} if it does not end."""
    command = [sys.executable, "-I", "-c", _BEGIN + script, *arguments]
    try:
        code, out, error = children.run((["sudo", "-n"] if as_root else []) + command, seconds)
    except children.SlowError as slow:
        return {"slow": round(slow.seconds)}
    if code != 0:
        raise RuntimeError(" ".join(error.strip().splitlines()[-1:]) or f"a child ended with code {code}")
    return json.loads(out)


def mount(wish: dict[str, Any]) -> dict[str, Any]:
    """Access wish["share"], which triggers an automount; return what is mounted there, and how it would come back.

    `mounts` are the mounts of the path, the last one on top; if it has none, the mount in which it lies.
    """
    share = wish["share"]
    # The shared user's home may be closed to the user of the login.
    try:
        touched = _ask(_KIND, share, as_root=children.as_root("true") is not None)
    except RuntimeError as error:
        touched = {"kind": "unknown", "why": str(error)}
    mounts = facts.mounts(share)
    is_nfs = bool(mounts) and "nfs" in mounts[-1]["type"]
    at = mounts[-1]["path"] if is_nfs else share  # the path may be a folder of a larger share
    unit = children.output("systemd-escape", "--path", at).strip()
    states = {}
    for kind in ("automount", "mount"):
        shown = children.output(
            "systemctl", "show", "-p", "LoadState,UnitFileState,ActiveState,FragmentPath", f"{unit}.{kind}"
        )
        states[kind] = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    # A replacement for NFS, such as a FUSE client, does not show its options.
    given = re.search(r"(?m)^Options=(.*)$", facts.text(states["mount"].get("FragmentPath", "") or "/dev/null"))
    return {
        **touched,
        "mounts": mounts,
        "server_addresses": _server_addresses(mounts[-1]["source"]) if is_nfs else [],
        "units": states,
        "unit_options": given[1].split(",") if given else [],
        "fstab": _fstab(at),
    }


def _server_addresses(source: str) -> list[str]:
    server = source.rpartition(":")[0].strip("[]")
    return resolve([server])[server] or [] if server else []


def _fstab(share: str) -> list[str]:
    """Return the options of the shared folder in /etc/fstab; none if it has no line there."""
    for line in facts.text("/etc/fstab").splitlines():
        words = line.split()
        if len(words) >= 4 and not words[0].startswith("#") and words[1].rstrip("/") == share.rstrip("/"):
            return [str(word) for word in words[3].split(",")]
    return []


def use(wish: dict[str, Any]) -> dict[str, Any]:
    """List the shared folder, query its free space, write and read back, as the user of this agent. Stop at the first
    hang.
    """
    answers = {"list": _ask(_LIST, wish["share"])}
    if answers["list"].get("seconds", 0.0) > 1.0:  # the first listing may have waited for an automount
        answers["list"] = _ask(_LIST, wish["share"])
    for name, script, arguments in (("room", _ROOM, ()), ("write", _WRITE, (wish["run"],))):
        before = list(answers.values())[-1]
        if "slow" in before or answers["list"].get("why"):
            break
        folder = _folder(wish)
        children.makes(folder)
        answers[name] = _ask(script, wish["share"], *arguments)
        if "slow" not in answers[name]:
            children.removed(folder)
    return answers


def _folder(wish: dict[str, Any]) -> str:
    return "{share}/.mpitrain-check-{run}".format(**wish)


def step(wish: dict[str, Any]) -> Any:
    """Run one step of a file's transfer between nodes: begin, miss, write, wait, end. Return why it failed, if it
    did."""
    if wish["action"] == "begin":
        children.makes(_folder(wish))
    try:
        answer = _ask(
            _STEP, wish["share"], wish["action"], wish["run"], wish.get("token", ""), seconds=_VISIBLE_SECONDS
        )
    except RuntimeError as error:
        return {"why": str(error)}
    if wish["action"] == "end" and answer == "":
        children.removed(_folder(wish))
    return answer


def serving(_wish: dict[str, Any]) -> dict[str, Any]:
    """Return what the head serves: its export table, read as root, and its server.

    "exports" is None if sudo may not be used; it is empty if there is no exportfs.
    """
    may_ask = children.as_root("true") is not None
    table = (children.as_root("exportfs", "-s") if may_ask else None) or ""
    lines = [line.split(None, 1) for line in table.splitlines() if line.startswith("/")]
    states = {}
    for unit in ("nfs-server", "nfs-kernel-server"):
        shown = children.output("systemctl", "show", "-p", "LoadState,ActiveState,UnitFileState", f"{unit}.service")
        states[unit] = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    known = next((state for state in states.values() if state.get("LoadState") == "loaded"), {})
    exports = []
    for path, clients in (line for line in lines if len(line) == 2):
        for client, options in re.findall(r"(\S+)\(([^)]*)\)", clients):
            exports.append({"path": path, "client": client, "options": options.split(",")})
    return {
        "exports": exports if may_ask else None,
        "server": known.get("ActiveState", "missing"),
        "enabled": known.get("UnitFileState", ""),
        "is_listening": bool(_listeners()),
        "answers": _answers(),
    }


def _answers() -> bool | None:
    """True if this machine's server answers an empty call (RFC 5531); None if nothing accepts the connection."""
    # Number, call, version of RPC, NFS, its version, NULL; then no credentials and no verifier.
    call = struct.pack(">10I", 1, 0, 2, _NFS_PROGRAM, 3, 0, 0, 0, 0, 0)
    is_connected = False
    try:
        with socket.create_connection(("127.0.0.1", _NFS_PORT), _CALL_SECONDS) as connection:
            is_connected = True
            connection.settimeout(_CALL_SECONDS)
            connection.sendall(struct.pack(">I", 1 << 31 | len(call)) + call)
            return bool(connection.recv(4))
    except (TimeoutError, socket.timeout):  # noqa: UP041 (the same from Python 3.10 only)
        # A firewall on this machine drops its own connections too. A frozen server's connections wait in its queue.
        return False if is_connected or any(_listeners()) else None
    except OSError:
        return None


def _listeners() -> list[int]:
    """Return how many connections wait for the server at each of its sockets that listen (proc_net_tcp)."""
    sockets = facts.text("/proc/net/tcp") + facts.text("/proc/net/tcp6")
    return [
        int(queue, 16) for queue in re.findall(rf":{_NFS_PORT:04X} [0-9A-F]+:0000 0A [0-9A-F]+:([0-9A-F]+) ", sockets)
    ]


def speed(wish: dict[str, Any]) -> dict[str, float]:
    """Write and remove a file of `bytes` and 100 small ones in `folder`, in a child, so that only the child hangs if
    the server is dead."""
    folder = Path(wish["folder"])
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "folder, count = Path(sys.argv[1]), int(sys.argv[2])\n"
        "folder.mkdir()\n"
        "block = os.urandom(1 << 20)\n"
        "started = time.perf_counter()\n"
        "with open(folder / 'large', 'wb') as file:\n"
        "    for _ in range(count >> 20):\n"
        "        file.write(block)\n"
        "    file.flush()\n"
        "    os.fsync(file.fileno())\n"
        "print(count / (time.perf_counter() - started))\n"
        "started = time.perf_counter()\n"
        "for number in range(100):\n"
        "    (folder / str(number)).write_text('x')\n"
        "print(100 / (time.perf_counter() - started))\n"
    )
    children.makes(str(folder))
    try:
        ended, out, err = children.run(["/usr/bin/python3", "-c", code, str(folder), str(wish["bytes"])], 25.0)
    finally:
        children.run(["rm", "-rf", str(folder)], 10.0)
        children.removed(str(folder))
    if ended != 0:
        raise OSError(err.strip().splitlines()[-1] if err.strip() else "writing failed")
    rate, files = out.split()
    return {"bytes_per_second": float(rate), "files_per_second": float(files)}


CALLS = {"share_mount": mount, "share_use": use, "share_step": step, "share_serving": serving, "share speed": speed}
