"""The shared user on a node: the account, and the remains of dead jobs."""

from __future__ import annotations

import os
import pwd
import re
import stat
import time
from pathlib import Path
from typing import Any

from mpitrain import facts
from mpitrain.check.node import children

# The variables that mark a process as a rank, set by Hydra (MPICH, Intel MPI), PRRTE (Open MPI) and Slurm.
_RANK = re.compile(r"(?:^|\0)(?:PMI_RANK|PMIX_RANK|OMPI_COMM_WORLD_RANK|PMI_FD)=")
# Hydra's daemon never leaves its parent. Open MPI's leaves it as soon as it runs, so it may live without one.
_DAEMONS = ("hydra_pmi_proxy", "hydra_bstrap_pr")
# A job that has just ended or is just starting may look like a dead one.
_YOUNG_PROCESS_SECONDS = 5.0
# While one of these files exists, pam_nologin lets only root log in.
_NOLOGIN = ("/etc/nologin", "/run/nologin")
_YOUNG_FILE_SECONDS = 60.0


def account(wish: dict[str, Any]) -> dict[str, Any]:
    """wish: user, uid."""
    try:
        entry = pwd.getpwnam(wish["user"])
    except KeyError:
        return {"uid": None, "uid_owner": _owner(wish["uid"])}
    shadow = children.as_root("getent", "shadow", wish["user"])
    _, _, changed, _, days, _, _, expires, *_ = f"{shadow or ''}".strip().split(":") + [""] * 8
    today = time.time() // 86400
    try:
        home = Path(entry.pw_dir).stat()
    except OSError:
        home = None
    return {
        "uid": entry.pw_uid,
        "gid": entry.pw_gid,
        "uid_owner": _owner(wish["uid"]),
        "group": facts.group_name(entry.pw_gid),
        "groups": [facts.group_name(gid) for gid in os.getgrouplist(entry.pw_name, entry.pw_gid)],
        "shell": entry.pw_shell,
        "shell_works": os.access(entry.pw_shell or "/bin/sh", os.X_OK),
        "home": entry.pw_dir,
        "home_owner": home.st_uid if home and stat.S_ISDIR(home.st_mode) else None,
        "expired": None if shadow is None else expires.isdigit() and int(expires) < today,
        # The next login asks the user for another password, and runs no command.
        "must_change_password": None
        if shadow is None
        else changed.isdigit() and (int(changed) == 0 or (days.isdigit() and int(changed) + int(days) < today)),
        "nologin": next((path for path in _NOLOGIN if Path(path).exists()), ""),
    }


def _owner(uid: int | None) -> str | None:
    return None if uid is None else facts.user_name(uid)


def leftovers(wish: dict[str, Any]) -> dict[str, Any]:
    """Return the remains of this user's dead jobs. wish: patterns of shared-memory files."""
    return {"processes": _dead_ranks(), "files": _dead_files(wish["patterns"])}


def _dead_ranks() -> list[dict[str, Any]]:
    """Return ranks and their daemons whose parent is gone."""
    tick = os.sysconf("SC_CLK_TCK")
    up = float(facts.text("/proc/uptime").split()[0])
    adopters = {1} | {
        int(path.name) for path in _own_processes() if re.match(r"\S*systemd\0--user", facts.text(f"{path}/cmdline"))
    }
    ranks = []
    for path in _own_processes():
        comm, _, rest = facts.text(f"{path}/stat").partition("(")[2].rpartition(")")
        fields = rest.split()
        if len(fields) < 20 or fields[0] == "Z" or int(fields[1]) not in adopters:
            continue
        age_seconds = up - int(fields[19]) / tick
        is_rank = comm in _DAEMONS or _RANK.search(facts.text(f"{path}/environ"))
        if is_rank and age_seconds > _YOUNG_PROCESS_SECONDS:
            # The arguments are left out: they may be private and must not be in a report.
            ranks.append({"pid": int(path.name), "age_seconds": age_seconds, "program": comm})
    return sorted(ranks, key=lambda one: int(str(one["pid"])))


def _own_processes() -> list[Path]:
    folders = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if path.stat().st_uid == os.getuid():
                folders.append(path)
        except OSError:
            continue  # the process has just ended
    return folders


def _dead_files(patterns: list[str]) -> list[dict[str, Any]]:
    """Return files of MPI libraries that belong to this user (root: to any user) and that no process has mapped.

    A pattern may also match folders with such files.
    """
    files = {}
    for pattern in patterns:
        for path in Path("/dev/shm").glob(pattern):
            try:
                status = path.lstat()
                size_bytes = 512 * (status.st_blocks + sum(one.lstat().st_blocks for one in path.glob("*")))
            except OSError:
                continue
            age_seconds = time.time() - status.st_mtime
            if os.getuid() in (0, status.st_uid) and age_seconds > _YOUNG_FILE_SECONDS:
                files[str(path)] = {"bytes": size_bytes, "age_seconds": age_seconds, "pattern": pattern}
    # A process of another user may have mapped a file of this user. Maps that may not be read are empty.
    for process in Path("/proc").glob("[0-9]*") if files else []:
        maps = facts.text(f"{process}/maps")
        files = {path: file for path, file in files.items() if path not in maps}
    return [{"path": path, **file} for path, file in sorted(files.items())]


CALLS = {
    "account": account,
    "sudo": lambda _wish: {"hangs": os.geteuid() != 0 and children.sudo_hangs()},
    "become": lambda _wish: facts.own_user(),
    "leftovers": leftovers,
}
