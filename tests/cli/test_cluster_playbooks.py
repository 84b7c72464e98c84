"""How `mpitrain cluster` runs Ansible: the line that it prints, failures, signals, tasks that hang."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_project import CLUSTER, LOCAL, PLAY, cluster, needs_ansible

from jobs import REPOSITORY, Job, run_command, until


def test_no_playbooks_anywhere(tmp_path: Path) -> None:
    """mpitrain is installed, and runs in a folder that is no checkout."""
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


def test_install_hands_the_packages_over_and_keeps_them(project: Path) -> None:
    """With what is there, other versions replaced; the variable is written only after a run that went well."""
    needs_ansible()
    (project / "cluster/hosts").write_text(LOCAL)
    variables = project / "cluster/group_vars/all.yml"
    variables.parent.mkdir()
    variables.write_text('---\n# More.\nmpitrain_python_packages: ["Torch==2.12", "tqdm"]\nmpitrain_uid: 1\n')
    before = variables.read_text()
    job = cluster(project, "install", "torch==2.13", "mpitrain[dashboard,plot]", "--check")
    assert job.code == 0 and variables.read_text() == before, job.output
    job = cluster(project, "install", "torch==2.13", "mpitrain[dashboard,plot]")
    listed = '["tqdm", "torch==2.13", "mpitrain[dashboard,plot]"]'
    assert f"--tags runtime -e '{{\"mpitrain_python_packages\": {listed}}}'" in job.stdout, job.output
    assert variables.read_text() == f"---\n# More.\nmpitrain_python_packages: {listed}\nmpitrain_uid: 1\n"


@pytest.mark.parametrize("word", ["-r", "torch; true", "", "../x", "a b"])
def test_install_refuses_what_is_no_package(project: Path, word: str) -> None:
    (project / "cluster/hosts").write_text(LOCAL)
    job = cluster(project, "install", "tqdm", "--", word)
    assert (job.code, f"install: {word!r} is not the name of a Python package" in job.stderr) == (2, True), job.output


def test_install_leaves_a_list_of_other_form_alone(project: Path) -> None:
    (project / "cluster/hosts").write_text(LOCAL)
    variables = project / "cluster/group_vars/all.yml"
    variables.parent.mkdir()
    variables.write_text("mpitrain_python_packages:\n  - torch\n")
    job = cluster(project, "install", "tqdm")
    assert (job.code, "is not on one line as" in job.stderr) == (2, True), job.output
    assert variables.read_text() == "mpitrain_python_packages:\n  - torch\n"


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


@pytest.mark.parametrize("before", [["setup"], ["remove", "node1", "--yes"], ["remove", "--yes", "node1"]])
def test_an_option_of_ansible_in_the_wrong_place(project: Path, before: list[str]) -> None:
    job = cluster(project, *before, "--tags", "ssh")
    assert job.code == 2, job.output
    assert "unknown argument --tags; options of ansible-playbook go after --" in job.stderr
    job = cluster(project, *before, "--", "--tags", "ssh", "-i", "x")
    assert (job.code, "-i is after --; put the inventory before it" in job.stderr) == (2, True), job.output


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
    """Ansible ends with mpitrain: after Ctrl-C to the whole group, and a signal to mpitrain alone, even SIGKILL."""
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

    # At "made", Ansible is about to start the next worker, and would forget it. SIGTERM and SIGHUP have one handler.
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
