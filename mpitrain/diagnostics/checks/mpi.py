"""A job over all nodes: does it form one world, make exact sums, and end when one rank dies?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from mpitrain.diagnostics.check import Ask, Check, Finding, NotHereError, NotSeenError, Seen
from mpitrain.diagnostics.collect import ClusterStep, PairStep
from mpitrain.diagnostics.jobs import GONE_SECONDS, end, run_job, word

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
        yield Finding("fail", (), text, allowed)
        return
    silent = [rank for rank in range(len(names)) if word(job, rank, "size") is None]
    absent = [rank for rank in silent if word(job, rank, "host") is None]
    for rank in absent or silent:  # if one did not begin, the others wait for it
        state = "no rank began" if absent else "its rank began, but did not get through MPI_Init"
        yield Finding("fail", (names[rank],), f"{state}; {end(job)}", allowed)
    if sum(sizes.values()) < len(names):
        return
    hosts = [word(job, rank, "host") for rank in range(len(names))]
    twice = sorted(host for host, count in Counter(hosts).items() if count > 1)
    if twice:
        text = f"several ranks were on one host: {', '.join(twice)}"
        yield Finding("fail", (), text, allowed)
    elif word(job, 0, "first_seconds") > _SLOW_SECONDS:
        text = f"MPI_Init takes {word(job, 0, 'first_seconds'):.0f} s"
        yield Finding("warn", (), text, f"less than {_SLOW_SECONDS:g} s")


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
            yield Finding("fail", (name,), f"wrong result: {', '.join(wrong)}", "exact results", _WRONG)
        if missing:
            text = f"{missing[0]} did not end; {end(job)}"
            yield Finding("fail", (name,), text, "all of them end", _MTU)


def _death(seen: Seen, _names: Sequence[str]) -> Iterator[Finding]:
    names, job = seen.target.names, seen.whole("death")
    if len(names) == 1:
        raise NotHereError("there is one node")
    last = len(names) - 1
    if word(job, last, "dies") is None:
        raise NotSeenError(f"the job ended before a rank could be killed: {end(job)}")
    if job["code"] in (124, 137):
        text = f"mpiexec did not end by itself within {job['seconds']:.0f} s of its start, after a rank was killed"
        yield Finding("fail", (), text, f"an end within {GONE_SECONDS:g} s")
    for name in names:
        left = job["left"].get(name, {"error": "was not looked at"})
        if isinstance(left, dict):
            yield Finding("unknown", (name,), str(left["error"]))
        elif left:
            text = f"{len(left)} processes of a dead job are left: {'; '.join(left)[:200]}"
            remedy = f"ssh {{login}} sudo kill -9 {' '.join(one.split(' ')[0] for one in left)}"
            yield Finding("fail", (name,), text, f"none after {GONE_SECONDS:g} s", remedy)


_HAND = "ssh {login} 'sudo -iu {user} mpiexec -n 1 hostname'  # as the job is started; then the same from the head"
_MTU = (
    "large messages are lost: compare `ip link` (MTU) of the nodes with the switch; mpitrain check-cluster --only NET03"
)
_WRONG = (
    "run again with UCX_TLS=tcp,self (MPICH) or OMPI_MCA_pml=ob1 (Open MPI); if that is right, the fast path is faulty"
)

ASKS: tuple[Ask, ...] = ()
PAIRS: dict[str, PairStep] = {}
CLUSTER: dict[str, ClusterStep] = {
    "hello": lambda cluster: run_job(cluster, "hello", _HELLO_SECONDS),
    "death": lambda cluster: run_job(cluster, "death", _DEATH_SECONDS, GONE_SECONDS),
}
CHECKS = (
    Check(
        "MPI02",
        "a job has one rank on every node, and they find each other",
        "full",
        "cluster",
        _hello,
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
        "full",
        "cluster",
        _exact,
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
        "bench",
        "cluster",
        _death,
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
