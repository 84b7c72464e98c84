"""The inventory: it is read as Ansible reads it, a refusal names the line, and edits keep the rest."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import run_command
from mpitrain.errors import ConfigError
from mpitrain.launch.hostfile import (
    PROJECT_INVENTORY,
    Host,
    Inventory,
    find_inventory,
    group_variables,
    read_inventory,
)
from mpitrain.provision.inventory import add_worker, remove_worker, write_inventory

EVERYTHING = """\
; the lab, second floor
# old machines
[workers:vars]
ansible_user = ada   # their own login
[head] # by the window
node1 ansible_host=10.0.0.1

[workers]
node2 ansible_host=10.0.0.2 ansible_user=bob  # the loud one
10.0.0.3
Node-4.lab ansible_host="10.0.0.4" ansible_ssh_common_args='-o ProxyJump="ada@gate" -4'
six ansible_host=fd00::6

[cluster:children]
head
workers # all of them

[all:vars]
mpitrain_interface=eth0
[cluster:vars]
mpitrain_time=off
"""
PLAIN = "[head]\na ansible_host=10.0.0.1\n[workers]\nb ansible_host=10.0.0.2\n[cluster:children]\nhead\nworkers\n"


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text(PLAIN)
    return path


def test_everything_that_is_read(hosts: Path) -> None:
    hosts.write_text(EVERYTHING)
    inventory = read_inventory(hosts)
    assert inventory.head == Host("node1", "10.0.0.1")
    assert [host.address for host in inventory.hosts] == ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "fd00::6"]
    assert inventory.workers[0].variables == {"ansible_user": "bob"}
    assert inventory.workers[1] == Host("10.0.0.3", "10.0.0.3")
    assert inventory.workers[2].variables == {"ansible_ssh_common_args": '-o ProxyJump="ada@gate" -4'}


@pytest.mark.parametrize("text", [EVERYTHING, PLAIN, PLAIN.replace("b ansible_host=10.0.0.2\n", "")])
def test_ansible_reads_the_same(text: str, hosts: Path) -> None:
    """Ansible reads the same from the original file and from the file that mpitrain writes back."""
    hosts.write_text(text)
    ours = read_inventory(hosts)
    written = hosts.with_name("written")
    write_inventory(written, ours)
    assert read_inventory(written) == Inventory(written, ours.head, ours.workers)
    for path in (hosts, written):
        theirs = ansible_reads(path)
        assert theirs["head"]["hosts"] == [ours.head.name]
        assert theirs.get("workers", {"hosts": []})["hosts"] == [host.name for host in ours.workers]
        assert sorted(theirs["cluster"]["children"]) == ["head", "workers"]
        for host in ours.hosts:
            variables = theirs["_meta"]["hostvars"].get(host.name, {})
            assert variables.get("ansible_host", host.name) == host.address
            assert host.variables.items() <= {key: str(value) for key, value in variables.items()}.items()


def ansible_reads(path: Path) -> dict[str, dict]:
    command = Path(sys.executable).with_name("ansible-inventory")
    if not command.exists():
        pytest.skip("Ansible is not installed: pip install 'mpitrain[cluster]'")
    job = run_command([str(command), "-i", str(path), "--list"], cwd=path.parent)
    assert job.code == 0, job.output
    return json.loads(job.stdout)


@pytest.mark.parametrize(
    ("old", "new", "line", "texts"),
    [
        ("b ansible_host=10.0.0.2", "node[1:4] ansible_host=10.0.0.2", 4, ["'node[1:4]'", "a line for each node"]),
        ("b ansible_host=10.0.0.2", "b", 4, ["b has no address", "b ansible_host=10.0.0.1"]),
        ("10.0.0.2", "b.lab", 4, ["the address 'b.lab' of b is not an IP address", "ip -brief address"]),
        ("10.0.0.2", "10.0.0.256", 4, ["'10.0.0.256' of b"]),
        ("10.0.0.2", "{{x}}", 4, ["'{{x}}' of b is not an IP address"]),
        ("10.0.0.2", "0.0.0.0", 4, ["is not a machine's address"]),
        ("10.0.0.2", "10.0.0.1", 4, ["the address 10.0.0.1 of b is in line 2 already, for a"]),
        ("b ansible_host=10.0.0.2", "a", 4, ["a has no address"]),
        ("b ansible", "A ansible", 4, ["the name a of A is in line 2 already, for a"]),
        ("b ansible", "a ansible", 4, ["the name a of a is in line 2 already, for a"]),
        ("b ansible", "b:22 ansible", 4, ["'b:22' cannot be a node's name", "ansible_port="]),
        ("b ansible", "node_b ansible", 4, ["'node_b' cannot be"]),
        ("b ansible", "workers ansible", 4, ["the name 'workers' is reserved"]),
        ("b ansible", "localhost ansible", 4, ["the name 'localhost'"]),
        ("b ansible", "10.0.0.7 ansible", 4, ["10.0.0.7 is an address, but its ansible_host is 10.0.0.2"]),
        ("10.0.0.2", "10.0.0.2 ansible_user = ada", 4, ["'ansible_user' of b is not", "no space around ="]),
        ("10.0.0.2", "10.0.0.2 ansible_host=10.0.0.3", 4, ["b sets ansible_host twice"]),
        ("10.0.0.2", "10.0.0.2 x='y", 4, ["cannot be split", "quotation"]),
        ("10.0.0.2", "10.0.0.2 note=it's mine", 4, ["cannot be split: No closing quotation", "quote the quote"]),
        ("[head]", "[all:vars]\nnote=it's mine\n[head]", 2, ["cannot be split: No closing quotation"]),
        ("[workers]", "[gpu]", 3, ["the section [gpu] is not known", "allowed are [head], [workers]"]),
        ("[cluster:children]", "[workers:children]", 5, ["[workers:children] is not known"]),
        ("[cluster:children]", "[cluster]", 5, ["[cluster] is not known"]),
        ("[cluster:children]", "[gpu:vars]", 5, ["[gpu:vars] is not known"]),
        ("[head]", "[head", 1, ["'[head' is no section"]),
        ("[head]", "c ansible_host=10.0.0.3\n[head]", 1, ["stands before the first section"]),
        ("[head]", "---\nall:", 1, ["this looks like YAML", "cluster/hosts.example"]),
        ("[head]", "all:", 1, ["this looks like YAML"]),
        ("head\nworkers\n", "head\nworkers\ngpu\n", 8, ["'gpu' is not one of its groups"]),
        ("[head]", "[cluster:vars]\nansible_host=10.0.0.9\n[head]", 2, ["ansible_host is set for a whole group"]),
        ("[head]", "[cluster:vars]\nansible_user ada\n[head]", 2, ["not of the form variable=value"]),
    ],
)
def test_what_is_refused_with_its_line(old: str, new: str, line: int, texts: list[str], hosts: Path) -> None:
    assert old in PLAIN
    hosts.write_text(PLAIN.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        read_inventory(hosts)
    assert str(caught.value).startswith(f"{hosts}:{line}: ")
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("a ansible_host=10.0.0.1\n", "", "[head] has nothing; it must have exactly one node"),
        ("[workers]\n", "", "there is no section [workers]"),
        (PLAIN, "", "there is no section [head]"),
        ("[workers]\nb", "c ansible_host=10.0.0.3\n[workers]\nb", "[head] has a, c; it must have exactly one"),
        ("[cluster:children]\nhead\nworkers\n", "", "[cluster:children] has nothing; it must have the two lines"),
        ("head\nworkers\n", "head\n", "[cluster:children] has head; it must"),
    ],
)
def test_what_is_refused_as_a_whole(old: str, new: str, text: str, hosts: Path) -> None:
    hosts.write_text(PLAIN.replace(old, new, 1))
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{hosts}: {text}')}"):
        read_inventory(hosts)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no such file; `mpitrain cluster init` writes one"):
        read_inventory(tmp_path / "hosts")
    with pytest.raises(ConfigError, match=r"is not a file, but a folder"):
        read_inventory(tmp_path)
    (tmp_path / "binary").write_bytes(b"[head]\n\xff\n")
    with pytest.raises(ConfigError, match=r"binary cannot be read: it is not text in UTF-8: line 2 has the byte 0xff"):
        read_inventory(tmp_path / "binary")


def test_where_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    node = tmp_path / "etc-hosts"
    monkeypatch.setattr("mpitrain.launch.hostfile.NODE_INVENTORY", node)
    assert find_inventory() is None
    node.write_text(PLAIN)
    assert find_inventory() == node
    PROJECT_INVENTORY.parent.mkdir()
    PROJECT_INVENTORY.write_text(PLAIN)
    assert find_inventory() == PROJECT_INVENTORY


def test_adding_and_removing_keep_the_rest(hosts: Path) -> None:
    hosts.write_text(EVERYTHING)
    after = add_worker(hosts, Host("node7", "10.0.0.7", {"ansible_user": "eve", "note": "two words # here"}))
    added = "node7 ansible_host=10.0.0.7 ansible_user=eve note='two words # here'\n"
    six = "six ansible_host=fd00::6\n"
    assert hosts.read_text() == EVERYTHING.replace(six, six + added)
    assert after == read_inventory(hosts)
    assert after.workers[-1].variables["note"] == "two words # here"
    remove_worker(hosts, "node7")
    assert hosts.read_text() == EVERYTHING
    remove_worker(hosts, "node2")
    assert hosts.read_text() == EVERYTHING.replace("node2 ansible_host=10.0.0.2 ansible_user=bob  # the loud one\n", "")
    hosts.write_text(PLAIN)
    assert remove_worker(hosts, "b").workers == ()
    assert add_worker(hosts, Host("c", "10.0.0.3")).workers == (Host("c", "10.0.0.3"),)
    assert hosts.read_text() == PLAIN.replace("b ansible_host=10.0.0.2", "c ansible_host=10.0.0.3")


WITHOUT_WORKERS = PLAIN.replace("[workers]\nb ansible_host=10.0.0.2\n", "")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda hosts: add_worker(hosts, Host("b", "10.0.0.9")), "the name b of b is in line 4 already"),
        (
            lambda hosts: add_worker(hosts, Host("c", "10.0.0.1")),
            "the address 10.0.0.1 of c is in line 2 already, for a",
        ),
        (lambda hosts: add_worker(hosts, Host("c", "c.lab")), "is not an IP address"),
        (lambda hosts: add_worker(hosts, Host("c d", "10.0.0.9")), "'d' of c is not of the form"),
        (lambda hosts: remove_worker(hosts, "a"), "it is the head"),
        (lambda hosts: remove_worker(hosts, "z"), "not in the file; the workers are: b"),
        (
            lambda hosts: write_inventory(hosts, Inventory(hosts, Host("a", "10.0.0.1"), (Host("b", "10.0.0.1"),))),
            "the address 10.0.0.1 of b is in line 2 already",
        ),
    ],
)
def test_a_wrong_change_changes_nothing(change: Callable[[Path], object], text: str, hosts: Path) -> None:
    before = hosts.stat()
    with pytest.raises(ConfigError, match=text):
        change(hosts)
    assert hosts.read_text() == PLAIN
    assert hosts.stat().st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in hosts.parent.iterdir()] == ["hosts"]


def test_adding_without_a_section_of_workers(hosts: Path) -> None:
    hosts.write_text(WITHOUT_WORKERS)
    with pytest.raises(ConfigError, match=r"there is no section \[workers\]; add it"):
        add_worker(hosts, Host("c", "10.0.0.3"))
    assert hosts.read_text() == WITHOUT_WORKERS


def test_a_link_stays_a_link_and_the_mode_stays(hosts: Path) -> None:
    hosts.chmod(0o640)
    link = hosts.with_name("link")
    link.symlink_to(hosts)
    add_worker(link, Host("c", "10.0.0.3"))
    assert link.is_symlink()
    assert read_inventory(hosts).workers[-1].name == "c"
    assert hosts.stat().st_mode & 0o777 == 0o640


def test_group_variables_with_a_quotation_that_does_not_end(hosts: Path) -> None:
    hosts.write_text(PLAIN + "[all:vars]\nnote=it's mine\n")
    with pytest.raises(ConfigError, match=r"hosts:9: \"it's mine\" cannot be split: No closing quotation"):
        group_variables(hosts)
