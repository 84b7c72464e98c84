"""What preflight refuses: pure functions from the facts of the nodes to a list of sentences.

A sentence names the node, and says what was found, what is allowed and what to do.
"""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict

PYTHON = (3, 11)
NETWORK_FILE_SYSTEMS = ("nfs", "fuse.nfs")
PATH = r"(/[A-Za-z0-9_][A-Za-z0-9._-]*)+"
# Ansible puts this before the message of the tool itself.
PREFIX = re.compile(r"^(Task failed|Module failed)[^:]*:\s*")


def problems(reports: dict, addresses: dict, groups: dict, settings: dict, logins: dict | None = None) -> list[str]:
    """A sentence for each problem, so that one run shows all problems.

    `reports`: node name -> result of mpitrain_facts; `addresses`: node name -> ansible_host; `groups`: the
    inventory's; `logins`: node name -> result of a login with a key alone, if one was tried.
    `settings`: user, uid, gid, share, venv, min_free_mib, set_hostname, mpi, python; "tunnel": node name -> address
    that the node has or would have in the tunnel; with a tunnel also "network", and "inside", which equals "tunnel";
    if the inventory has them, "login_users" and "login_ports" by node name.
    """
    # Before ansible-core 2.19, a template always gives text.
    settings = settings | {key: int(settings[key]) for key in ("uid", "gid", "min_free_mib")}
    inside = settings.get("inside") or addresses
    result = inventory_problems(addresses, groups)
    if settings.get("network"):
        result += tunnel_problems(inside, settings["network"])
    head = (groups.get("head") or [""])[0]
    # A mount from before the tunnel came or went is allowed: the role mounts the shared folder again.
    sources = [
        f"[{address}]:{settings['share']}" if ":" in address else f"{address}:{settings['share']}"
        for address in dict.fromkeys(of.get(head, "") for of in (inside, addresses, settings.get("tunnel", {})))
    ]
    facts = {}
    for name, report in sorted(reports.items()):
        if report.get("unreachable") or report.get("failed"):
            result.append(no_answer(name, addresses.get(name), report))
            continue
        facts[name] = one = report["ansible_facts"]["mpitrain"]
        user, port = (settings.get(key, {}).get(name, "") for key in ("login_users", "login_ports"))
        result += key_problems(name, addresses.get(name), (logins or {}).get(name, {}), user, port)
        result += node_problems(name, one, settings)
        result += network_problems(name, addresses, one, inside)
        result += way_problems(name, one, settings["network"]) if settings.get("network") else []
        result += account_problems(name, one, settings)
        result += head_problems(name, one, settings) if name == head else worker_problems(name, one, settings, sources)
    return result + difference_problems(facts)


def inventory_problems(addresses: dict, groups: dict) -> list[str]:
    result = []
    head, workers = groups.get("head", []), groups.get("workers", [])
    if len(head) != 1:
        result.append(
            f"inventory: [head] has {len(head)} hosts {sorted(head)}; allowed: exactly one, which has the shared folder"
        )
    result += [
        f"inventory: {name} is in the groups [head] and [workers]; allowed: one of them. Remove it from the other"
        for name in sorted(set(head) & set(workers))
    ]
    names_of = defaultdict(list)
    for name, address in sorted(addresses.items()):
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?", name):
            result.append(f"inventory: {name!r} is no host name; allowed: letters, digits and hyphens, no dots")
        try:
            number = ipaddress.ip_address(address or "")
        except ValueError:
            result.append(
                f"inventory: {name} has ansible_host={address or '(nothing)'}; allowed: an IP address, because"
                " /etc/hosts is made from it. Write the address by which the other nodes reach it"
            )
            continue
        if number.is_loopback or number.is_unspecified:
            result.append(f"inventory: {name} has ansible_host={address}; allowed: an address that other nodes reach")
        names_of[number].append(name)
    result += [
        f"inventory: {' and '.join(names)} have the same address {number}; allowed: one name for each address."
        " Correct ansible_host, or remove one of them"
        for number, names in names_of.items()
        if len(names) > 1
    ]
    return result


