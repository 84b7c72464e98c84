"""How `mpitrain cluster` runs Ansible: the line that it prints, failures, signals, tasks that hang.

Ansible is slow to start, so most tests have a program in its place that notes its words and reports what they say.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mpitrain
from cli.provisioned_here import LOCAL, PLAY, Cluster, needs_ansible
from jobs import Job, run_command, until
from mpitrain.provision import playbook

STATS = {"event": "stats", "hosts": {"here": {"ok": 1, "changed": 1, "unreachable": 0, "failures": 0}}}
WAIT = "    - name: Wait\n      ansible.builtin.command: {cmd: \"sh -c 'touch waits; sleep 3600'\", chdir: '%s'}\n"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cluster:
    """With an inventory. Processes that others have lost do not become children of this one."""
    monkeypatch.setattr(playbook, "adopt_orphans", lambda: None)
    made = Cluster(tmp_path, monkeypatch, capsys)
    made.hosts.write_text(LOCAL)
    return made


@pytest.fixture
def ansible(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of Ansible: a program that writes its words into this file, and reports one change."""
    program, words = cluster.folder / "ansible-playbook", cluster.folder / "words"
    program.write_text(
        f"#!/bin/sh\nprintf '%s\\n' \"$@\" >'{words}'\necho '{json.dumps(STATS)}' >\"$ANSIBLE_MPITRAIN_REPORT\"\n"
    )
    program.chmod(0o755)
    for module in ("playbook", "nodes"):
        monkeypatch.setattr(f"mpitrain.provision.{module}.ansible_program", lambda _name: str(program))
    return words


