"""`mpitrain cluster`: turn bare machines into a cluster with the playbooks of `cluster/`."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpitrain.errors import ConfigError
from mpitrain.units import add_renamed

HELP = "turn bare machines into a cluster, and change it"
PAGE = "how-to/cluster-admin.md"

_EPILOG = """\
These commands run the playbooks of the folder cluster/, or else those of the
installed mpitrain. They print each ansible-playbook line before they run it;
the line alone does the same.
Arguments after -- go to ansible-playbook unchanged.

  mpitrain cluster init --nodes node1=10.0.0.1,node2=10.0.0.2 --user admin
  mpitrain cluster trust
  mpitrain cluster setup --dry-run
  mpitrain cluster setup
  mpitrain cluster install torch tqdm
  mpitrain cluster add node3=10.0.0.3
  mpitrain cluster remove node2
  mpitrain cluster setup -- --tags ssh,nfs --limit node1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their options."""
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, text: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        made.add_argument("--inventory", type=Path, metavar="FILE", help="use this file instead of cluster/hosts")
        return made

    init = action("init", "write cluster/hosts, from options or from your answers")
    init.add_argument("--nodes", metavar="NAME=ADDRESS,...", help="the nodes with their IP addresses")
    init.add_argument("--head", metavar="NAME", help="the node that holds the shared folder (default: the first)")
    init.add_argument("--user", help="log in to the nodes as this user, who may use sudo (default: that of ssh)")
    init.add_argument("--key", metavar="FILE", help="private key for that login (default: that of ssh)")

    trust = action("trust", "show the nodes' host keys, and make them known to your ssh")
    trust.add_argument("nodes", nargs="*", metavar="NODE", help="name of a node (default: all)")
    _add_fingerprints(trust)

    setup = action("setup", "set up the nodes of cluster/hosts; changes only what is wrong or missing")
    _add_playbook_options(setup)

    install = action("install", "install Python packages for the programs of all nodes")
    install.add_argument("packages", nargs="+", metavar="PACKAGE", help="as for pip: torch, 'torch==2.13.0'")
    _add_playbook_options(install)

    add = action("add", "add workers to cluster/hosts and set them up")
    add.add_argument("nodes", metavar="NAME=ADDRESS,...", help="the new workers")
    add.add_argument("--user", help="log in to the new workers as this user (default: that of ssh)")
    add.add_argument("--key", metavar="FILE", help="private key for that login (default: that of ssh)")
    _add_fingerprints(add)
    _add_playbook_options(add)

    remove = action("remove", "undo the set-up on a worker, and remove it from cluster/hosts")
    remove.add_argument("node", metavar="NODE", help="name of a worker")
    remove.add_argument("--offline", action="store_true", help="the worker is dead: only make the others forget it")
    remove.add_argument("--yes", action="store_true", help="do not ask")
    _add_playbook_options(remove)

    teardown = action("teardown", "undo the set-up on all nodes; the data on the shared folder stays")
    teardown.add_argument("--yes", action="store_true", help="do not ask")
    _add_playbook_options(teardown)


def run(arguments: argparse.Namespace) -> int:
    """Do the action. Return the exit code."""
    from mpitrain.provision import nodes
    from mpitrain.provision.inventory import login_variables, parse_nodes
    from mpitrain.provision.project import find_project
    from mpitrain.provision.trust import read_fingerprints, trust

    if arguments.action == "init":
        return _init(arguments)
    project = find_project(arguments.inventory)
    if arguments.action == "trust":
        return 0 if trust(project, arguments.nodes, read_fingerprints(arguments.fingerprints)) else 1
    options = _ansible_options(arguments)
    if arguments.action == "setup":
        return nodes.set_up(project, options, check=arguments.check)
    if arguments.action == "install":
        return nodes.install(project, arguments.packages, options, check=arguments.check)
    if arguments.action == "add":
        variables = login_variables(arguments.user, arguments.key)
        hosts = parse_nodes(arguments.nodes, variables)
        return nodes.add(project, hosts, read_fingerprints(arguments.fingerprints), options, check=arguments.check)
    if arguments.action == "remove":
        return nodes.remove(
            project,
            arguments.node,
            options,
            check=arguments.check,
            offline=arguments.offline,
            assume_yes=arguments.yes,
        )
    return nodes.tear_down(project, options, check=arguments.check, assume_yes=arguments.yes)


def _init(arguments: argparse.Namespace) -> int:
    from mpitrain.provision import terminal
    from mpitrain.provision.inventory import (
        ask_for_login,
        ask_for_nodes,
        create_inventory,
        host_line,
        login_variables,
        parse_nodes,
        refuse_existing,
    )
    from mpitrain.provision.project import find_project

    project = find_project(arguments.inventory, is_new=True)
    path = arguments.inventory or project.inventory
    refuse_existing(path)
    user, key = arguments.user, arguments.key
    if arguments.nodes is None and not terminal.is_there():
        raise ConfigError("init: there is no terminal to ask on; give --nodes NAME=ADDRESS,NAME=ADDRESS")
    if arguments.nodes is None and user is None and key is None:
        user, key = ask_for_login()
    variables = login_variables(user, key)
    nodes = ask_for_nodes(variables) if arguments.nodes is None else parse_nodes(arguments.nodes, variables)
    inventory = create_inventory(path, nodes, arguments.head)
    print(f"{path}:")
    for host in inventory.hosts:
        print(f"    {'head  ' if host is inventory.head else 'worker'}  {host_line(host)}")
    if variables_file := project.write_variables():
        print(f"{variables_file}: every variable of the set-up with its default, for editing")
    named = f" --inventory {path}" if arguments.inventory else ""
    print(f"Next: mpitrain cluster trust{named}, then mpitrain cluster setup{named}")
    return 0


def _add_fingerprints(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fingerprints",
        action="append",
        default=[],
        metavar="FILE|NODE=SHA256:...",
        help="the right keys, so that no question is asked; FILE has lines NODE SHA256:...; may be repeated",
    )


def _add_playbook_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", dest="check", help="show what would change, change nothing")
    add_renamed(parser, check="--dry-run")
    parser.add_argument("--ask-become-pass", action="store_true", help="ask for the password of sudo")
    parser.add_argument("ansible", nargs="*", metavar="ARGUMENT", help="after --: arguments for ansible-playbook")
    parser.set_defaults(
        if_unknown="options of ansible-playbook go after --, as in: mpitrain cluster setup -- --tags ssh"
    )


def _ansible_options(arguments: argparse.Namespace) -> list[str]:
    inventories = ("-i", "--inventory", "--inventory-file")
    if wrong := [word for word in arguments.ansible if word.partition("=")[0] in inventories]:
        raise ConfigError(f"{wrong[0]} is after --; put the inventory before it: --inventory FILE")
    return [*(["--ask-become-pass"] if arguments.ask_become_pass else []), *arguments.ansible]
