"""The ssh of a node: the settings of sshd, the keys of the user, and a login to another node."""

from __future__ import annotations

import os
import re
import stat
import time
from pathlib import Path
from typing import Any

from mpitrain import facts
from mpitrain.check.node import children

_LET_IN = "/etc/ssh/mpitrain/authorized_keys"
_SETTINGS = "/etc/ssh/sshd_config.d"
# Patterns of ssh's messages on stderr, and the kind of failure that each means.
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


def ssh_server(wish: dict[str, Any]) -> dict[str, Any]:
    """Return sshd's effective settings, for all and for some users, and the file that "sets" each: [file, value].

    The users are the shared user, root, and "own", the user of the login. "startups" is where the sshd that runs begins
    to drop logins, by its command line or by files as they were when it read them; None if it does not say.
    """
    settings: dict[str, Any] = {"is_known": True, "sets": {}, "startups": _startups()}
    users = {"user": wish["user"], "root": "root", "own": facts.own_user()}
    from_peer = "host={peer},addr={peer}".format(**wish)
    connections: dict[str, list[str]] = {"all": []}
    connections.update({name: ["-C", f"user={user},{from_peer}"] for name, user in users.items()})
    for name, options in connections.items():
        out = children.as_root("sshd", "-T", *options)
        if out is None:
            return {"is_known": False}
        settings[name] = facts.sshd_settings(out)
    files = sorted(Path(_SETTINGS).glob("*.conf")) + [Path("/etc/ssh/sshd_config")]
    for path in files:
        for line in (children.as_root("cat", str(path)) or "").splitlines():
            setting = re.match(r"\s*(\w+)[\s=]+(.*)", line)
            if setting:
                settings["sets"].setdefault(setting[1].lower(), []).append([str(path), setting[2].strip()])
    return settings


def _startups() -> int | None:
    """Return at how many logins at once the running sshd begins to drop some: newer ones have that in their title."""
    numbers = children.output("systemctl", "show", "--value", "--property=MainPID", "ssh", "sshd").split()
    titles = (facts.text(f"/proc/{number}/cmdline") for number in numbers if number != "0")
    says = next(filter(None, (re.search(r"\[listener\] \d+ of (\d+)-\d+ startups", title) for title in titles)), None)
    return int(says[1]) if says else None


def ssh_keys(wish: dict[str, Any]) -> dict[str, Any]:
    """Return the private keys that this user offers to `peer`."""
    asked = children.output("ssh", "-G", wish["peer"])
    paths = [Path(line.split(" ", 1)[1]).expanduser() for line in asked.splitlines() if line.startswith("identityfile")]
    keys = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        words = children.output("ssh-keygen", "-lf", str(path)).split()
        keys.append(
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
    # The file that set-up writes; ssh-keygen shows a line for each key in it.
    let_in = [line.split()[1] for line in children.output("ssh-keygen", "-lf", _LET_IN).splitlines() if " " in line]
    offers = [str(path) for path in paths]
    return {"offers": offers, "keys": keys, "writable_by_others": loose, "loose": _loose(), "let_in": let_in}


def _loose() -> list[str]:
    """Return the paths, among set-up's keys and lists of the shared user and their folder, that others may write."""
    folder = Path("/etc/ssh/mpitrain")
    try:
        # A private key is judged more strictly.
        paths = [folder, *(path for path in sorted(folder.iterdir()) if path.name != "id_ed25519")]
        return [str(path) for path in paths if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)]
    except OSError:
        return []


def log_in(wish: dict[str, Any]) -> dict[str, Any]:
    """Run `ssh peer true` as jobs do; if it takes too long, as on a busy machine, once more."""
    answer = _log_in(wish["peer"])
    return _log_in(wish["peer"]) if answer["failed"] == "timeout" else answer


def _log_in(peer: str) -> dict[str, Any]:
    started = time.monotonic()
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", peer, "true"]
    try:
        code, _out, err = children.run(command, 8.0)
    except children.SlowError:
        return {"failed": "timeout", "found": "the login hangs", "seconds": time.monotonic() - started}
    seconds = time.monotonic() - started
    if code == 0:
        return {"failed": "", "found": "", "seconds": seconds, "patience": children.patience()}
    kind = next((kind for pattern, kind in _SSH_SAYS if re.search(pattern, err, re.I)), "other")
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    return {"failed": kind, "found": lines[-1] if lines else f"exit code {code}", "seconds": seconds}


CALLS = {"ssh server": ssh_server, "ssh keys": ssh_keys, "log in": log_in}
