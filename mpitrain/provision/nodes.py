"""Set up the cluster, add and remove nodes, and tear the cluster down: the order of edits and playbook runs.

The variable `mpitrain_python_packages` names additional Python packages for all nodes; it is extended here.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from mpitrain.errors import ClusterError, ConfigError
from mpitrain.launch.hostfile import Host
from mpitrain.provision import terminal
from mpitrain.provision.inventory import add_worker, remove_worker
from mpitrain.provision.playbook import Report, run_playbook
from mpitrain.provision.project import Project, ansible_program
from mpitrain.provision.trust import Fingerprints, trust
from mpitrain.reading import find_file, text_of

# These tags write the files that name every node, which become shorter when a node is removed.
_SHRINK = ("--tags", "hosts,ssh,firewall,nfs,wireguard")
_CHECK = ("--check", "--diff")
_CONFIRM = ("-e", "confirm=yes")


def set_up(project: Project, options: Sequence[str], *, check: bool) -> int:
    """Turn the machines of the inventory into a cluster. Return the exit code."""
    project.read()
    return _said(run_playbook(project, "setup.yml", [*_checked(check), *options]), check)


def install(project: Project, packages: Sequence[str], options: Sequence[str], *, check: bool) -> int:
    """Install Python packages into the environment that all nodes share. Return the exit code.

    The variables get them too, so that a later set-up brings them to a new environment.
    """
    check_requirements(packages)
    project.read()
    wanted = wanted_packages(project, packages)
    given = ("--tags", "runtime", "-e", json.dumps({VARIABLE: wanted}))
    code = _said(run_playbook(project, "setup.yml", [*given, *_checked(check), *options]), check)
    if code == 0 and not check:
        print(f"{keep_packages(project, wanted)}: {VARIABLE} names them", flush=True)
    return code


def add(
    project: Project, hosts: Sequence[Host], fingerprints: Fingerprints, options: Sequence[str], *, check: bool
) -> int:
    """Add new workers to the inventory and set up all nodes. Return the exit code.

    If no machine was changed (an unknown key, a node that preflight refuses), the inventory gets its old content. If a
    machine was changed, the new lines stay, so that the next run completes the set-up.
    """
    ansible_program("ansible-playbook")
    added: list[Host] = []
    keep = False
    try:
        for host in hosts:
            add_worker(project.inventory, host)
            added.append(host)
        if not trust(project, [host.name for host in hosts], fingerprints):
            raise ClusterError("not every new node is trusted; see above")
        keep = not check
        report = run_playbook(project, "setup.yml", [*_checked(check), *options])
        keep = keep and (report.code == 0 or report.changed_something)
        code = _said(report, check)
    finally:
        if not keep:
            for host in added:
                remove_worker(project.inventory, host.name)
            if added:
                print(f"{project.inventory} is as it was before; no machine was changed.", file=sys.stderr)
    if code != 0 and keep:
        _warn(
            f"{_names(hosts)} stays in {project.inventory}, because machines were changed. Repair the fault, then run "
            f"`mpitrain cluster setup`; or run `mpitrain cluster remove {hosts[0].name}`."
        )
    return code


def remove(project: Project, name: str, options: Sequence[str], *, check: bool, offline: bool, assume_yes: bool) -> int:
    """Undo the set-up on a worker (unless it is `offline`), and remove it from the configuration of the others. Return
    the exit code."""
    inventory = project.read()
    if name not in {host.name for host in inventory.workers}:
        remove_worker(project.inventory, name)  # raises the error that says why
    if not check:
        manner = "without touching it, because it is offline" if offline else "and undo the set-up on it"
        _confirm(f"Take {name} out of the cluster, {manner}?", assume_yes)
    if not offline:
        report = run_playbook(project, "teardown.yml", ["--limit", name, *_CONFIRM, *_checked(check), *options])
        code = _said(report, check)
        if code != 0:
            _warn(
                f"{name} is still in {project.inventory}. Repair the fault and run this again; if the node is gone for "
                f"good: mpitrain cluster remove {name} --offline"
            )
            return code
    if check:
        return 0
    remove_worker(project.inventory, name)
    print(f"{name} is no longer in {project.inventory}.", flush=True)
    code = _said(run_playbook(project, "setup.yml", [*_SHRINK, *options]))
    if code != 0:
        _warn(f"other nodes may still know {name}; run: mpitrain cluster setup -- {shlex.join(_SHRINK)}")
    return code


def tear_down(project: Project, options: Sequence[str], *, check: bool, assume_yes: bool) -> int:
    """Undo the set-up on every node. Return the exit code. The inventory stays."""
    inventory = project.read()
    if not check:
        _confirm(f"Undo the set-up on {_names(inventory.hosts)}? The data on the shared folder stays.", assume_yes)
    code = _said(run_playbook(project, "teardown.yml", [*_CONFIRM, *_checked(check), *options]), check)
    if code == 0 and not check:
        print(f"{project.inventory} stays, and ssh still knows the nodes: `mpitrain cluster setup` makes it all again.")
    return code


def _said(report: Report, check: bool = False) -> int:
    """Print how a run ended. Return its exit code."""
    note = " that a real run would make" if check and report.code == 0 else ""
    print(f"\n{report.text()}{note}", file=sys.stderr if report.code else sys.stdout, flush=True)
    return report.code if report.code in (0, 130) else 1


def _checked(check: bool) -> tuple[str, ...]:
    return _CHECK if check else ()


def _confirm(question: str, assume_yes: bool) -> None:
    if assume_yes:
        return
    if not terminal.is_there():
        raise ConfigError("there is no terminal to ask on; --yes skips the question")
    if not terminal.confirm(question):
        raise ClusterError("nothing was changed")


def _names(hosts: Sequence[Host]) -> str:
    return ", ".join(host.name for host in hosts)


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- more Python packages ----------------------------------------------------------------------------------------------

VARIABLE = "mpitrain_python_packages"
# A name with extras and versions, as for pip: torch, mpitrain[dashboard,plot], 'numpy>=2,<3'.
_REQUIREMENT = re.compile(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?(\[[\w., -]+\])?\s*([<>=!~]=?=?\s*[\w.*+!-]+\s*,?\s*)*")
_LINE = re.compile(rf"^{VARIABLE}:(.*)$", re.M)


def check_requirements(packages: Sequence[str]) -> None:
    """Refuse words that are not the name of a package for pip.

    Raises:
        ConfigError: names the first such word.
    """
    for package in packages:
        if not _REQUIREMENT.fullmatch(package):
            raise ConfigError(
                f"install: {package!r} is not the name of a Python package; known forms are torch, 'torch==2.13.0', "
                "'mpitrain[dashboard,plot]'. Anything else goes into "
                f"{VARIABLE} of group_vars/all.yml, as for pip"
            )


def wanted_packages(project: Project, packages: Sequence[str]) -> list[str]:
    """Return the packages for the nodes: those of the variable, where new ones replace those of the same name.

    Raises:
        ConfigError: the variable's value is not on one line.
    """
    file = _file(project)
    text = _text(file)
    named = {_name(package) for package in packages}
    return [*(one for one in _listed(file, text) if _name(one) not in named), *packages]


def keep_packages(project: Project, packages: Sequence[str]) -> Path:
    """Write the variable, so that the next set-up has the packages too. Return its file."""
    file = _file(project)
    text = _text(file)
    line = f"{VARIABLE}: {json.dumps(packages)}"
    text = _LINE.sub(lambda _: line, text) if _LINE.search(text) else f"{text.rstrip() or '---'}\n\n{line}\n"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


def _file(project: Project) -> Path:
    """The variables beside the playbooks win over those beside the inventory."""
    folder = project.inventory.parent if project.playbooks.is_absolute() else project.folder / project.playbooks
    return folder / "group_vars/all.yml"


def _text(file: Path) -> str:
    content = find_file(file, ConfigError, is_given=True)
    return "" if content is None else text_of(content, ConfigError, f"{file} cannot be read")


def _listed(file: Path, text: str) -> list[str]:
    line = _LINE.search(text)
    if line is None:
        return []
    try:
        listed = json.loads(line[1].partition(" #")[0])
    except (ValueError, RecursionError):
        listed = None
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise ConfigError(
            f'{file}: {VARIABLE} is not on one line as ["torch", "tqdm"]. Write the packages there yourself, then run '
            "`mpitrain cluster setup -- --tags runtime`"
        )
    return listed


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~ ]", requirement)[0]).lower()
