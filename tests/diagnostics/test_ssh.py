"""The judges of logins between nodes."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest

from diagnostics.made_up import seen
from mpitrain.diagnostics.check import Result, Seen
from mpitrain.diagnostics.checks import CHECKS
from mpitrain.diagnostics.judge import judge
from mpitrain.diagnostics.node import children, sshd

KEY = {
    "path": "/etc/ssh/mpitrain/id_ed25519",
    "mode": "0600",
    "is_own": True,
    "is_readable": True,
    "bits": 256,
    "fingerprint": "SHA256:a",
    "kind": "ED25519",
}
OURS = "/etc/ssh/sshd_config.d/10-mpitrain.conf"


def judged(id_: str, looked: Seen) -> list[Result]:
    """The results of a check, as if all checks that it needs had passed."""
    return [one for one in judge([CHECKS[id_]], looked) if one.verdict != "pass"]


def of_node(section: str, answer: Any) -> Seen:
    looked = seen(2)
    looked.nodes = {"node1": {section: answer}, "node2": {}}
    return looked


def first(id_: str, looked: Seen) -> Result | None:
    """The first result for node1."""
    return next((one for one in judged(id_, looked) if one.where and one.where[0] == "node1"), None)


def server(**fields: str) -> dict[str, Any]:
    settings = {"maxstartups": "100:30:400", "passwordauthentication": "no", "permitrootlogin": "without-password"}
    settings.update(fields)
    return {"is_known": True, "all": settings, "user": settings, "root": settings, "own": settings, "sets": {}}


def login(failed: str, found: str = "", seconds: float = 0.2) -> Seen:
    looked = seen(2)
    looked.nodes = {"node1": {}, "node2": {}}
    looked.pairs[("node1", "node2")] = {"login between": {"failed": failed, "found": found, "seconds": seconds}}
    return looked


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


def test_capacity() -> None:
    assert first("SSH06", of_node("ssh server", server())) is None
    result = first("SSH06", of_node("ssh server", server(maxstartups="3:30:100")))
    assert result is not None and result.verdict == "warn"
    assert "MaxStartups 3:30:100" in result.observed and result.allowed == "4 or more, for 2 nodes"
    assert "--tags ssh" in result.remedy
    result = first("SSH06", of_node("ssh server", server(maxstartups="1:30:100")))
    assert result is not None and result.verdict == "fail"


def test_a_file_that_is_read_before_ours_is_named() -> None:
    site = "/etc/ssh/sshd_config.d/05-site.conf"
    found = {**server(maxstartups="1:30:100"), "sets": {"maxstartups": [[site, "1:30:100"], [OURS, "100:30:400"]]}}
    result = first("SSH06", of_node("ssh server", found))
    assert result is not None and site in result.observed and site in result.remedy and "--tags" not in result.remedy
    found["sets"] = {"maxstartups": [[site, "1:30:100"]]}  # before the first set-up, whose file would come too late
    result = first("SSH06", of_node("ssh server", found))
    assert result is not None and site in result.remedy
    found["sets"] = {"maxstartups": [["/etc/ssh/sshd_config", "1:30:100"]]}
    result = first("SSH06", of_node("ssh server", found))
    assert result is not None and "--tags ssh" in result.remedy


def test_the_file_whose_value_holds_is_named() -> None:
    """Some versions of sshd take the last value of MaxStartups. All of them take the first value of everything else."""
    main = "/etc/ssh/sshd_config"
    found = {**server(maxstartups="1:30:100"), "sets": {"maxstartups": [[OURS, "100:30:400"], [main, "1:30:100"]]}}
    result = first("SSH06", of_node("ssh server", found))
    assert result is not None and f"by {main}" in result.observed and f" {main} &&" in result.remedy


def test_penalties() -> None:
    on = {"persourcepenalties": "authfail:5 noauth:1"}
    result = first("SSH06", of_node("ssh server", server(**on)))
    assert result is not None and result.verdict == "warn" and "PerSourcePenalties" in result.observed
    exempt = {"persourcepenaltyexemptlist": "10.0.0.1,10.0.0.2"}
    assert first("SSH06", of_node("ssh server", server(**on, **exempt))) is None


def test_without_sudo_sshd_is_skipped() -> None:
    for id_ in ("SSH06", "SSH07"):
        result = first(id_, of_node("ssh server", {"is_known": False}))
        assert result is not None and result.verdict == "skip" and "root" in result.observed


@pytest.mark.parametrize(
    ("settings", "verdict", "words"),
    [
        ({"passwordauthentication": "yes"}, "warn", "passwords for cluster"),
        ({"kbdinteractiveauthentication": "yes"}, "warn", "passwords for cluster"),
        ({"pubkeyauthentication": "no"}, "fail", "no keys for cluster"),
        ({"permitrootlogin": "yes", "passwordauthentication": "yes"}, "warn", "root may log in with a password"),
    ],
)
def test_policy(settings: dict[str, str], verdict: str, words: str) -> None:
    results = [one for one in judged("SSH07", of_node("ssh server", server(**settings))) if one.where == ("node1",)]
    assert any(one.verdict == verdict and words in one.observed and one.remedy for one in results)


SITE = "/etc/ssh/sshd_config.d/05-site.conf"


@pytest.mark.parametrize(
    ("word", "value", "groups", "before", "after"),
    [
        ("AllowUsers", "admin", ["cluster"], "AllowUsers admin", "AllowUsers admin cluster"),
        ("allowgroups", "sudo", ["cluster"], "  allowgroups sudo", "  allowgroups sudo cluster"),
        ("DenyUsers", "a cluster b", ["cluster"], "DenyUsers a cluster b", "DenyUsers a b"),
        ("DenyUsers", "cl*", ["cluster"], "DenyUsers cl*\nPort 22", "Port 22"),
        ("DenyGroups", "lab", ["cluster", "lab"], "DenyGroups  lab", None),
        ("AllowUsers", "cluster@192.0.2.*", ["cluster"], "AllowUsers cluster@192.0.2.*", None),
        ("DenyUsers", "a cluster@10.0.0.0/24", ["cluster"], "DenyUsers a\tcluster@10.0.0.0/24", "DenyUsers a"),
        # What a block allows was not asked about.
        (
            "AllowUsers",
            "admin",
            ["cluster"],
            "\tAllowUsers\tadmin\nMatch Address 192.0.2.0/24\n\tAllowUsers root",
            "\tAllowUsers\tadmin cluster\nMatch Address 192.0.2.0/24\n\tAllowUsers root",
        ),
    ],
)
def test_a_user_whom_the_lists_of_sshd_shut_out(
    word: str, value: str, groups: list[str], before: str, after: str | None, tmp_path: Path
) -> None:
    found = {**server(**{word.lower(): value}), "sets": {word.lower(): [[SITE, value]]}}
    looked = of_node("ssh server", found)
    looked.nodes["node1"]["account"] = {"group": "cluster", "groups": groups}
    result = first("SSH07", looked)
    assert result is not None and result.verdict == "fail"
    assert f" {value.split()[-1] if word != 'DenyUsers' else ''}" in result.observed and f"by {SITE}" in result.observed
    remote = shlex.split(result.remedy)[2]
    edit, reload = remote.split(" && ")
    assert reload == "sudo systemctl reload ssh"
    if after is not None:
        file = tmp_path / "site.conf"
        file.write_text(f"{before}\n")
        subprocess.run(edit.removeprefix("sudo ").replace(SITE, str(file)), shell=True, check=True)
        assert file.read_text() == f"{after}\n"


def test_a_block_that_shuts_the_user_out_is_shown() -> None:
    """An administrator has chosen the list of the block, so no remedy changes it."""
    found = {**server(), "sets": {"allowusers": [[SITE, "admin"]]}}
    looked = of_node("ssh server", {**found, "user": {**found["user"], "allowusers": "admin"}})
    result = first("SSH07", looked)
    assert result is not None and result.verdict == "fail"
    assert shlex.split(result.remedy)[2] == "sudo grep -rniwE 'Match|AllowUsers' /etc/ssh"


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("allowusers", "admin clu?ter"),
        ("allowusers", "cluster@10.0.0.0/24"),
        ("allowgroups", "lab"),
        ("denyusers", "ada cluster@192.0.2.1"),
    ],
)
def test_a_user_whom_the_lists_of_sshd_let_in(word: str, value: str) -> None:
    looked = of_node("ssh server", server(**{word: value}))
    looked.nodes["node1"]["account"] = {"group": "cluster", "groups": ["cluster", "lab"]}
    assert first("SSH07", looked) is None


def test_a_safe_policy_passes() -> None:
    assert first("SSH07", of_node("ssh server", server(permitrootlogin="yes"))) is None


def offered(hello: str = "admin", **users: str) -> Result | None:
    """What SSH10 says of node1: whose passwords sshd offers to take; `file` sets it."""
    file = users.pop("file", "")
    answer = {"is_known": True, **{key: {"passwordauthentication": "no"} for key in ("all", "user", "root", "own")}}
    answer |= {key: {"passwordauthentication": value} for key, value in users.items()}
    answer["sets"] = {"passwordauthentication": [[OURS, "no"], *([[file, "yes"]] if file else [])]}
    looked = of_node("ssh server", answer)
    looked.nodes["node1"]["login"] = {"failed": "", "hello": hello}
    return first("SSH10", looked)


def test_passwords_of_other_users() -> None:
    switch_off = "ansible-playbook cluster/setup.yml --tags ssh --limit {limit} -e mpitrain_sshd_passwords=false  # and"
    assert offered() is None
    found = offered(all="yes", own="yes", root="yes")
    assert found is not None and found.verdict == "warn" and found.remedy.startswith(switch_off)
    assert found.observed == "sshd offers passwords to admin, root, others (passwordauthentication yes)"
    # As the shared user, on the head: SSH07 is about that one.
    found = offered("cluster", all="yes", own="yes", root="yes", file="/etc/ssh/sshd_config")
    assert found is not None and found.remedy.startswith(switch_off)
    assert "to root, others (passwordauthentication yes, by /etc/ssh/sshd_config)" in found.observed


def test_passwords_that_set_up_does_not_switch_off() -> None:
    """A file before ours, and a block of one user's: what is printed takes them away."""
    early, block = "/etc/ssh/sshd_config.d/05-site.conf", "/etc/ssh/sshd_config.d/60-site.conf"
    found = offered(all="yes", own="yes", root="yes", file=early)
    assert found is not None and f"/Id\" {early} && sudo systemctl reload ssh' && ansible-playbook" in found.remedy
    found = offered(own="yes", file=block)
    assert found is not None and found.remedy.endswith(f"/Id\" {block} && sudo systemctl reload ssh'")


