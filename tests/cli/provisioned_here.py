"""A project's folder for `mpitrain cluster`, with a playbook of one task for this machine, and its commands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mpitrain.cli import main

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


def needs_ansible() -> None:
    if not Path(sys.executable).with_name("ansible-playbook").exists():
        pytest.skip("Ansible is not installed: pip install 'mpitrain[cluster]'")


class Cluster:
    """`mpitrain cluster`, called in a folder with a playbook and a configuration as in the checkout."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.hosts = folder, folder / "cluster/hosts"
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.hosts.parent.mkdir()
        (folder / "cluster/setup.yml").write_text(PLAY)
        (folder / "ansible.cfg").write_text("[defaults]\ninventory = cluster/hosts\n")
        monkeypatch.chdir(folder)
        monkeypatch.delenv("ANSIBLE_INVENTORY", raising=False)

    def __call__(self, *arguments: str) -> tuple[object, str, str]:
        """The exit code and what was printed."""
        try:
            code: object = main(["cluster", *arguments])
        except SystemExit as end:
            code = end.code
        return code, *self._capsys.readouterr()

    def refuses(self, text: str, *arguments: str) -> None:
        """It is wrong use, and nothing is run."""
        code, out, err = self(*arguments)
        assert (code, text in err, "ansible-playbook" in out) == (2, True, False), (out, err)

    def types(self, *answers: str | type[BaseException]) -> None:
        """A user at a terminal gives these answers."""
        waiting = list(answers)

        def answer(_question: str) -> str:
            given = waiting.pop(0)
            if isinstance(given, str):
                return given
            raise given

        self._monkeypatch.setattr("mpitrain.provision.terminal.is_there", lambda: True)
        self._monkeypatch.setattr("builtins.input", answer)