def no_answer(name: str, address: str | None, report: dict) -> str:
    message = PREFIX.sub("", str(report.get("msg") or report.get("module_stderr") or "no message")).strip()
    where = f"{name} ({address})"
    if report.get("unreachable") and re.search(r"(?i)timeout .*privilege escalation prompt", message):
        return (
            f"{where}: no answer to sudo: {message}. Is the node up? Is it overloaded? Try: ssh {address} sudo -n true."
            f" If the node is gone for good, remove {name} from the inventory"
        )
    if report.get("unreachable"):
        return (
            f"{where}: ssh cannot log in: {message}. Is the node up? Is the address right? Try: ssh {address} true."
            f" If the node is gone for good, remove {name} from the inventory"
        )
    if re.search(r"(?i)(incorrect|missing) .*password|a password is required|timeout .*privilege", message):
        return (
            f"{where}: sudo refuses: {message}. Give the right password with --ask-become-pass, or for this node alone"
            " with ansible_become_password from a vault, or allow sudo without a password"
        )
    if re.search(r"(?i)sudoers|not allowed to|may not run", message):
        return f"{where}: the login user may not use sudo: {message}. Add this user to the group sudo (or wheel)"
    if re.search(r"python3?: (not found|No such file)|interpreter", message):
        return f"{where}: there is no /usr/bin/python3: {message}. Install it: apt-get install python3"
    return f"{where}: the module mpitrain_facts failed: {message}"


def key_problems(name: str, address: str | None, login: dict, user: str = "", port: int | str = "") -> list[str]:
    """A node that would lock out its administrator: without passwords, only a key gives access."""
    if not (login.get("unreachable") or login.get("failed")):
        return []
    message = PREFIX.sub("", str(login.get("msg") or "no message")).strip()
    bring = "ssh-copy-id" + (f" -p {port}" if port else "") + (f" {user}@{address}" if user else f" {address}")
    sentence = (
        f"{name} ({address}): mpitrain_sshd_passwords is false, and a login with a key alone fails: {message}. Set-up"
        f" would lock you out. Install your key: {bring}; or set mpitrain_sshd_passwords: true"
    )
    return [sentence]


def node_problems(name: str, facts: dict, settings: dict) -> list[str]:
    result = []
    if not facts["family"]:
        result.append(f"runs {facts['os']}; allowed: Debian, Ubuntu, the RHEL family. Remove it from the inventory")
    if not facts["systemd"]:
        result.append("systemd is not running; allowed: a machine that booted with it")
    if facts["python"] == "silent":
        result.append(f"{settings['python']} does not answer within 8 s. Is the node overloaded? Run the set-up again")
    elif tuple(int(part) for part in facts["python"].split(".") if part) < PYTHON:
        result.append(
            f"{settings['python']} is {facts['python'] or 'not there'}; allowed: Python 3.11 or newer (Debian 12,"
            " Ubuntu 24.04; on RHEL 9 install python3.12). Set mpitrain_python to one of these"
        )
    if facts["hostname"] != name and not settings["set_hostname"]:
        result.append(
            f"the host name is {facts['hostname']}; allowed: the name in the inventory. Change one of the two, or set"
            " mpitrain_set_hostname: true"
        )
    for program, key in (("sshd", "sshd_includes"), ("ssh", "ssh_includes")):
        if not facts[key]:
            path = f"/etc/ssh/{program}_config"
            result.append(
                f"{path} does not include {path}.d/*.conf; needed, because set-up writes files there. Add this line"
                f" at its top: Include {path}.d/*.conf"
            )
    if not facts["host_keys"]:
        result.append("there is no /etc/ssh/ssh_host_*_key.pub; needed: host keys. Run: sudo ssh-keygen -A")
    if not facts["mpiexec_found"]:
        result.append(
            f"there is no mpiexec where mpitrain_mpi={settings['mpi']} says. Install it, or set mpitrain_mpi: wheel"
        )
    return [f"{name}: {problem}" for problem in result]


def tunnel_problems(inside: dict, network: str) -> list[str]:
    """Problems with the tunnel's network, and with the addresses in it that follow from those of the inventory."""
    try:
        whole = ipaddress.ip_network(network)
    except ValueError:
        whole = None
    if whole is None or whole.version != 4 or whole.prefixlen > 28:
        return [f"mpitrain_wireguard_network is {network!r}; allowed: an IPv4 network with room, such as 10.213.0.0/16"]
    names_of = defaultdict(list)
    for name, address in sorted(inside.items()):
        names_of[address].append(name)
    ends = {str(whole.network_address), str(whole.broadcast_address)}
    return [
        f"inventory: {' and '.join(names)} would have the address {address} in the tunnel; allowed: an address of its"
        f" own, neither the first nor the last of {network}. The address has the last {32 - whole.prefixlen} bits of"
        " ansible_host. Change ansible_host or mpitrain_wireguard_network"
        for address, names in names_of.items()
        if len(names) > 1 or address in ends
    ]


