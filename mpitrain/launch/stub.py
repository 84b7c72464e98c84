"""What mpiexec starts in place of a rank when a job starts again: it lends its place to a fork of a warm interpreter.

    python -I -S stub.py NAME PROGRAM ARGUMENT...

NAME is that of the interpreter's socket. The stub hands over the environment, the output and the connection to mpiexec
(PMI_FD). Then it only passes signals on, and ends in the way in which the fork ends. If there is no interpreter, it
becomes the program. See mpitrain.job.warm.

It starts in some 10 ms, because it imports nothing but what is built into Python.
"""

import _signal  # type: ignore[import-not-found]  # in C; signal.py takes 5 ms
import _socket
import os
import sys

_ANSWER_SECONDS = 5.0
_PASSED_ON = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT, _signal.SIGUSR1, _signal.SIGUSR2)


def lend(name: str, program: "tuple[str, ...]") -> "_socket.socket | None":
    """Return the line to the warm interpreter, whose fork is now the rank; None: there is no fork."""
    line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    line.settimeout(_ANSWER_SECONDS)
    try:
        line.connect("\0" + name)
        peer = line.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)  # process, user and group
        if int.from_bytes(peer[4:8], sys.byteorder) != os.geteuid():
            return None
        place = os.memfd_create("mpitrain-place")
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0)))).encode()
        variables = [name + b"=" + value for name, value in os.environb.items()]
        with open(place, "wb", closefd=False) as file:
            words = [b"%d" % len(program), *map(os.fsencode, program)]
            file.write(b"\0".join([os.getcwdb(), cores, *words, *variables]))  # noqa: PTH109 (no pathlib)
        number = os.environ.get("PMI_FD", "")
        given = [place, 1, 2, *([int(number)] if number.isdecimal() else [])]
        rights = b"".join(descriptor.to_bytes(4, sys.byteorder) for descriptor in given)
        line.sendmsg([b"place"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
        os.close(place)
        if line.recv(64) != b"taken":
            return None
    except OSError as error:  # there is no interpreter, or it does not answer; when the line closes, it ends the fork
        if isinstance(error, TimeoutError):
            late = f"mpitrain: {os.uname().nodename}: the rank starts cold: no warm interpreter answered within"
            os.write(2, f"{late} {_ANSWER_SECONDS:g} s\n".encode())
        line.close()
        return None
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, *given[1:]):  # mpiexec must see when the rank closes them
        os.dup2(nothing, descriptor)
    line.settimeout(None)
    return line


def pass_on(line: "_socket.socket", number: int) -> None:
    """Have the rank get this signal too."""
    try:  # noqa: SIM105 (nothing is imported here)
        line.send(b"%d" % number)
    except OSError:  # it has just ended, and its code waits here to be read
        pass


def stand_in(line: "_socket.socket") -> None:
    """Wait for the end of the rank, and end in the same way. Never returns."""
    for number in _PASSED_ON:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, lambda number, _: pass_on(line, number))
    try:
        code = int(line.recv(64) or -_signal.SIGKILL)  # ranks end with their holder
    except OSError:
        code = -_signal.SIGKILL
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left one
        if -code != _signal.SIGKILL:
            _signal.signal(-code, _signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def main(name: str, *program: str) -> None:
    """Lend the place of this process, or become the program. Never returns."""
    line = lend(name, program)
    if line is not None:
        stand_in(line)
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # ignored by Python, which the program would inherit
        _signal.signal(number, _signal.SIG_DFL)
    os.execv(program[0], program)


if __name__ == "__main__":
    main(*sys.argv[1:])
