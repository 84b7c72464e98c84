"""The paths between nodes, for each pair in each direction: ports, packet sizes, round trips.

A connection to a busy node, or through a busy tunnel, may take too long. So a high port that seems closed is tried
again, alternating with that node's ssh port. It is open if any connection is made, and closed if none is made while
ssh's port answers each time. Otherwise nothing is known about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mpitrain.check.check import Check, Finding, NotHereError, NotSeenError, Seen, on_each
from mpitrain.check.collect import Cluster, PairStep
from mpitrain.check.node.children import MOST_PATIENCE
from mpitrain.launch.variables import port_ranges

_TURNS = 2
_ANSWERS = ("ok", "refused")  # of a port: the way there works
_SSH = 22
_SECONDS = 20.0
_SLOW_MILLISECONDS = 10.0
_ODD_MILLISECONDS = 5.0
_ODD_TIMES = 3.0
# Parts of the sent packets: the loss that is still normal, and the loss that TCP can no longer compensate.
_LITTLE_LOSS = 0.01
_MUCH_LOSS = 0.05


def in_turns(connect: Callable[[], dict[str, Any]], answer: Callable[[], str]) -> dict[str, Any]:
    """The result of the first `connect` that succeeds, or of the last; "beside": the answers of ssh's port between
    them."""
    reached, beside = connect(), list[str]()
    while reached["connect"] != "ok" and len(beside) < _TURNS:
        beside.append(answer())
        reached = connect()
    return {**reached, "beside": beside}


def why_unclear(reached: Mapping[str, Any]) -> str:
    """The reason why a failed connection to a high port proves nothing. "" if it proves something."""
    if reached["connect"] == "ok" or all(answer in _ANSWERS for answer in reached["beside"]):
        return ""
    answers = ", ".join(reached["beside"])
    return f"a high port gave no connection ({reached['found']}), and ssh's port, in turns with it: {answers}"


def _reach(cluster: Cluster, a: str, b: str) -> Any:
    """Make a connection from a to a high port of b, and send messages over it; then ping."""
    try:
        network = cluster.seen.node(a, "network")
    except NotSeenError as error:
        return {"error": str(error)}
    address = cluster.target.addresses[b]
    ranges = list(port_ranges(cluster.target.environ).values())
    # The listener stays until the other node's question has timed out.
    to_listen = {"address": address, "seconds": MOST_PATIENCE * _SECONDS, "range": ranges[0] if ranges else None}
    ports: list[int] = []

    def connect() -> dict[str, Any]:
        if not ports:
            ports.append(cluster.ask(b, "listen", to_listen, seconds=5.0, user="login"))
        wish = {"address": address, "port": ports[0]}
        reached: dict[str, Any] = cluster.ask(a, "reach", wish, seconds=_SECONDS, user="login")
        if reached["connect"] in ("lost", "refused"):  # the listener there may have ended
            ports.clear()
        return reached

    def answer() -> str:
        return str(cluster.ask(a, "answer", {"address": address, "port": _SSH}, seconds=_SECONDS, user="login"))

    connection = in_turns(connect, answer)
    interface = network["interfaces"].get(network["routes"].get(b, {}).get("interface"), {})
    wish = {"address": address, "mtu_bytes": interface.get("mtu_bytes", 1500)}
    return {
        **connection,
        "ping": cluster.ask(a, "ping", wish, seconds=14.0, user="login"),
        "mtu_bytes": wish["mtu_bytes"],
    }


def _lose(cluster: Cluster, a: str, b: str) -> dict[str, int]:
    """Count how many datagrams from a reach b, and how many segments of TCP are sent again.

    If one is lost, send others, and count only those.
    """
    address = cluster.target.addresses[b]
    counts: dict[str, int] = {}
    for tries in (1, 2):
        counts = {"segments": 0, "again": 0}
        for _ in range(tries):
            listener = {"address": address, "seconds": MOST_PATIENCE * _SECONDS, "range": None}
            port = cluster.ask(b, "listen", listener, seconds=5.0, user="login")
            sent = cluster.ask(a, "send_stream", {"address": address, "port": port}, seconds=15.0, user="login")
            counts = {name: count + sent[name] for name, count in counts.items()}
        if not counts["again"]:
            break
    for tries in (1, 2):
        counts |= {"sent": 0, "came": 0}
        for _ in range(tries):
            port = cluster.ask(b, "open_room", {"address": address}, seconds=5.0, user="login")
            wish = {"address": address, "port": port}
            counts["sent"] += cluster.ask(a, "send_datagrams", wish, seconds=8.0, user="login")
            counts["came"] += cluster.ask(b, "count_datagrams", wish, seconds=8.0, user="login")
        if counts["came"] in (0, counts["sent"]):
            break
    return counts


def loss(seen: Seen, pair: tuple[str, str]) -> float:
    """Return the fraction of the packets that is lost on the path; 0 if that was not observed."""
    counts = seen.pairs.get(pair, {}).get("loss", {})
    came = counts.get("came", 0)
    return max(1.0 - came / counts["sent"] if came else 0.0, _sent_again(counts))


def _sent_again(counts: Mapping[str, int]) -> float:
    return counts["again"] / counts["segments"] if counts.get("segments") else 0.0


def _loses(seen: Seen, pair: tuple[str, str]) -> Iterator[Finding]:
    counts = seen.pair(pair, "loss")
    if counts["came"] == 0 and not counts.get("segments"):
        raise NotHereError("no UDP gets through, which would be needed to count")
    lost = loss(seen, pair)
    if lost >= _LITTLE_LOSS:
        # Rounded, so that the same fault on several pairs has the same text.
        rough = max(limit for limit in (1, 2, 5, 10, 20, 50) if limit <= 100 * lost)
        text = f"{rough} % or more of the packets are lost on this way, but not all"
        if _sent_again(counts) == lost:
            text = f"TCP sends {rough} % or more of its packets again on this way"
        look = f"{_both_ends(seen, pair, _LOSSES)}  # then try another cable and port"
        yield Finding("fail" if lost >= _MUCH_LOSS else "warn", text, "none", look)


def _gets_there(seen: Seen, pair: tuple[str, str]) -> Iterator[Finding]:
    reach, login = seen.pair(pair, "reach"), seen.pair(pair, "login between")
    if reach["connect"] in ("timeout", "unreachable") and login["failed"] in ("timeout", "unreachable"):
        pings = "pings get through" if reach["ping"]["small"] else "pings do not get through either"
        text = f"no connection gets through, neither to port 22 nor to a high one ({reach['found']}); {pings}"
        yield Finding("fail", text, remedy=_both_ends(seen, pair, "sudo nft list ruleset"))


def _high_ports(seen: Seen, pair: tuple[str, str]) -> Iterator[Finding]:
    reach = seen.pair(pair, "reach")
    if reach["connect"] in ("ok", "lost"):
        return
    if unclear := why_unclear(reach):
        raise NotSeenError(unclear)
    how = {"timeout": "dropped (DROP)", "refused": "refused (REJECT)", "unreachable": "refused (REJECT)"}
    firewall = seen.nodes.get(pair[1], {}).get("network", {}).get("firewall", "")
    active = f"{firewall} is active there" if firewall else "no firewall is seen there"
    text = f"a connection to a high port is {how[reach['connect']]}: {reach['found']}; {active}"
    mended = (
        "{set_up} --tags firewall --limit {limit}" if firewall in ("ufw", "firewalld") else _look_at_rules(seen, pair)
    )
    yield Finding("fail", text, "all TCP ports open between nodes", mended, mend=(pair[1],))


def _look_at_rules(seen: Seen, pair: tuple[str, str]) -> str:
    look = f"ssh {seen.target.login(pair[1])} sudo nft list ruleset"
    return f"{look}  # all traffic between the nodes' addresses must be allowed"


def _both_ends(seen: Seen, pair: tuple[str, str], command: str) -> str:
    """Return the same line for both directions, so that they are one finding."""
    return on_each(seen, sorted(pair), command)


def _mtu(seen: Seen, pair: tuple[str, str]) -> Iterator[Finding]:
    reach = seen.pair(pair, "reach")
    ping, size = reach["ping"], reach["mtu_bytes"]
    if ping["large"] or not ping["small"]:
        if ping["large"] is None and not reach.get("large_is_complete"):
            raise NotHereError("there is no ping that could tell")
        return
    interface = seen.node(pair[0], "network")["routes"][pair[1]]["interface"]
    stalls = not reach.get("large_is_complete", True)
    if not stalls and any(_stalls(seen, (pair[0], other)) for other in seen.target.names):
        return  # the finding for that pair says it already
    command = f"sudo ip link set {interface} mtu 1500"
    remedy = _both_ends(seen, pair, command) if stalls else f"ssh {seen.target.login(pair[0])} {command}"
    text = f"{interface} sends packets of {size} bytes; these do not get through, but small ones do"
    yield Finding(
        "fail" if stalls else "warn",
        text + ("; TCP stalls too" if stalls else "; TCP agrees on smaller ones"),
        "the MTU of the network between the nodes, the same on all of them",
        remedy + "  # or let the switch pass larger packets",
    )


def _stalls(seen: Seen, pair: tuple[str, str]) -> bool:
    reach = seen.pairs.get(pair, {}).get("reach", {})
    return reach.get("large_is_complete") is False and reach["ping"]["small"] is True and not reach["ping"]["large"]


def _round_trips(seen: Seen, pair: tuple[str, str]) -> Iterator[Finding]:
    reach = seen.pair(pair, "reach")
    remedy = _both_ends(seen, pair, "ip -statistics link")
    if reach["connect"] == "lost":
        if unclear := why_unclear(reach):
            raise NotSeenError(unclear)
        yield Finding("fail", f"a connection was made, then messages were lost: {reach['found']}", "", remedy)
        return
    # The fastest quarter, because single messages are slow or fast by chance.
    bests = {
        other: 1e3 * sorted(trips)[len(trips) // 4]
        for other, sections in seen.pairs.items()
        if (trips := sections.get("reach", {}).get("round_trips_seconds"))
    }
    # A low value, because a slow node slows every way that it is part of.
    usual = sorted(bests.values())[len(bests) // 4]
    best = bests[pair]
    if best > _SLOW_MILLISECONDS or (best > _ODD_MILLISECONDS and best > _ODD_TIMES * usual):
        text = f"a round trip takes over {_rough(best)} ms"
        yield Finding("warn", text, "less, as between most others", remedy)


def _rough(milliseconds: float) -> float:
    """Round, so that the same fault on several pairs has the same text."""
    return max(limit for limit in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if limit <= milliseconds)


_LOSSES = "ip -statistics link; sudo nft list ruleset; tc -s qdisc"

PAIRS: dict[str, PairStep] = {
    "reach": _reach,
    "loss": _lose,
}
CHECKS = (
    Check(
        "NET09",
        "each node can connect to each other node",
        _gets_there,
        level="full",
        scope="pair",
        uses=("network", "reach", "login between"),
        looks="A login, a connection to a high port, and a ping. The check fails if neither connection gets through.",
        why="The nodes of a job talk to each other directly, each with each.",
        needs=("PRB01", "NET01"),
        fault="all packets from one node to another dropped there; only its new connections dropped",
    ),
    Check(
        "NET04",
        "nodes reach each other's high ports",
        _high_ports,
        level="full",
        scope="pair",
        uses=("network", "reach"),
        looks="A listener on one node, on a port that the system chose (or of MPIEXEC_PORT_RANGE), and a connection "
        "from the other: no answer means DROP, a refusal means REJECT. A failed connection is tried three times, in "
        "turns with ssh's port, which must answer meanwhile.",
        why="MPI listens on ports that the system chooses. If they are dropped, a job hangs without a message.",
        tag="firewall",
        needs=("PRB01", "NET01", "NET09"),
        fault="high ports dropped, and rejected, on one node",
    ),
    Check(
        "NET11",
        "no packets are lost on the way",
        _loses,
        level="full",
        scope="pair",
        uses=("loss",),
        looks="64 datagrams of 256 bytes over UDP, counted at the receiver; 512 KiB over TCP, of which the kernel says "
        "how many packets it has sent again. If one is lost, twice as many others.",
        why="TCP waits a fifth of a second or more for each lost packet, and all ranks wait with it.",
        needs=("PRB01", "NET01", "NET09", "NET04"),
        fault="20 % lost from one node to another; 20 % of what TCP sends; 20 % dropped by the sender's filter",
    ),
    Check(
        "NET03",
        "packets of full size get through",
        _mtu,
        level="full",
        scope="pair",
        uses=("network", "reach"),
        looks="`ping -M do` with packets as large as the interface sends them, and 128 KiB over TCP.",
        why="If they are lost, logins and small messages work, but a job hangs with its first large message.",
        needs=("PRB01", "NET01", "NET09", "NET04", "NET11"),
        fault="MTU 9000 over a network of 1500, on two nodes, on one",
    ),
    Check(
        "NET06",
        "round trips are fast",
        _round_trips,
        level="full",
        scope="pair",
        uses=("network", "reach"),
        looks="20 echoes of 64 bytes over TCP, of which the fastest quarter counts.",
        why="Each step of a training waits for many small messages.",
        needs=("PRB01", "NET01", "NET09", "NET04", "NET11", "NET03"),
        fault="32 kbit/s from one node to another",
    ),
)
