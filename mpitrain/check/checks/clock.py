"""The clocks: do they agree, and does a time daemon set them?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median_low
from typing import Any

from mpitrain.check.check import BY_SSH, Ask, Check, Finding, NotHereError, NotSeenError, Seen
from mpitrain.check.collect import Cluster, ClusterStep, on_each

_SAMPLES = 6
_ANSWER_SECONDS = 3.0
_SMALL_SECONDS = 0.25
_LARGE_SECONDS = 2.0


def _offsets(cluster: Cluster) -> dict[str, Any]:
    """How far each node's clock is ahead of this machine's, and how precisely that is known; or {"error": why}."""
    return on_each(list(cluster.agents), lambda name: _offset(cluster, name), at_once=1)


def _offset(cluster: Cluster, name: str) -> dict[str, float]:
    """Use the sample with the shortest round trip, because only the transmission time is unknown."""
    samples = []
    for _ in range(_SAMPLES):
        begun, before = time.monotonic(), time.time()
        there = cluster.ask(name, "clock", {}, seconds=_ANSWER_SECONDS, user="login")
        way_seconds = time.monotonic() - begun
        samples.append((way_seconds, float(there) - (before + way_seconds / 2)))
    way_seconds, ahead_seconds = min(samples)
    return {"ahead_seconds": ahead_seconds, "uncertain_seconds": way_seconds / 2}


def _skew(seen: Seen, nodes: Sequence[str]) -> Iterator[Finding]:
    offsets = seen.whole("clock_offsets")
    known = {}
    for node in nodes:
        one = offsets.get(node, {"error": "was not asked"})
        if "error" in one:
            yield Finding("unknown", one["error"], where=(node,))
        else:
            known[node] = one
    if not known:
        return
    # This machine's clock counts too. With three or more clocks, one wrong clock does not change the median.
    clocks = [0.0, *(one["ahead_seconds"] for one in known.values())]
    middle = median_low(clocks) if len(clocks) > 2 else 0.0
    for node, one in known.items():
        away = one["ahead_seconds"] - middle
        least = abs(away) - one["uncertain_seconds"]
        if least < _SMALL_SECONDS:
            continue
        direction = "ahead of" if away > 0 else "behind"
        yield Finding(
            "fail" if least >= _LARGE_SECONDS else "warn",
            f"its clock is {_about(least)} {direction} the others",
            f"less than {_SMALL_SECONDS:g} s",
            remedy=_set_again(seen, node),
            where=(node,),
        )


def _set_again(seen: Seen, node: str) -> str:
    """Return a line that sets the clock. A running daemon moves it slowly; if none runs, set-up may start one."""
    try:
        service = seen.node(node, "time_service")
    except NotSeenError:
        return ""
    if service["container"]:
        return "sudo timedatectl set-ntp true  # on the host of the container {node}: the clock is the host's"
    if {"chrony", "chronyd"} & set(service["daemons"]):
        return "ssh {login} sudo chronyc makestep"
    if service["daemons"]:
        return f"ssh {{login}} sudo systemctl restart {service['daemons'][0]}"
    is_off = seen.target.settings.get("mpitrain_time") == "off"
    return "ssh {login} sudo timedatectl set-ntp true" if is_off else ""


def _about(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"


def _kept(seen: Seen, node: str) -> Iterator[Finding]:
    service = seen.node(node, "time_service")
    if service["container"]:
        raise NotHereError(f"a container ({service['container']}) has its host's clock")
    if service["synchronized"]:
        return
    if not service["daemons"]:
        remedy = "ssh {login} sudo timedatectl set-ntp true"
        is_off = seen.target.settings.get("mpitrain_time") == "off"
        yield Finding("warn", "no time daemon runs", "one, such as chrony", remedy=remedy if is_off else "")
    elif service["synchronized"] is None:
        raise NotSeenError("neither timedatectl nor chronyc says whether the clock is synchronized")
    else:
        daemon = service["daemons"][0]
        remedy = f"ssh {{login}} '{_SOURCES.get(daemon, f'systemctl status {daemon}')}'  # does it reach a server?"
        yield Finding("warn", f"{daemon} runs, but has not set the clock yet", "synchronized", remedy=remedy)


_SOURCES = {
    "chrony": "chronyc -n sources",
    "chronyd": "chronyc -n sources",
    "systemd-timesyncd": "timedatectl timesync-status",
}

ASKS = (Ask("time_service", "time_service", "login", seconds=9.0),)
CLUSTER: dict[str, ClusterStep] = {
    "clock_offsets": _offsets,
}
CHECKS = (
    Check(
        "CLK01",
        "the clocks agree",
        _skew,
        scope="cluster",
        uses=("clock_offsets", "time_service"),
        looks=f"{_SAMPLES} queries of the time over the open connection. The one with the shortest round trip counts, "
        f"less half of that trip. The clocks are compared with their median.",
        why="NFS compares times of files, certificates expire, and logs of several nodes cannot be read together.",
        tag="time",
        needs=BY_SSH,
        fault="the clock 5 minutes ahead on one node",
    ),
    Check(
        "CLK02",
        "a time daemon sets the clock",
        _kept,
        uses=("time_service",),
        alone=True,
        remedy_alone="sudo timedatectl set-ntp true",
        looks="timedatectl show, or else chronyc tracking; systemctl is-active of the usual daemons.",
        why="A clock that no daemon sets drifts by seconds a week.",
        tag="time",
        needs=(*BY_SSH, "CLK01"),
        fault="none on a test bed, whose nodes have their host's clock: judged on made-up answers",
    ),
)
