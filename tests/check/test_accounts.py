"""The judges of the shared user's account, and of clocks."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from check.made_up_machines import NODES, changed, healthy, judged, only
from mpitrain.check.check import Seen


def test_another_uid() -> None:
    found = "user cluster has uid 1950 and gid 1900"
    only("USR01", changed("account", uid=1950), "fail", "node2", found, "sudo usermod -u 1900 -g 1900 cluster")
    only(
        "USR01",
        changed("account", gid=7, group="cluster"),
        "fail",
        "node2",
        "uid 1900 and gid 7",
        "'sudo groupmod -g 1900 cluster && sudo usermod",
    )
    assert (
        "find / -xdev -uid 1950 -exec chown -h 1900:1900 {} +"
        in judged("USR01", changed("account", uid=1950))[0].remedy
    )


def test_a_group_that_others_may_be_in_is_not_renumbered() -> None:
    seen = changed("account", uid=1950, gid=100, group="users")
    only("USR01", seen, "fail", "node2", "uid 1950 and gid 100", "getent group users 1900'")
    remedy = judged("USR01", seen)[0].remedy
    assert "groupmod" not in remedy
    assert "uid 1950 is to be 1900 and gid 100 is to be 1900" in remedy
    assert "groupmod" not in judged("USR01", changed("account", uid=1950))[0].remedy


def test_an_expiry_that_may_not_be_read_is_no_pass() -> None:
    only("USR02", changed("account", expired=None), "skip", "node2", "can only be read as root")
    only("USR02", changed("account", expired=True), "fail", "node2", "has expired", "chage -E -1 cluster")


def test_a_home_with_a_space() -> None:
    (one,) = judged("USR02", changed("account", home_owner=0, home="/home/a b"))
    assert shlex.split(one.remedy)[2] == "sudo chown cluster: '/home/a b'"


def test_no_user() -> None:
    only("USR01", changed("account", uid=None, uid_owner=None), "fail", "node2", "there is no user", "--tags users")
    taken = changed("account", uid=None, uid_owner="bob")
    only("USR01", taken, "fail", "node2", "there is no user cluster, and uid 1900 belongs to bob", "mpitrain_uid")
    only("USR02", taken, "skip", "node2", "there is no user")


def test_other_numbers_than_ours_on_all_nodes_are_right() -> None:
    seen = healthy()
    for name in NODES:
        seen.nodes[name]["account"].update(uid=1000, gid=1000, home_owner=1000)
    assert judged("USR01", seen) == []
    seen.nodes["node3"]["account"].update(uid=1001)
    only("USR01", seen, "fail", "node3", "uid 1001", "usermod -u 1000")


@pytest.mark.parametrize(
    ("fields", "found", "remedy"),
    [
        (
            {"shell": "/usr/sbin/nologin"},
            "/usr/sbin/nologin, refuses logins",
            "ssh 10.0.0.2 sudo usermod -s /bin/bash cluster",
        ),
        ({"shell": "/bin/zsh", "shell_works": False}, "/bin/zsh, does not exist", "usermod -s"),
        ({"home_owner": None}, "/home/cluster, does not exist", "--tags users"),
        ({"home_owner": 0}, "belongs to uid 0", "sudo chown cluster: /home/cluster"),
        ({"expired": True}, "has expired", "sudo chage -E -1 cluster"),
        ({"must_change_password": True}, "must choose another password", "sudo chage -d -1 -M -1 cluster"),
        ({"nologin": "/etc/nologin"}, "lets only root log in", "sudo rm /etc/nologin"),
    ],
)
def test_an_account_that_cannot_log_in(fields: dict[str, Any], found: str, remedy: str) -> None:
    only("USR02", changed("account", **fields), "fail", "node2", found, remedy)


def test_root_may_log_in_all_the_same() -> None:
    account = {"uid": 0, "gid": 0, "home_owner": 0, "nologin": "/etc/nologin"}
    assert judged("USR02", changed("account", **account)) == []


def clocks(uncertain: float = 0.002, **ahead: float) -> Seen:
    seen = healthy()
    for node, seconds in ahead.items():
        seen.cluster["clock"][node] = {"ahead_seconds": seconds, "uncertain_seconds": uncertain}
    return seen


def test_a_clock_that_is_wrong() -> None:
    only(
        "CLK01", clocks(node3=300.0), "fail", "node3", "its clock is 300 s ahead of the others", "sudo chronyc makestep"
    )
    only("CLK01", clocks(node3=-1.0), "warn", "node3", "its clock is 1.0 s behind the others")
    assert judged("CLK01", clocks(node3=0.2)) == []


def test_a_slow_answer_is_no_wrong_clock() -> None:
    assert judged("CLK01", clocks(uncertain=2.0, node3=2.1)) == []
    only("CLK01", clocks(uncertain=2.0, node3=4.5), "fail", "node3", "2.5 s ahead")


def test_our_own_clock_may_be_wrong() -> None:
    assert judged("CLK01", clocks(node1=300.0, node2=300.0, node3=300.0)) == []


@pytest.mark.parametrize(
    ("service", "remedy"),
    [
        ({"daemons": [], "container": ""}, "--tags time"),
        ({"daemons": ["systemd-timesyncd"], "container": ""}, "systemctl restart systemd-timesyncd"),
        ({"daemons": [], "container": "docker"}, "on the host of the container node3"),
    ],
)
def test_who_can_set_the_clock(service: dict[str, Any], remedy: str) -> None:
    seen = clocks(node3=9.0)
    seen.nodes["node3"]["time_service"].update(service)
    only("CLK01", seen, "fail", "node3", "9.0 s ahead", remedy)


def test_a_node_whose_clock_did_not_answer() -> None:
    seen = healthy()
    seen.cluster["clock"]["node2"] = {"error": "no answer within 3 s"}
    only("CLK01", seen, "unknown", "node2", "no answer")


def test_who_keeps_the_clock() -> None:
    only(
        "CLK02",
        changed("time_service", synchronized=False, daemons=[]),
        "warn",
        "node2",
        "no time daemon",
        "--tags time",
    )
    only(
        "CLK02", changed("time_service", synchronized=False), "warn", "node2", "chrony runs, but has not", "chronyc -n"
    )
    only("CLK02", changed("time_service", synchronized=None), "unknown", "node2", "neither timedatectl nor chronyc")
    only("CLK02", changed("time_service", container="docker"), "skip", "node2", "has its host's clock")
