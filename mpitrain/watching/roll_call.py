"""Registration of a host's ranks with the job's agent there: each connects to a socket that the agent has made.

With its number, a rank sends two descriptors: of its own process, and of its record (rank_record.py). So the agent can
read the record and see the rank's end, whatever its process id: in a container the id is mostly different, or there is
none. The connection stays open as long as the process lives. It breaks when the kernel closes the files of the process.
At the same time the process's connection to mpiexec breaks, and mpiexec ends the other ranks.

The agent may see this late. So a rank that has a record also sends a witness of the time: the far end of a TCP
connection of the rank to itself. When the rank ends, the kernel closes the near end and sends a FIN to the far end, on
the same host, where it notes when the last packet came. The agent asks for that time (TCP_INFO, tcp(7)). On a busy host
it may see an end half a second late. By then mpiexec has ended the ranks of other hosts, whose agents may look sooner.
By the kernel's times, a rank that ended because of another one ended after that one.

The text of this module is sent to other hosts. It imports only modules that are sent with it, and runs with an old
Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import socket
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpitrain.watching.sockets import peer, send, user_of
from mpitrain.watching.sockets import receive as receive_message

_CONNECT_SECONDS = 1.0
# Each fork copies the table of files up to the highest number.
_MOST_FILES = 1024
# struct tcp_info of linux/tcp.h begins with the state; tcpi_last_ack_recv is the last of these bytes. A FIN is an ACK.
_INFO_BYTES, _LAST_ACK_AT = 60, 56
_CLOSE_WAIT = 8
# The kernel counts ticks, of up to 10 ms. A look that comes sooner than that is more precise.
_TICK_SECONDS = 0.01


def connect_to_self() -> tuple[socket.socket, socket.socket] | None:
    """Return the near end and the far end. None: this process has no loopback interface, or may not use it."""
    try:
        near = socket.socket()
    except OSError:  # a filter of system calls may forbid it
        return None
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            listener.settimeout(_CONNECT_SECONDS)
            near.settimeout(_CONNECT_SECONDS)
            near.connect(listener.getsockname())
            far, peer = listener.accept()
        if peer == near.getsockname():
            return near, far
        far.close()  # another process has connected in between
    except OSError:
        pass
    near.close()
    return None


def close_first(*connections: socket.socket) -> list[socket.socket]:
    """Give these connections high numbers: the end of this process closes the last of them first, then the one before.

    The end of a process closes its files one by one, that with the highest number first (since Linux 4.3). On a busy
    host other ranks may run in between, see their own connections to this one broken, and end because of that.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if soft < 0 else min(soft, _MOST_FILES)
    moved = list(connections)
    for place, connection in enumerate(connections):
        with contextlib.suppress(OSError):  # no number is left; the connection keeps its own
            number = fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, most - len(connections) + place)
            moved[place] = socket.socket(fileno=number)
            connection.close()
    return moved


def when_closed(far: int | None) -> float:
    """Return when the near end was closed, by time.monotonic(), or now if that is not known."""
    now = time.monotonic()
    if far is None:
        return now
    with socket.socket(fileno=os.dup(far)) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES or info[0] != _CLOSE_WAIT:
        return now
    seconds = float(struct.unpack_from("I", info, _LAST_ACK_AT)[0]) / 1000
    return now if seconds < _TICK_SECONDS else now - seconds


PREFIX = "mpitrain-roll-call-"  # of the names of these sockets
_MOST_BYTES = 108 - 1  # of a socket's path: unix(7)
_MOST_WAITING = 4096
_YOUNG_SECONDS = 60.0
_PIDFD_OPEN = 434  # the system call's number, on all processors
_MOUNTS = "/proc/self/mountinfo"
# On these file systems, a folder is on one machine only. In a shared folder, a socket of another machine would look
# abandoned.
_LOCAL = ("btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs")


@dataclass(frozen=True)
class Appearance:
    """A rank's registration.

    Attributes:
        rank: the rank that called.
        pid: the number of its process here. 0: the process has no number here.
        process: a descriptor that becomes readable when the process ends. None: the kernel offers no such descriptor.
        record: the descriptor of its record. None: the rank has not called init().
        witness: the descriptor of the witness of its end. None: there is none.
        errors: the descriptor of its error file (error_file.py). None: it has sent none.
        starter: the number of the process of mpiexec that started the rank. 0: the parent of the rank's process.
    """

    rank: int
    pid: int
    process: int | None
    record: int | None
    witness: int | None = None
    starter: int = 0
    errors: int | None = None


