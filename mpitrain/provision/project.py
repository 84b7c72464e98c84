"""The places of the playbooks, their inventory and Ansible's programs."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import mpitrain
from mpitrain.errors import ClusterError, ConfigError
from mpitrain.launch.foreign_files import refuse_foreign
from mpitrain.launch.hostfile import PROJECT_INVENTORY, Inventory, read_inventory

_SETUP = Path("cluster/setup.yml")
# Ansible reads these files by itself. They may name programs to run.
_CONFIGURATION, _GROUP_VARS = Path("ansible.cfg"), Path("cluster/group_vars/all.yml")


@dataclass(frozen=True)
class Project:
    """A folder with the playbooks, and the inventory that they run on.

    `inventory_options` are the options with which an `ansible-playbook` line in that folder finds the inventory: none
    if ansible.cfg or ANSIBLE_INVENTORY names it.
    """

    folder: Path
    inventory: Path
    inventory_options: tuple[str, ...] = ()

    def read(self) -> Inventory:
        """The nodes."""
        return read_inventory(self.inventory)

    def shown(self, command: list[str]) -> str:
        """Return a line that does the same from the user's folder, for copying."""
        line = shlex.join(command)
        return line if self.folder == Path.cwd() else f"(cd {shlex.quote(str(self.folder))} && {line})"


def find_project(inventory: Path | None = None) -> Project:
    """Find the project of the current folder, or else of the checkout from which this mpitrain runs.

    The inventory is `inventory`, or else ANSIBLE_INVENTORY, which Ansible itself prefers, or else cluster/hosts.

    Raises:
        ClusterError: there are no playbooks in either place.
        ConfigError: ANSIBLE_INVENTORY is a list, `inventory` does not exist, or another user may write a file that was
            found.
    """
    places = [Path.cwd(), Path(mpitrain.__file__).resolve().parents[1]]
    folder = next((place for place in places if (place / _SETUP).is_file()), None)
    if folder is None:
        looked = " and ".join(dict.fromkeys(str(place / _SETUP) for place in places))
        raise ClusterError(
            f"there are no playbooks here: looked for {looked}. An installed mpitrain has none; "
            "change to a checkout of mpitrain, or to a folder with a copy of its cluster/ and ansible.cfg"
        )
    for name in (_SETUP, _CONFIGURATION, _GROUP_VARS):
        if (folder / name).is_file():
            refuse_foreign(folder / name, instead="copy cluster/ and ansible.cfg into a folder of your own")
    if inventory is not None:
        if not inventory.is_file():
            raise ConfigError(
                f"--inventory: there is no file {inventory}; `mpitrain cluster init` writes cluster/hosts"
            )
        return Project(folder, inventory.absolute(), ("-i", str(inventory.absolute())))
    named = os.environ.get("ANSIBLE_INVENTORY", "")
    if "," in named:
        raise ConfigError(f"ANSIBLE_INVENTORY is {named!r}; it must be one file, or unset for cluster/hosts")
    if named:
        return Project(folder, Path(named).expanduser().absolute())
    path = folder / PROJECT_INVENTORY
    if path.is_file():
        refuse_foreign(path, instead=f"name it: --inventory {path}")
    return Project(folder, path)


def ansible_program(name: str) -> str:
    """Return the path of one of Ansible's programs: the one in this environment, or else the one on PATH.

    Raises:
        ClusterError: Ansible is not installed.
    """
    beside = Path(sys.executable).with_name(name)
    program = str(beside) if os.access(beside, os.X_OK) else shutil.which(name)
    if program is None:
        raise ClusterError(
            f"there is no {name} beside {sys.executable} nor on PATH; install Ansible:\n"
            f"    {sys.executable} -m pip install 'mpitrain[cluster]'"
        )
    return program