def test_no_playbooks_anywhere(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """mpitrain is installed without them, and runs in a folder that is no checkout."""
    monkeypatch.setattr(mpitrain, "__file__", str(tmp_path / "site/mpitrain/__init__.py"))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    code, _, err = cluster("setup")
    assert (code, "there are no playbooks here: looked for" in err) == (1, True), err
    assert str(tmp_path / "empty/cluster/setup.yml") in err


def test_the_checkouts_playbooks_are_found_from_elsewhere(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    (cluster.folder / "elsewhere").mkdir()
    monkeypatch.chdir(cluster.folder / "elsewhere")
    cluster.refuses("--inventory: there is no file hosts", "setup", "--inventory", "hosts")
    Path("hosts").write_text("[head]\n")
    cluster.refuses("there is no section [workers]", "setup", "--inventory", "hosts")


def test_no_ansible(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(cluster.folder / "python"))
    monkeypatch.setenv("PATH", str(cluster.folder))
    code, _, err = cluster("setup")
    assert code == 1
    assert "there is no ansible-playbook beside" in err and "-m pip install 'mpitrain[cluster]'" in err


@pytest.mark.parametrize(
    ("arguments", "inventory", "line", "says"),
    [
        (["setup", "--", "-e", "a=b c"], None, "cluster/setup.yml -e 'a=b c'", "1 changes\n"),
        (["setup", "--dry-run"], None, "cluster/setup.yml --check --diff", "1 changes that a real run would make\n"),
        (["setup", "--ask-become-pass"], None, "cluster/setup.yml --ask-become-pass", "1 changes\n"),
        (["setup", "--inventory", "other"], None, "cluster/setup.yml -i {folder}/other", "1 changes\n"),
        (["setup"], "other", "cluster/setup.yml", "1 changes\n"),
        (["teardown", "--yes"], None, "cluster/teardown.yml -e confirm=yes", "`mpitrain cluster setup` makes it all"),
    ],
)
def test_the_line_that_is_printed_is_the_one_that_is_run(
    arguments: list[str],
    inventory: str | None,
    line: str,
    says: str,
    cluster: Cluster,
    ansible: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (cluster.folder / "other").write_text(LOCAL)
    if inventory:
        monkeypatch.setenv("ANSIBLE_INVENTORY", inventory)
    code, out, _ = cluster(*arguments)
    expected = f"ansible-playbook {line.format(folder=cluster.folder)}"
    assert (code, out.splitlines()[0]) == (0, f"$ {expected}")
    assert ansible.read_text().splitlines() == shlex.split(expected)[1:]
    assert "done in 0:00: 1 nodes, " in out and says in out


def test_install_hands_the_packages_over_and_keeps_them(cluster: Cluster, ansible: Path) -> None:
    """With what is there, other versions replaced; the variable is written only after a run that went well."""
    variables = cluster.folder / "cluster/group_vars/all.yml"
    variables.parent.mkdir()
    variables.write_text('---\n# More.\nmpitrain_python_packages: ["Torch==2.12", "tqdm"]\nmpitrain_uid: 1\n')
    before = variables.read_text()
    packages = ["install", "torch==2.13", "mpitrain[dashboard,plot]"]
    assert cluster(*packages, "--dry-run")[0] == 0 and variables.read_text() == before
    code, out, _ = cluster(*packages)
    listed = '["tqdm", "torch==2.13", "mpitrain[dashboard,plot]"]'
    assert f"--tags runtime -e '{{\"mpitrain_python_packages\": {listed}}}'" in out and code == 0
    assert variables.read_text() == f"---\n# More.\nmpitrain_python_packages: {listed}\nmpitrain_uid: 1\n"
    variables.write_text("mpitrain_python_packages:\n  - torch\n")
    cluster.refuses("is not on one line as", "install", "tqdm")
    assert variables.read_text() == "mpitrain_python_packages:\n  - torch\n"


@pytest.mark.parametrize("word", ["-r", "torch; true", "", "../x", "a b"])
def test_install_refuses_what_is_no_package(cluster: Cluster, word: str) -> None:
    cluster.refuses(f"install: {word!r} is not the name of a Python package", "install", "tqdm", "--", word)


@pytest.mark.parametrize("before", [["setup"], ["remove", "node1", "--yes"], ["remove", "--yes", "node1"]])
def test_an_option_of_ansible_in_the_wrong_place(cluster: Cluster, before: list[str]) -> None:
    code, _, err = cluster(*before, "--tags", "ssh")
    assert (code, "unknown argument --tags; options of ansible-playbook go after --" in err) == (2, True)
    cluster.refuses("-i is after --; put the inventory before it", *before, "--", "--tags", "ssh", "-i", "x")


def test_what_ansible_reports(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is summed up, and what a playbook rescues or ignores is none."""
    needs_ansible()
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
    (cluster.folder / "cluster/setup.yml").write_text(PLAY + more)
    events: list[dict[str, Any]] = []
    take = playbook.Report._take
    monkeypatch.setattr(playbook.Report, "_take", lambda self, event: (events.append(event), take(self, event)))
    code, _, err = cluster("setup")
    assert code == 1
    assert (cluster.folder / "cluster/made").exists()
    assert events[0] == {"event": "start", "host": "here", "task": "First"}
    assert events[1]["event"] == "ok" and events[1]["changed"] is True
    summary = err.partition("FAILED after")[2]
    assert "ansible-playbook: code 2" in summary
    assert "\nhere: Look at three things\n    one is wrong; write it anew\n    three is wrong; write it anew" in summary
    assert "not this" not in summary and "nor this" not in summary


def test_a_run_that_fails_without_a_task(tmp_path: Path) -> None:
    """Such as of a playbook that is no YAML."""
    report = playbook.Report(tmp_path / "none")
    report.end(4, 95.0)
    assert report.text().splitlines() == [
        "FAILED after 1:35 (ansible-playbook: code 4)",
        "See Ansible's output above for the reason.",
    ]


@pytest.mark.parametrize(
    ("number", "group", "when"),
    [
        # At "made", Ansible is about to start the next worker, and would forget it. SIGTERM and SIGHUP are alike.
        (signal.SIGINT, True, "made"),
        (signal.SIGTERM, False, "made"),
        (signal.SIGKILL, False, "waits"),
        pytest.param(signal.SIGINT, True, "waits", marks=pytest.mark.nightly),
        pytest.param(signal.SIGHUP, False, "waits", marks=pytest.mark.nightly),
    ],
)
def test_a_signal_leaves_no_ansible_behind(cluster: Cluster, number: int, group: bool, when: str) -> None:
    """Ansible ends with mpitrain: after Ctrl-C to the whole group, and a signal to mpitrain alone, even SIGKILL."""
    needs_ansible()
    folder = cluster.folder / "cluster"
    (folder / "setup.yml").write_text(PLAY + WAIT % folder)

    def during(process: subprocess.Popen[str]) -> None:
        until((folder / when).exists)
        (os.killpg if group else os.kill)(process.pid, number)

    job: Job = run_command([sys.executable, "-m", "mpitrain", "cluster", "setup"], cwd=cluster.folder, during=during)
    assert not job.left
    if number != signal.SIGKILL:
        assert job.code == 130, job.output
        assert "interrupted after 0:" in job.stderr


def test_a_task_that_never_ends(cluster: Cluster, ansible: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command names what the task waits for, and ends it at the deadline. Both times count from its start."""
    begun = json.dumps({"event": "start", "host": "here", "task": "Wait"})
    program = cluster.folder / "ansible-playbook"
    program.write_text(f"#!/bin/sh\nsleep 2\necho '{begun}' >\"$ANSIBLE_MPITRAIN_REPORT\"\nexec sleep 60\n")
    monkeypatch.setattr(playbook, "NOTICE_SECONDS", 1.0)
    monkeypatch.setattr(playbook, "STALL_SECONDS", 4.0)
    code, _, err = cluster("setup")
    *notices, last = err.splitlines()
    assert code == 1 and notices and all(line.endswith("] waiting for here at 'Wait'") for line in notices), err
    assert notices[0].startswith("[0:0") and not notices[0].startswith("[0:00]")
    assert last.startswith("mpitrain cluster: nothing has happened for 0:0")
    assert last.endswith(": waiting for here at 'Wait'; run ended")
