"""Checks of the playbooks that need no node."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement

from jobs import REPOSITORY
from mpitrain import facts as host_facts
from mpitrain.launch.hostfile import read_inventory

CLUSTER = REPOSITORY / "cluster"
ROLES = sorted((CLUSTER / "playbooks/roles").iterdir())
VARIABLES = yaml.safe_load((CLUSTER / "group_vars/all.yml").read_text())

SETTINGS = {
    "user": "cluster",
    "uid": 1900,
    "gid": 1900,
    "share": "/srv/share",
    "venv": "/srv/share/venv",
    "min_free_mib": 1,
    "set_hostname": False,
    "mpi": "wheel",
    "python": "/usr/bin/python3",
}

# The report of a node that is set up.
HEALTHY = {
    "family": "Debian",
    "systemd": True,
    "architecture": "x86_64",
    "python": "3.11.2",
    "mpiexec_found": True,
    "hostname": "a",
    "addresses": ["10.0.0.1"],
    "hosts_lines": [],
    "sources": {},
    "sshd_includes": True,
    "ssh_includes": True,
    "host_keys": ["ssh-ed25519 A"],
    "user_uid": 1900,
    "user_gid": 1900,
    "uid_user": "cluster",
    "group_gid": 1900,
    "gid_group": "cluster",
    "share": {"kind": "folder", "type": "", "source": "", "owner": 1900, "empty": False, "free_mib": 5},
    "runtime": "",
    "venv_foreign": False,
}


@pytest.fixture(scope="module")
def preflight() -> ModuleType:
    return loaded(CLUSTER / "playbooks/roles/mpitrain_preflight/filter_plugins/mpitrain_preflight.py")


@pytest.fixture(scope="module")
def facts() -> Iterator[ModuleType]:
    """Set-up's module. Ansible gives it mpitrain/facts.py under the name that it has in the role."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ansible.module_utils.mpitrain_host", host_facts)
        yield loaded(CLUSTER / "playbooks/roles/mpitrain_facts/library/mpitrain_facts.py")


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_is_an_inventory(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text((CLUSTER / "hosts.example").read_text())
    inventory = read_inventory(tmp_path / "hosts")
    assert [host.name for host in inventory.hosts] == ["node1", "node2", "node3"]


def test_setup_imports_each_playbook_once() -> None:
    imported = [play["ansible.builtin.import_playbook"] for play in yaml.safe_load((CLUSTER / "setup.yml").read_text())]
    there = {f"playbooks/{path.name}" for path in (CLUSTER / "playbooks").glob("*.yml")} - {"playbooks/undo.yml"}
    assert sorted(imported) == sorted(there)


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_roles_interface_is_whole(role: Path) -> None:
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text())
    options = yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
    assert set(defaults) == {name for name in options if name.startswith(f"{role.name}_")}
    assert (role / "README.md").read_text().startswith(f"# {role.name}\n")
    # If a default is a variable of the cluster, the user finds that variable in group_vars/all.yml.
    for value in defaults.values():
        for name in re.findall(r"mpitrain_\w+", str(value)):
            assert name in VARIABLES


