"""Does MPI work: launcher and library of one family, one world over all nodes, exact sums, and an end when one dies."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any
from uuid import uuid4

from mpitrain.diagnostics.cluster.check import Ask, Check, Finding, NotHereError, NotSeenError, Seen
from mpitrain.diagnostics.cluster.collect import Cluster, ClusterStep, PairStep
from mpitrain.diagnostics.cluster.connect import UnansweredError
from mpitrain.errors import LaunchError
from mpitrain.launch.dialects import Request, command_for
from mpitrain.launch.libraries import VENDOR_NAMES, can_launch, mpiexec_of_text, vendor_of_library
from mpitrain.launch.placement import Place
from mpitrain.launch.tags import MPIEXEC, TagDecoder

_HELLO_SECONDS = 25
_SLOW_SECONDS = 15.0
_DEATH_SECONDS = 40
_GONE_SECONDS = 10.0
_MARK = "mpitrain-check:"
_NEEDS = ("SSH04", "NET04", "NET03", "NET07", "ENV01", "ENV02", "ENV03", "NFS01", "NFS02", "NFS03", "MPI01")


def family(programs: Mapping[str, Any]) -> tuple[str, str]:
    """What is wrong with a node's launcher and library: "" if nothing, else verdict and words."""
    launcher, library = programs["mpiexec"], programs["mpi"]
    if "why" in library:
        return "fail", f"mpi4py cannot load an MPI library: {library['why']}"
    if launcher["why"]:
        return "fail", f"{launcher['path']} does not run: {launcher['why']}"
    mpiexec = mpiexec_of_text(launcher["path"], launcher["text"])
    vendor, version = vendor_of_library(library["library"]), _version(library["library"])
    both = f"{mpiexec.path} is of {VENDOR_NAMES[mpiexec.vendor]} {mpiexec.version}".rstrip()
    both += f", mpi4py loads {VENDOR_NAMES[vendor]} {version}".rstrip()
    if not can_launch(mpiexec.vendor, vendor):
        return "fail", both
    if mpiexec.vendor == vendor and _series(mpiexec.version) != _series(version):
        return "warn", both
    return "", ""


def _version(library: str) -> str:
    found = re.search(r"\d+\.\d+(\.\w+)*", library)
    return found[0] if found else ""


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _one_family(seen: Seen, name: str) -> Iterator[Finding]:
    verdict, words = family(seen.node(name, "programs"))
    if verdict:
        remedy = "" if seen.target.settings.get("mpitrain_mpi", "wheel") == "wheel" else _SYSTEM
        allowed = "launcher and library of one family and version"
        yield Finding("fail" if verdict == "fail" else "warn", (name,), words, allowed, remedy)


def run_job(cluster: Cluster, program: str, seconds: int, gone_seconds: float = 2.0) -> dict[str, Any]:
    """Run a Python text from nodes' `program` on all nodes, a rank each, from the head as the shared user.

    Gives what each rank said, by rank, with mpiexec's end and what was "left" of it on each node `gone_seconds` after,
    or {"error": why} where it cannot be tried.
    """
    target = cluster.target
    begin = target.names[0]  # the head, if it is looked at
    sections = cluster.seen.nodes.get(begin, {})
    programs, shell = sections.get("programs", {}), sections.get("shell", {})
    if "mpiexec" not in programs or "environment" not in shell:
        return {"error": f"the programs of {begin} are not known"}
    token = str(uuid4())  # by which its processes are known
    text = files("mpitrain.diagnostics.cluster.ranks").joinpath(f"{program}.py").read_text()
    request = Request(
        mpiexec_of_text(programs["mpiexec"]["path"], programs["mpiexec"]["text"]),
        (programs["python"]["path"], "-c", text, token),
        num_ranks=len(target.hosts),
        num_cores=1,
        as_root=target.user == "root",
        places=[Place(name, number, 1) for number, name in enumerate(target.names)],
    )
    try:
        command = command_for(request, shell["environment"])
    except LaunchError as error:
        return {"error": str(error)}
    wish = {
        "command": list(command.arguments),
        "environment": {**shell["environment"], **command.environment},
        "seconds": seconds,
    }
    before = {name: _try(cluster, name, "job_memory", {}) for name in cluster.agents}
    ended = cluster.ask(begin, "job_run", wish, seconds=seconds + 8.0)
    left: dict[str, Any] = {}
    until = time.monotonic() + gone_seconds
    for name, memory in before.items():
        wish = {"token": token, "memory": memory, "seconds": max(0.0, until - time.monotonic())}
        left[name] = _try(cluster, name, "job_left", wish) if isinstance(memory, list) else memory
    decoder = TagDecoder(command.tag)
    written: dict[int, bytes] = {}
    for rank, piece in [*decoder.feed(ended["out"].encode()), *decoder.close()]:
        written[rank] = written.get(rank, b"") + piece
    said = {str(rank): _said(text) for rank, text in sorted(written.items()) if rank != MPIEXEC}
    error_text = ended["error"].strip() or written.get(MPIEXEC, b"").decode(errors="replace").strip()
    words = [line for line in error_text.splitlines() if line.strip()]
    error_text = "; ".join(words[:3])[:300]
    return {"code": ended["code"], "seconds": ended["seconds"], "said": said, "error_text": error_text, "left": left}


