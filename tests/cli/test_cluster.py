"""`mpitrain cluster` without machines: what is written, what is refused, what is said of a run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import REPOSITORY, Job, run_command, until
from mpitrain.launch.hostfile import read_inventory
from mpitrain.provision.host_keys import fingerprint_of_line
from mpitrain.provision.playbook_report import FailedTask

CLUSTER = [sys.executable, "-m", "mpitrain", "cluster"]
# A playbook of one machine, this one, which Ansible reaches without a network.
LOCAL = f"""\
[head]
here ansible_host=10.0.0.1 ansible_connection=local ansible_python_interpreter={sys.executable}
[workers]
[cluster:children]
head
workers
"""
PLAY = """\
- name: Play
  hosts: cluster
  gather_facts: false
  tasks:
    - name: First
      ansible.builtin.file: {path: "{{ inventory_dir }}/made", state: touch, mode: "0644"}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a playbook and a configuration as in the checkout, and no inventory yet."""
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/setup.yml").write_text(PLAY)
    (tmp_path / "ansible.cfg").write_text("[defaults]\ninventory = cluster/hosts\n")
    return tmp_path


def cluster(project: Path, *arguments: str, env: dict[str, str] | None = None) -> Job:
    return run_command([*CLUSTER, *arguments], cwd=project, env=env)


def type_in(project: Path, answers: list[tuple[str, str]], *arguments: str) -> Job:
    typed = [sys.executable, str(REPOSITORY / "tests/typed.py"), json.dumps(answers)]
    return run_command([*typed, *CLUSTER, *arguments], cwd=project)


def needs_ansible() -> None:
    if not Path(sys.executable).with_name("ansible-playbook").exists():
        pytest.skip("Ansible is not installed: pip install 'mpitrain[cluster]'")


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


def test_no_playbooks_anywhere(tmp_path: Path) -> None:
    """An installed mpitrain, in a folder that is no checkout."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/mpitrain").symlink_to(REPOSITORY / "mpitrain")
    source = "import mpitrain, pathlib; mpitrain.__file__ = 'site/mpitrain/__init__.py'; pathlib.Path.resolve = "
    source += "pathlib.Path.absolute; import mpitrain.cli, sys; sys.exit(mpitrain.cli.main(['cluster', 'setup']))"
    job = run_command([sys.executable, "-c", source], cwd=tmp_path)
    assert job.code == 1, job.output
    assert "there are no playbooks here: looked for" in job.stderr
    assert str(tmp_path / "cluster/setup.yml") in job.stderr


def test_the_checkouts_playbooks_are_found_from_elsewhere(tmp_path: Path) -> None:
    job = cluster(tmp_path, "setup", "--inventory", "hosts")
    assert (job.code, "--inventory: there is no file hosts" in job.stderr) == (2, True), job.output
    (tmp_path / "hosts").write_text("[head]\n")
    job = cluster(tmp_path, "setup", "--inventory", "hosts")
    assert (job.code, "there is no section [workers]" in job.stderr) == (2, True), job.output


def test_no_ansible(project: Path) -> None:
    (project / "cluster/hosts").write_text(LOCAL)
    (project / "python").symlink_to(Path(sys.executable).resolve())
    env = {"PATH": str(project), "PYTHONPATH": str(REPOSITORY)}
    job = run_command([str(project / "python"), "-m", "mpitrain", "cluster", "setup"], cwd=project, env=env)
    assert job.code == 1, job.output
    assert "there is no ansible-playbook beside" in job.stderr
    assert "-m pip install 'mpitrain[cluster]'" in job.stderr


def test_the_line_that_is_printed_does_the_same(project: Path) -> None:
    needs_ansible()
    (project / "cluster/hosts").write_text(LOCAL)
    job = cluster(project, "setup", "--", "-e", "a=b c")
    assert job.code == 0, job.output
    line = next(line for line in job.stdout.splitlines() if line.startswith("$ ")).removeprefix("$ ")
    assert line == "ansible-playbook cluster/setup.yml -e 'a=b c'"
    assert (project / "cluster/made").exists()
    assert "done in 0:" in job.stdout and "1 nodes, 1 changes" in job.stdout
    (project / "cluster/made").unlink()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    assert run_command(["bash", "-c", line], cwd=project, env={"PATH": path}).code == 0
    assert (project / "cluster/made").exists()


def test_check_changes_nothing(project: Path) -> None:
    needs_ansible()
    (project / "cluster/hosts").write_text(LOCAL)
    job = cluster(project, "setup", "--check")
    assert job.code == 0, job.output
    assert "$ ansible-playbook cluster/setup.yml --check --diff" in job.stdout
    assert "1 nodes, 1 changes that a real run would make" in job.stdout
    assert not (project / "cluster/made").exists()