def test_passwords_of_a_block_go_and_a_ban_for_all_stays(tmp_path: Path) -> None:
    block = "/etc/ssh/sshd_config.d/60-site.conf"
    found = offered(own="yes", file=block)
    assert found is not None
    edit = shlex.split(found.remedy)[2].partition(" && ")[0].removeprefix("sudo ")
    file = tmp_path / "site.conf"
    file.write_text("PasswordAuthentication no\nMatch User admin\n\tPasswordAuthentication\tyes\n")
    subprocess.run(edit.replace(block, str(file)), shell=True, check=True)
    assert file.read_text() == "PasswordAuthentication no\nMatch User admin\n"


def test_a_setting_of_sshd_may_stand_behind_tabs(monkeypatch: pytest.MonkeyPatch) -> None:
    site = "# none\n\tPasswordAuthentication\tyes\nPort = 22\nAllowUsers a b\n"
    monkeypatch.setattr(children, "as_root", lambda *words: site if words[0] == "cat" else "")
    monkeypatch.setattr(sshd.Path, "glob", lambda *_: [])
    sets = sshd.ssh_server({"user": "cluster", "peer": "10.0.0.2"})["sets"]
    path = "/etc/ssh/sshd_config"
    assert sets == {"passwordauthentication": [[path, "yes"]], "port": [[path, "22"]], "allowusers": [[path, "a b"]]}


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
    looked = of_node("ssh keys", {"offers": [], "keys": [{**KEY, **fields}], "writable_by_others": [], "loose": []})
    result = first("SSH08", looked)
    assert result is not None
    assert (result.verdict, result.allowed) == (verdict, allowed)
    assert words in result.observed and "--tags ssh" in result.remedy