def _said(written: bytes) -> list[dict[str, Any]]:
    """The lines of a rank that are its own words for us."""
    found = []
    for line in written.decode(errors="replace").splitlines():
        with suppress(ValueError):
            if line.startswith(_MARK):
                found.append(json.loads(line[len(_MARK) :]))
    return found


def _word(job: Mapping[str, Any], rank: int, key: str) -> Any:
    """What a rank said under `key`; None where it did not."""
    return next((word[key] for word in job["said"].get(str(rank), []) if key in word), None)


def _end(job: Mapping[str, Any]) -> str:
    if job["code"] in (124, 137):
        return f"no end within {job['seconds']:.0f} s"
    return f"mpiexec ended with code {job['code']}" + (f": {job['error_text']}" if job["error_text"] else "")


def _hello(seen: Seen, _names: Sequence[str]) -> Iterator[Finding]:
    names, job = seen.target.names, seen.whole("hello")
    if len(names) == 1:
        raise NotHereError("there is one node")
    allowed = f"one world of {len(names)} ranks, one on each node"
    # What was said before MPI_Init tells who was started, what was said after it who got through.
    sizes = Counter(word["size"] for words in job["said"].values() for word in words if "size" in word)
    alone = sum(count for size, count in sizes.items() if size != len(names))
    if alone:
        text = f"{alone} ranks believe that their world has {', '.join(str(size) for size in sorted(sizes))} ranks"
        yield Finding("fail", (), text, allowed)
        return
    silent = [rank for rank in range(len(names)) if _word(job, rank, "size") is None]
    absent = [rank for rank in silent if _word(job, rank, "host") is None]
    for rank in absent or silent:  # where one did not begin, the others wait for it
        state = "no rank began" if absent else "its rank began, and did not get through MPI_Init"
        yield Finding("fail", (names[rank],), f"{state}; {_end(job)}", allowed)
    if sum(sizes.values()) < len(names):
        return
    hosts = [_word(job, rank, "host") for rank in range(len(names))]
    twice = sorted(host for host, count in Counter(hosts).items() if count > 1)
    if twice:
        text = f"several ranks were on one host: {', '.join(twice)}"
        yield Finding("fail", (), text, allowed)
    elif _word(job, 0, "first_seconds") > _SLOW_SECONDS:
        text = f"MPI_Init takes {_word(job, 0, 'first_seconds'):.0f} s"
        yield Finding("warn", (), text, f"less than {_SLOW_SECONDS:g} s")


def _exact(seen: Seen, _names: Sequence[str]) -> Iterator[Finding]:
    names, job = seen.target.names, seen.whole("hello")
    if len(names) == 1:
        raise NotHereError("there is one node")
    steps = _word(job, 0, "steps")
    if steps is None:
        raise NotSeenError(f"the job did not come to it: {_end(job)}")
    for rank, name in enumerate(names):
        done = [(word["step"], word["is_right"]) for word in job["said"].get(str(rank), []) if "step" in word]
        wrong = [step for step, is_right in done if not is_right]
        missing = [step for step in steps if step not in [step for step, _ in done]]
        if wrong:
            yield Finding("fail", (name,), f"wrong result: {', '.join(wrong)}", "exact results", _WRONG)
        if missing:
            text = f"{missing[0]} did not end; {_end(job)}"
            yield Finding("fail", (name,), text, "all of them end", _MTU)


def _try(cluster: Cluster, name: str, call: str, wish: Mapping[str, Any]) -> Any:
    try:
        return cluster.ask(name, call, wish, seconds=_GONE_SECONDS + 5.0)
    except UnansweredError as error:
        return {"error": str(error)}


