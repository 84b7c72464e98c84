"""The needs of a node on which jobs are started: folders for the job's files, and the programs that a user types."""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
import types
from pathlib import Path
from typing import Any

from mpitrain.diagnostics.node import children

_MARK = "mpitrain-check:"
_LOGIN_SECONDS = 20.0
# The file that each shell reads last at a login; of several, the first that exists.
_LAST_READ = {
    "bash": (".bash_profile", ".bash_login", ".profile"),
    "sh": (".profile",),
    "dash": (".profile",),
    "zsh": (".zlogin",),
}


def temporary(wish: dict[str, Any]) -> dict[str, Any]:
    """Return why this user cannot use the folders of a job; empty if it can.

    `wish` has "folders" (the text of launch/folders.py) and "is_here": a job on one machine has its socket elsewhere.
    """
    folders = types.ModuleType("folders")
    exec(wish["folders"], folders.__dict__)
    try:
        scripts = tempfile.gettempdir()
    except OSError as error:
        scripts, programs = "", error.strerror or str(error)
    else:
        programs = "" if wish["is_here"] else folders.why_no_programs(scripts)
    folder = scripts if wish["is_here"] and scripts else folders.OF_SOCKETS
    status = Path(folder).stat()
    mount = Path(scripts).resolve()
    while not mount.is_mount():
        mount = mount.parent
    return {
        "folder": folder,
        "socket": folders.why_no_socket(folder),
        "mode": f"{stat.S_IMODE(status.st_mode):04o}",
        "owner": _name(status.st_uid),
        "scripts": scripts,
        "mount": str(mount),
        "programs": programs,
    }


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def login_shell(wish: dict[str, Any]) -> dict[str, Any]:
    """Return the programs that a login of this user gets by their names.

    `wish` has "commands", the folder that set-up puts first into PATH, and "names" of programs. "programs" is None for
    an unknown shell.
    """
    entry = pwd.getpwuid(os.getuid())
    shell = entry.pw_shell or "/bin/sh"
    last_read = _LAST_READ.get(Path(shell).name)
    answer: dict[str, Any] = {
        "shell": shell,
        "is_set_up": Path(wish["commands"]).is_dir(),
        "has_profile": Path("/etc/profile.d/mpitrain.sh").is_file(),
        "programs": None,
    }
    if last_read is None:
        return answer
    home = Path(entry.pw_dir)
    last = next((name for name in last_read if (home / name).is_file()), last_read[-1])
    answer["last_read"] = str(home / last)
    # Interactive, because conda changes only such shells; and with no variable of the shell that started the agent.
    settings = {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name, "SHELL": shell, "TERM": "dumb"}
    clean = ["env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin", *(f"{name}={value}" for name, value in settings.items())]
    looks = "; ".join(f"echo {_MARK}$(command -v {name})" for name in wish["names"])
    code, out, error = children.run([*clean, shell, "-lic", f"unalias -a; {looks}"], _LOGIN_SECONDS)
    lines = [line.partition(_MARK)[2].strip() for line in out.splitlines() if _MARK in line]
    if len(lines) != len(wish["names"]):
        said = " ".join((error.strip() or out.strip()).splitlines()[-1:])
        raise OSError(f"a login shell ended with code {code}: {said[:200]}")
    answer["programs"] = dict(zip(wish["names"], lines))  # noqa: B905 (strict is of Python 3.10)
    return answer


CALLS = {"temporary": temporary, "login_shell": login_shell}