def test_another_inventory_is_in_the_line(project: Path) -> None:
    needs_ansible()
    (project / "other").write_text(LOCAL)
    job = cluster(project, "setup", "--inventory", "other", "--check")
    assert job.code == 0, job.output
    assert f"$ ansible-playbook cluster/setup.yml -i {project}/other --check --diff" in job.stdout
    job = cluster(project, "setup", env={"ANSIBLE_INVENTORY": "other"})
    assert job.code == 0, job.output
    assert "$ ansible-playbook cluster/setup.yml\n" in job.stdout
    assert (project / "made").exists()
    job = cluster(project, "setup", "--inventory", "other", "--", "-i", "x")
    assert (job.code, "--inventory FILE" in job.stderr) == (2, True)


def test_an_option_of_ansible_in_the_wrong_place(project: Path) -> None:
    job = cluster(project, "setup", "--tags", "ssh")
    assert job.code == 2, job.output
    assert "unknown argument --tags; options of ansible-playbook go after --" in job.stderr


def test_a_failure_is_summed_up(project: Path) -> None:
    needs_ansible()
    (project / "cluster/hosts").write_text(LOCAL)
    more = """\
    - name: Made good
      block: [{name: Breaks, ansible.builtin.fail: {msg: not this}}]
      rescue: [{name: Mends, ansible.builtin.debug: {msg: mended}}]
    - name: Does not matter
      ansible.builtin.fail: {msg: nor this}
      ignore_errors: true
    - name: Look at three things
      ansible.builtin.fail: {msg: "{{ item }} is wrong; write it anew"}
      when: item != "two"
      loop: [one, two, three]
"""
    (project / "cluster/setup.yml").write_text(PLAY + more)
    job = cluster(project, "setup")
    assert job.code == 1, job.output
    summary = job.stderr.partition("FAILED after")[2]
    assert "ansible-playbook: code 2" in summary
    assert "\nhere: Look at three things\n    one is wrong; write it anew\n    three is wrong; write it anew" in summary
    assert "not this" not in summary and "nor this" not in summary


def test_a_broken_playbook(project: Path) -> None:
    needs_ansible()
    (project / "cluster/hosts").write_text(LOCAL)
    (project / "cluster/setup.yml").write_text("- hosts: [cluster\n")
    job = cluster(project, "setup")
    assert job.code == 1, job.output
    assert "See Ansible's output above for the reason." in job.stderr


def test_a_signal_leaves_no_ansible_behind(project: Path) -> None:
    """Each way out: Ctrl-C to the whole group, and a kill of mpitrain alone, even by SIGKILL."""
    needs_ansible()
    (project / "cluster/hosts").write_text(LOCAL)
    wait = "    - name: Wait\n      ansible.builtin.command: {cmd: \"sh -c 'touch waits; sleep 3600'\", chdir: '%s'}\n"
    (project / "cluster/setup.yml").write_text(PLAY + wait % (project / "cluster"))

    def send(number: int, *, group: bool, when: str) -> Job:
        def during(process: subprocess.Popen[str]) -> None:
            until((project / "cluster" / when).exists)
            (os.killpg if group else os.kill)(process.pid, number)

        job = run_command([*CLUSTER, "setup"], cwd=project, during=during)
        for file in ("made", "waits"):
            (project / "cluster" / file).unlink(missing_ok=True)
        return job

    # At "made" Ansible is about to start the next worker, which it then forgets. SIGTERM and SIGHUP have one handler.
    for number, group, when in (
        (signal.SIGINT, True, "made"),
        (signal.SIGINT, True, "waits"),
        (signal.SIGTERM, False, "made"),
        (signal.SIGHUP, False, "waits"),
    ):
        job = send(number, group=group, when=when)
        assert job.code == 130, job.output
        assert "interrupted after 0:" in job.stderr
        assert not job.left
    assert send(signal.SIGKILL, group=False, when="waits").left == []


def test_a_task_that_never_ends(project: Path) -> None:
    """The command names what the task waits for, and ends it at the deadline. Both times count from the start of the
    task."""
    needs_ansible()
    (project / "cluster/hosts").write_text(LOCAL)
    wait = "    - name: Wait\n      ansible.builtin.command: {argv: [sleep, '3600']}\n"
    (project / "cluster/setup.yml").write_text(PLAY + wait)
    source = """
import sys
import mpitrain.cli
from mpitrain.provision import playbook

read = playbook.Report.read
def shorten(report):
    news = read(report)
    if "'Wait'" in report.waiting():
        playbook.NOTICE_SECONDS, playbook.STALL_SECONDS = 2.0, 8.0
    return news
playbook.Report.read = shorten
sys.exit(mpitrain.cli.main(["cluster", "setup"]))
"""
    job = run_command([sys.executable, "-c", source], cwd=project)
    assert job.code == 1, job.output
    assert re.search(r"^\[0:\d\d\] waiting for here at 'Wait'$", job.stderr, re.M), job.output
    assert re.search(r"nothing has happened for 0:\d\d: waiting for here at 'Wait'; run ended$", job.stderr, re.M)
    assert not job.left


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
