"""The judges of the settings of sshd: files, policy, passwords."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from check.made_up import judged
from check.test_ssh import of_node, passes, said
from mpitrain import facts
from mpitrain.check.check import Seen
from mpitrain.check.node import children, sshd

MAIN = "/etc/ssh/sshd_config"
OURS = f"{MAIN}.d/10-mpitrain.conf"
SITE = f"{MAIN}.d/05-site.conf"
SAFE = {"maxstartups": "100:30:400", "passwordauthentication": "no", "permitrootlogin": "without-password"}


def server(sets: dict[str, Any] | None = None, more: dict[str, Any] | None = None, **fields: str) -> Seen:
    """These settings hold for everybody, and these files set them."""
    held = {key: {**SAFE, **fields} for key in ("all", "user", "root", "own")}
    return of_node(**{"ssh server": {"is_known": True, **held, "sets": sets or {}, **(more or {})}})


def test_capacity() -> None:
    assert passes("SSH06", server())
    one = said("SSH06", server(maxstartups="3:30:100"), "warn", "MaxStartups 3:30:100", "--tags ssh")
    assert one.allowed == "4 or more, for 2 nodes"
    said("SSH06", server(maxstartups="1:30:100"), "fail", "")


@pytest.mark.parametrize(("running", "verdict"), [(2, "warn"), (1, "fail"), (100, None), (None, None)])
def test_the_sshd_that_runs_has_the_last_word(running: int | None, verdict: str | None) -> None:
    """A MaxStartups of its command line, or one that was changed in its files without a reload."""
    looked = server(more={"startups": running})
    if verdict is None:
        assert passes("SSH06", looked)
    else:
        words = f"(MaxStartups {running} of the sshd that runs; its files say 100:30:400)"
        said("SSH06", looked, verdict, words, "sudo systemctl restart ssh")


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


@pytest.mark.parametrize(
    ("files", "observed", "remedy"),
    [
        ([[SITE, "1:30:100"], [OURS, "100:30:400"]], SITE, SITE),
        ([[SITE, "1:30:100"]], "", SITE),  # before the first set-up; its file would come too late
        ([[MAIN, "1:30:100"]], "", "--tags ssh"),
        # Some versions of sshd take the last value of MaxStartups, and all of them the first of everything else.
        ([[OURS, "100:30:400"], [MAIN, "1:30:100"]], f"by {MAIN}", f" {MAIN} &&"),
    ],
)
def test_the_file_whose_value_holds_is_named(files: list[list[str]], observed: str, remedy: str) -> None:
    one = said("SSH06", server({"maxstartups": files}, maxstartups="1:30:100"), "fail", observed, remedy)
    assert ("--tags" in one.remedy) == (remedy == "--tags ssh")


def test_penalties() -> None:
    on = {"persourcepenalties": "authfail:5 noauth:1"}
    said("SSH06", server(**on), "warn", "PerSourcePenalties")
    assert passes("SSH06", server(**on, persourcepenaltyexemptlist="10.0.0.1,10.0.0.2"))


def test_without_sudo_sshd_is_skipped() -> None:
    for id_ in ("SSH06", "SSH07"):
        said(id_, of_node(**{"ssh server": {"is_known": False}}), "skip", "root")


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
    assert passes("SSH07", server(permitrootlogin="yes"))
    results = [one for one in judged("SSH07", server(**settings)) if one.where == ("node1",)]
    assert any(one.verdict == verdict and words in one.observed and one.remedy for one in results)


def edited(remedy: str, site: str, text: str, folder: Path) -> str:
    """What the printed line makes of the file."""
    edit, *_ = shlex.split(remedy)[2].split(" && ")
    file = folder / "site.conf"
    file.write_text(f"{text}\n")
    subprocess.run(edit.removeprefix("sudo ").replace(site, str(file)), shell=True, check=True)
    return file.read_text()


ADMIN = "\tAllowUsers\tadmin"
BLOCK = "Match Address 192.0.2.0/24\n\tAllowUsers root"


@pytest.mark.parametrize(
    ("word", "value", "before", "after"),
    [
        ("AllowUsers", "admin", "AllowUsers admin", "AllowUsers admin cluster"),
        ("allowgroups", "sudo", "  allowgroups sudo", "  allowgroups sudo cluster"),
        ("DenyUsers", "a cluster b", "DenyUsers a cluster b", "DenyUsers a b"),
        ("DenyUsers", "cl*", "DenyUsers cl*\nPort 22", "Port 22"),
        ("DenyGroups", "lab", "DenyGroups  lab", None),
        ("AllowUsers", "cluster@192.0.2.*", "AllowUsers cluster@192.0.2.*", None),
        ("DenyUsers", "a cluster@10.0.0.0/24", "DenyUsers a\tcluster@10.0.0.0/24", "DenyUsers a"),
        ("AllowUsers", "admin", f"{ADMIN}\n{BLOCK}", f"{ADMIN} cluster\n{BLOCK}"),  # no matter what a block allows
    ],
)
def test_a_user_whom_the_lists_of_sshd_shut_out(
    word: str, value: str, before: str, after: str | None, tmp_path: Path
) -> None:
    looked = server({word.lower(): [[SITE, value]]}, **{word.lower(): value})
    looked.nodes["node1"]["account"] = {"group": "cluster", "groups": ["cluster", "lab"][: 1 + (value == "lab")]}
    one = said("SSH07", looked, "fail", f" {value.split()[-1] if word != 'DenyUsers' else ''}")
    assert f"by {SITE}" in one.observed
    assert shlex.split(one.remedy)[2].split(" && ")[1:] == ["sudo systemctl reload ssh"]
    assert after is None or edited(one.remedy, SITE, before, tmp_path) == f"{after}\n"


def test_a_block_that_shuts_the_user_out_is_shown() -> None:
    """An administrator has chosen the list of the block, so no remedy changes it."""
    looked = server({"allowusers": [[SITE, "admin"]]}, {"user": {**SAFE, "allowusers": "admin"}})
    one = said("SSH07", looked, "fail", "")
    assert shlex.split(one.remedy)[2] == "sudo grep -rniwE 'Match|AllowUsers' /etc/ssh"


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
    looked = server(**{word: value})
    looked.nodes["node1"]["account"] = {"group": "cluster", "groups": ["cluster", "lab"]}
    assert passes("SSH07", looked)


def offered(hello: str = "admin", file: str = "", **users: str) -> Seen:
    """The users whose passwords sshd accepts, as set by `file`."""
    held = {key: {"passwordauthentication": users.get(key, "no")} for key in ("all", "user", "root", "own")}
    looked = server({"passwordauthentication": [[OURS, "no"], *([[file, "yes"]] if file else [])]}, held)
    looked.nodes["node1"]["login"] = {"failed": "", "hello": hello}
    return looked


def test_passwords_of_other_users() -> None:
    switch_off = "ansible-playbook cluster/setup.yml --tags ssh --limit {limit} -e mpitrain_sshd_passwords=false  # and"
    assert passes("SSH10", offered())
    everybody = dict.fromkeys(("all", "own", "root"), "yes")
    words = "sshd offers passwords to admin, root, others (passwordauthentication yes)"
    assert said("SSH10", offered(**everybody), "warn", words).remedy.startswith(switch_off)
    # As the shared user, on the head: SSH07 is about that user.
    words = "to root, others (passwordauthentication yes, by /etc/ssh/sshd_config)"
    assert said("SSH10", offered("cluster", MAIN, **everybody), "warn", words).remedy.startswith(switch_off)
    # A file before ours, which set-up does not switch off: the printed lines remove it.
    remedy = f"/Id\" {SITE} && sudo systemctl reload ssh' && ansible-playbook"
    said("SSH10", offered(file=SITE, **everybody), "warn", "", remedy)


def test_passwords_of_a_block_go_and_a_ban_for_all_stays(tmp_path: Path) -> None:
    block = f"{MAIN}.d/60-site.conf"
    one = said("SSH10", offered(file=block, own="yes"), "warn", "")
    assert one.remedy.endswith(f"/Id\" {block} && sudo systemctl reload ssh'")
    ban = "PasswordAuthentication no\nMatch User admin\n"
    assert edited(one.remedy, block, f"{ban}\tPasswordAuthentication\tyes", tmp_path) == ban


def test_a_setting_of_sshd_may_stand_behind_tabs(monkeypatch: pytest.MonkeyPatch) -> None:
    site = "# none\n\tPasswordAuthentication\tyes\nPort = 22\nAllowUsers a b\n"
    monkeypatch.setattr(children, "as_root", lambda *words: site if words[0] == "cat" else "")
    monkeypatch.setattr(sshd.Path, "glob", lambda *_: [])
    sets = sshd.ssh_server({"user": "cluster", "peer": "10.0.0.2"})["sets"]
    assert sets == {"passwordauthentication": [[MAIN, "yes"]], "port": [[MAIN, "22"]], "allowusers": [[MAIN, "a b"]]}