def way_problems(name: str, facts: dict, network: str) -> list[str]:
    """Reasons why a node cannot be an end of the tunnel."""
    result = []
    if not facts["tunnel_possible"]:
        result.append(
            f"{name}: the kernel has no WireGuard, and there is no /dev/net/tun for WireGuard in user space; needed:"
            " one of the two. Run: sudo modprobe wireguard || sudo modprobe tun"
        )
    for route in facts["routes"]:
        try:
            overlaps = ipaddress.ip_network(route).overlaps(ipaddress.ip_network(network))
        except (ValueError, TypeError):  # "default", or an IPv6 route
            continue
        if overlaps:
            result.append(
                f"{name}: has a route to {route}; allowed: none into the tunnel's network {network}. Choose another"
                " mpitrain_wireguard_network"
            )
    return result


def network_problems(name: str, addresses: dict, facts: dict, inside: dict | None = None) -> list[str]:
    """Problems with a node's own address, its names of other nodes in /etc/hosts, and its routes to them."""
    inside = inside or addresses
    address = addresses.get(name)
    if not any(same(address, one) for one in facts["addresses"]):
        own = [one for one in facts["addresses"] if not one.startswith(("127.", "::1", "fe80"))]
        seen = f"is on no interface of the node (the node has {', '.join(own) or 'none'})"
        return [f"{name}: the address {address} {seen}; allowed: an address of the node. Correct ansible_host"]
    entries = [(line, line.partition("#")[0].split()) for line in facts["hosts_lines"]]
    result = [
        f"{name}: /etc/hosts has the line {line!r}; allowed: {other} at {inside[other]}. Remove {other} from this line"
        for line, words in entries
        for other in sorted(inside.keys() & set(words[1:]))
        # The role itself removes Debian's line for the node's own name.
        if not same(words[0], inside[other]) and (words[0], other) != ("127.0.1.1", name)
    ]
    result += [
        f"{name}: reaches {other} ({there}) from its address {facts['sources'][there]}; allowed: from {address}. The"
        " other nodes let in no other address. Give all nodes addresses of one network as ansible_host"
        for other, there in sorted(addresses.items())
        if other != name and facts["sources"].get(there) and not same(facts["sources"][there], address)
    ]
    return result


def same(one: str | None, other: str | None) -> bool:
    """Whether two spellings mean the same address."""
    try:
        return ipaddress.ip_address(one or "") == ipaddress.ip_address(other or "")
    except ValueError:
        return False


def account_problems(name: str, facts: dict, settings: dict) -> list[str]:
    user, uid, gid = settings["user"], settings["uid"], settings["gid"]
    result = []
    if facts["user_uid"] not in (None, uid):
        result.append(
            f"user {user} has uid {facts['user_uid']}; allowed: {uid} as on the other nodes. Choose another"
            " mpitrain_user, or change its uid (usermod -u, then chown its files)"
        )
    if facts["uid_user"] not in (None, user):
        result.append(f"uid {uid} belongs to {facts['uid_user']}; it is needed for {user}. Choose another mpitrain_uid")
    if facts["group_gid"] not in (None, gid):
        result.append(
            f"group {user} has gid {facts['group_gid']}; allowed: {gid}. Choose another mpitrain_user, or use groupmod"
        )
    if facts["gid_group"] not in (None, user):
        result.append(
            f"gid {gid} belongs to {facts['gid_group']}; it is needed for {user}. Choose another mpitrain_gid"
        )
    if facts["user_uid"] == uid and facts["user_gid"] != gid:
        result.append(
            f"user {user} has the primary group {facts['user_gid']}; allowed: {gid}. Run usermod -g {gid} {user}"
        )
    return [f"{name}: {problem}" for problem in result]


