"""The judges of logins between nodes, of their shells, and of keys that only their owner may write."""

from __future__ import annotations

import shlex
from typing import Any, cast

import pytest

from check.made_up import SET_UP, judged, seen
from mpitrain.check.check import Result, Seen
from mpitrain.check.checks import CHECKS
from mpitrain.check.node import children, sshd
from mpitrain.check.run import judge

KEY = {"path": "/etc/ssh/mpitrain/id_ed25519", "mode": "0600", "is_own": True, "is_readable": True}
KEY |= {"bits": 256, "fingerprint": "SHA256:a", "kind": "ED25519"}
BY_SET_UP = SET_UP.format(tag="ssh")
DENIED = "cluster@node2: Permission denied (publickey)."


def of_node(**sections: Any) -> Seen:
    """What the first of two nodes has answered."""
    looked = seen(2)
    looked.nodes = {"node1": sections, "node2": {}}
    return looked


def login(failed: str = "", found: str = "", seconds: float = 0.2, **fields: float) -> Seen:
    looked = of_node()
    looked.pairs["node1", "node2"] = {"login between": {"failed": failed, "found": found, "seconds": seconds, **fields}}
    return looked


def keys(*own: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"offers": [], "keys": list(own), "writable_by_others": [], "loose": [], **fields}


def passes(id_: str, looked: Seen) -> bool:
    """Nothing is said of node1."""
    return not [one for one in judged(id_, looked) if one.where and one.where[0] == "node1"]


def said(id_: str, looked: Seen, verdict: str, observed: str, *remedies: str) -> Result:
    """The first result for node1."""
    one = next(one for one in judged(id_, looked) if one.where and one.where[0] == "node1")
    assert (one.verdict, observed in one.observed) == (verdict, True), one
    for remedy in remedies:
        assert remedy in one.remedy, one
    return one


def test_any_to_any() -> None:
    """On a busy machine, and where packets get lost, a slow login is no finding."""
    lossy = login(seconds=2.5)
    lossy.pairs["node2", "node1"] = {"loss": {"sent": 128, "came": 100}}
    for looked in (login(), login(seconds=2.5, patience=3.0), lossy):
        assert passes("SSH04", looked)
    said("SSH04", login(seconds=2.5), "warn", "over 2 s")


@pytest.mark.parametrize(
    ("kind", "words", "mend", "remedy"),
    [
        ("key", DENIED, ("node2",), BY_SET_UP),
        ("host key", "Host key verification failed.", ("node1",), BY_SET_UP),
        ("timeout", "ssh: connect to host node2 port 22", (), "ssh 10.0.0.1 sudo -u cluster ssh -v node2 true"),
    ],
)
def test_what_set_up_mends_at_the_right_end(kind: str, words: str, mend: tuple[str, ...], remedy: str) -> None:
    one = said("SSH04", login(kind, words), "fail", words.replace("node2", "there"))
    assert (one.where, one.mend or (), one.remedy) == (("node1", "node2"), mend, remedy)


@pytest.mark.parametrize(("let_in", "words"), [([], "--tags ssh"), (["SHA256:a"], "sudo journalctl -n 20 -u ssh")])
def test_set_up_is_offered_where_the_key_is_missing(let_in: list[str], words: str) -> None:
    """If the list has the key, something else refuses the login."""
    looked = login("key", DENIED)
    own = {"keys": [KEY], "let_in": let_in}
    refused = {"refused": "ended with code 255: Permission denied"}
    looked.nodes = {"node1": {"ssh keys": own, "shell": refused}, "node2": {"ssh keys": own}}
    for id_ in ("SSH04", "SSH09"):
        said(id_, looked, "fail", "", words)


@pytest.mark.parametrize(
    ("refused", "startup", "observed", "remedy"),
    [
        ("ended with code 127: exec: zsh: not found", "~/.bashrc", ", because of ~cluster/.bashrc", "1i [ -t 0 ] ||"),
        ("does not end within 10 s", "/etc/bash.bashrc", ", because of /etc/bash.bashrc", "1i [ -t 0 ] || return"),
        ("ended with code 1, without a message", "", "", ""),
    ],
)
def test_a_login_whose_shell_runs_no_command(refused: str, startup: str, observed: str, remedy: str) -> None:
    one = said("SSH09", of_node(shell={"refused": refused, "startup": startup}), "fail", "", remedy)
    whole = f"`ssh` of cluster to its own node logs in, but runs no command: it {refused}{observed}"
    assert one.observed == whole and "--tags" not in one.remedy
    assert ("1i [ -t 0 ] || return" in one.remedy) == bool(startup)


