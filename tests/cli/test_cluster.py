"""`mpitrain cluster` without machines: what it writes, asks and refuses before any machine is changed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cluster_project import LOCAL, cluster, needs_ansible, type_in

from mpitrain.launch.hostfile import read_inventory
from mpitrain.provision.playbook import FailedTask
from mpitrain.provision.trust import fingerprint_of_line


def test_init_from_options(project: Path) -> None:
    key = project / "key"
    key.touch()
    nodes = "a=10.0.0.1,b=10.0.0.2, c=fd00::3"
    job = cluster(project, "init", "--nodes", nodes, "--user", "ada", "--key", "key", "--head", "b")
    assert job.code == 0, job.output
    inventory = read_inventory(project / "cluster/hosts")
    assert [host.name for host in inventory.hosts] == ["b", "a", "c"]
    assert inventory.head.variables == {"ansible_user": "ada", "ansible_ssh_private_key_file": str(key)}
    assert "head    b ansible_host=10.0.0.2 ansible_user=ada" in job.stdout


def test_init_keeps_what_is_there(project: Path) -> None:
    (project / "cluster/hosts").write_text("# mine\n")
    job = cluster(project, "init", "--nodes", "a=10.0.0.1")
    assert job.code == 2
    assert "exists already and was not changed" in job.stderr
    assert (project / "cluster/hosts").read_text() == "# mine\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "there is no terminal to ask on; give --nodes NAME=ADDRESS"),
        (["--nodes", "a"], "'a' is not a node; allowed is NAME=ADDRESS"),
        (["--nodes", ""], "'' is not a node"),
        (["--nodes", "a=node1"], "a: 'node1' is not an IP address"),
        (["--nodes", "a=127.0.0.1"], "the other nodes cannot reach 127.0.0.1"),
        (["--nodes", "a=10.0.0.1,a=10.0.0.2"], "a=10.0.0.2: a=10.0.0.1 is in the list already"),
        (["--nodes", "a=10.0.0.1,b=10.0.0.1"], "b=10.0.0.1: a=10.0.0.1 is in the list already"),
        (["--nodes", "a b=10.0.0.1"], "'b' of a is not of the form"),
        (["--nodes", "a=10.0.0.1", "--head", "b"], "--head is 'b'; it must be one of the nodes: a"),
        (["--nodes", "a=10.0.0.1", "--key", "/no/key"], "there is no file /no/key"),
        (["--nodes", "a=10.0.0.1", "--key", "/no/key.pub"], "is the public key; give the private one, /no/key"),
    ],
)
def test_init_refuses(arguments: list[str], text: str, project: Path) -> None:
    job = cluster(project, "init", *arguments)
    assert job.code == 2, job.output
    assert text in job.stderr
    assert not (project / "cluster/hosts").exists()


def test_init_from_answers(project: Path) -> None:
    answers = [
        ("User to log in", "ada\n"),
        ("Private key", "/no/key\n"),
        ("there is no file /no/key", ""),
        ("Private key", "\n"),
        ("Name of the head: ", "\n"),
        ("Name of the head: ", "a\n"),
        ("IP address of a: ", "10.0.0.1\n"),
        ("Name of worker 1: ", "b\n"),
        ("IP address of b: ", "10.0.0.1\n"),
        ("a=10.0.0.1 is in the list already", ""),
        ("Name of worker 1: ", "b\n"),
        ("IP address of b: ", "10.0.0.2\n"),
        ("Name of worker 2: ", "\n"),
    ]
    job = type_in(project, answers, "init")
    assert job.code == 0, job.output
    inventory = read_inventory(project / "cluster/hosts")
    assert [(host.name, host.address) for host in inventory.hosts] == [("a", "10.0.0.1"), ("b", "10.0.0.2")]
    assert inventory.head.variables == {"ansible_user": "ada"}


@pytest.mark.parametrize("key", ["\x04", "\x03"])
def test_init_stopped_at_a_question_writes_nothing(key: str, project: Path) -> None:
    job = type_in(project, [("User to log in", "\n"), ("Private key", "\n"), ("Name of the head: ", key)], "init")
    assert job.code == 1, job.output
    assert "mpitrain cluster: stopped at a question" in job.stdout
    assert not (project / "cluster/hosts").exists()


@pytest.mark.parametrize(("action", "arguments"), [("remove", ["b"]), ("teardown", [])])
def test_nothing_is_undone_without_a_yes(action: str, arguments: list[str], project: Path) -> None:
    assert cluster(project, "init", "--nodes", "a=10.0.0.1,b=10.0.0.2").code == 0
    before = (project / "cluster/hosts").read_text()
    job = cluster(project, action, *arguments)
    assert (job.code, "--yes skips the question" in job.stderr) == (2, True), job.output
    job = type_in(project, [("[yes/no]", "perhaps\n"), ("Please answer", ""), ("[yes/no]", "no\n")], action, *arguments)
    assert (job.code, "nothing was changed" in job.stdout) == (1, True), job.output
    assert (project / "cluster/hosts").read_text() == before
    assert "ansible-playbook" not in job.stdout


@pytest.mark.parametrize(("name", "text"), [("a", "it is the head"), ("z", "not in the file; the workers are: b")])
def test_what_cannot_be_removed(name: str, text: str, project: Path) -> None:
    assert cluster(project, "init", "--nodes", "a=10.0.0.1,b=10.0.0.2").code == 0
    job = cluster(project, "remove", name, "--yes")
    assert (job.code, text in job.stderr) == (2, True), job.output


@pytest.mark.parametrize(
    ("fingerprints", "text"),
    [
        (["a=SHA256:short"], "'a SHA256:short' is not a fingerprint of a node"),
        (["no-file"], "neither HOST=SHA256:... nor a file that can be read"),
        (["z=SHA256:" + 43 * "x"], "there is no node z in"),
        (["file"], "file:2: 'a MD5:00' is not a fingerprint"),
    ],
)
def test_wrong_fingerprints_are_refused_before_any_contact(fingerprints: list[str], text: str, project: Path) -> None:
    assert cluster(project, "init", "--nodes", "a=10.0.0.1").code == 0
    (project / "file").write_text("# the lab\na MD5:00\n")
    job = cluster(project, "trust", *(word for one in fingerprints for word in ("--fingerprints", one)))
    assert (job.code, text in job.stderr) == (2, True), job.output


def test_trust_of_an_unknown_node(project: Path) -> None:
    assert cluster(project, "init", "--nodes", "a=10.0.0.1").code == 0
    job = cluster(project, "trust", "b")
    assert (job.code, "there is no node b; the nodes are a" in job.stderr) == (2, True), job.output


def test_trust_where_ssh_is_not_used(project: Path) -> None:
    needs_ansible()
    (project / "cluster/hosts").write_text(LOCAL)
    job = cluster(project, "trust")
    assert (job.code, "here (10.0.0.1): reached without ssh" in job.stdout) == (0, True), job.output


def test_fingerprint_is_that_of_ssh_keygen(tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    public = (tmp_path / "key.pub").read_text()
    told = subprocess.run(["ssh-keygen", "-lf", str(tmp_path / "key.pub")], capture_output=True, text=True, check=True)
    assert fingerprint_of_line(f"10.0.0.1 {public}") == told.stdout.split()[1]
    assert fingerprint_of_line(f"@revoked 10.0.0.1 {public}") == told.stdout.split()[1]
    assert fingerprint_of_line("# 10.0.0.1") == fingerprint_of_line("10.0.0.1 ssh-ed25519 ?") == ""


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("Failed to connect to the host via ssh: Host key verification failed.", "mpitrain cluster trust b"),
        ("ada@10.0.0.2: Permission denied (publickey,password).", "ssh-copy-id"),
        ("Task failed: Incorrect sudo password", "the right password"),
        ("Task failed: Missing sudo password", "--ask-become-pass"),
        ("sudo: a password is required", "--ask-become-pass"),
        ("Timeout (12s) waiting for privilege escalation prompt: ", "check that b is on"),
        ("ssh: connect to host 10.0.0.2 port 22: No route to host", "check that b is on"),
        ("Connection timed out during banner exchange", "check that b is on"),
        ("b: /home/cluster is in use; move it away", ""),
    ],
)
def test_remedies(message: str, remedy: str) -> None:
    found = FailedTask("b", "task", message).remedy
    assert remedy in found
    assert bool(remedy) == bool(found)
