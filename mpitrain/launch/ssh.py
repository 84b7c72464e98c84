"""The ssh of mpiexec over hosts: it marks what it starts as processes of the job, and finds connections that are open.

A login takes both machines some 0.1 s of processor time, and a restart waits for it. So connections to the hosts of the
next attempt are open before its mpiexec needs them: master connections of OpenSSH (ControlMaster of ssh_config(5)).
Where one has broken, mpiexec's ssh logs in as always.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mpitrain.context import JobContext
from mpitrain.facts import why_no_programs
from mpitrain.launch.batch import step
from mpitrain.launch.conditions import Condition, Refusal, refuse
from mpitrain.launch.connections import AGENT_OPTIONS, SSH_OPTIONS
from mpitrain.launch.processes import start_beside

# It is ssh, but puts the job's mark into the environment of what ssh starts, so
# that the agent there knows these processes. ssh itself joins the words of a command with spaces, as "$*" does.
_MARKING_SSH = """#!/bin/sh
options=
while :; do
    case $1 in
    -[BbcDEeFIiJLlmOoPpQRSWw]) options="$options $1 $2"; shift 2 ;;
    -*) options="$options $1"; shift ;;
    *) break ;;
    esac
done
host=$1; shift
{step}exec {ssh} $options "$host" "export {marks}; $*"
"""
# A host of this Slurm job needs no ssh.
_STEP = """case $host in
{hosts}) exec {words} "--nodelist=$host" sh -c "export {marks}; $*" ;;
esac
"""


def marking_ssh(own: str, path: Path, ssh: Sequence[str], context: JobContext, in_steps: Sequence[str] = ()) -> str:
    """Write the program to `path`, in a folder that `own`, this host, runs programs from. Return the path.

    Args:
        own: names this host in the error.
        path: of the program. It is overwritten.
        ssh: the words of the ssh that it becomes.
        context: the mark.
        in_steps: the hosts on which it starts a step of this Slurm job in place of ssh.

    Raises:
        LaunchError: no program in that folder can be run.
    """
    exports = " ".join(f"{name}='{value}'" for name, value in context.variables().items())
    by_step = _STEP.format(hosts="|".join(in_steps), words=shlex.join(step()), marks=exports) if in_steps else ""
    path.write_text(_MARKING_SSH.format(ssh=shlex.join(ssh), marks=exports, step=by_step))
    path.chmod(0o700)
    if why := why_no_programs(folder := str(path.parent)):
        fault = f"no program in {folder} can be run: {why}"
        refusal = Refusal(Condition.PROGRAMS, own, fault)
        raise refuse("the job was not started", [refusal], script="", advice="Or set TMPDIR to another folder. ")
    return str(path)


# A socket's path has 107 bytes at most: unix(7). ssh adds a hash of 40 (%C), and 17 while it makes the socket. Other
# signs may mean something to ssh.
_FOLDER = re.compile(rf"[\w/.+-]{{1,{107 - 1 - 40 - 17}}}", re.ASCII)
# A firewall may forget a connection without traffic, which would then hang.
_ALIVE_SECONDS = 15
_END_SECONDS = 1.0


@contextmanager
def open_masters(hosts: Iterable[str], folder: Path) -> Iterator[list[str]]:
    """Connect to the hosts, and yield the options with which ssh finds these connections. Does not wait for them.

    Call this in the main thread. If the path of `folder`, for the sockets, is too long for ssh or has odd signs, no
    connection is made, and no options are yielded.

    Raises:
        OSError: ssh cannot be started here.
    """
    if not _FOLDER.fullmatch(str(folder)):
        yield []
        return
    options = ["-o", f"ControlPath={folder}/%C"]
    masters: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        stack.callback(_end, masters)
        for host in hosts:
            stays = ["-N", "-o", "ControlMaster=yes", "-o", f"ServerAliveInterval={_ALIVE_SECONDS}"]
            command = ["ssh", *stays, *options, *SSH_OPTIONS, *AGENT_OPTIONS, host]
            masters.append(start_beside(stack, command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        yield [*options, "-o", "ControlMaster=no"]  # mpiexec's ssh is no master, whatever the user's settings are


def _end(masters: Iterable[subprocess.Popen[bytes]]) -> None:
    """End them, and with them their processes for ProxyJump, which SIGKILL would leave."""
    for master in masters:
        master.terminate()
    deadline = time.monotonic() + _END_SECONDS
    for master in masters:
        try:
            master.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            master.kill()
            master.wait()
