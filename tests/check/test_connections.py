"""The judges of connections between nodes: closed ports, lost packets, packet sizes."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from check.made_up import only, sound, verdicts
from check.test_network import PAIR, REACH, healthy
from mpitrain.check.checks import CHECKS, PAIRS
from mpitrain.check.collect import Cluster
from mpitrain.check.node import ways
from mpitrain.check.run import judge


def test_drop_and_reject() -> None:
    looked = healthy()
    reach = looked.pairs[PAIR]["reach"]
    reach.update(connect="timeout", found="no answer within 3 s", beside=["ok", "refused"])
    one = only(
        "NET04", looked, "fail", "node1 node2", "no firewall is seen there", "ssh 10.0.0.2 sudo nft list ruleset"
    )
    assert "DROP" in one.observed and one.mend == ("node2",)
    reach.update(connect="refused", found="Connection refused")
    looked.nodes["node2"]["network"]["firewall"] = "ufw"
    set_up = "ansible-playbook cluster/setup.yml --tags firewall --limit {limit}"
    one = only("NET04", looked, "fail", "node1 node2", "ufw is active there", set_up)
    assert "REJECT" in one.observed


@pytest.mark.parametrize("connect", ["timeout", "refused", "unreachable"])
def test_a_way_that_is_too_slow_is_not_closed(connect: str) -> None:
    """ssh's port gave no answer in one of the turns, so nothing is known of the high ones."""
    looked = healthy()
    looked.pairs[PAIR]["reach"].update(connect=connect, found="no answer within 3 s", beside=["ok", "timeout"])
    words = "a high port gave no connection (no answer within 3 s), and ssh's port, in turns with it: ok, timeout"
    only("NET04", looked, "unknown", "node1 node2", words)


@pytest.mark.parametrize(
    ("tries", "beside"),
    [
        (["ok"], []),
        (["timeout", "ok"], ["ok"]),
        (["lost", "refused", "ok"], ["ok", "ok"]),
        (["timeout", "timeout", "timeout"], ["ok", "ok"]),
        (["timeout", "timeout", "refused"], ["ok", "ok"]),
    ],
)
def test_what_seems_closed_is_tried_again(tries: list[str], beside: list[str]) -> None:
    """A port that seems closed is tried in turns with ssh's port. A new listener replaces one that may have ended."""
    looked = healthy()
    calls: list[tuple[str, str]] = []

    def ask(name: str, call: str, wish: dict[str, Any], **_: Any) -> Any:
        calls.append((name, call))
        if call == "reach":
            return {**REACH, "connect": tries[sum(call == "reach" for _, call in calls) - 1]}
        assert call != "answer" or wish["port"] == 22
        return {"listen": 40000, "answer": "ok", "ping": REACH["ping"]}[call]

    cluster = cast("Cluster", SimpleNamespace(target=looked.target, seen=looked, ask=ask))
    reached = PAIRS["reach"](cluster, *PAIR)
    assert (reached["connect"], reached["beside"]) == (tries[-1], beside)
    listens = 1 + sum(one in ("lost", "refused") for one in tries[:-1])
    expected = ["listen"] * listens + ["reach"] * len(tries) + ["answer"] * len(beside) + ["ping"]
    assert sorted(call for _, call in calls) == sorted(expected)
    assert [call for _, call in calls if call in ("reach", "answer")] == [
        call for number in range(len(tries)) for call in ("answer", "reach") if number or call == "reach"
    ]


def test_what_a_port_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        wish = {"address": "127.0.0.1", "port": server.getsockname()[1]}
        assert ways.answer(wish) == "ok"
    assert ways.answer(wish) == "refused"


def test_nothing_gets_there() -> None:
    looked = healthy()
    looked.pairs[PAIR]["reach"].update(connect="timeout", found="no answer within 3 s")
    sound("NET09", looked)
    looked.pairs[PAIR]["login between"] = {"failed": "timeout", "seconds": 5.0}
    only("NET09", looked, "fail", "node1 node2", "pings get through")
    looked.pairs[PAIR]["reach"]["ping"] = {"large": False, "small": False}
    only("NET09", looked, "fail", "node1 node2", "pings do not get through either")


def test_packet_sizes() -> None:
    looked = healthy()
    reach = looked.pairs[PAIR]["reach"]
    reach.update(ping={"large": False, "small": True}, mtu_bytes=9000, large_is_complete=False)
    lines = "; ".join(f"ssh 10.0.0.{number} 'sudo ip link set eth0 mtu 1500'" for number in (1, 2))
    one = only("NET03", looked, "fail", "node1 node2", "9000 bytes", f"{lines}  #")
    assert "TCP stalls" in one.observed
    reach["large_is_complete"] = True
    only("NET03", looked, "warn", "node1 node2", "")
    # No ping arrives at all, so pings tell nothing about sizes.
    reach["ping"] = {"large": False, "small": False}
    sound("NET03", looked)
    reach.update(ping={"large": None, "small": None}, large_is_complete=False)
    only("NET03", looked, "skip", "node1 node2", "")


