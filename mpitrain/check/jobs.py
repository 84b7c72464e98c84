"""Small MPI jobs that a check runs: one rank on each node, or two ranks on one node."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.resources import files
from typing import Any
from uuid import uuid4

from mpitrain.check.collect import Cluster, on_each, tried
from mpitrain.check.node.children import MOST_PATIENCE
from mpitrain.errors import LaunchError
from mpitrain.launch.dialects import JobSpec, LaunchCommand, command_for
from mpitrain.launch.libraries import mpiexec_of_text
from mpitrain.launch.output import MPIEXEC, TagDecoder
from mpitrain.launch.placement import Place, Placement
from mpitrain.reading import message_of

GONE_SECONDS = 10.0  # processes of a job that live longer than this are left over
_MARK = "mpitrain-check:"


def run_job(cluster: Cluster, program: str, seconds: int, gone_seconds: float = 2.0) -> dict[str, Any]:
    """Run a program of ranks.py on all nodes, one rank each, from the head as the shared user.

    Return each rank's output, by rank, with mpiexec's end and the processes "left" on each node `gone_seconds` later,
    or {"error": reason} if the job cannot be tried.
    """
    names = cluster.target.names
    places = tuple(Place(name, number, 1) for number, name in enumerate(names))
    placement = Placement(places, {host.name: host.address for host in cluster.target.hosts}, names[0])
    token = str(uuid4())  # identifies the processes of the job
    command = _command(cluster, names[0], [*arguments_of(program), token], placement)
    if isinstance(command, str):
        return {"error": command}
    ask = partial(cluster.ask, seconds=GONE_SECONDS + 5.0)
    before = {name: tried(partial(ask, name, "job_memory", {})) for name in cluster.agents}
    ended = _run(cluster, names[0], command, seconds)
    left: dict[str, Any] = {}
    until = time.monotonic() + gone_seconds
    for name, memory in before.items():
        wish = {"token": token, "memory": memory, "seconds": max(0.0, until - time.monotonic())}
        left[name] = tried(partial(ask, name, "job_left", wish)) if isinstance(memory, list) else memory
    return {**ended, "left": left}


def run_two(cluster: Cluster, arguments: Sequence[str], seconds: int, names: Sequence[str]) -> dict[str, Any]:
    """Run the Python of jobs with `arguments` as two ranks of one node, on each of `names` at once.

    Return, by node, the ranks' output with mpiexec's end, or {"error": reason} if the job cannot be tried.
    """

    def run(name: str) -> dict[str, Any]:
        command = _command(cluster, name, arguments, Placement((Place(name, 0, 2),), own=name))
        return {"error": command} if isinstance(command, str) else _run(cluster, name, command, seconds)

    return on_each(names, run)


def arguments_of(program: str) -> list[str]:
    """The arguments of the Python of jobs for a program of ranks.py."""
    return ["-c", files("mpitrain.check").joinpath("ranks.py").read_text(), program]


def _command(cluster: Cluster, begin: str, arguments: Sequence[str], placement: Placement) -> LaunchCommand | str:
    """Return the mpiexec command for a job that starts on node `begin`, or the reason why there is none."""
    sections = cluster.seen.nodes.get(begin, {})
    programs, shell = sections.get("programs", {}), sections.get("shell", {})
    if "mpiexec" not in programs or "environment" not in shell:
        return f"the programs of {begin} are not known"
    job = JobSpec(
        mpiexec=mpiexec_of_text(programs["mpiexec"]["path"], programs["mpiexec"]["text"]),
        program=(programs["python"]["path"], *arguments),
        placement=placement,
        num_cores=sections.get("processors", {}).get("usable", 1) if placement.is_here else 1,
        as_root=cluster.target.user == "root",
    )
    try:
        return command_for(job, shell["environment"])
    except LaunchError as error:
        return str(error)


def _run(cluster: Cluster, begin: str, command: LaunchCommand, seconds: int) -> dict[str, Any]:
    shell = cluster.seen.nodes[begin]["shell"]
    wish = {
        "command": list(command.arguments),
        "environment": {**shell["environment"], **command.environment},
        "seconds": seconds,
    }
    ended = cluster.ask(begin, "job_run", wish, seconds=MOST_PATIENCE * seconds + 8.0)
    assert command.tag is not None
    decoder = TagDecoder(command.tag)
    written: dict[int, bytes] = {}
    for rank, piece in [*decoder.feed(ended["out"].encode()), *decoder.close()]:
        written[rank] = written.get(rank, b"") + piece
    said = {str(rank): _said(text) for rank, text in sorted(written.items()) if rank != MPIEXEC}
    # The reason may be on mpiexec's stderr, on its stdout, or on that of a rank.
    error = command.tag.whole.sub(b"", ended["error"].encode())
    texts = [error.decode(errors="replace"), *(text.decode(errors="replace") for _, text in sorted(written.items()))]
    words = [line for text in texts for line in text.splitlines() if line.strip("=- ") and not _is_ours(line)]
    return {"code": ended["code"], "seconds": ended["seconds"], "said": said, "error_text": "; ".join(words[:3])[:300]}


def _is_ours(line: str) -> bool:
    return line.startswith((_MARK, "{"))


def _said(written: bytes) -> list[dict[str, Any]]:
    """Return the lines of a rank that are meant for mpitrain."""
    words = []
    for line in written.decode(errors="replace").splitlines():
        with suppress(ValueError):
            if _is_ours(line):
                words.append(message_of(line.removeprefix(_MARK)))
    return words


def word(job: Mapping[str, Any], rank: int, key: str) -> Any:
    """Return what a rank reported under `key`; None if it did not."""
    return next((said[key] for said in job["said"].get(str(rank), []) if key in said), None)


def end(job: Mapping[str, Any]) -> str:
    """Describe how mpiexec ended."""
    if job["code"] in (124, 137):
        return f"no end within {job['seconds']:.0f} s"
    return f"mpiexec ended with code {job['code']}" + (f": {job['error_text']}" if job["error_text"] else "")
