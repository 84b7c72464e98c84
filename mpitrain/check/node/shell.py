"""The shells of a node: the one that mpiexec's ssh gives a job, that of a login, and the folders that a job needs."""

from __future__ import annotations

import json
import os
import pwd
import shlex
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

from mpitrain.check.node import children
from mpitrain.facts import OF_SOCKETS, user_name, why_no_programs, why_no_socket

SSH_SECONDS = 10.0
_SSH_FAILED = 255  # ssh's own failure; other codes come from the remote shell
_STARTUP_SECONDS = 5.0
MARK = "mpitrain-check:"
_SENT = "# mpitrain-check\n"  # input for the shell; its startup files must not read it

# Runs in that shell with the system's Python, so that settings of the shell for another Python do not matter.
_SHELL = """
import json, os, re, resource, shutil, sys
names = r"PATH|(?i:\\w+_proxy)|(OMPI|UCX|FI|I_MPI|NCCL|GLOO|HYDRA|PRTE|PMIX)_\\w+|LD_PRELOAD|LD_LIBRARY_PATH|PYTHONPATH"
names += "|OMP_NUM_THREADS"
def limit(which):
    return [None if most == resource.RLIM_INFINITY else most for most in resource.getrlimit(which)]
try:
    has_rdma = bool(os.listdir("/sys/class/infiniband"))
except OSError:
    has_rdma = False
print("MARK" + json.dumps({
    "limits": {"nofile": limit(resource.RLIMIT_NOFILE)[0], "nofile_hard": limit(resource.RLIMIT_NOFILE)[1],
               "memlock_bytes": limit(resource.RLIMIT_MEMLOCK)[0]},
    "has_rdma": has_rdma,
    "input": sys.stdin.read(),
    "environment": {name: value for name, value in sorted(os.environ.items()) if re.fullmatch(names, name)},
    "programs": {name: shutil.which(name) for name in ("mpiexec", "python")},
}))
""".replace("MARK", MARK)
MARK = "mpitrain-check:"
_LOGIN_SECONDS = 20.0
# The file that each shell reads last at a login; of several, the first that exists.
_LAST_READ = {
    "bash": (".bash_profile", ".bash_login", ".profile"),
    "sh": (".profile",),
    "dash": (".profile",),
    "zsh": (".zlogin",),
}


def shell(wish: dict[str, Any]) -> dict[str, Any]:
    """Return the properties of a job's shell, which is not a login shell: limits, variables, programs, and its output.

    `wish` has this node's "address"; without one, use the shell that started this agent. If the user cannot log in, the
    answer has only "refused", with ssh's words. If the login works but its shell runs no command, it also has
    "startup", the file that prevents it.
    """
    python = "/usr/bin/python3" if wish["address"] else sys.executable
    try:
        code, out, error = in_job(wish["address"], [python, "-I", "-c", _SHELL], SSH_SECONDS, _SENT)
    except children.SlowError as slow:
        return {"refused": f"does not end within {slow.seconds:.0f} s", "startup": startup()}
    noise, _, answer = out.partition(MARK)
    if not answer:
        refused = {"refused": ending(code, error, out)}
        return refused if code == _SSH_FAILED else {**refused, "startup": startup()}
    facts, rest = json.JSONDecoder().raw_decode(answer)
    swallowed_by = "" if facts.pop("input") == _SENT else startup() or "its shell"
    return {**facts, "noise": (noise + answer[rest:].lstrip("\n"))[:400], "swallowed_by": swallowed_by}


def ending(code: int, error: str, out: str) -> str:
    said = " ".join((error.strip() or out.strip()).splitlines()[-1:])
    return f"ended with code {code}" + (f": {said[:200]}" if said else ", without a message")


def _own_shell() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_shell
    except KeyError:  # a container may run as a number without a name
        return ""


def startup() -> str:
    """Return the file that makes bash, started as by sshd, run no command or take its input; empty if there is none.

    If SSH_CLIENT is set and no other shell is its parent, bash assumes a login through ssh, and reads both files.
    """
    own = _own_shell()
    if not own.endswith("/bash"):
        return ""
    for options, path in ((["--norc"], ""), (["--rcfile", "/dev/null"], "/etc/bash.bashrc"), ([], "~/.bashrc")):
        command = [own, *options, "-c", "cat"]
        environment = {"SSH_CLIENT": "127.0.0.1 1 22", "SHLVL": "0"}
        try:
            _, out, _ = children.run(command, _STARTUP_SECONDS, _SENT, environment, str(Path.home()))
        except children.SlowError:
            return path
        if not out.endswith(_SENT):
            return path
    return ""


def in_job(address: str, command: list[str], seconds: float, input: str | None = None) -> tuple[int, str, str]:
    """Run a command as mpiexec would start a rank here: through ssh, without a login shell; without an address,
    directly.

    On a single machine, mpiexec starts its ranks without ssh.
    """
    if not address:
        return children.run(command, seconds, input)
    # ssh must not ask, and must not share the connection of another command.
    options = ["-o", "BatchMode=yes", "-o", "ControlPath=none", "-o", "ConnectTimeout=8"]
    return children.run(["ssh", *options, "--", address, shlex.join(command)], seconds, input)


def temporary(wish: dict[str, Any]) -> dict[str, Any]:
    """Return why this user cannot use the folders of a job; empty if it can.

    `wish` has "is_here": a job on one machine has its socket elsewhere.
    """
    try:
        scripts = tempfile.gettempdir()
    except OSError as error:
        scripts, programs = "", error.strerror or str(error)
    else:
        programs = "" if wish["is_here"] else why_no_programs(scripts)
    folder = scripts if wish["is_here"] and scripts else OF_SOCKETS
    status = Path(folder).stat()
    mount = Path(scripts).resolve()
    while not mount.is_mount():
        mount = mount.parent
    return {
        "folder": folder,
        "socket": why_no_socket(folder),
        "mode": f"{stat.S_IMODE(status.st_mode):04o}",
        "owner": user_name(status.st_uid) or str(status.st_uid),
        "scripts": scripts,
        "mount": str(mount),
        "programs": programs,
    }


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
    looks = "; ".join(f"echo {MARK}$(command -v {name})" for name in wish["names"])
    code, out, error = children.run([*clean, shell, "-lic", f"unalias -a; {looks}"], _LOGIN_SECONDS)
    lines = [line.partition(MARK)[2].strip() for line in out.splitlines() if MARK in line]
    if len(lines) != len(wish["names"]):
        said = " ".join((error.strip() or out.strip()).splitlines()[-1:])
        raise OSError(f"a login shell ended with code {code}: {said[:200]}")
    answer["programs"] = dict(zip(wish["names"], lines))  # noqa: B905 (strict is of Python 3.10)
    return answer


CALLS = {"shell": shell, "temporary": temporary, "login_shell": login_shell}