def head_problems(name: str, facts: dict, settings: dict) -> list[str]:
    place, path = facts["share"], settings["share"]
    result = path_problems(name, place, path)
    if result:
        return result
    if place["type"].startswith((*NETWORK_FILE_SYSTEMS, "autofs")):
        seen = f"a mount of {place['source']} ({place['type']})"
        return [f"{name}: {path} is {seen}; allowed on the head: its own disk. Make another node the head"]
    if not place["empty"] and place["owner"] not in (0, settings["uid"]):
        result.append(
            f"{name}: {path} has files and belongs to uid {place['owner']}; allowed: {settings['uid']}. Choose another"
            " mpitrain_share"
        )
    venv = settings["venv"]
    if not re.fullmatch(rf"{re.escape(path)}{PATH}", venv):
        result.append(
            f"{name}: mpitrain_venv is {venv!r}; allowed: a path inside of mpitrain_share {path}, of letters, digits,"
            " '.', '_' and '-'"
        )
    elif facts["venv_foreign"]:
        result.append(
            f"{name}: {venv} holds files that set-up did not make, and that set-up would delete; allowed: nothing, or"
            " an empty folder. Move the files away, or choose another mpitrain_venv"
        )
    if not facts["runtime"] and place["free_mib"] < settings["min_free_mib"]:
        result.append(
            f"{name}: {path} has {place['free_mib']} MiB free; needed: {settings['min_free_mib']} MiB for Python and"
            " MPI (mpitrain_min_free_mib). Free some space, or choose another mpitrain_share"
        )
    return result


def worker_problems(name: str, facts: dict, settings: dict, sources: list[str]) -> list[str]:
    place, path = facts["share"], settings["share"]
    result = path_problems(name, place, path)
    if place["kind"] == "mount" and place["type"] != "autofs":
        right = place["type"].startswith(NETWORK_FILE_SYSTEMS) and place["source"] in sources
        if not right:
            result.append(
                f"{name}: {path} is a mount of {place['source']} ({place['type']}); allowed: {sources[0]}. Unmount it:"
                f" sudo umount {path}"
            )
    if place["kind"] == "folder" and not place["empty"]:
        result.append(
            f"{name}: {path} holds files on the node's own disk, which the mount would hide; allowed: an empty folder."
            " Move the files away, or choose another mpitrain_share"
        )
    return result


def path_problems(name: str, place: dict, path: str) -> list[str]:
    if not re.fullmatch(PATH, path):
        return [f"{name}: mpitrain_share is {path!r}; allowed: an absolute path of letters, digits, '.', '_' and '-'"]
    if place["kind"] in ("file", "symbolic link"):
        seen = f"{place['kind']} {place['source']}".rstrip()
        return [f"{name}: {path} is a {seen}; allowed: nothing, or a folder. Move it or choose another mpitrain_share"]
    return []


def difference_problems(facts: dict) -> list[str]:
    """Differences between nodes that one virtual environment for all of them does not allow."""
    result = []
    pythons = {name: one["python"] for name, one in facts.items() if one["python"] not in ("", "silent")}
    for property_name, value_of in (
        ("architecture", {name: one["architecture"] for name, one in facts.items()}),
        ("minor version of Python", {name: ".".join(python.split(".")[:2]) for name, python in pythons.items()}),
    ):
        names_of = defaultdict(list)
        for name, value in value_of.items():
            names_of[value].append(name)
        common = max(names_of, key=lambda value: len(names_of[value]), default="")
        result += [
            f"{', '.join(names)}: the {property_name} is {value or 'unknown'}; allowed: {common} as on"
            f" {', '.join(names_of[common])}, because one environment serves all nodes. Remove the node"
            " from the inventory, or make all nodes alike"
            for value, names in names_of.items()
            if value != common
        ]
    return result


def notes(reports: dict) -> list[str]:
    """Warnings, which do not stop a set-up."""
    result = []
    facts = {name: report["ansible_facts"]["mpitrain"] for name, report in sorted(reports.items())}
    for name, one in facts.items():
        if one["nvidia_cards"] and not one["nvidia_driver"]:
            result.append(
                f"{name}: has {one['nvidia_cards']} NVIDIA cards and no loaded driver. Set-up never installs drivers."
                " See https://docs.nvidia.com/datacenter/tesla/driver-installation-guide"
            )
        if one["firewall"] == "own rules":
            result.append(
                f"{name}: nftables drops unknown packets, and neither ufw nor firewalld manages it. Set-up leaves such"
                " rules as they are. Let the nodes' addresses in, or MPI will hang"
            )
    drivers = {one["nvidia_driver"] for one in facts.values() if one["nvidia_driver"]}
    if len(drivers) > 1:
        result.append(f"the nodes have different NVIDIA drivers: {', '.join(sorted(drivers))}")
    return result


class FilterModule:
    """Ansible looks for this class."""

    def filters(self) -> dict:
        return {"mpitrain_problems": problems, "mpitrain_notes": notes}
