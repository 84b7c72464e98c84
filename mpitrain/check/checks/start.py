"""The start of a job by `mpitrain run`: folders, the programs that a user types, the inventory, the script."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import PurePosixPath

from mpitrain.check.check import (
    BY_SSH,
    IN_JOB,
    ON_SHARE,
    Ask,
    Check,
    Finding,
    NotHereError,
    NotSeenError,
    Seen,
    Verdict,
    over_ssh,
    through_ssh,
)

# The folder in which set-up puts the commands of the environment.
_COMMANDS = "/usr/local/lib/mpitrain/bin"
_PROGRAMS = ("mpitrain", "python", "mpiexec")


def _folders(seen: Seen, name: str) -> Iterator[Finding]:
    temporary = seen.node(name, "temporary")
    folder, user = temporary["folder"], seen.target.user
    if why := temporary["socket"]:
        text = f"{user} cannot make a file in {folder}, of {temporary['owner']}, mode {temporary['mode']}: {why}"
        opened = over_ssh("{login}", "sudo", "chmod", "1777", folder)
        look = over_ssh("{login}", "findmnt", "-T", folder)
        denied = os.strerror(errno.EACCES)
        yield Finding("fail", text, "mode 1777, for all users", opened if why == denied else look)
    elif why := temporary["programs"]:
        # A job starts on one node; the others run no program from the folder.
        text = f"programs in {temporary['scripts'] or 'a temporary folder'} cannot be run: {why}"
        mount = over_ssh("{login}", "sudo", "mount", "-o", "remount,exec", temporary["mount"])
        remedy = f"{mount}  # and the same in /etc/fstab, if it is there; or TMPDIR"
        verdict: Verdict = "fail" if name == seen.target.head else "warn"
        yield Finding(verdict, text, "a folder without noexec on the node that starts jobs", remedy)


def _typed(seen: Seen, name: str) -> Iterator[Finding]:
    login = seen.node(name, "login shell")
    if not login["is_set_up"]:
        raise NotHereError("cluster/setup.yml did not put commands there")
    if login["programs"] is None:
        raise NotHereError(f"how {login['shell']} starts is not known")
    allowed = (_COMMANDS, f"{seen.target.venv}/bin")
    wrong = {program: path for program, path in login["programs"].items() if path.rpartition("/")[0] not in allowed}
    if not wrong:
        return
    said = " and ".join(f"{program} is {path}" if path else f"there is no {program}" for program, path in wrong.items())
    remedy = ""  # set-up's own line
    if login["has_profile"] and all(wrong.values()):
        line = f"printf '\\nPATH={_COMMANDS}:$PATH\\n' | sudo tee -a {login['last_read']}"
        remedy = f"{through_ssh('{login}', line)}  # or remove what puts the other one first"
    yield Finding("fail", f"in a login shell of {seen.target.user}, {said}", f"those in {_COMMANDS}", remedy)


def _inventory(seen: Seen, name: str) -> Iterator[Finding]:
    python = seen.node(name, "programs")["python"]
    inventory = python.get("inventory")
    if inventory is None:
        raise NotHereError("there is no inventory for `mpitrain run`" if "why" not in python else "no Python runs")
    if inventory:
        # The rest of the message is for the user of a single machine.
        observed, is_foreign, _ = inventory.partition(". Allowed is ")
        allowed = "files that only root may write" if is_foreign else "an inventory as set-up writes it"
        yield Finding("fail", observed, allowed)


def _shadows(seen: Seen, name: str) -> Iterator[Finding]:
    script, share = seen.target.script, seen.target.share
    if script is None:
        raise NotHereError("no script was named: --script FILE")
    python = seen.node(name, "programs")["python"]
    if python["files"] is None:
        raise NotHereError(f"there is no {script}")  # ENV04 reports that
    if python["shadows"] is None:
        raise NotSeenError(f"the environment's python did not get to it: {python['why_no_shadows']}")
    for library, path in python["shadows"].items():
        text = f"Python takes {path}, beside the script, for the library {library}"
        # A file on the shared folder is renamed once, for all nodes.
        is_shared = share is not None and PurePosixPath(share) in PurePosixPath(path).parents
        login = seen.target.login(seen.target.head) if is_shared else "{login}"
        other = str(PurePosixPath(path).with_name(f"my_{PurePosixPath(path).name}"))
        rename = over_ssh(login, "sudo", "-u", seen.target.user, "mv", "-n", path, other)
        remedy = f"{rename}  # and import it by that name"
        yield Finding("fail", text, "no file there with the name of a library", remedy)


_PYTHON = (*ON_SHARE, "ENV01")

ASKS = (
    Ask(
        "temporary",
        "temporary",
        "job",
        lambda target, _host: {
            "is_here": target.is_here,
        },
    ),
    Ask(
        "login shell",
        "login_shell",
        "job",
        lambda _target, _host: {"commands": _COMMANDS, "names": _PROGRAMS},
        seconds=24.0,
    ),
)
CHECKS = (
    Check(
        "RUN01",
        "jobs may use the folder for temporary files",
        _folders,
        uses=("temporary",),
        alone=True,
        looks="As the shared user: a socket in /tmp; and whether the folder of temporary files is mounted noexec.",
        why="`mpitrain run` makes a socket in /tmp on every node, and runs a program from the folder of temporary "
        "files.",
        needs=(*BY_SSH, "PRB02", "USR01", "USR02", "LIM07"),
        fault="/tmp of mode 0700; of mode 0755; mounted noexec",
    ),
    Check(
        "RUN02",
        "a user who logs in gets the programs of the environment",
        _typed,
        uses=("login shell",),
        looks="As the shared user, in an interactive login shell: which mpitrain, python and mpiexec are in PATH.",
        why="Another Python, such as conda's, lacks the packages of the environment, and its MPI.",
        tag="runtime",
        needs=(*IN_JOB, "ENV03"),
        fault="conda in .profile; /etc/profile.d/mpitrain.sh removed",
    ),
    Check(
        "RUN03",
        "`mpitrain run` accepts the node's inventory",
        _inventory,
        uses=("programs",),
        looks="As the shared user, with the environment's python: mpitrain's own search for /etc/mpitrain/hosts.",
        why="`mpitrain run` refuses an inventory that other users may write: they could choose the machines of a job.",
        tag="hosts",
        needs=_PYTHON,
        needs_head=("NFS09",),
        fault="/etc/mpitrain/hosts writable by all",
    ),
    Check(
        "RUN04",
        "no file beside the program takes the place of a library",
        _shadows,
        uses=("programs",),
        looks="The names of .py files and packages beside the script of --script, against what NumPy, mpi4py and "
        "mpitrain import, and the libraries for training.",
        why="Python searches beside the script first, so it imports a numpy.py there instead of NumPy.",
        needs=_PYTHON,
        needs_head=("NFS09",),
        fault="a numpy.py beside the script",
    ),
)
