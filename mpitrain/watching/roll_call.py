"""The ranks of a host make themselves known to the job's guard there: each calls at a socket that the guard has made.

With its number a rank hands over two descriptors: of its own process, and of its record (rank_record.py). So the guard
can read what the rank says, and see its end, whatever number its process has. In a container the number is mostly a
different one, or there is none.
The line stays open as long as the process lives. It breaks when the kernel closes the files of the process. At the same
time the process's line to mpiexec breaks, and mpiexec ends the other ranks.

The guard may see this late. So a rank that has a record also hands over a witness of the time (witness.py).

This module is sent to other hosts as text. It imports only modules that are sent with it, and runs with an old Python.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpitrain.watching.watched_process import open_process
from mpitrain.watching.witness import close_first, connect_to_self

PREFIX = "mpitrain-roll-call-"  # of the names of these sockets
_MOST_BYTES = 108 - 1  # of a socket's path: unix(7)
_MOST_WAITING = 4096
_MESSAGE_BYTES = 1024
_YOUNG_SECONDS = 60.0
_MOUNTS = "/proc/self/mountinfo"
# Of these file systems a folder is on one machine only. On a share, a socket of another machine looks like one left.
_LOCAL = ("btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs")


@dataclass(frozen=True)
class Appearance:
    """What a rank has sent over a line.

    Attributes:
        rank: the rank that called.
        pid: the number of its process here. 0: the process has no number here.
        process: a descriptor that becomes readable when the process ends. None: the kernel offers no such descriptor.
        record: the descriptor of its record. None: the rank has not called init().
        witness: the descriptor of the witness of its end. None: there is none.
        starter: the number of the process of mpiexec that started the rank. 0: the parent of the rank's process.
    """

    rank: int
    pid: int
    process: int | None
    record: int | None
    witness: int | None = None
    starter: int = 0


class OpenLine:
    """What a process keeps open as long as it lives."""

    def __init__(self, *sockets: socket.socket) -> None:
        self._sockets = sockets

    def close(self) -> None:
        """Let the guard take this for the end of the process, unless another process has it open too."""
        for each in self._sockets:
            each.close()


def appear(path: str, rank: int, record: int | None = None, starter: int = 0) -> OpenLine | None:
    """Call at the socket of a guard, and return the line to it. None if there is no socket.

    Args:
        path: the path of the socket.
        rank: the rank of this process.
        record: the descriptor of this process's record, if there is one.
        starter: see Appearance.

    Raises:
        OSError: the path is not a socket, or the guard belongs to another user, who must get no descriptor.
    """
    pair = None if record is None else connect_to_self()
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    whole = OpenLine(line, *(pair or ()))
    try:
        with _address(path) as address:
            line.connect(address)
        _, user, _ = peer(line)
        if user != os.geteuid():
            raise PermissionError(f"user {user} listens there, and the rank runs as user {os.geteuid()}")
    except (FileNotFoundError, ConnectionRefusedError):  # the path is another machine's, or the guard has gone
        whole.close()
        return None
    except OSError as error:
        whole.close()
        raise OSError(
            f"rank {rank} on {socket.gethostname()} cannot answer the roll call: _MPITRAIN_ROLL_CALL is {path!r}: "
            f"{error.strerror or error}. It must be the socket that mpitrain run has made as the same user; leave the "
            "variable to mpitrain run: unset _MPITRAIN_ROLL_CALL"
        ) from None
    descriptors = {} if record is None else {"record": record}
    if pair is not None:
        descriptors["witness"] = pair[1].fileno()
    process = open_process(os.getpid())
    if process is not None:
        descriptors["process"] = process
    message = json.dumps({"rank": rank, "descriptors": list(descriptors), "starter": starter}).encode()
    rights = array.array("i", descriptors.values())
    line.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else [])
    if process is not None:
        os.close(process)
    if pair is None:
        return OpenLine(line)
    near, far = pair
    far.close()
    return OpenLine(*close_first(line, near))


def listen(path: str) -> socket.socket:
    """Make the socket at which ranks of this user can call.

    Raises:
        OSError: the socket cannot be made, or the path exists.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = os.umask(0o177)
    try:
        with _address(path) as address:
            listener.bind(address)
    finally:
        os.umask(before)
    listener.listen(_MOST_WAITING)
    listener.setblocking(False)
    return listener


def remove_left(path: str) -> None:
    """Remove the sockets beside this one that no process has any more: job and guard were killed together.

    Nothing is removed if it is not sure that the folder is this machine's own.
    """
    with contextlib.suppress(OSError):  # others may write in this folder, and not look into it
        if not _is_local(Path(path).parent):
            return
        for left in Path(path).parent.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):  # somebody else has removed it
                status = left.lstat()
                is_own = stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()
                # A socket that is being made has its name a moment before it has a process.
                if is_own and time.time() - status.st_mtime > _YOUNG_SECONDS and _is_left(str(left)):
                    left.unlink()


def _is_local(folder: Path) -> bool:
    """True if the folder is on a file system that no other machine sees: proc_pid_mountinfo(5)."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path(_MOUNTS).read_text(errors="replace").splitlines():
        mount, _, system = line.partition(" - ")
        if mount.split()[2] == number:
            return system.split()[0] in _LOCAL
    return False


def _is_left(path: str) -> bool:
    """True if no process has this socket. A guard does not notice: its own socket is of another type."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line, _address(path) as address:
        try:
            line.connect(address)
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
    return False


def receive(line: socket.socket) -> Appearance | None:
    """What a rank has sent on a line to the socket of `listen`. None: the rank has hung up."""
    room = socket.CMSG_SPACE(3 * struct.calcsize("i"))
    try:
        data, extra, _, _ = line.recvmsg(_MESSAGE_BYTES, room)
    except OSError:
        return None
    if not data:
        return None
    message = json.loads(data)
    numbers = array.array("i")
    for _, _, rights in extra:
        numbers.frombytes(rights[: len(rights) - len(rights) % numbers.itemsize])
    descriptors = dict(zip(message["descriptors"], numbers))  # noqa: B905 (strict is of Python 3.10)
    pid, _, _ = peer(line)
    process, record, witness = (descriptors.get(name) for name in ("process", "record", "witness"))
    return Appearance(message["rank"], pid, process, record, witness, message["starter"])


def peer(line: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the other end, at the time when it began to listen or connected."""
    data = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    pid, user, group = struct.unpack("iII", data)
    return pid, user, group


@contextlib.contextmanager
def _address(path: str) -> Iterator[str]:
    """A name of this path that is short enough for a socket."""
    if len(os.fsencode(path)) <= _MOST_BYTES:
        yield path
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
