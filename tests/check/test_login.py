"""The judges of the login from this machine."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from check.made_up import judged, of_each, only
from check.test_machine import ACCOUNT
from mpitrain.check.check import Seen
from mpitrain.check.checks import login
from mpitrain.check.run import judge, select


def looked(**of_node2: Any) -> Seen:
    """Three nodes with a successful login, except for the given values of the second."""
    found = of_each(3, {"sudo": {"hangs": False}, "become": "cluster", "account": {"uid": 1900}})
    for number, name in enumerate(found.target.names, 1):
        found.nodes[name]["login"] = {"failed": "", "hello": "admin", "host_keys": {"known": f"SHA256:{number}"}}
    found.nodes["node2"] |= of_node2
    return found


def failed(how: str, words: str, **fields: Any) -> Seen:
    return looked(login={"failed": how, "found": words, **fields})


def other_key(got: str, known: str) -> dict[str, Any]:
    text = f"its host key is {got} (ssh-ed25519); known is {known}"
    return {"failed": "host key", "found": text, "host_keys": {"got": got, "known": known}}


@pytest.mark.parametrize(("patience", "verdicts"), [(1.0, ["warn"]), (3.0, [])])
def test_a_login_that_takes_long(patience: float, verdicts: list[str]) -> None:
    """On a busy machine everything is slow, so a slow login is no finding."""
    slow = {"failed": "", "hello": "admin", "seconds": 2.5, "patience": patience}
    assert [one.verdict for one in judged("SSH01", looked(login=slow))] == verdicts


def test_the_host_key_of_another_node() -> None:
    found = looked(login=other_key("SHA256:3", "SHA256:2"))
    one = only("SSH03", found, "fail", "node2", "; that is the key of node3, which answers at this address")
    assert "correct ansible_host" in one.remedy and "ssh-keygen -R" not in one.remedy
    found.nodes["node3"]["login"] = other_key("SHA256:2", "SHA256:3")  # swapped
    first, second = judged("SSH03", found)
    assert "that is the key of node3," in first.observed and "that is the key of node2," in second.observed
    nobodys = looked(login=other_key("SHA256:9", "SHA256:2"))
    remedy = "ssh-keygen -R 10.0.0.2 && mpitrain cluster trust node2"
    assert "that is the key of" not in only("SSH03", nobodys, "fail", "node2", "", remedy).observed


NO_PYTHON = "bash: line 1: /usr/bin/python3: No such file or directory"
LOCKED = "it refuses ada with /home/ada/.ssh/id; /home/ada/.ssh/id has a passphrase, and ssh-agent does not hold it"
NOON = "it refuses ada and says 'Back at noon', and hangs up"
GARBAGE = "something else than our probe answers; it printed 'garbage'"
LOOKS = "ssh 10.0.0.2 '/usr/bin/python3 --version | head -c 200'  # "
RELEASE = "ssh 10.0.0.2 'cat /etc/os-release'  # node2 needs a newer release of its system"
NOLOGIN = "sudo rm -f /etc/nologin /run/nologin; sudo journalctl -n 20 _COMM=sshd  # "


@pytest.mark.parametrize(
    ("id_", "how", "words", "remedy"),
    [
        ("SSH03", "host key", "its host key is not known on this machine", "mpitrain cluster trust node2"),
        ("SSH02", "key", LOCKED, "ssh-add "),
        ("SSH02", "key", NOON, NOLOGIN),
        ("SSH02", "key", NOON, "on the console of node2"),
        ("PRB01", "agent", "/usr/bin/python3 did not start our probe within 20 s", "ssh -v 10.0.0.2 true  # "),
        ("PRB01", "agent", "/home/admin/.bashrc: line 1: exec: zsh: not found", "1i [ -t 0 ] || return' /home/admin/"),
        ("PRB01", "agent", NO_PYTHON, "apt-get install -y python3"),
        ("PRB01", "agent", "/usr/bin/python3 is version 3.6.8; 3.8 or newer is needed", RELEASE),
        ("PRB01", "agent", GARBAGE, LOOKS),
    ],
)
def test_a_login_that_fails(id_: str, how: str, words: str, remedy: str) -> None:
    (one,) = judged(id_, failed(how, words, host_keys={}))
    assert one.verdict == "fail" and remedy in one.remedy


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ("it has mode 0600", "sudo chmod 666 /dev/null"),
        ("it is not a device", "sudo rm -f /dev/null && sudo mknod /dev/null c 1 3 && sudo chmod 666 /dev/null"),
    ],
)
def test_dev_null(wrong: str, line: str) -> None:
    found = looked()
    found.nodes["node2"]["login"]["null"] = wrong
    (one,) = judged("PRB01", found)
    assert (one.verdict, one.where) == ("fail", ("node2",))
    assert one.observed == f"/dev/null is not open to all: {wrong}"
    assert shlex.split(one.remedy) == ["ssh", "10.0.0.2", line]


@pytest.mark.parametrize(
    "words",
    [
        "admin cannot become cluster: RuntimeError: can't start new thread",
        "admin cannot become cluster: sudo: unable to execute /usr/bin/python3: Resource temporarily unavailable",
    ],
)
def test_a_user_who_may_have_few_processes(words: str) -> None:
    """The probe may have answered some questions before it fails."""
    for answers in ({"become": {"error": words}}, {"shell": {"error": words}}):
        (one,) = judged("PRB02", looked(**answers))
        assert (one.verdict, one.where) == ("fail", ("node2",))
        assert one.observed == f"cluster may not have enough processes: {words.rpartition(': ')[2]}"
        line = "echo 'cluster - nproc unlimited' | sudo tee /etc/security/limits.d/zz-mpitrain-nproc.conf"
        assert shlex.split(one.remedy) == ["ssh", "10.0.0.2", line]


def test_a_sudo_that_hangs_is_the_one_cause() -> None:
    """As a node reports it: answers that need root are unknown, and answers that need the shared user are missing."""
    late = {"error": "admin cannot become cluster: sudo hangs"}
    sections = ("shell", "ssh keys", "use", "programs", "processors", "leftovers", "variables")
    account = {**ACCOUNT, "expired": None, "must_change_password": None}
    answers = {"sudo": {"hangs": True}, "become": late, **dict.fromkeys(sections, late), "account": account}
    found = looked(**answers, **{"ssh server": {"is_known": False}, "serving": {"exports": None}})
    asked = {*sections, "sudo", "ssh server", "account"}
    ours = [check for check in select("quick") if {*check.uses} & asked and check.scope == "node"]
    results = [one for one in judge(ours, found) if one.where == ("node2",)]
    assert len(results) > 12
    assert [one.check.id for one in results if one.verdict == "fail"] == ["PRB02"]
    assert {one.verdict for one in results} == {"fail", "blocked", "skip"}
    assert {one.blocked_by for one in results if one.verdict == "blocked"} == {"PRB02"}
    (cause,) = (one for one in results if one.verdict == "fail")
    assert cause.observed == "sudo, run by admin, hangs" and "  # on the console of node2: " in cause.remedy
    assert cause.remedy.startswith("time getent ")


def test_a_login_that_may_not_become_the_shared_user() -> None:
    words = "admin cannot become cluster: sudo: a password is required"
    (one,) = judged("PRB02", looked(become={"error": words}))
    assert (one.verdict, one.observed) == ("fail", words)
    assert one.remedy.startswith("ssh -t 10.0.0.2 sudo -l  #")
    (one,) = judged("PRB02", looked(become={"error": words}, account={"uid": None}))
    assert (one.verdict, one.observed) == ("skip", "there is no user cluster")  # which USR01 reports
    (one,) = judged("PRB02", looked(become={"error": "no answer in time"}))
    assert one.verdict == "unknown"


@pytest.mark.parametrize("remedy", [login._LOOK, login._SUDO_HANGS, *login._REMEDIES.values()])
def test_a_remedy_is_a_line_that_a_shell_takes(remedy: str) -> None:
    """If the line is for another machine, a comment names that machine."""
    line = remedy.partition("  # ")[0]
    assert line.split()[0] in ("ping", "time", "sudo", "ssh", "ssh-add")
    assert "console" not in line