def test_round_trips() -> None:
    looked = healthy()
    looked.pairs[PAIR]["reach"]["round_trips_seconds"] = [0.5, 7e-3]  # the best time counts
    only("NET06", looked, "warn", "node1 node2", "over 5 ms", allowed="most others")
    for sections in looked.pairs.values():  # all ways are alike: the network is slower, which is no fault
        sections["reach"]["round_trips_seconds"] = [7e-3]
    sound("NET06", looked)
    lost = {**REACH, "connect": "lost", "found": "timed out", "round_trips_seconds": [], "beside": ["ok", "ok"]}
    looked.pairs[PAIR]["reach"] = lost
    only("NET06", looked, "fail", "node1 node2", "")
    sound("NET04", looked)
    looked.pairs[PAIR]["reach"] = {**lost, "beside": ["timeout", "ok"]}
    only("NET06", looked, "unknown", "node1 node2", "")


def test_taken_ports() -> None:
    looked = healthy(environ={"MPIEXEC_PORT_RANGE": "50200:50201", "FI_TCP_PORT_LOW_RANGE": "7"})
    ports = looked.nodes["node3"]["ports"]
    ports["50200"] = "python3 (pid 5)"
    sound("NET08", looked)  # one way is left
    ports["50201"] = ""
    words = "all ports of MPIEXEC_PORT_RANGE (50200 to 50201) are in use, by python3"
    only("NET08", looked, "fail", "node3", words)
    assert verdicts("NET08", healthy()) == {"skip"}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_connection_of_either_family(address: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            pytest.skip(f"this machine has no {address}")
    port = ways.listen({"address": address, "seconds": 5.0})
    found = ways.reach({"address": address, "port": port})
    assert (found["connect"], found["large_is_complete"]) == ("ok", True)


@pytest.mark.parametrize(("address", "payload_bytes"), [("10.0.0.2", 1472), ("fd00::2", 1452)])
def test_a_ping_of_full_size(address: str, payload_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(ways, "_ping", lambda _address, size, _count: sizes.append(size) or True)
    assert ways.ping({"address": address, "mtu_bytes": 1500}) == {"large": True, "small": True}
    assert sizes == [payload_bytes]


@pytest.mark.parametrize(
    ("sent", "came", "again", "verdict", "words"),
    [
        (64, 64, 0, None, ""),
        (128, 127, 7, None, ""),  # below 1 %
        (128, 126, 0, "warn", "1 % or more of the packets are lost"),
        (128, 121, 0, "fail", "5 % or more of the packets are lost"),
        (128, 102, 9, "fail", "20 % or more of the packets are lost"),
        (64, 64, 9, "warn", "TCP sends 1 % or more of its packets again"),
        (64, 0, 180, "fail", "TCP sends 20 % or more of its packets again"),
        (64, 0, None, "skip", "no UDP gets through"),
    ],
)
def test_packets_that_get_lost(sent: int, came: int, again: int | None, verdict: str | None, words: str) -> None:
    looked = healthy(2)
    stream = {"segments": 800, "again": again} if again is not None else {"segments": 0, "again": 0}
    looked.pairs[PAIR]["loss"] = {"sent": sent, "came": came, **stream}
    looked.pairs["node2", "node1"]["loss"] = {"sent": 64, "came": 64}
    there, back = judge([CHECKS["NET11"]], looked)
    assert (there.where, back.where, back.verdict) == (PAIR, PAIR[::-1], "pass")
    assert there.verdict == (verdict or "pass")
    assert words in there.observed
    if verdict in ("warn", "fail"):
        line = "'ip -statistics link; sudo nft list ruleset; tc -s qdisc'"
        assert there.remedy == f"ssh 10.0.0.1 {line}; ssh 10.0.0.2 {line}  # then try another cable and port"


def test_datagrams_are_counted_where_they_come() -> None:
    """All datagrams are counted, by the node's own calls. If some got lost, only those of a second try count."""
    lost_at_first, again = [30, 0, 0], [1, 0, 2]

    def ask(_name: str, call: str, wish: dict[str, Any], **_: Any) -> Any:
        answer = ways.CALLS[call](wish)
        if call == "send_stream":
            assert answer["segments"] > 0  # 512 KiB go out in few segments where these may be long
            return {"segments": 100, "again": again.pop(0)}
        return answer - lost_at_first.pop(0) if call == "count_datagrams" else answer

    cluster = cast(
        Cluster, SimpleNamespace(ask=ask, target=SimpleNamespace(addresses=dict.fromkeys(PAIR, "127.0.0.1")))
    )
    assert PAIRS["loss"](cluster, *PAIR) == {"sent": 128, "came": 128, "segments": 200, "again": 2}
    lost_at_first[:], again[:] = [0], [0]
    assert PAIRS["loss"](cluster, *PAIR) == {"sent": 64, "came": 64, "segments": 100, "again": 0}
    lost_at_first[:], again[:] = [64], [0]  # as if UDP were blocked: that is not packet loss
    assert PAIRS["loss"](cluster, *PAIR) == {"sent": 64, "came": 0, "segments": 100, "again": 0}
