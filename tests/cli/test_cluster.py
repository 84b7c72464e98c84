"""`mpitrain cluster` without machines: what it writes, asks and refuses before any machine is changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli.provisioned_here import LOCAL, PLAY, Cluster, needs_ansible
from jobs import REPOSITORY, run_command
from mpitrain.launch.hostfile import read_inventory
from mpitrain.provision.playbook import FailedTask
from mpitrain.provision.trust import fingerprint_of_line

TWO = ("--nodes", "a=10.0.0.1,b=10.0.0.2")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cluster:
    return Cluster(tmp_path, monkeypatch, capsys)


def test_init_from_options(cluster: Cluster) -> None:
    key = cluster.folder / "key"
    key.touch()
    nodes = "a=10.0.0.1,b=10.0.0.2, c=fd00::3"
    code, out, _ = cluster("init", "--nodes", nodes, "--user", "ada", "--key", "key", "--head", "b")
    assert code == 0
    inventory = read_inventory(cluster.hosts)
    assert [host.name for host in inventory.hosts] == ["b", "a", "c"]
    assert inventory.head.variables == {"ansible_user": "ada", "ansible_ssh_private_key_file": str(key)}
    assert "head    b ansible_host=10.0.0.2 ansible_user=ada" in out
    cluster.hosts.write_text("# mine\n")
    cluster.refuses("exists already and was not changed", "init", "--nodes", "a=10.0.0.1")
    assert cluster.hosts.read_text() == "# mine\n"


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
def test_init_refuses(arguments: list[str], text: str, cluster: Cluster) -> None:
    cluster.refuses(text, "init", *arguments)
    assert not cluster.hosts.exists()


def test_init_from_answers(tmp_path: Path) -> None:
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
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/setup.yml").write_text(PLAY)
    typed = [sys.executable, str(REPOSITORY / "tests/typed.py"), json.dumps(answers)]
    job = run_command([*typed, sys.executable, "-m", "mpitrain", "cluster", "init"], cwd=tmp_path)
    assert job.code == 0, job.output
    inventory = read_inventory(tmp_path / "cluster/hosts")
    assert [(host.name, host.address) for host in inventory.hosts] == [("a", "10.0.0.1"), ("b", "10.0.0.2")]
    assert inventory.head.variables == {"ansible_user": "ada"}


@pytest.mark.parametrize("key", [EOFError, KeyboardInterrupt], ids=["Ctrl-D", "Ctrl-C"])
def test_init_stopped_at_a_question_writes_nothing(key: type[BaseException], cluster: Cluster) -> None:
    cluster.types("", "", key)
    code, _, err = cluster("init")
    assert (code, "mpitrain cluster: stopped at a question" in err) == (1, True), err
    assert not cluster.hosts.exists()


@pytest.mark.parametrize("arguments", [["remove", "b"], ["teardown"]])
def test_nothing_is_undone_without_a_yes(arguments: list[str], cluster: Cluster) -> None:
    cluster("init", *TWO)
    before = cluster.hosts.read_text()
    cluster.refuses("--yes skips the question", *arguments)
    cluster.types("perhaps", "no")
    code, out, err = cluster(*arguments)
    assert (code, "nothing was changed" in err, out) == (1, True, "Please answer yes or no.\n")
    assert cluster.hosts.read_text() == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["remove", "a", "--yes"], "it is the head"),
        (["remove", "z", "--yes"], "not in the file; the workers are: b"),
        (["trust", "z"], "there is no node z; the nodes are a"),
        (["trust", "--fingerprints", "a=SHA256:short"], "'a SHA256:short' is not a fingerprint of a node"),
        (["trust", "--fingerprints", "no-file"], "--fingerprints takes HOST=SHA256:..., or a file"),
        (["trust", "--fingerprints", "z=SHA256:" + 43 * "x"], "there is no node z in"),
        (["trust", "--fingerprints", "file"], "file:2: 'a MD5:00' is not a fingerprint"),
    ],
)
def test_refused_before_any_contact(arguments: list[str], text: str, cluster: Cluster) -> None:
    cluster("init", *TWO)
    (cluster.folder / "file").write_text("# the lab\na MD5:00\n")
    cluster.refuses(text, *arguments)


def test_trust_where_ssh_is_not_used(cluster: Cluster) -> None:
    needs_ansible()
    cluster.hosts.write_text(LOCAL)
    code, out, _ = cluster("trust")
    assert (code, "here (10.0.0.1): reached without ssh" in out) == (0, True), out


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