@pytest.mark.parametrize("playbook", ["setup", "teardown"])
def test_ansible_core_alone_reads_the_playbooks(playbook: str) -> None:
    """Modules of collections are in separate files, which are read only where needed."""
    program = Path(sys.executable).with_name("ansible-playbook")
    if not program.exists():
        pytest.skip("Ansible is not installed: pip install 'mpitrain[cluster]'")
    no_collections = {"ANSIBLE_COLLECTIONS_PATH": "/nonexistent", "ANSIBLE_COLLECTIONS_SCAN_SYS_PATH": "false"}
    line = [str(program), "-i", str(CLUSTER / "hosts.example"), "--syntax-check", f"cluster/{playbook}.yml"]
    done = subprocess.run(
        line, cwd=REPOSITORY, env=os.environ | no_collections, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", [int, str])
def test_a_node_that_is_set_up_is_not_refused(preflight: ModuleType, kind: type) -> None:
    """Numbers from -e are text. Before ansible-core 2.19, numbers from any template are text too."""
    numbers = {name: kind(SETTINGS[name]) for name in ("uid", "gid", "min_free_mib")}
    reports = {"a": {"ansible_facts": {"mpitrain": HEALTHY}}}
    assert preflight.problems(reports, {"a": "10.0.0.1"}, {"head": ["a"]}, SETTINGS | numbers) == []


@pytest.mark.parametrize(
    ("settings", "source", "is_refused"),
    [
        ({}, "10.0.0.1", False),
        ({}, "10.0.0.9", True),
        ({}, "10.213.0.1", False),  # switched off, but the tunnel still exists
        ({"network": "10.213.0.0/16", "inside": {"a": "10.213.0.1", "b": "10.213.0.2"}}, "10.0.0.1", False),
    ],
)
def test_a_share_that_a_worker_has_mounted(
    preflight: ModuleType, settings: dict[str, object], source: str, is_refused: bool
) -> None:
    share = {**HEALTHY["share"], "kind": "mount", "type": "nfs4", "source": f"{source}:/srv/share"}
    tunnelled = {"tunnel_possible": True, "routes": []}
    worker = HEALTHY | tunnelled | {"hostname": "b", "addresses": ["10.0.0.2"], "share": share}
    reports = {
        name: {"ansible_facts": {"mpitrain": one}} for name, one in {"a": HEALTHY | tunnelled, "b": worker}.items()
    }
    addresses, tunnel = {"a": "10.0.0.1", "b": "10.0.0.2"}, {"a": "10.213.0.1", "b": "10.213.0.2"}
    usual = SETTINGS | {"tunnel": tunnel} | settings
    found = preflight.problems(reports, addresses, {"head": ["a"], "workers": ["b"]}, usual)
    assert ["is a mount of" in one for one in found] == [True] * is_refused


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({}, None),
        ({"addresses": ["fd00:0::2"]}, None),
        ({"addresses": ["10.0.0.2"]}, "b: the address fd00::2 is on no interface of the node (the node has 10.0.0.2)"),
        ({"hosts_lines": ["127.0.1.1 b.example b", "10.0.0.1 a"]}, None),
        ({"hosts_lines": ["127.0.1.1 a"]}, "b: /etc/hosts has the line '127.0.1.1 a'; allowed: a at 10.0.0.1"),
        ({"sources": {"10.0.0.1": "10.9.0.2"}}, "b: reaches a (10.0.0.1) from its address 10.9.0.2"),
    ],
)
def test_the_network_as_a_node_sees_it(preflight: ModuleType, facts: dict[str, object], says: str | None) -> None:
    usual = {"addresses": ["fd00::2"], "hosts_lines": ["127.0.0.1 localhost"], "sources": {"fd00::2": "fd00::2"}}
    found = preflight.network_problems("b", {"a": "10.0.0.1", "b": "fd00::2"}, usual | facts)
    assert len(found) == (says is not None)
    assert says is None or found[0].startswith(says)


