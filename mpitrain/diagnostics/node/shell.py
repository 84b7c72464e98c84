"""The shell that mpiexec's ssh gives a job on this node: what it is like, and how a command runs in it."""

from __future__ import annotations

import json
import os
import pwd
import shlex
import sys
from pathlib import Path
from typing import Any

from mpitrain.diagnostics.node import children

SSH_SECONDS = 10.0
_SSH_FAILED = 255  # by ssh itself; what the far shell ends with is passed on
_STARTUP_SECONDS = 5.0
MARK = "mpitrain-check:"
_SENT = "# mpitrain-check\n"  # to the shell, whose startup files are not to read it

# Runs in that shell, by the system's Python: whatever the shell's own setting does to another one is to be seen here.
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


def shell(wish: dict[str, Any]) -> dict[str, Any]:
    """What the shell of a job is like, which is not a login shell: limits, variables, programs, and what it prints.

    `wish` has this node's "address"; without one it is the shell that this agent was started by. Where the user cannot
    log in there is "refused" alone, with ssh's words; where the login came about and its shell ran no command, it has
    "startup" too, the file that keeps it from doing so.
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
    return f"ended with code {code}" + (f": {said[:200]}" if said else ", without a word")


def _own_shell() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_shell
    except KeyError:  # a container may run as a number without a name
        return ""


def startup() -> str:
    """The file because of which bash, begun as sshd begins it, runs no command or takes its input; empty if none does.

    Bash takes one that has SSH_CLIENT, and is no other shell's child, for a login by ssh, and reads both files.
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
    """Run a command as mpiexec would start a rank here: through ssh, without a login shell; or, without an address, so.

    On one machine mpiexec starts its ranks without ssh.
    """
    if not address:
        return children.run(command, seconds, input)
    # No word is asked for, and the connection of another command is not shared.
    options = ["-o", "BatchMode=yes", "-o", "ControlPath=none", "-o", "ConnectTimeout=8"]
    return children.run(["ssh", *options, "--", address, shlex.join(command)], seconds, input)


CALLS = {"shell": shell}
