"""Repair lines reach the node as they are printed, and use the names of its system."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from check.made_up import by_node, check, seen, target
from mpitrain.check.check import Seen, on_each, through_ssh
from mpitrain.check.checks import CHECKS
from mpitrain.check.run import judge
from mpitrain.check.target import find_target, ssh_settings
from mpitrain.errors import ConfigError
from mpitrain.launch.hostfile import Host

LOGIN = {
    "ansible_user": "ada",
    "ansible_port": "2222",
    "ansible_ssh_private_key_file": "/my keys/id",
    "ansible_ssh_common_args": "-o 'ProxyJump=door'",
}


def of_host(**variables: str) -> Seen:
    looked = seen(2)
    looked.target = replace(looked.target, hosts=(target(2).hosts[0], Host("node2", "10.0.0.2", variables)))
    return looked


def remedy(looked: Seen, line: str) -> str:
    looked.nodes = {"node1": {"a": ""}, "node2": {"a": "odd"}}
    return next(one.remedy for one in judge([check("AAA01", by_node("a"), remedy=line)], looked) if one.remedy)


def test_a_plain_node_is_its_address() -> None:
    assert remedy(of_host(), "ssh {login} uptime; ssh-keygen -R {known_as}") == (
        "ssh 10.0.0.2 uptime; ssh-keygen -R 10.0.0.2"
    )


def test_what_the_inventory_says_of_the_login_is_in_the_line() -> None:
    line = remedy(of_host(**LOGIN), "ssh {login} uptime")
    words = ["-p", "2222", "-i", "/my keys/id", "-o", "ProxyJump=door", "ada@10.0.0.2", "uptime"]
    assert shlex.split(line) == ["ssh", *words]
    assert remedy(of_host(**LOGIN), "ssh-keygen -R {known_as}") == "ssh-keygen -R '[10.0.0.2]:2222'"


def test_a_login_is_asked_for_as_the_line_says() -> None:
    settings = ssh_settings(Host("node2", "10.0.0.2", {"ansible_user": "ada", "ansible_port": "2222"}))
    assert (settings["hostname"], settings["user"], settings["port"]) == (["10.0.0.2"], ["ada"], ["2222"])


def test_several_nodes() -> None:
    looked = of_host(ansible_user="ada")
    assert on_each(looked, ["node1", "node2"], "sudo x") == "ssh 10.0.0.1 'sudo x'; ssh ada@10.0.0.2 'sudo x'"
    assert shlex.split(through_ssh("a", 'grep "x y" /z'))[2] == 'grep "x y" /z'


@pytest.mark.parametrize(("family", "service"), [("", "ssh"), ("RedHat", "sshd")])
def test_a_drop_in_of_sshd(family: str, service: str) -> None:
    looked = of_host(**LOGIN)
    settings = {"maxstartups": "1:30:100", "passwordauthentication": "yes", "permitrootlogin": "yes"}
    path = "/etc/ssh/sshd_config.d/00 site.conf"
    server = {"is_known": True, "all": settings, "user": settings, "root": settings}
    server["sets"] = {"maxstartups": [[path, "1:30:100"]], "passwordauthentication": [[path, "yes"]]}
    looked.nodes = {"node2": {"ssh server": server, "login": {"family": family}}}
    results = judge([CHECKS["SSH06"], CHECKS["SSH07"]], looked)
    remedies = [one.remedy for one in results if one.where == ("node2",)]
    assert len(remedies) == 3
    for line, words in zip(remedies[:2], (r"maxstartups\s\+.*", r"passwordauthentication\s\+yes"), strict=True):
        sed, reload = shlex.split(line)[-1].split(" && ")
        assert shlex.split(sed) == ["sudo", "sed", "-i", rf"/^\s*{words}\b/Id", path]
        assert reload == f"sudo systemctl reload {service}"
    assert shlex.split(remedies[2])[-1].endswith(f"&& sudo systemctl reload {service}")


def test_a_c_library_of_another_system() -> None:
    looked = seen(3)
    for name in looked.target.names:
        python = {"python": "3.9.1", "machine": "x86_64", "libc": "glibc 2.34", "path": "/v/bin/python"}
        python["prefix"] = "/v"
        looked.nodes[name] = {"programs": {"python": python}, "login": {"family": "RedHat"}}
    looked.nodes["node3"]["programs"]["python"]["libc"] = "glibc 2.28"
    (one,) = (one for one in judge([CHECKS["ENV01"]], looked) if one.verdict == "warn")
    assert one.remedy == "ssh 10.0.0.3 sudo dnf upgrade -y python3 glibc"


def _config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ssh in PATH that reads the test's configuration."""
    (tmp_path / "config").write_text("Host gpu-a\n  HostName 127.0.0.7\n  User ada\n  Port 2222\n")
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {tmp_path}/config "$@"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)


def test_names_of_ssh_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _config(tmp_path, monkeypatch)
    found = find_target(None, "gpu-a,localhost,127.0.0.9", None, {})
    assert found.addresses == {
        "127.0.0.7": "127.0.0.7",
        "localhost": found.addresses["localhost"],
        "127.0.0.9": "127.0.0.9",
    }
    assert [found.login(name) for name in found.names] == ["gpu-a", "localhost", "127.0.0.9"]
    settings = ssh_settings(found.hosts[0])
    assert (settings["hostname"], settings["user"], settings["port"]) == (["127.0.0.7"], ["ada"], ["2222"])
    with pytest.raises(ConfigError, match=r"gpu-a is a second name of 127\.0\.0\.7"):
        find_target(None, "127.0.0.7,gpu-a", None, {})
    with pytest.raises(ConfigError, match="nowhere-at-all is in no inventory and cannot be resolved"):
        find_target(None, "nowhere-at-all", None, {})
