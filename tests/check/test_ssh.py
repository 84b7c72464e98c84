"""The judges of logins between nodes."""

from __future__ import annotations

import shlex
from typing import Any, cast

import pytest

from check.made_up import seen
from check.made_up_logins import KEY, first, judged, login, of_node
from mpitrain.check.check import Seen
from mpitrain.check.checks import CHECKS
from mpitrain.check.node import children, sshd
from mpitrain.check.run import judge


def test_any_to_any() -> None:
    assert first("SSH04", login("")) is None
    slow = first("SSH04", login("", seconds=2.5))
    assert slow is not None and slow.verdict == "warn" and "over 2 s" in slow.observed
    busy = login("", seconds=2.5)
    busy.pairs["node1", "node2"]["login between"]["patience"] = 3.0
    assert first("SSH04", busy) is None


@pytest.mark.parametrize(
    ("kind", "words", "mend"),
    [
        ("key", "cluster@node2: Permission denied (publickey).", ("node2",)),
        ("host key", "Host key verification failed.", ("node1",)),
    ],
)
def test_set_up_mends_keys_at_the_right_end(kind: str, words: str, mend: tuple[str, ...]) -> None:
    result = first("SSH04", login(kind, words))
    assert result is not None and result.verdict == "fail" and result.where == ("node1", "node2")
    assert result.mend == mend
    assert words.replace("node2", "there") in result.observed
    assert result.remedy == "ansible-playbook cluster/setup.yml --tags ssh --limit {limit}"


@pytest.mark.parametrize(("let_in", "words"), [([], "--tags ssh"), (["SHA256:a"], "sudo journalctl -n 20 -u ssh")])
def test_set_up_is_offered_where_the_key_is_missing(let_in: list[str], words: str) -> None:
    """If the list has the key, something else refuses the login."""
    looked = login("key", "cluster@node2: Permission denied (publickey).")
    keys = {"keys": [KEY], "let_in": let_in}
    looked.nodes = {
        "node1": {"ssh keys": keys, "shell": {"refused": "ended with code 255: Permission denied"}},
        "node2": {"ssh keys": keys},
    }
    for id_ in ("SSH04", "SSH09"):
        result = first(id_, looked)
        assert result is not None and words in result.remedy


@pytest.mark.parametrize(
    ("said", "words"),
    [("Host key verification failed.", "--tags ssh"), ("Connection reset", "sudo -u cluster ssh -v ")],
)
def test_other_refusals_of_a_nodes_own_login(said: str, words: str) -> None:
    keys = {"keys": [KEY], "let_in": ["SHA256:a"]}
    looked = of_node("shell", {"refused": f"ended with code 255: {said}"})
    looked.nodes["node1"]["ssh keys"] = keys
    result = first("SSH09", looked)
    assert result is not None and words in result.remedy


def test_what_set_up_does_not_mend_is_looked_at_by_hand() -> None:
    result = first("SSH04", login("timeout", "ssh: connect to host 10.0.0.2 port 22: Connection timed out"))
    assert result is not None
    assert "to host there port 22" in result.observed
    assert result.remedy == "ssh 10.0.0.1 sudo -u cluster ssh -v node2 true"


def test_a_quiet_shell() -> None:
    def looked(login_noise: str, shell_noise: str) -> Seen:
        found = of_node("shell", {"noise": shell_noise, "swallowed_by": ""})
        login = {"failed": "", "hello": "admin", "noise": login_noise, "swallowed_by": ""}
        found.nodes["node1"]["login"] = login
        return found

    assert first("SSH05", looked("", "\n")) is None
    result = first("SSH05", looked("Welcome!\n", ""))
    assert result is not None and result.verdict == "fail"
    assert "of admin" in result.observed and "'Welcome!'" in result.observed and result.allowed == "nothing"
    result = first("SSH05", looked("", "Hello"))
    assert result is not None and "of cluster" in result.observed and "~cluster/.bashrc" in result.remedy


@pytest.mark.parametrize(
    ("login", "shell", "account", "file"),
    [
        ("", "~/.bashrc", "cluster", "~cluster/.bashrc"),
        ("~/.bashrc", "", "admin", "~admin/.bashrc"),
        ("", "/etc/bash.bashrc", "cluster", "/etc/bash.bashrc"),
    ],
)
def test_a_shell_that_takes_what_is_sent_to_a_command(login: str, shell: str, account: str, file: str) -> None:
    found = of_node("shell", {"noise": "", "swallowed_by": shell})
    found.nodes["node1"]["login"] = {"failed": "", "hello": "admin", "noise": "", "swallowed_by": login}
    (result,) = (one for one in judged("SSH05", found) if one.where == ("node1",))
    words = f"a login of {account} that runs one command does not get what is sent to it: {file} takes it"
    assert (result.verdict, result.observed) == ("fail", words)
    assert result.remedy.startswith(f"ssh 10.0.0.1 \"sudo sed -i '1i [ -t 0 ] || return' {file}\"  # ")


