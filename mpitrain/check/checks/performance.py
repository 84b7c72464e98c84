"""The speed of nodes, of the paths between them, of the shared folder and of sums; and the cause if one is slow.

A busy node occasionally makes any path look slow. So a path that seems slow is measured several times again,
alternating with one that does not. It is slow if its best rate is below half of the other's worst, and sound if it
reaches half of the other's usual rate. Otherwise the measurements vary by more than a finding would claim, and the path
counts as not measured.
"""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

from mpitrain.check.check import Check, Finding, NotHereError, NotSeenError, Seen, Verdict
from mpitrain.check.collect import Cluster, ClusterStep, on_each, rounds, tried
from mpitrain.check.jobs import run_job

Pair = tuple[str, str]
Rates = Mapping[str, Any]  # what is known of a way
_SLOW = 0.5  # of what most others reach
_TURNS = 5
_BUSY = 0.2  # of the time, in which what measures waits for a processor
_STRAGGLER_BEST, _STRAGGLER_WARN, _STRAGGLER_FAIL = 1.15, 1.3, 1.6
_SHARE_MIB = 32
_SLOW_SHARE_MIB_PER_SECOND = 20.0
_SUM_SECONDS = 60
_SLOW_SUM = 0.25  # part of the slowest way's rate; a library's ring reaches about half, if cores are not the limit


def measure_ways(cluster: Cluster) -> dict[str, Any]:
    """Rates of all pairs, "a b" -> rates; those that seem slow also have "again", "beside" and "beside_way"."""
    measured: dict[Pair, dict[str, Any]] = {}
    for pairs in rounds([name for name in cluster.target.names if name in cluster.agents]):
        for both in (pairs, [pair[::-1] for pair in pairs]):
            turn = [pair for pair in both if _is_open(cluster.seen, pair)]
            with ThreadPoolExecutor(len(turn) or 1) as pool:
                measured |= zip(turn, pool.map(lambda pair: _way(cluster, pair), turn), strict=True)
    rates = rates_of(measured)
    if suspects := slow_pairs(rates):
        _measure_again(cluster, measured, suspects, usual_pair(rates))
    return {" ".join(pair): one for pair, one in measured.items()}


def _measure_again(cluster: Cluster, measured: dict[Pair, dict[str, Any]], suspects: list[Pair], usual: Pair) -> None:
    """Measure the usual way and those that do not yet look sound, in turns, each alone."""
    beside = [_way(cluster, usual)]
    for pair in suspects:
        measured[pair] |= {"again": [], "beside": beside, "beside_way": " ".join(usual)}
    for _ in range(_TURNS):
        for pair in suspects:
            again = _way(cluster, pair)
            measured[pair]["again"].append(again)
            measured[pair]["bytes_per_second"] = max(_all_rates([measured[pair], again]))
        beside.append(_way(cluster, usual))
        suspects = [pair for pair in suspects if state(measured[pair]) != "sound"]
        if not suspects:
            return


def _is_open(seen: Seen, pair: Pair) -> bool:
    """True if large messages get through there, as far as is known; other checks report pairs where they do not."""
    reach = seen.pairs.get(pair, {}).get("reach", {})
    return bool(reach.get("connect", "ok") == "ok" and reach.get("large_is_complete", True))


def _way(cluster: Cluster, pair: Pair) -> dict[str, Any]:
    rates: dict[str, Any] = tried(partial(_ask_way, cluster, *pair))
    return rates


def _ask_way(cluster: Cluster, a: str, b: str) -> Any:
    address = cluster.target.addresses[b]
    wish = {"address": address, "seconds": 20.0}
    echo, sink = (cluster.ask(b, "listen", wish, seconds=5.0, user="login") for _ in range(2))
    wish = {"address": address, "echo_port": echo, "sink_port": sink}
    return cluster.ask(a, "way", wish, seconds=30.0, user="login")


