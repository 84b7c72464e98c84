"""The shell that mpiexec's ssh gives a job on this node: its properties, and how to run a command in it."""

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
    return f"ended with code {code}" + (f": {said[:200]}" if said else ", without a word")


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


CALLS = {"shell": shell}