def test_no_key_and_a_home_that_others_may_write() -> None:
    looked = of_node(
        "ssh keys", {"offers": ["/x/key"], "keys": [], "writable_by_others": ["/home/cluster"], "loose": []}
    )
    missing, home = (one for one in judged("SSH08", looked) if one.where == ("node1",))
    assert "there is no /x/key" in missing.observed
    assert missing.remedy == "ansible-playbook cluster/setup.yml --tags ssh"  # all nodes must learn it
    assert (home.verdict, home.remedy) == ("warn", "ssh 10.0.0.1 'sudo chmod go-w /home/cluster'")


def test_keys_and_lists_that_others_may_write() -> None:
    loose = ["/etc/ssh/mpitrain", "/etc/ssh/mpitrain/known_hosts"]
    one = first("SSH08", of_node("ssh keys", {"offers": [], "keys": [KEY], "writable_by_others": [], "loose": loose}))
    assert one is not None and one.verdict == "fail"
    assert one.observed.startswith(
        "other users than root may write to /etc/ssh/mpitrain, /etc/ssh/mpitrain/known_hosts"
    )
    assert one.remedy == "ansible-playbook cluster/setup.yml --tags ssh --limit {limit}"


def test_the_logins_that_every_job_begins_with() -> None:
    """The ways from the head, and no others; set-up of the node that refuses the key mends it."""
    looked = seen(3)
    refused = {"failed": "key", "found": "cluster@10.0.0.3: Permission denied (publickey).", "seconds": 0.1}
    looked.cluster["logins of the head"] = {"node2": {"failed": "", "found": "", "seconds": 5.0}, "node3": refused}
    results = judge([CHECKS["SSH11"]], looked)
    assert [(one.where, one.verdict) for one in results] == [(("node1", "node2"), "pass"), (("node1", "node3"), "fail")]
    assert results[1].observed == "cluster's `ssh` fails: cluster@there: Permission denied (publickey)."
    assert results[1].mend == ("node3",)
    looked.cluster["logins of the head"]["node3"] = {"error": "no answer in time"}
    assert [one.verdict for one in judge([CHECKS["SSH11"]], looked)] == ["pass", "unknown"]
    # A pair that has failed so is not judged again; the others are.
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


def test_the_same_key_on_two_nodes() -> None:
    answer = {"offers": [], "keys": [KEY], "writable_by_others": [], "loose": []}
    looked = of_node("ssh keys", answer)
    assert first("SSH08", looked) is None
    looked.nodes["node2"] = {"ssh keys": answer}
    assert [one.where for one in judged("SSH08", looked)] == [("node1",), ("node2",)]


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
