"""Two ranks on one node: do they find each other, and how can they add up arrays on its GPUs?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpitrain.diagnostics.check import Ask, Check, Finding, NotHereError, NotSeenError, Seen
from mpitrain.diagnostics.collect import Cluster, ClusterStep, PairStep
from mpitrain.diagnostics.jobs import end, run_two, text_of, word
from mpitrain.diagnostics.remedies import as_user

_SECONDS = 30
_WAYS_SECONDS = 120
_WAYS = "mpitrain.bench.transports"


def _hello(cluster: Cluster) -> dict[str, Any]:
    return run_two(cluster, ["-c", text_of("hello")], _SECONDS, list(cluster.agents))


def _ways(cluster: Cluster) -> dict[str, Any]:
    """Ask the nodes on which CuPy sees a card."""
    with_cards = [name for name in cluster.agents if (cluster.seen.nodes[name].get("cupy") or {}).get("cards")]
    return run_two(cluster, ["-P", "-m", _WAYS], _WAYS_SECONDS, with_cards)


def _of(seen: Seen, section: str, name: str) -> dict[str, Any]:
    job: dict[str, Any] = seen.whole(section).get(name, {"error": "was not looked at"})
    if "error" in job:
        raise NotSeenError(job["error"])
    return job


def _one_job(seen: Seen, name: str) -> Iterator[Finding]:
    programs = seen.node(name, "programs")
    job = _of(seen, "two ranks", name)
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
    yield Finding("fail", (name,), text, "one job of 2 ranks, with exact sums", f"{remedy}  # shows what MPI says")


def _ways_of_gpus(seen: Seen, name: str) -> Iterator[Finding]:
    if not (seen.node(name, "cupy") or {}).get("cards"):
        raise NotHereError("the Python of jobs sees no GPU")
    job = _of(seen, "gpu ways", name)
    problem = word(job, 0, "error") if word(job, 0, "transports") is not None else end(job)
    if problem:
        text = f"two ranks could not try the ways to add up arrays on a GPU: {problem}"
        remedy = as_user(seen, seen.target.python, "-m", "mpitrain", "run", "-n", "2", "-m", _WAYS)
        yield Finding("warn", (name,), text, "at least one way", remedy)


ASKS: tuple[Ask, ...] = ()
PAIRS: dict[str, PairStep] = {}
CLUSTER: dict[str, ClusterStep] = {"two ranks": _hello, "gpu ways": _ways}
CHECKS = (
    Check(
        "MPI05",
        "two processes on the node make one job",
        "full",
        "node",
        _one_job,
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
        "full",
        "node",
        _ways_of_gpus,
        uses=("gpu ways", "cupy", "programs", "shell", "processors"),
        alone=True,
        looks=f"2 ranks of `python -m {_WAYS}` on the node, if CuPy sees a card.",
        why="Otherwise training with device arrays on several ranks does not start.",
        needs=("PRB01", "PRB02", "ENV01", "MPI01", "MPI05"),
        fault="none on a bed, which has no GPU: judged on made-up answers",
    ),
)