def _death(seen: Seen, _names: Sequence[str]) -> Iterator[Finding]:
    names, job = seen.target.names, seen.whole("death")
    if len(names) == 1:
        raise NotHereError("there is one node")
    last = len(names) - 1
    if _word(job, last, "dies") is None:
        raise NotSeenError(f"no rank came so far as to die: {_end(job)}")
    if job["code"] in (124, 137):
        text = f"mpiexec did not end by itself within {job['seconds']:.0f} s of its start, after a rank was killed"
        yield Finding("fail", (), text, f"an end within {_GONE_SECONDS:g} s")
    for name in names:
        left = job["left"].get(name, {"error": "was not looked at"})
        if isinstance(left, dict):
            yield Finding("unknown", (name,), str(left["error"]))
        elif left:
            text = f"{len(left)} processes of a dead job are left: {'; '.join(left)[:200]}"
            remedy = f"ssh {{login}} sudo kill -9 {' '.join(one.split(' ')[0] for one in left)}"
            yield Finding("fail", (name,), text, f"none {_GONE_SECONDS:g} s after", remedy)


_SYSTEM = "install one MPI on all nodes, and mpi4py for it; or: {set_up} -e mpitrain_mpi=wheel --tags runtime"
_HAND = "ssh {login} 'sudo -iu {user} mpiexec -n 1 hostname'  # as the job is started; then the same from the head"
_MTU = (
    "large messages are lost: compare `ip link` (MTU) of the nodes with the switch; mpitrain check-cluster --only NET03"
)
_WRONG = (
    "run again with UCX_TLS=tcp,self (MPICH) or OMPI_MCA_pml=ob1 (Open MPI); if it is right then, the fast path is not"
)

ASKS: tuple[Ask, ...] = ()
PAIRS: dict[str, PairStep] = {}
CLUSTER: dict[str, ClusterStep] = {
    "hello": lambda cluster: run_job(cluster, "hello", _HELLO_SECONDS),
    "death": lambda cluster: run_job(cluster, "death", _DEATH_SECONDS, _GONE_SECONDS),
}
CHECKS = (
    Check(
        "MPI01",
        "mpiexec and the library that mpi4py loads are of one MPI",
        "quick",
        "node",
        _one_family,
        uses=("programs",),
        looks="Through a job's shell: mpiexec --version, and MPI.Get_library_version() in a child.",
        why="With a launcher of another MPI every rank thinks that it is alone, and all end with code 0.",
        tag="runtime",
        needs=("PRB01", "NFS01", "NFS02", "NFS03", "ENV01", "ENV02", "ENV03"),
        needs_head=("NFS09",),
        fault="mpiexec of another family; a library that cannot be loaded",
    ),
    Check(
        "MPI02",
        "a job has one rank on every node, and they find each other",
        "full",
        "cluster",
        _hello,
        uses=("hello", "programs", "shell"),
        looks="From the head as the shared user: mpiexec, one rank a node, with a deadline; each says host and size.",
        why="This is what every job begins with; a wrong answer here is a wrong or endless job later.",
        remedy=_HAND,
        needs=_NEEDS,
        needs_head=("NFS09",),
        needs_all=True,
        fault="a shell that holds up mpiexec's proxy on one node; a launcher that starts all ranks on the head",
    ),
    Check(
        "MPI03",
        "sums and copies over all nodes are exact",
        "full",
        "cluster",
        _exact,
        uses=("hello", "programs", "shell"),
        looks="In the same job: Allreduce and Bcast of 1 B, 64 KiB, 4 MiB of whole numbers, against what is right.",
        why="Small messages may pass where large ones are lost, and a wrong sum shows only as bad training.",
        remedy=_WRONG,
        needs=(*_NEEDS, "MPI02"),
        needs_head=("NFS09",),
        needs_all=True,
        fault="recorded answers with a wrong sum, and with one that never came",
    ),
    Check(
        "MPI04",
        "when one rank dies, the whole job ends",
        "bench",
        "cluster",
        _death,
        uses=("death", "programs", "shell"),
        looks="In another job one rank kills itself by SIGKILL; 10 s later nothing of the job may be left anywhere.",
        why="What stays holds the processors, the memory and the ports of the next job.",
        remedy="ssh {login} sudo -u {user} ps -fu {user}",
        needs=(*_NEEDS, "MPI02"),
        needs_head=("NFS09",),
        needs_all=True,
        fault="recorded answers with processes left, and with an mpiexec that did not end",
    ),
)