def rates_of(measured: Mapping[Pair, Rates]) -> dict[Pair, float]:
    """Bytes per second of the pairs that could be measured."""
    return {pair: one["bytes_per_second"] for pair, one in measured.items() if "bytes_per_second" in one}


def usual_pair(rates: Mapping[Pair, float]) -> Pair:
    """A pair with the rate of a sound one: the upper quartile. Of three nodes, a slow one spoils four of six pairs."""
    return sorted(rates, key=lambda pair: rates[pair])[len(rates) * 3 // 4]


def slow_pairs(rates: Mapping[Pair, float]) -> list[Pair]:
    """The directed pairs that stayed far below the others in the first measurement."""
    return [pair for pair, rate in rates.items() if rate < _SLOW * rates[usual_pair(rates)]]


def state(one: Rates) -> Literal["sound", "slow", "unclear"]:
    """The verdict of the alternating measurements of a path. A path without them did not seem slow."""
    if "again" not in one:
        return "sound"
    own, others = _all_rates(one["again"]), _all_rates(one["beside"])
    if not own or not others:
        return "unclear"
    if max(own) >= _SLOW * statistics.median(others):
        return "sound"
    return "slow" if max(own) < _SLOW * min(others) else "unclear"


def _all_rates(turns: Sequence[Rates]) -> list[float]:
    return [one["bytes_per_second"] for one in turns if "bytes_per_second" in one]


def own_and_usual(ways: Sequence[Rates]) -> tuple[float, float]:
    """The median of the best rates of slow ways, and the rate of the usual way."""
    bests = [max(_all_rates(one["again"])) for one in ways]
    return statistics.median(bests), statistics.median(_all_rates(ways[0]["beside"]))


def why_unclear(pair: Pair, one: Rates) -> str:
    """The reason why nothing is known about a way: which node is busy, and what was measured."""
    own, others = _all_rates(one["again"]), _all_rates(one["beside"])
    if not own or not others:
        errors = [turn["error"] for turn in [*one["again"], *one["beside"]] if "error" in turn]
        return f"seemed slow, and could not be measured again: {errors[0]}"
    waited = [statistics.median(turn["waited"][end] for turn in one["again"] if "waited" in turn) for end in (0, 1)]
    busy = [f"{name} ({share:.0%} of the time)" for name, share in zip(pair, waited, strict=True) if share >= _BUSY]
    cause = f"programs wait for a processor on {' and on '.join(busy)}" if busy else "the rates differ too much"
    beside = one["beside_way"].replace(" ", " -> ")
    return f"not measured: {cause}. {_span(own)} MiB/s, in turns with {beside}, {_span(others)} MiB/s"


def _span(rates: Sequence[float]) -> str:
    return f"{mib(min(rates))} to {mib(max(rates))}"


def mib(rate: float) -> str:
    """Format a rate in MiB/s."""
    return f"{rate / 2**20:.3g}"


def whose_fault(
    slow: Sequence[Pair], names: Sequence[str], unclear: Collection[Pair] = ()
) -> list[tuple[tuple[str, ...], str]]:
    """What is slow: a node (all its outgoing or incoming paths, or both), or single links. Each is (place, text).

    With two nodes the slow end cannot be determined; with three, two slow paths out of two are a weak sign. If other
    paths of the same nodes are unclear, it may be the node or the link.
    """
    if len(names) < 3:
        return [(pair, "from the one to the other; with two nodes it cannot be told which end it is") for pair in slow]
    probably = "probably " if len(names) == 3 else ""
    left = set(slow)
    faults: list[tuple[tuple[str, ...], str]] = []
    explained: set[Pair] = set()
    for name in names:
        others = [other for other in names if other != name]
        out, into = {(name, other) for other in others}, {(other, name) for other in others}
        ways = [(pairs, words) for pairs, words in ((out, "sends"), (into, "receives")) if pairs <= left]
        if not ways:
            continue
        faults.append(((name,), f"{probably}the node: it {' and '.join(words for _, words in ways)} slowly"))
        explained |= {pair for pairs, _ in ways for pair in pairs}
    for pair in slow:
        if pair in explained:
            continue
        hidden = any(a == pair[0] or b == pair[1] for a, b in unclear)
        words = "from the one to the other; whether others of their ways are slow too was not measured"
        faults.append((pair, words if hidden else "the link between them: each has faster ones"))
    return faults


def _matrix(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    measured = {_pair(key): one for key, one in seen.whole("ways").items()}
    if len(names) < 2:
        raise NotHereError("there are no two nodes to measure between")
    measured = {pair: one for pair, one in measured.items() if set(pair) <= set(names)}
    states = {pair: state(one) for pair, one in measured.items()}
    slow, unclear = ([pair for pair in measured if states[pair] == wanted] for wanted in ("slow", "unclear"))
    for pair, one in measured.items():
        if "error" in one:
            yield Finding("unknown", one["error"], where=pair)
    for pair in unclear:
        yield Finding("unknown", why_unclear(pair, measured[pair]), where=pair)
    for place, words in whose_fault(slow, names, unclear):
        own, usual = own_and_usual([measured[pair] for pair in slow if set(place) <= set(pair)])
        remedy = f"ssh {seen.target.login(place[0])} 'ip -statistics link; tc qdisc'  # cable, port, shaping"
        allowed = f"{mib(usual)} MiB/s, as between most others"
        yield Finding("fail", f"{words}; {mib(own)} MiB/s", allowed, remedy, where=place)


def _pair(key: str) -> Pair:
    a, b = key.split(" ")
    return a, b


def _compute(cluster: Cluster) -> dict[str, Any]:
    """Run the same computation on all nodes at once. Return the seconds of each repetition."""
    return on_each(list(cluster.agents), lambda name: cluster.ask(name, "compute", {}, seconds=45.0, user="login"))


def _straggler(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    seconds = seen.whole("computation")
    bests, medians = {}, {}
    for name in names:
        if isinstance(seconds.get(name), list):
            bests[name], medians[name] = min(seconds[name]), statistics.median(seconds[name])
        else:
            yield Finding("unknown", str(seconds.get(name, {}).get("error", "was not looked at")), where=(name,))
    if len(bests) < 2:
        raise NotHereError("there are no two nodes to compare")
    usual, usual_best = (statistics.median_low(times.values()) for times in (medians, bests))
    for name, median in medians.items():
        # Compare the best too, because other programs that happen to run may distort a median.
        if median > _STRAGGLER_WARN * usual and bests[name] > _STRAGGLER_BEST * usual_best:
            text = f"a fixed computation takes {median / usual:.1f} times as long as on most others"
            remedy = f"ssh {seen.target.login(name)} 'uptime; ps -eo pid,user,pcpu,comm --sort=-pcpu | head -5'"
            verdict: Verdict = "fail" if median > _STRAGGLER_FAIL * usual else "warn"
            yield Finding(verdict, text, "the same speed on all", remedy, where=(name,))


def _share(cluster: Cluster) -> dict[str, Any]:
    """Measure one node after the other, so that each has the server to itself."""

    def ask(name: str) -> Any:
        folder = f"{cluster.target.share}/.mpitrain-check-{uuid.uuid4().hex}"
        return cluster.ask(name, "share speed", {"folder": folder, "bytes": _SHARE_MIB << 20}, seconds=40.0)

    return {} if cluster.target.share is None else on_each(list(cluster.agents), ask, at_once=1)


def _share_speed(seen: Seen, name: str) -> Iterator[Finding]:
    by_node = seen.whole("share speed")
    if not by_node:
        raise NotHereError("there is no shared folder")
    rates = by_node.get(name, {})
    if "bytes_per_second" not in rates:
        raise NotSeenError(rates.get("error", "was not looked at"))
    rate = rates["bytes_per_second"] / 2**20
    if rate < _SLOW_SHARE_MIB_PER_SECOND:
        text = f"a file of {_SHARE_MIB} MiB is written to the shared folder at {rate:.2g} MiB/s"
        remedy = f"ssh {seen.target.login(seen.target.head)} 'nfsstat -s; iostat -x 1 3'"
        yield Finding("warn", text, f"{_SLOW_SHARE_MIB_PER_SECOND:g} MiB/s or more", remedy)


def bus_bytes_per_second(size_bytes: int, seconds: float, num_ranks: int) -> float:
    """Return the bytes per second that each path must carry in each direction with any algorithm, as in nccl-tests."""
    return size_bytes / seconds * 2 * (num_ranks - 1) / num_ranks


def _rate(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    if len(seen.target.hosts) < 2:
        raise NotHereError("there is one node")
    job = seen.whole("allreduce")
    measured = [word for word in job["said"].get("0", []) if "size_bytes" in word]
    if not measured:
        raise NotSeenError(f"the job printed nothing, and ended with code {job['code']}: {job['error_text']}")
    ways = [one["bytes_per_second"] for one in seen.whole("ways").values() if "bytes_per_second" in one]
    if not ways:
        raise NotSeenError("the ways between the nodes were not measured")
    num_machines = next((word["num_machines"] for word in job["said"]["0"] if "num_machines" in word), len(names))
    if num_machines < len(names):
        raise NotHereError("several nodes are one machine, whose processors all ranks share")
    best = max(bus_bytes_per_second(one["size_bytes"], one["seconds"], len(names)) for one in measured)
    if best < _SLOW_SUM * min(ways):
        observed = (
            f"Allreduce moves {best / 2**20:.3g} MiB/s on each way; the slowest way has {min(ways) / 2**20:.3g} MiB/s"
        )
        yield Finding("warn", observed, f"{_SLOW_SUM:.0%} of it, or more")


CLUSTER: dict[str, ClusterStep] = {
    "computation": _compute,
    "ways": measure_ways,
    "share speed": _share,
    "allreduce": lambda cluster: run_job(cluster, "allreduce", _SUM_SECONDS),
}
CHECKS = (
    Check(
        "PRF03",
        "all nodes compute at about the same speed",
        _straggler,
        level="bench",
        scope="cluster",
        uses=("computation",),
        looks="The same computation on all nodes at the same time, 9 times.",
        why="Every step waits for the slowest node. Causes are heat, a governor, or another user's job.",
        needs=("PRB01",),
        fault="a limit on one node's CPU time",
    ),
    Check(
        "PRF01",
        "all ways between nodes are about equally fast",
        _matrix,
        level="bench",
        scope="cluster",
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
        "large files are written to the shared folder quickly",
        _share_speed,
        level="bench",
        uses=("share speed",),
        looks="Writes 32 MiB and 100 small files to the shared folder as its user, with fsync, and removes them.",
        why="Checkpoints are as slow as this, and all ranks wait for them.",
        needs=("PRB01", "NET01", "PRF01", "NFS01", "NFS02", "NFS03"),
        fault="one node's traffic to the NFS port limited",
    ),
    Check(
        "PRF02",
        "a sum over all nodes uses the network",
        _rate,
        level="bench",
        scope="cluster",
        uses=("allreduce", "ways", "programs", "shell"),
        looks="Allreduce of 1, 16 and 64 MiB with mpi4py, the best of 4; bus bandwidth as in nccl-tests, against "
        "the slowest way of PRF01.",
        why="MPI may have taken another interface, or a slower transport, than the best one of the nodes.",
        remedy="mpitrain check-cluster --only NET01 --only NET02; and compare with UCX_TLS=tcp,self",
        needs=("MPI02", "MPI03", "PRF01"),
        needs_all=True,
        fault="recorded rates of a slow sum",
    ),
)