class OpenLine:
    """A connection that a process keeps open as long as it lives."""

    def __init__(self, *sockets: socket.socket) -> None:
        self._sockets = sockets

    def close(self) -> None:
        """Close it. The agent takes this for the end of the process, unless another process also has it open."""
        for each in self._sockets:
            each.close()


def appear(
    path: str, rank: int, record: int | None = None, starter: int = 0, errors: int | None = None
) -> OpenLine | None:
    """Register at the socket of an agent, and return the connection. None if there is no socket.

    Args:
        path: the path of the socket.
        rank: the rank of this process.
        record: the descriptor of this process's record, if there is one.
        starter, errors: see Appearance.

    Raises:
        OSError: the path is not a socket, or the agent belongs to another user, who must not get descriptors.
    """
    pair = None if record is None else connect_to_self()
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    whole = OpenLine(line, *(pair or ()))
    try:
        with _address(path) as address:
            line.connect(address)
        if (user := user_of(line)) != os.geteuid():
            raise PermissionError(f"user {user} listens there, and the rank runs as user {os.geteuid()}")
    except (FileNotFoundError, ConnectionRefusedError):  # the path is another machine's, or the agent is gone
        whole.close()
        return None
    except OSError as error:
        whole.close()
        raise OSError(
            f"rank {rank} on {socket.gethostname()} cannot answer the roll call: _MPITRAIN_ROLL_CALL is {path!r}: "
            f"{error.strerror or error}. It must be the socket that mpitrain run has made as the same user; leave the "
            "variable to mpitrain run: unset _MPITRAIN_ROLL_CALL"
        ) from None
    given = {"record": record, "errors": errors}
    descriptors = {name: descriptor for name, descriptor in given.items() if descriptor is not None}
    if pair is not None:
        descriptors["witness"] = pair[1].fileno()
    process = open_process(os.getpid())
    if process is not None:
        descriptors["process"] = process
    message = {"rank": rank, "descriptors": list(descriptors), "starter": starter}
    send(line, message, list(descriptors.values()))
    if process is not None:
        os.close(process)
    if pair is None:
        return OpenLine(line)
    near, far = pair
    far.close()
    return OpenLine(*close_first(line, near))


def listen(path: str) -> socket.socket:
    """Make the socket at which ranks of this user can register.

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
    """Remove the sockets beside this one that no process has open: their job and agent were killed together.

    Nothing is removed unless the folder is certainly on this machine.
    """
    with contextlib.suppress(OSError):  # others may write in this folder, and not look into it
        if not _is_local(Path(path).parent):
            return
        for left in Path(path).parent.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):  # somebody else has removed it
                status = left.lstat()
                is_own = stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()
                # A new socket has its name a moment before it has a process.
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
    """True if no process has this socket. An agent does not notice the test: its own socket is of another type."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line, _address(path) as address:
        try:
            line.connect(address)
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
    return False


def receive(line: socket.socket) -> Appearance | None:
    """Receive a rank's registration on a connection to the socket of `listen`. None: the rank has hung up."""
    try:
        message, numbers = receive_message(line)
    except (OSError, ValueError):
        return None
    try:
        rank, starter, names = message["rank"], message["starter"], message["descriptors"]
        if not (
            type(rank) is type(starter) is int
            and 0 <= rank < 1 << 31
            and 0 <= starter < 1 << 31
            and isinstance(names, list)
        ):
            raise ValueError("it does not say which rank it is")
        descriptors = dict(zip(names, numbers))  # noqa: B905 (strict is of Python 3.10)
    except (ValueError, KeyError, TypeError):  # it is not from a rank of ours
        for number in numbers:
            os.close(number)
        return None
    pid, _, _ = peer(line)
    process, record, witness, errors = (descriptors.get(name) for name in ("process", "record", "witness", "errors"))
    return Appearance(rank, pid, process, record, witness, starter, errors)


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


def open_process(pid: int) -> int | None:
    """Return a descriptor of a process; None if there is none.

    Python's own os.pidfd_open is missing before 3.9, and where Python was built on an old kernel.
    """
    descriptor = int(ctypes.CDLL(None).syscall(_PIDFD_OPEN, pid, 0))
    return None if descriptor < 0 else descriptor
