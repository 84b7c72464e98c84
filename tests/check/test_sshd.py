"""The judges of the settings of sshd: files, policy, passwords."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from check.made_up_logins import first, judged, of_node
from mpitrain import facts
from mpitrain.check.check import Result
from mpitrain.check.node import children, sshd

OURS = "/etc/ssh/sshd_config.d/10-mpitrain.conf"


def server(**fields: str) -> dict[str, Any]:
    settings = {"maxstartups": "100:30:400", "passwordauthentication": "no", "permitrootlogin": "without-password"}
    settings.update(fields)
    return {"is_known": True, "all": settings, "user": settings, "root": settings, "own": settings, "sets": {}}


def test_capacity() -> None:
    assert first("SSH06", of_node("ssh server", server())) is None
    result = first("SSH06", of_node("ssh server", server(maxstartups="3:30:100")))
    assert result is not None and result.verdict == "warn"
    assert "MaxStartups 3:30:100" in result.observed and result.allowed == "4 or more, for 2 nodes"
    assert "--tags ssh" in result.remedy
    result = first("SSH06", of_node("ssh server", server(maxstartups="1:30:100")))
    assert result is not None and result.verdict == "fail"


@pytest.mark.parametrize(("running", "verdict"), [(2, "warn"), (1, "fail"), (100, None), (None, None)])
def test_the_sshd_that_runs_has_the_last_word(running: int | None, verdict: str | None) -> None:
    """A MaxStartups of its command line, or one that was changed in its files without a reload."""
    result = first("SSH06", of_node("ssh server", {**server(), "startups": running}))
    assert (result and result.verdict) == verdict
    if result is not None:
        assert f"(MaxStartups {running} of the sshd that runs; its files say 100:30:400)" in result.observed
        assert "sudo systemctl restart ssh" in result.remedy


@pytest.mark.parametrize(
    ("title", "first"),
    [
        ("sshd: /usr/sbin/sshd -D -oMaxStartups=2 [listener] 0 of 2-100 startups\0\0", 2),
        ("sshd: /usr/sbin/sshd -D [listener] 3 of 100-400 startups", 100),
        ("/usr/sbin/sshd\0-D\0", None),
        ("", None),
    ],
)
def test_the_title_of_the_sshd_that_runs(monkeypatch: pytest.MonkeyPatch, title: str, first: int | None) -> None:
    monkeypatch.setattr(children, "output", lambda *_: "0\n\n17\n")
    monkeypatch.setattr(facts, "text", lambda path: title if path == "/proc/17/cmdline" else "")
    assert sshd._startups() == first


def test_a_file_that_is_read_before_ours_is_named() -> None:
    site = "/etc/ssh/sshd_config.d/05-site.conf"
    found = {**server(maxstartups="1:30:100"), "sets": {"maxstartups": [[site, "1:30:100"], [OURS, "100:30:400"]]}}
    result = first("SSH06", of_node("ssh server", found))
    assert result is not None and site in result.observed and site in result.remedy and "--tags" not in result.remedy
    found["sets"] = {"maxstartups": [[site, "1:30:100"]]}  # before the first set-up; its file would come too late
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
        # The check did not ask what a block allows.
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
    """What SSH10 says about node1: the users whose passwords sshd accepts, as set by `file`."""
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
    # As the shared user, on the head: SSH07 is about that user.
    found = offered("cluster", all="yes", own="yes", root="yes", file="/etc/ssh/sshd_config")
    assert found is not None and found.remedy.startswith(switch_off)
    assert "to root, others (passwordauthentication yes, by /etc/ssh/sshd_config)" in found.observed


def test_passwords_that_set_up_does_not_switch_off() -> None:
    """A file before ours, and a block for one user: the printed lines remove both."""
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
