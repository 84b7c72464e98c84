"""The places of the playbooks, their inventory and Ansible's programs."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import mpitrain
from mpitrain.errors import ClusterError, ConfigError
from mpitrain.launch.foreign_files import refuse_foreign
from mpitrain.launch.hostfile import PROJECT_INVENTORY, Inventory, read_inventory
from mpitrain.reading import is_file, named_path

_SETUP = Path("cluster/setup.yml")
_DEFAULTS = Path("cluster/hosts.none")  # an inventory without nodes, beside the variables with their defaults
# Ansible reads these files by itself. They may name programs to run.
_CONFIGURATION, _GROUP_VARS = Path("ansible.cfg"), Path("cluster/group_vars/all.yml")
# A wheel has the playbooks here.
_INSTALLED = Path(__file__).parent / "installed"


@dataclass(frozen=True)
class Project:
    """A folder with an inventory, and the playbooks that run on it.

    `playbooks` is their folder, as an `ansible-playbook` line in `folder` names it. `inventory_options` are the options
    with which that line finds the inventory: none if ansible.cfg or ANSIBLE_INVENTORY names it. `environment` has the
    variables that this line needs in addition.
    """

    folder: Path
    inventory: Path
    inventory_options: tuple[str, ...] = ()
    playbooks: Path = _SETUP.parent
    environment: Mapping[str, str] = field(default_factory=dict)

    def read(self) -> Inventory:
        """The nodes."""
        return read_inventory(self.inventory)

    def shown(self, command: list[str]) -> str:
        """Return a line that does the same from the user's folder, for copying."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        line = " ".join([*settings, shlex.join(command)])
        return line if self.folder == Path.cwd() else f"(cd {shlex.quote(str(self.folder))} && {line})"

    def write_variables(self) -> Path | None:
        """Write every variable with its default beside the inventory, for editing, and return the file.

        None: the file is there already, or the playbooks are those of a checkout, which has it beside them.
        """
        path = self.inventory.parent / "group_vars/all.yml"
        if not self.playbooks.is_absolute() or path.exists():
            return None
        path.parent.mkdir(exist_ok=True)
        path.write_text((_INSTALLED / _GROUP_VARS).read_text())
        return path


def find_project(inventory: Path | None = None, *, is_new: bool = False) -> Project:
    """Find the playbooks: in the current folder, or else in the checkout or package from which this mpitrain runs.

    The inventory is `inventory`, or else ANSIBLE_INVENTORY, which Ansible itself prefers, or else cluster/hosts: of the
    checkout with the playbooks, or of the current folder if the playbooks are in the package. With `is_new`, the file
    `inventory` need not exist.

    Raises:
        ClusterError: there are no playbooks in these places.
        ConfigError: ANSIBLE_INVENTORY is a list, `inventory` does not exist, or another user may write a file that was
            found.
    """
    places = [Path.cwd(), Path(mpitrain.__file__).resolve().parents[1]]
    folder = next((place for place in places if (place / _SETUP).is_file()), None)
    is_installed = folder is None and (_INSTALLED / _SETUP).is_file()
    if is_installed:
        folder = Path.cwd()
    if folder is None:
        looked = " and ".join(dict.fromkeys(str(place / _SETUP) for place in [*places, _INSTALLED]))
        raise ClusterError(
            f"there are no playbooks here: looked for {looked}. Install mpitrain again, or change to a checkout of it"
        )
    for name in (_SETUP, _CONFIGURATION, _GROUP_VARS):
        if (folder / name).is_file():
            refuse_foreign(folder / name, instead="copy cluster/ and ansible.cfg into a folder of your own")
    if inventory is not None and not is_new and not is_file(inventory):
        raise ConfigError(f"--inventory: there is no file {inventory}; `mpitrain cluster init` writes cluster/hosts")
    path, options = _inventory(folder, inventory)
    return _installed(folder, path) if is_installed else Project(folder, path, options)


def _inventory(folder: Path, inventory: Path | None) -> tuple[Path, tuple[str, ...]]:
    """Return the inventory, and the options with which Ansible finds it in `folder`."""
    if inventory is not None:
        return inventory.absolute(), ("-i", str(inventory.absolute()))
    named = os.environ.get("ANSIBLE_INVENTORY", "")
    if "," in named:
        raise ConfigError(f"ANSIBLE_INVENTORY is {named!r}; it must be one file, or unset for cluster/hosts")
    if named:
        return named_path(named).absolute(), ()
    path = folder / PROJECT_INVENTORY
    if is_file(path):
        refuse_foreign(path, instead=f"name it: --inventory {path}")
    return path, ()


def _installed(folder: Path, inventory: Path) -> Project:
    """Return the project of a folder that has no playbooks, with those of the package.

    The package's own variables come first, so that those beside the inventory win. The folder's ansible.cfg is used.
    """
    environment = {"ANSIBLE_MPITRAIN_LOG": str(inventory.parent / "log")}
    if "ANSIBLE_CONFIG" not in os.environ and not (folder / _CONFIGURATION).is_file():
        environment["ANSIBLE_CONFIG"] = str(_INSTALLED / "cluster" / _CONFIGURATION)
    options = ("-i", str(_INSTALLED / _DEFAULTS), "-i", str(inventory))
    return Project(folder, inventory, options, _INSTALLED / _SETUP.parent, environment)


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