@pytest.mark.skipif(os.geteuid() != 0, reason="the module runs as root")
@pytest.mark.parametrize(
    ("program", "mpiexec", "is_damaged"),
    [
        ("exit 0", "", False),
        ("exit 1", "", True),
        # As in /usr/local/lib/mpitrain/launch: mpi4py itself does not search the prefix of an MPI.
        ('[ "$MPI4PY_LIBMPI" = "" ]', "/usr/bin/mpiexec", False),
        ('[ "$MPI4PY_LIBMPI" = "/opt/mpi/lib/libmpi.so" ]', "/opt/mpi/bin/mpiexec", False),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_damaged(
    facts: ModuleType, tmp_path: Path, program: str, mpiexec: str, is_damaged: bool
) -> None:
    """The note of what set-up has installed does not prove that the environment is whole."""
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    (tmp_path / ".mpitrain").write_text("numpy==1\n")
    found = facts.environment(tmp_path, "root", mpiexec, mounted=False)
    assert found == {"runtime": "numpy==1\n", "runtime_damaged": is_damaged, "venv_foreign": False}


def test_the_pinned_versions_are_ones_that_mpitrain_allows() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["mpich"]]
    allowed = {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}
    for name in ("mpi4py", "mpich", "numpy"):
        assert allowed[name].contains(VARIABLES[f"mpitrain_{name}_version"])


def test_all_that_is_wrong_is_said_at_once(preflight: ModuleType) -> None:
    reports = {
        "a": {"unreachable": True, "msg": "Task failed: Failed to connect: Connection refused"},
        "b": {"failed": True, "msg": "Task failed: Incorrect sudo password"},
        "c": {"failed": True, "msg": "ops is not in the sudoers file."},
        "d": {"unreachable": True, "msg": "Task failed: Timeout (32s) waiting for privilege escalation prompt:"},
    }
    addresses = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.2", "d": "10.0.0.4"}
    found = preflight.problems(reports, addresses, {"head": ["a"], "workers": ["b", "c", "d"]}, SETTINGS)
    assert [sentence.split(":")[0] for sentence in found] == [
        "inventory",
        "a (10.0.0.1)",
        "b (10.0.0.2)",
        "c (10.0.0.2)",
        "d (10.0.0.4)",
    ]
    assert "b and c have the same address 10.0.0.2" in found[0]
    assert "Connection refused. Is the node up" in found[1]
    assert "--ask-become-pass" in found[2]
    assert "group sudo" in found[3]
    assert "no answer to sudo" in found[4]


@pytest.mark.parametrize(
    ("python", "says"),
    [
        ("silent", ["b: /usr/bin/python3 does not answer within 8 s"]),
        ("", ["b: /usr/bin/python3 is not there; allowed"]),
        ("3.9.2", ["b: /usr/bin/python3 is 3.9.2; allowed", "b: the minor version of Python is 3.9; allowed: 3.11"]),
    ],
)
def test_a_python_that_does_not_fit(preflight: ModuleType, python: str, says: list[str]) -> None:
    facts = HEALTHY | {"hostname": "b", "python": python}
    found = preflight.node_problems("b", facts, SETTINGS)
    found += preflight.difference_problems({"a": HEALTHY, "c": HEALTHY, "b": facts})
    assert len(found) == len(says)
    assert all(sentence.startswith(start) for sentence, start in zip(found, says, strict=True))


def test_what_cannot_be_a_tunnel(preflight: ModuleType) -> None:
    found = preflight.tunnel_problems({"a": "10.213.1.11", "b": "10.213.1.12"}, "10.213.0.0/16")
    assert found == []
    (one,) = preflight.tunnel_problems({"a": "10.213.1.11"}, "10.213.1.0/16")
    assert one.startswith("mpitrain_wireguard_network is '10.213.1.0/16'; allowed: an IPv4 network")
    (one,) = preflight.tunnel_problems({"a": "10.9.0.11", "b": "10.9.0.11", "c": "10.9.0.12"}, "10.9.0.0/24")
    assert one.startswith("inventory: a and b would have the address 10.9.0.11 in the tunnel")
    (one,) = preflight.tunnel_problems({"a": "10.9.0.255"}, "10.9.0.0/24")
    assert "neither the first nor the last of 10.9.0.0/24. The address has the last 8 bits of ansible_host" in one
    facts = {"tunnel_possible": True, "routes": ["default", "10.77.0.0/24", "fe80::/64", "10.212.0.0/15"]}
    (one,) = preflight.way_problems("a", facts, "10.213.0.0/16")
    assert one.startswith("a: has a route to 10.212.0.0/15; allowed: none into the tunnel's network 10.213.0.0/16")
    (one,) = preflight.way_problems("a", {"tunnel_possible": False, "routes": []}, "10.213.0.0/16")
    assert "no WireGuard" in one and "/dev/net/tun" in one


def test_names_that_lead_past_the_tunnel(preflight: ModuleType) -> None:
    """A line of /etc/hosts with the address of the inventory was right before the tunnel existed."""
    facts = {"addresses": ["10.0.0.2"], "sources": {}, "hosts_lines": ["10.0.0.1 a"]}
    addresses, inside = {"a": "10.0.0.1", "b": "10.0.0.2"}, {"a": "10.213.0.1", "b": "10.213.0.2"}
    assert preflight.network_problems("b", addresses, facts) == []
    (one,) = preflight.network_problems("b", addresses, facts, inside)
    assert one.startswith("b: /etc/hosts has the line '10.0.0.1 a'; allowed: a at 10.213.0.1")


def test_who_would_be_locked_out_is_refused(preflight: ModuleType) -> None:
    denied = {"unreachable": True, "msg": "Task failed: Failed to connect: admin@10.0.0.1: Permission denied"}
    assert preflight.key_problems("a", "10.0.0.1", {}) == []
    assert preflight.key_problems("a", "10.0.0.1", {"skipped": True}) == []
    (sentence,) = preflight.key_problems("a", "10.0.0.1", denied)  # no user is named, so ssh uses its default
    assert sentence.startswith("a (10.0.0.1): mpitrain_sshd_passwords is false, and a login with a key alone fails: ")
    assert "Permission denied" in sentence and "Install your key: ssh-copy-id 10.0.0.1; or" in sentence
    settings = SETTINGS | {"login_users": {"a": "admin"}, "login_ports": {"a": 2222}}
    reports = {"a": {"ansible_facts": {"mpitrain": HEALTHY}}}
    (sentence,) = preflight.problems(reports, {"a": "10.0.0.1"}, {"head": ["a"]}, settings, {"a": denied})
    assert "Install your key: ssh-copy-id -p 2222 admin@10.0.0.1; or" in sentence


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"nvidia_cards": 2, "nvidia_driver": ""}, "node1: has 2 NVIDIA cards and no loaded driver"),
        ({"firewall": "own rules"}, "node1: nftables drops unknown packets"),
        ({"nvidia_cards": 1, "nvidia_driver": "580.65"}, "different NVIDIA drivers: 570.1, 580.65"),
    ],
)
def test_what_is_worth_a_word(preflight: ModuleType, facts: dict[str, object], says: str) -> None:
    usual = {"nvidia_cards": 0, "nvidia_driver": "", "firewall": ""}
    other = {**usual, "nvidia_cards": 1, "nvidia_driver": "570.1"} if "driver" in says and "no " not in says else usual
    nodes = {"node1": usual | facts, "node2": other}
    words = preflight.notes({name: {"ansible_facts": {"mpitrain": one}} for name, one in nodes.items()})
    assert len(words) == 1
    assert says in words[0]
    assert preflight.notes({"node1": {"ansible_facts": {"mpitrain": usual}}}) == []
