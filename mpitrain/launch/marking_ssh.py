"""The program that mpiexec over hosts takes for ssh, which marks what it starts as processes of the job."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from mpitrain.job.context import JobContext
from mpitrain.launch.conditions import Condition, Refusal, refuse
from mpitrain.launch.folders import why_no_programs
from mpitrain.launch.slurm_step import step

# It is ssh, but puts the job's mark into the environment of what ssh starts, so
# that the guard there knows these processes. ssh itself joins the words of a command with spaces, as "$*" does.
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
