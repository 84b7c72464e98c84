"""An operator of a test bed, with small playbooks of the same shape as those of the cluster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from jobs import REPOSITORY, clean_environment
from mpitrain.launch.hostfile import read_inventory
from testbed import Bed

SETUP = """\
- name: Preflight
  hosts: cluster
  gather_facts: false
  any_errors_fatal: true
  tags: [preflight, always]
  tasks:
    - name: Look for the mark
      ansible.builtin.stat: {path: /etc/refuse}
      register: mark
    - name: Refuse what does not fit
      ansible.builtin.fail: {msg: "{{ inventory_hostname }}: /etc/refuse is there; remove it"}
      when: mark.stat.exists
- name: Names
  hosts: cluster
  gather_facts: false
  become: true
  tags: [hosts]
  tasks:
    - name: Write the names of all nodes
      ansible.builtin.copy:
        content: "{{ groups['cluster'] | join(' ') }}"
        dest: /etc/nodes
        mode: "0644"
- name: More
  hosts: cluster
  gather_facts: false
  become: true
  tasks:
    - name: Break where the second mark is
      ansible.builtin.command: {argv: [test, "!", -e, /etc/break]}
      changed_when: false
"""
TEARDOWN = """\
- name: Undo
  hosts: cluster
  gather_facts: false
  become: true
  tasks:
    - name: Was it confirmed
      ansible.builtin.assert: {that: confirm == "yes"}
    - name: Remove the names
      ansible.builtin.file: {path: /etc/nodes, state: absent}
"""


@dataclass
class Operator:
    """A person with a project and an ssh that knows no node yet. A command has a terminal, or none."""

    bed: Bed
    folder: Path
    known_hosts: Path = field(init=False)

    def __post_init__(self) -> None:
        self.known_hosts = self.folder / "known_hosts"
        shutil.copytree(REPOSITORY / "cluster/callback_plugins", self.folder / "cluster/callback_plugins")
        (self.folder / "cluster/setup.yml").write_text(SETUP)
        (self.folder / "cluster/teardown.yml").write_text(TEARDOWN)
        # The configuration is that of the checkout, whose last section is [ssh_connection].
        ours = (REPOSITORY / "ansible.cfg").read_text()
        (self.folder / "ansible.cfg").write_text(f"{ours}ssh_common_args = -F {self.folder}/ssh_config\n")
        (self.folder / "ssh_config").write_text(
            f"UserKnownHostsFile {self.known_hosts}\nGlobalKnownHostsFile /dev/null\nHashKnownHosts yes\n"
            f"IdentityFile {self.bed.record.key}\nIdentitiesOnly yes\nStrictHostKeyChecking yes\n"
        )

    def __call__(
        self, *arguments: str, typing: list[tuple[str, str]] | None = None, timeout_seconds: float = 600.0
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mpitrain", "cluster", *arguments]
        if typing is not None:
            command = [sys.executable, str(REPOSITORY / "tests/typed.py"), json.dumps(typing), *command]
        command = ["env", "--unset=ANSIBLE_INVENTORY", *command]  # the inventory of the bed
        env = clean_environment({"ANSIBLE_PYTHON_INTERPRETER": "/usr/bin/python3"})
        return self.bed.run(command, timeout_seconds=timeout_seconds, env=env, cwd=self.folder)

    def init(self, num_nodes: int = 2) -> None:
        nodes = ",".join(f"{name}={self.bed.address(name)}" for name in self.bed.names[:num_nodes])
        done = self("init", "--nodes", nodes, "--user", "admin")
        assert done.returncode == 0, done

    def trust_all(self) -> None:
        fingerprints = [f"--fingerprints={name}={self.fingerprint(name)}" for name in self.names]
        done = self("trust", *fingerprints)
        assert done.returncode == 0, done

    @property
    def names(self) -> list[str]:
        return [host.name for host in read_inventory(self.folder / "cluster/hosts").hosts]

    def fingerprint(self, node: str) -> str:
        """The fingerprint that the node's console shows."""
        console = self.bed.node_run(node, ["ssh-keygen", "-lf", "/etc/ssh/ssh_host_ed25519_key.pub"])
        return re.search(r"SHA256:\S+", console.stdout)[0]

    def knows(self, node: str) -> bool:
        """True if the operator's ssh logs in without help."""
        command = [
            "ssh",
            "-F",
            f"{self.folder}/ssh_config",
            "-o",
            "BatchMode=yes",
            f"admin@{self.bed.address(node)}",
            "true",
        ]
        return self.bed.run(command, timeout_seconds=300).returncode == 0

    def nodes_of(self, node: str) -> str | None:
        """The nodes in the file that set-up has written."""
        found = self.bed.node_run(node, ["cat", "/etc/nodes"])
        return found.stdout if found.returncode == 0 else None
