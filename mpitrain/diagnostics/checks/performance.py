"""The speed of the ways between nodes, of the nodes themselves, and of the share; and the cause if one is slow."""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mpitrain.diagnostics.agent import UnansweredError
from mpitrain.diagnostics.check import Ask, Check, Finding, NotHereError, NotSeenError, Seen, Verdict
from mpitrain.diagnostics.collect import Cluster, ClusterStep, PairStep
from mpitrain.diagnostics.slow_ways import Pair, measure_ways, mib, own_and_usual, state, whose_fault, why_unclear

_STRAGGLER_BEST, _STRAGGLER_WARN, _STRAGGLER_FAIL = 1.15, 1.3, 1.6
_SHARE_MIB = 32
_SLOW_SHARE_MIB_PER_SECOND = 20.0


def _matrix(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    measured = {_pair(key): one for key, one in seen.whole("ways").items()}
    if len(names) < 2:
        raise NotHereError("there are no two nodes to measure between")
    measured = {pair: one for pair, one in measured.items() if set(pair) <= set(names)}
    states = {pair: state(one) for pair, one in measured.items()}
    slow, unclear = ([pair for pair in measured if states[pair] == wanted] for wanted in ("slow", "unclear"))
    for pair, one in measured.items():
        if "error" in one:
            yield Finding("unknown", pair, one["error"])
    for pair in unclear:
        yield Finding("unknown", pair, why_unclear(pair, measured[pair]))
    for place, words in whose_fault(slow, names, unclear):
        own, usual = own_and_usual([measured[pair] for pair in slow if set(place) <= set(pair)])
        remedy = f"ssh {seen.target.login(place[0])} 'ip -statistics link; tc qdisc'  # cable, port, shaping"
        allowed = f"{mib(usual)} MiB/s, as between most others"
        yield Finding("fail", place, f"{words}; {mib(own)} MiB/s", allowed, remedy)


def _pair(key: str) -> Pair:
    a, b = key.split(" ")
    return a, b


def _compute(cluster: Cluster) -> dict[str, Any]:
    """Run the same computation on all nodes at once. Return the seconds of each repetition."""
    names = list(cluster.agents)

    def ask(name: str) -> Any:
        try:
            return cluster.ask(name, "compute", {}, seconds=45.0, user="login")
        except UnansweredError as error:
            return {"error": str(error)}

    with ThreadPoolExecutor(len(names) or 1) as pool:
        return dict(zip(names, pool.map(ask, names), strict=True))


def _straggler(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    seconds = seen.whole("computation")
    bests, medians = {}, {}
    for name in names:
        if isinstance(seconds.get(name), list):
            bests[name], medians[name] = min(seconds[name]), statistics.median(seconds[name])
        else:
            yield Finding("unknown", (name,), str(seconds.get(name, {}).get("error", "was not looked at")))
    if len(bests) < 2:
        raise NotHereError("there are no two nodes to compare")
    usual, usual_best = (statistics.median_low(times.values()) for times in (medians, bests))
    for name, median in medians.items():
        # Compare the best too, because other programs that happen to run may distort a median.
        if median > _STRAGGLER_WARN * usual and bests[name] > _STRAGGLER_BEST * usual_best:
            text = f"a fixed computation takes {median / usual:.1f} times as long as on most others"
            remedy = f"ssh {seen.target.login(name)} 'uptime; ps -eo pid,user,pcpu,comm --sort=-pcpu | head -5'"
            verdict: Verdict = "fail" if median > _STRAGGLER_FAIL * usual else "warn"
            yield Finding(verdict, (name,), text, "the same speed on all", remedy)


def _share(cluster: Cluster) -> dict[str, Any]:
    """Measure one node after the other, so that each has the server to itself."""
    if cluster.target.share is None:
        return {}
    rates: dict[str, Any] = {}
    for name in cluster.agents:
        folder = f"{cluster.target.share}/.mpitrain-check-{uuid.uuid4().hex}"
        try:
            wish = {"folder": folder, "bytes": _SHARE_MIB << 20}
            rates[name] = cluster.ask(name, "share speed", wish, seconds=40.0)
        except UnansweredError as error:
            rates[name] = {"error": str(error)}
    return rates


def _share_speed(seen: Seen, name: str) -> Iterator[Finding]:
    by_node = seen.whole("share speed")
    if not by_node:
        raise NotHereError("there is no shared folder")
    rates = by_node.get(name, {})
    if "bytes_per_second" not in rates:
        raise NotSeenError(rates.get("error", "was not looked at"))
    rate = rates["bytes_per_second"] / 2**20
    if rate < _SLOW_SHARE_MIB_PER_SECOND:
        text = f"a file of {_SHARE_MIB} MiB is written to the share at {rate:.2g} MiB/s"
        remedy = f"ssh {seen.target.login(seen.target.head)} 'nfsstat -s; iostat -x 1 3'"
        yield Finding("warn", (name,), text, f"{_SLOW_SHARE_MIB_PER_SECOND:g} MiB/s or more", remedy)


ASKS: tuple[Ask, ...] = ()
PAIRS: dict[str, PairStep] = {}
CLUSTER: dict[str, ClusterStep] = {"computation": _compute, "ways": measure_ways, "share speed": _share}
CHECKS = (
    Check(
        "PRF03",
        "all nodes compute at about the same speed",
        "bench",
        "cluster",
        _straggler,
        uses=("computation",),
        looks="The same computation on all nodes at the same time, 9 times.",
        why="Every step waits for the slowest node. Causes are heat, a governor, or another user's job.",
        needs=("PRB01",),
        fault="a limit on one node's CPU time",
    ),
    Check(
        "PRF01",
        "all ways between nodes are about equally fast",
        "bench",
        "cluster",
        _matrix,
        uses=("ways",),
        looks="Bytes per second over TCP between each two nodes, each way, the best of 5. Ways that seem slow are "
        "measured again, 5 times, in turns with one that does not. If all ways of a node are slow, it is the node; if "
        "only one is, it is the link. If the turns differ by more, the result is unknown: a busy node makes any way "
        "look slow.",
        why="An allreduce is as fast as the slowest way in its ring.",
        needs=("PRB01", "NET01", "NET09", "NET11", "NET03", "NET04", "PRF03"),
        fault="one node limited to 100 Mbit/s; one link limited, in one direction",
    ),
    Check(
        "PRF04",
        "large files are written to the share quickly",
        "bench",
        "node",
        _share_speed,
        uses=("share speed",),
        looks="Writes 32 MiB and 100 small files to the share as the shared user, with fsync, and removes them.",
        why="Checkpoints are as slow as this, and all ranks wait for them.",
        needs=("PRB01", "NET01", "PRF01", "NFS01", "NFS02", "NFS03"),
        fault="one node's traffic to the NFS port limited",
    ),
)
