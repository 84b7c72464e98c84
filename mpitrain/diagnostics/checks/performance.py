"""How fast the ways between nodes are, the nodes themselves, and the share; and whose fault it is if one is slow."""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mpitrain.diagnostics.agent import UnansweredError
from mpitrain.diagnostics.check import Ask, Check, Finding, NotHereError, NotSeenError, Seen, Verdict
from mpitrain.diagnostics.collect import Cluster, ClusterStep, PairStep, rounds

Pair = tuple[str, str]
_SLOW = 0.5  # of what most others reach
_RETRIES = 3
_STRAGGLER_BEST, _STRAGGLER_WARN, _STRAGGLER_FAIL = 1.15, 1.3, 1.6
_SHARE_MIB = 32
_SLOW_SHARE_MIB_PER_SECOND = 20.0


def _ways(cluster: Cluster) -> dict[str, Any]:
    """Rates of all pairs, "a b" -> rates; those that seem slow are measured again, alone."""
    measured: dict[Pair, dict[str, Any]] = {}
    for pairs in rounds([name for name in cluster.target.names if name in cluster.agents]):
        for both in (pairs, [pair[::-1] for pair in pairs]):
            turn = [pair for pair in both if _is_open(cluster.seen, pair)]
            with ThreadPoolExecutor(len(turn) or 1) as pool:
                measured |= zip(turn, pool.map(lambda pair: _way(cluster, pair), turn), strict=True)
    for _ in range(_RETRIES):
        for pair in slow_pairs(_rates(measured)):
            again = _way(cluster, pair)
            if again.get("bytes_per_second", 0.0) > measured[pair]["bytes_per_second"]:
                measured[pair] = again
    return {" ".join(pair): rates for pair, rates in measured.items()}


def _is_open(seen: Seen, pair: Pair) -> bool:
    """Whether large messages get through there, as far as is known; other checks say so where they do not."""
    reach = seen.pairs.get(pair, {}).get("reach", {})
    return bool(reach.get("connect", "ok") == "ok" and reach.get("large_is_complete", True))


def _way(cluster: Cluster, pair: Pair) -> dict[str, Any]:
    a, b = pair
    address = cluster.target.addresses[b]
    try:
        echo, sink = (
            cluster.ask(b, "listen", {"address": address, "seconds": 20.0}, seconds=5.0, user="login") for _ in range(2)
        )
        wish = {"address": address, "echo_port": echo, "sink_port": sink}
        rates: dict[str, Any] = cluster.ask(a, "way", wish, seconds=30.0, user="login")
    except UnansweredError as error:
        return {"error": str(error)}
    return rates


def _rates(measured: Mapping[Pair, Mapping[str, Any]]) -> dict[Pair, float]:
    return {pair: rates["bytes_per_second"] for pair, rates in measured.items() if "bytes_per_second" in rates}


def usual_rate(rates: Mapping[Pair, float]) -> float:
    """What a sound pair reaches: the upper quartile. Of three nodes, one that is slow spoils four pairs of six."""
    return sorted(rates.values())[len(rates) * 3 // 4] if rates else 0.0


def slow_pairs(rates: Mapping[Pair, float]) -> list[Pair]:
    """The directed pairs that stay far below the others."""
    return [pair for pair, rate in rates.items() if rate < _SLOW * usual_rate(rates)]


def whose_fault(slow: Sequence[Pair], names: Sequence[str]) -> list[tuple[tuple[str, ...], str]]:
    """What is slow: a node (all its ways out, all its ways in, or both), or single links; (place, words) each.

    With two nodes the end cannot be told; with three, two ways of two are a weak sign.
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
    faults += [(pair, "the link between them: each has faster ones") for pair in slow if pair not in explained]
    return faults


def _matrix(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    measured = {_pair(key): rates for key, rates in seen.whole("ways").items()}
    if len(names) < 2:
        raise NotHereError("there are no two nodes to measure between")
    for pair, answer in measured.items():
        if "error" in answer and set(pair) <= set(names):
            yield Finding("unknown", pair, answer["error"])
    rates = {pair: rate for pair, rate in _rates(measured).items() if set(pair) <= set(names)}
    usual = usual_rate(rates)
    slow = slow_pairs(rates)
    for place, words in whose_fault(slow, names):
        slow_rates = [rates[pair] for pair in slow if set(place) <= set(pair)]
        text = f"{words}; {_mib(statistics.median(slow_rates))} MiB/s"
        remedy = f"ssh {seen.target.login(place[0])} 'ip -statistics link; tc qdisc'  # cable, port, shaping"
        yield Finding("fail", place, text, f"{_mib(usual)} MiB/s, as between most others", remedy)


def _pair(key: str) -> Pair:
    a, b = key.split(" ")
    return a, b


def _mib(rate: float) -> str:
    return f"{rate / 2**20:.3g}"


def _compute(cluster: Cluster) -> dict[str, Any]:
    """The same computation on all nodes at once: seconds of each repetition."""
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
        # The best too: a median alone is spoilt by what ran by chance.
        if median > _STRAGGLER_WARN * usual and bests[name] > _STRAGGLER_BEST * usual_best:
            text = f"a fixed computation takes {median / usual:.1f} times as long as on most others"
            remedy = f"ssh {seen.target.login(name)} 'uptime; ps -eo pid,user,pcpu,comm --sort=-pcpu | head -5'"
            verdict: Verdict = "fail" if median > _STRAGGLER_FAIL * usual else "warn"
            yield Finding(verdict, (name,), text, "the same speed on all", remedy)


def _share(cluster: Cluster) -> dict[str, Any]:
    """One node after the other, so that each has the server for itself."""
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
CLUSTER: dict[str, ClusterStep] = {"computation": _compute, "ways": _ways, "share speed": _share}
CHECKS = (
    Check(
        "PRF03",
        "all nodes compute at about the same speed",
        "bench",
        "cluster",
        _straggler,
        uses=("computation",),
        looks="The same computation on all nodes at the same time, 9 times.",
        why="Every step waits for the slowest node: heat, a governor, or somebody else's job.",
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
        looks="Bytes a second over TCP between each two nodes, each way, the best of 5; slow ones again, alone. Slow "
        "on all ways of a node is the node; on one way only, the link.",
        why="An allreduce is as fast as the slowest way in its ring.",
        needs=("PRB01", "NET01", "NET09", "NET11", "NET03", "NET04", "PRF03"),
        fault="one node limited to 100 Mbit/s; one link limited, in one direction",
    ),
    Check(
        "PRF04",
        "the share takes large files quickly",
        "bench",
        "node",
        _share_speed,
        uses=("share speed",),
        looks="Writes 32 MiB and 100 small files to the share as the shared user, with fsync, and removes them.",
        why="Checkpoints are as slow as this, and all ranks wait for them.",
        needs=("PRB01", "NET01", "PRF01", "NFS01", "NFS02", "NFS03"),
        fault="what one node sends to the NFS port limited",
    ),
)