@pytest.mark.parametrize(
    ("refused", "startup", "words"),
    [
        (
            "ended with code 127: exec: zsh: not found",
            "~/.bashrc",
            "ended with code 127: exec: zsh: not found, because of ~cluster/.bashrc",
        ),
        ("does not end within 10 s", "/etc/bash.bashrc", "does not end within 10 s, because of /etc/bash.bashrc"),
        ("ended with code 1, without a word", "", "ended with code 1, without a word"),
    ],
)
def test_a_login_whose_shell_runs_no_command(refused: str, startup: str, words: str) -> None:
    result = first("SSH09", of_node("shell", {"refused": refused, "startup": startup}))
    assert result is not None
    assert result.observed == f"`ssh` of cluster to its own node logs in, but runs no command: it {words}"
    assert ("1i [ -t 0 ] || return" in result.remedy) == bool(startup)
    assert "--tags" not in result.remedy


def test_the_logins_that_every_job_begins_with() -> None:
    """Only the ways from the head. Set-up of the node that refuses the key repairs them."""
    looked = seen(3)
    refused = {"failed": "key", "found": "cluster@10.0.0.3: Permission denied (publickey).", "seconds": 0.1}
    looked.cluster["logins of the head"] = {"node2": {"failed": "", "found": "", "seconds": 5.0}, "node3": refused}
    results = judge([CHECKS["SSH11"]], looked)
    assert [(one.where, one.verdict) for one in results] == [(("node1", "node2"), "pass"), (("node1", "node3"), "fail")]
    assert results[1].observed == "cluster's `ssh` fails: cluster@there: Permission denied (publickey)."
    assert results[1].mend == ("node3",)
    looked.cluster["logins of the head"]["node3"] = {"error": "no answer in time"}
    assert [one.verdict for one in judge([CHECKS["SSH11"]], looked)] == ["pass", "unknown"]
    # A pair that has failed in this way is not judged again; the others are.
    looked.cluster["logins of the head"]["node3"] = refused
    results = judge([CHECKS["SSH11"], CHECKS["SSH04"]], looked)
    blocked = [one.where for one in results if one.blocked_by == "SSH11"]
    assert blocked == [("node1", "node3")]


def test_a_login_that_takes_too_long_is_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine one slow login proves nothing. A refused login is not tried again."""
    ends: list[Any] = [children.SlowError("slow"), (0, "", "")]

    def run(*_: Any) -> tuple[int, str, str]:
        end = ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return cast(tuple[int, str, str], end)

    monkeypatch.setattr(children, "run", run)
    assert sshd.log_in({"peer": "node2"})["failed"] == ""
    ends[:] = [children.SlowError("slow"), children.SlowError("slow")]
    assert sshd.log_in({"peer": "node2"})["failed"] == "timeout"
    ends[:] = [(255, "", "cluster@node2: Permission denied (publickey).")]
    assert sshd.log_in({"peer": "node2"})["failed"] == "key"


def test_a_slow_login_where_packets_get_lost_is_not_told_of() -> None:
    looked = login("", seconds=2.5)
    looked.pairs["node2", "node1"] = {"loss": {"sent": 128, "came": 100}}
    assert first("SSH04", looked) is None


def test_paths_get_through_both_shells() -> None:
    path = "/home/cluster/.ssh/my key;reboot"
    looked = of_node(
        "ssh keys",
        {"offers": [], "keys": [{**KEY, "path": path, "mode": "0644"}], "writable_by_others": [], "loose": []},
    )
    found = first("SSH08", looked)
    assert found is not None
    assert shlex.split(shlex.split(found.remedy)[2]) == ["sudo", "chmod", "600", path]


def test_a_refused_shell_is_for_one_check_to_judge() -> None:
    looked = of_node("shell", {"refused": "ended with code 255: Connection reset"})
    looked.nodes["node1"]["login"] = {"hello": "admin", "noise": "", "swallowed_by": ""}
    verdicts = {id_: found.verdict for id_ in ("SSH05", "SSH09") if (found := first(id_, looked))}
    assert verdicts == {"SSH05": "unknown", "SSH09": "fail"}
