"""The ways between nodes, for each pair in each direction: ports, packet sizes, round trips."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpitrain.diagnostics.check import Ask, Check, Finding, NotHereError, NotSeenError, Seen
from mpitrain.diagnostics.closed_ports import in_turns, why_unclear
from mpitrain.diagnostics.collect import Cluster, ClusterStep, PairStep
from mpitrain.diagnostics.node.children import MOST_PATIENCE
from mpitrain.diagnostics.remedies import on_each
from mpitrain.launch.variables import port_ranges

_SSH = 22
_SECONDS = 20.0
_SLOW_MILLISECONDS = 10.0
_ODD_MILLISECONDS = 5.0
_ODD_TIMES = 3.0
# Parts of the sent packets: the loss that is still normal, and the loss that TCP can no longer compensate.
_LITTLE_LOSS = 0.01
_MUCH_LOSS = 0.05


def _reach(cluster: Cluster, a: str, b: str) -> Any:
    """Make a connection from a to a high port of b, and send messages over it; then ping."""
    try:
        network = cluster.seen.node(a, "network")
    except NotSeenError as error:
        return {"error": str(error)}
    address = cluster.target.addresses[b]
    ranges = list(port_ranges(cluster.target.environ).values())
    # The listener stays until the question of the other node has been given up.
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
    """Count how many datagrams from a reach b. If one is lost, send others, and count only those."""
    address = cluster.target.addresses[b]
    counts = {"sent": 0, "came": 0}
    for tries in (1, 2):
        counts = {"sent": 0, "came": 0}
        for _ in range(tries):
            port = cluster.ask(b, "open_room", {"address": address}, seconds=5.0, user="login")
            wish = {"address": address, "port": port}
            counts["sent"] += cluster.ask(a, "send_datagrams", wish, seconds=8.0, user="login")
            counts["came"] += cluster.ask(b, "count_datagrams", wish, seconds=8.0, user="login")
        if counts["came"] in (0, counts["sent"]):
            break
    return counts


def loss(seen: Seen, pair: tuple[str, str]) -> float:
    """Return the part of the packets that is lost on the way; 0 if that was not seen."""
    datagrams = seen.pairs.get(pair, {}).get("loss", {})
    came = datagrams.get("came", 0)
    return 1.0 - came / datagrams["sent"] if came else 0.0


def _loses(seen: Seen, pair: tuple[str, str]) -> Iterator[Finding]:
    if seen.pair(pair, "loss")["came"] == 0:
        raise NotHereError("no UDP gets through, which would be needed to count")
    lost = loss(seen, pair)
    if lost >= _LITTLE_LOSS:
        # Rounded, so that the same fault on several pairs has the same text.
        rough = max(limit for limit in (1, 2, 5, 10, 20, 50) if limit <= 100 * lost)
        text = f"{rough} % or more of the packets are lost on this way, but not all"
        look = f"{_both_ends(seen, pair, _LOSSES)}  # then try another cable and port"
        yield Finding("fail" if lost >= _MUCH_LOSS else "warn", pair, text, "none", look)


def _gets_there(seen: Seen, pair: tuple[str, str]) -> Iterator[Finding]:
    reach, login = seen.pair(pair, "reach"), seen.pair(pair, "login between")
    if reach["connect"] in ("timeout", "unreachable") and login["failed"] in ("timeout", "unreachable"):
        pings = "pings get through" if reach["ping"]["small"] else "pings do not get through either"
        text = f"no connection gets through, neither to port 22 nor to a high one ({reach['found']}); {pings}"
        yield Finding("fail", pair, text, remedy=_both_ends(seen, pair, "sudo nft list ruleset"))


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
    yield Finding("fail", pair, text, "all TCP ports open between nodes", mended, mend=(pair[1],))


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
        pair,
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
        yield Finding("fail", pair, f"a connection was made, then messages were lost: {reach['found']}", "", remedy)
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
        yield Finding("warn", pair, text, "less, as between most others", remedy)


def _rough(milliseconds: float) -> float:
    """Round, so that the same fault on several pairs has the same text."""
    return max(limit for limit in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if limit <= milliseconds)


ASKS: tuple[Ask, ...] = ()
_LOSSES = "ip -statistics link; sudo nft list ruleset; tc -s qdisc"
PAIRS: dict[str, PairStep] = {"reach": _reach, "loss": _lose}
CLUSTER: dict[str, ClusterStep] = {}
CHECKS = (
    Check(
        "NET09",
        "each node can connect to each other node",
        "full",
        "pair",
        _gets_there,
        uses=("network", "reach", "login between"),
        looks="A login, a connection to a high port, and a ping. The check fails if neither connection gets through.",
        why="The nodes of a job talk to each other directly, each with each.",
        needs=("PRB01", "NET01"),
        fault="all packets from one node to another dropped there; only its new connections dropped",
    ),
    Check(
        "NET04",
        "nodes reach each other's high ports",
        "full",
        "pair",
        _high_ports,
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
        "full",
        "pair",
        _loses,
        uses=("loss",),
        looks="64 datagrams of 256 bytes over UDP, counted at the receiver; if one of them is lost, 128 others.",
        why="TCP waits a fifth of a second or more for each lost packet, and all ranks wait with it.",
        needs=("PRB01", "NET01", "NET09", "NET04"),
        fault="20 % lost from one node to another",
    ),
    Check(
        "NET03",
        "packets of full size get through",
        "full",
        "pair",
        _mtu,
        uses=("network", "reach"),
        looks="`ping -M do` with packets as large as the interface sends them, and 128 KiB over TCP.",
        why="If they are lost, logins and small messages work, but a job hangs with its first large message.",
        needs=("PRB01", "NET01", "NET09", "NET04", "NET11"),
        fault="MTU 9000 over a network of 1500, on two nodes, on one",
    ),
    Check(
        "NET06",
        "round trips are fast",
        "full",
        "pair",
        _round_trips,
        uses=("network", "reach"),
        looks="20 echoes of 64 bytes over TCP, of which the fastest quarter counts.",
        why="Each step of a training waits for many small messages.",
        needs=("PRB01", "NET01", "NET09", "NET04", "NET11", "NET03"),
        fault="32 kbit/s from one node to another",
    ),
)