@pytest.mark.parametrize(
    ("words", "remedy"),
    [("Host key verification failed.", "--tags ssh"), ("Connection reset", "sudo -u cluster ssh -v ")],
)
def test_other_refusals_of_a_nodes_own_login(words: str, remedy: str) -> None:
    """A refused shell is for one check to judge."""
    own = {"keys": [KEY], "let_in": ["SHA256:a"]}
    greeting = {"hello": "admin", "noise": "", "swallowed_by": ""}
    looked = of_node(shell={"refused": f"ended with code 255: {words}"}, login=greeting, **{"ssh keys": own})
    said("SSH09", looked, "fail", "", remedy)
    said("SSH05", looked, "unknown", "")


def greeted(login: dict[str, str], shell: dict[str, str]) -> Seen:
    quiet = {"noise": "", "swallowed_by": ""}
    return of_node(shell={**quiet, **shell}, login={"failed": "", "hello": "admin", **quiet, **login})


def test_a_quiet_shell() -> None:
    assert passes("SSH05", greeted({}, {"noise": "\n"}))
    one = said("SSH05", greeted({"noise": "Welcome!\n"}, {}), "fail", "'Welcome!'")
    assert "of admin" in one.observed and one.allowed == "nothing"
    said("SSH05", greeted({}, {"noise": "Hello"}), "fail", "of cluster", "~cluster/.bashrc")


@pytest.mark.parametrize(
    ("login", "shell", "account", "file"),
    [
        ("", "~/.bashrc", "cluster", "~cluster/.bashrc"),
        ("~/.bashrc", "", "admin", "~admin/.bashrc"),
        ("", "/etc/bash.bashrc", "cluster", "/etc/bash.bashrc"),
    ],
)
def test_a_shell_that_takes_what_is_sent_to_a_command(login: str, shell: str, account: str, file: str) -> None:
    words = f"a login of {account} that runs one command does not get what is sent to it: {file} takes it"
    one = said("SSH05", greeted({"swallowed_by": login}, {"swallowed_by": shell}), "fail", words)
    assert one.remedy.startswith(f"ssh 10.0.0.1 \"sudo sed -i '1i [ -t 0 ] || return' {file}\"  # ")


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
    assert [one.where for one in results if one.blocked_by == "SSH11"] == [("node1", "node3")]


def test_a_login_that_takes_too_long_is_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine one slow login proves nothing. A refused login is not tried again."""
    ends: list[Any] = []

    def run(*_: Any) -> tuple[int, str, str]:
        end = ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return cast(tuple[int, str, str], end)

    monkeypatch.setattr(children, "run", run)
    slow, refused = children.SlowError("slow"), (255, "", DENIED)
    for tries, failed in (([slow, (0, "", "")], ""), ([slow, slow], "timeout"), ([refused], "key")):
        ends[:] = tries
        assert sshd.log_in({"peer": "node2"})["failed"] == failed
        assert ends == []


@pytest.mark.parametrize(
    ("fields", "verdict", "words", "allowed"),
    [
        ({"mode": "0644"}, "fail", "has mode 0644", "0600"),
        ({"is_own": False, "is_readable": False}, "fail", "may not read", "its own, mode 0600"),
        ({"fingerprint": ""}, "fail", "not a key that ssh can read", ""),
        ({"kind": "RSA", "bits": 2048}, "warn", "RSA key of 2048 bits", "ed25519, or RSA of 3072 bits or more"),
    ],
)
def test_keys(fields: dict[str, Any], verdict: str, words: str, allowed: str) -> None:
    one = said("SSH08", of_node(**{"ssh keys": keys({**KEY, **fields})}), verdict, words, "--tags ssh")
    assert one.allowed == allowed


def test_no_key_and_what_others_may_write() -> None:
    looked = of_node(**{"ssh keys": keys(offers=["/x/key"], writable_by_others=["/home/cluster"])})
    missing, home = (one for one in judged("SSH08", looked) if one.where == ("node1",))
    assert "there is no /x/key" in missing.observed
    assert missing.remedy == "ansible-playbook cluster/setup.yml --tags ssh"  # all nodes must learn the new key
    assert (home.verdict, home.remedy) == ("warn", "ssh 10.0.0.1 'sudo chmod go-w /home/cluster'")
    loose = ["/etc/ssh/mpitrain", "/etc/ssh/mpitrain/known_hosts"]
    found = f"other users than root may write to {', '.join(loose)}"
    assert said("SSH08", of_node(**{"ssh keys": keys(KEY, loose=loose)}), "fail", found).remedy == BY_SET_UP


def test_the_same_key_on_two_nodes() -> None:
    looked = of_node(**{"ssh keys": keys(KEY)})
    assert passes("SSH08", looked)
    looked.nodes["node2"] = {"ssh keys": keys(KEY)}
    assert [one.where for one in judged("SSH08", looked)] == [("node1",), ("node2",)]


def test_paths_get_through_both_shells() -> None:
    path = "/home/cluster/.ssh/my key;reboot"
    one = said("SSH08", of_node(**{"ssh keys": keys({**KEY, "path": path, "mode": "0644"})}), "fail", "")
    assert shlex.split(shlex.split(one.remedy)[2]) == ["sudo", "chmod", "600", path]
