"""A project's folder for `mpitrain cluster`, with a playbook of one task."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from jobs import REPOSITORY, Job, run_command

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
