"""The folder of this user on this machine in which each launcher has a socket for those who watch its job.

It is below /tmp and not in XDG_RUNTIME_DIR, which is removed when the user logs out, while the job goes on.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from mpitrain.errors import LaunchError
from mpitrain.launch.folders import OF_SOCKETS
from mpitrain.launch.roster import launcher_pid

_SUFFIX = ".live"


def live_folder(*, make: bool = False) -> Path | None:
    """Return the folder; None: it is not there. With `make`, it is made.

    Raises:
        LaunchError: the folder is not this user's alone, so who can read or replace what is in it is not known.
    """
    folder = _folder()
    if make:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"{socket.gethostname()}: {folder} cannot be made: {error.strerror}") from None
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise LaunchError(
            f"{socket.gethostname()}: {folder} belongs to user {status.st_uid} and has mode "
            f"{stat.S_IMODE(status.st_mode):04o}; it must be a folder of user {os.geteuid()} with mode 0700. Remove "
            "it, or have its owner remove it"
        )
    return folder


def socket_of(launcher: str) -> Path:
    """Return the path of the socket of a launcher of this user, which roster.launcher_name names."""
    return _folder() / (launcher.replace(" ", "~") + _SUFFIX)


def launcher_of(path: Path) -> str:
    """Return the name of the launcher whose socket this is."""
    return path.name.removesuffix(_SUFFIX).replace("~", " ")


def sockets() -> list[Path]:
    """Return the sockets of all launchers of this user that are alive, oldest first. Remove those of others.

    Raises:
        LaunchError: see live_folder.
    """
    folder = live_folder()
    paths = []
    for path in folder.glob(f"*{_SUFFIX}") if folder is not None else ():
        name = launcher_of(path)
        if launcher_pid(name) is not None or name.partition(" ")[0] != socket.gethostname():
            paths.append(path)
        else:  # it was killed; the name has the time of its start, so no other launcher has it
            path.unlink(missing_ok=True)
    return sorted(paths, key=_made)


def _folder() -> Path:
    return Path(OF_SOCKETS, f"mpitrain-live-{os.geteuid()}")


def _made(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
