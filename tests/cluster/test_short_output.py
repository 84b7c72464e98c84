"""What a set-up prints: little, with all of Ansible's own output in a log file. The tests need no node."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from playbooks import log_of, recap

from jobs import REPOSITORY, Job, run_command

HERE = f"ansible_connection=local ansible_python_interpreter={sys.executable}"
HOSTS = f"""\
[head]
node1 ansible_host=10.0.0.1 {HERE}
[workers]
node2 ansible_host=10.0.0.2 {HERE}
[cluster:children]
head
workers
"""
PLAYS = """\
- name: Look
  hosts: cluster
  gather_facts: false
  tasks:
    - name: Look at the node
      ansible.builtin.command: {argv: ["echo", "a line of a task"]}
      changed_when: false
    - name: Fail in a way that is expected
      ansible.builtin.command: {argv: ["ls", "/expected"]}
      changed_when: false
      ignore_errors: true
- name: Change
  hosts: cluster
  gather_facts: false
  tasks:
    - name: Change something
      ansible.builtin.command: {argv: ["sleep", "2"]}
    - name: Refuse
      ansible.builtin.command: {argv: ["ls", "/nonexistent/{{ inventory_hostname }}"]}
      when: inventory_hostname == refused | default("")
    - name: Say what to do now
      ansible.builtin.debug: {msg: Now train}
      run_once: true
"""
ALL = "All output goes to cluster/log/setup-"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    if not Path(sys.executable).with_name("ansible-playbook").exists():
        pytest.skip("Ansible is not installed: pip install 'mpitrain[cluster]'")
    shutil.copytree(REPOSITORY / "cluster/callback_plugins", tmp_path / "cluster/callback_plugins")
    shutil.copy(REPOSITORY / "ansible.cfg", tmp_path)
    (tmp_path / "cluster/hosts").write_text(HOSTS)
    (tmp_path / "cluster/setup.yml").write_text(PLAYS)
    return tmp_path


def play(
    project: Path,
    *arguments: str,
    env: dict[str, str] | None = None,
    terminal: bool = False,
    playbook: str = "cluster/setup.yml",
) -> Job:
    command = [str(Path(sys.executable).with_name("ansible-playbook")), playbook, *arguments]
    typed = [sys.executable, str(REPOSITORY / "tests/typed.py"), json.dumps([])]
    return run_command([*typed, *command] if terminal else command, cwd=project, env=env, timeout=300.0)


def without_time(text: str) -> list[str]:
    return re.sub(r"\d+:\d\d\b", "M:SS", text).splitlines()


def test_a_line_for_each_part_that_changes_something_and_a_log_with_everything(project: Path) -> None:
    """`mpitrain cluster` adds the line that it runs."""
    job = run_command([sys.executable, "-m", "mpitrain", "cluster", "setup"], cwd=project, timeout=300.0)
    assert job.code == 0, job.output
    first, second, *rest = [line for line in without_time(job.stdout) if line]
    assert first == "$ ansible-playbook cluster/setup.yml"
    assert second.startswith(ALL)
    assert rest == ["Now train", "[M:SS]  2 of 2  Change: 2 changes", "done in M:SS: 2 nodes, 2 changes"]
    log = log_of(job.stdout, project)
    assert "TASK [Look at the node]" in log and "Now train" in log and "/expected" in log
    assert {name: (counts["ok"], counts["changed"]) for name, counts in recap(log).items()} == {
        "node1": (4, 1),
        "node2": (3, 1),
    }


def test_a_failure_of_a_users_own_playbook_is_printed_in_full_with_the_name_of_the_log(project: Path) -> None:
    (project / "own").mkdir()
    shutil.move(project / "cluster/setup.yml", project / "own/play.yml")
    job = play(project, "-e", "refused=node2", playbook="own/play.yml")
    assert job.code == 2, job.output
    assert job.stdout.startswith("All output goes to own/log/play-")
    told = job.stdout.partition("fatal: [node2]: FAILED!")[2]
    assert "/nonexistent/node2" in told and "No such file or directory" in told, job.output
    assert "/expected" not in job.output
    [last] = without_time(job.stdout)[-1:]
    assert re.fullmatch(r"FAILED after M:SS on node2; all output is in own/log/play-\S+\.log", last)
    assert "/nonexistent/node2" in log_of(job.stdout, project)


def test_a_dry_run_prints_all(project: Path) -> None:
    job = play(project, "--check")
    assert job.code == 0, job.output
    assert job.stdout.startswith(ALL)
    assert "TASK [Change something]" in job.stdout and "PLAY RECAP" in job.stdout
    assert "TASK [Change something]" in log_of(job.stdout, project)


def test_a_terminal_shows_what_is_being_done(project: Path) -> None:
    job = play(project, env={"TERM": "xterm"}, terminal=True)
    assert job.code == 0, job.output
    # The text read here has a line end for each carriage return.
    assert re.search(r"^\x1b\[K\[0:\d\d\] 2 of 2  Change: Change something$", job.stdout, re.M), job.stdout
    # The lines that stay on the screen are the same as without a terminal.
    written = [line.rpartition("\x1b[K")[2] for line in without_time(job.stdout)]
    left = [line for line in written if line and not re.match(r"\[M:SS\] \d of 2  \w+: [A-Z]", line)]
    assert left[1:] == ["Now train", "[M:SS]  2 of 2  Change: 2 changes", "done in M:SS: 2 nodes, 2 changes"]


def test_a_folder_that_cannot_be_written_is_said_and_a_dumb_terminal_gets_lines(project: Path) -> None:
    (project / "cluster/log").write_text("a file in the way")
    job = play(project, env={"TERM": "dumb"}, terminal=True)
    assert job.code == 0, job.output
    assert "\x1b" not in job.stdout
    first = job.stdout.splitlines()[0]
    log = re.fullmatch(r"All output goes to (\S+) \(\S+/cluster/log cannot be written: File exists\)", first)
    assert log is not None, first
    assert "PLAY RECAP" in Path(log[1]).read_text()
    Path(log[1]).unlink()
