"""On which hosts a job runs: those of --hosts, --hostfile or -i, else of the batch job, else of this machine's cluster,
else this machine.

A file of hosts (--hostfile) is that of another launcher, as `mpiexec` and batch systems write it:

    node1 slots=4     # Open MPI's
    node2:2           # MPICH's and Intel MPI's
    node3             # one rank; a host in several lines, as in PBS's file, has as many
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from mpitrain.errors import ConfigError
from mpitrain.launch.batch import Allocation, find_allocation
from mpitrain.launch.foreign_files import refuse_foreign
from mpitrain.launch.hostfile import Inventory, find_inventory, read_inventory
from mpitrain.launch.placement import HOST_NAME, Place, Placement, fill, names_devices, parse_hosts, place
from mpitrain.reading import read_text, shown

_LINE = re.compile(
    rf"(?P<host>{HOST_NAME})(:(?P<number>0*[1-9][0-9]{{0,5}})|\s+slots\s*=\s*(?P<slots>0*[1-9][0-9]{{0,5}}))?"
)


def read_hostfile(path: Path) -> str:
    """Return the hosts of the file at `path` in the form of --hosts: `node1:4,node2:2,node3:1`.

    If every host has one line and no number, they come without numbers: `node1,node2`.

    Raises:
        ConfigError: the file cannot be read, names no host, or has a line of another form.
    """
    slots: dict[str, int] = {}
    has_numbers = False
    for number, line in enumerate(read_text(path, ConfigError, called=f"--hostfile {path}").split("\n"), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        parts = _LINE.fullmatch(text)
        if parts is None:
            hint = "; an Ansible inventory is given by -i" if text.startswith("[") else ", with N above 0"
            raise ConfigError(
                f"--hostfile {path}, line {number}: {shown(text)} is none of HOST, HOST:N and HOST slots=N{hint}"
            )
        given = parts["number"] or parts["slots"]
        has_numbers |= given is not None or parts["host"] in slots
        slots[parts["host"]] = slots.get(parts["host"], 0) + int(given or 1)
    if not slots:
        raise ConfigError(f"--hostfile {path} names no host; allowed are lines HOST, HOST:N and HOST slots=N")
    return ",".join(f"{host}:{count}" if has_numbers else host for host, count in slots.items())


# Returns the hosts that the inventory of a job has now; None: the job has none. Raises ConfigError.
Listed = Callable[[], Sequence[str] | None]

_LOCAL_NAMES = ("localhost", "127.0.0.1")
_LOCALLY = ", or for this machine alone: --hosts localhost"


def place_ranks(
    hosts: str | None, inventory: Path | None, num_ranks: int | None, ranks_per_host: int | None
) -> Placement:
    """Decide where the ranks run, from the options of `mpitrain run`.

    Args:
        hosts: `--hosts`, with or without devices. Without any number, each has one rank.
        inventory: `-i`; None: the hosts of this batch job, else ./cluster/hosts, else /etc/mpitrain/hosts.
        num_ranks: `-n`.
        ranks_per_host: `--ppn`.

    Raises:
        ConfigError: options contradict each other, a name is unknown, or an inventory cannot be read.
    """
    if hosts is None and inventory is None and (allocation := find_allocation(os.environ)):
        return _given(allocation, num_ranks, ranks_per_host)
    path = inventory or (find_inventory(_LOCALLY) if hosts is None or not _is_local(hosts) else None)
    cluster = read_inventory(path) if path else None
    note = ""
    devices: dict[str, tuple[str, ...]] = {"localhost": ()}  # the devices of each host of the job
    if hosts is not None:
        devices = parse_hosts(hosts)
    elif cluster is not None and (inventory is not None or _own_name(cluster) is not None):
        # Take no more hosts than there are ranks.
        most = None if num_ranks is None else -(-num_ranks // (ranks_per_host or 1))
        devices = {host.name: () for host in cluster.hosts[:most]}
    elif cluster is not None:
        note = (
            f"this machine is not a node of {cluster.path}, so the job runs here alone; "
            f"start it on {cluster.head.name} to use the cluster, or name --hosts"
        )
    if not devices.keys().isdisjoint(_LOCAL_NAMES):
        if len(devices) > 1:
            raise ConfigError(f"{hosts}: localhost is another machine on every host; write its name")
        own, (local_devices,) = socket.gethostname(), devices.values()
        return Placement(place({own: local_devices}, num_ranks, ranks_per_host), own=own, note=note)
    if hosts is not None and num_ranks is None and ranks_per_host is None and not any(devices.values()):
        ranks_per_host = 1
        note = f"one rank on each of the hosts {hosts}; --ppn N makes N"
    places = place(devices, num_ranks, ranks_per_host)
    addresses, own = _addresses([one.host for one in places], cluster)
    return Placement(places, {} if list(addresses) == [own] else addresses, own, note)


def _given(allocation: Allocation, num_ranks: int | None, ranks_per_host: int | None) -> Placement:
    """Place the ranks on the hosts that a batch system has given."""
    slots = allocation.slots
    asked, option, hosts = num_ranks or 0, "-n", ",".join(slots)
    if num_ranks is None and ranks_per_host is not None:
        asked, option = ranks_per_host * len(slots), "--ppn"
    if asked > allocation.most_ranks:
        value = f"{ranks_per_host} on each of {hosts}" if option == "--ppn" else str(asked)
        raise ConfigError(
            f"{option} {value} is more than {allocation.name} has been given: {allocation.most_ranks} ranks on "
            f"{', '.join(slots)}. Ask for more with `{allocation.how_more}`, or leave out {option}. Hosts that are "
            f"named have no such limit: --hosts {hosts}, or --hosts localhost for this machine alone"
        )
    if ranks_per_host is None and asked <= sum(slots.values()):
        places = fill(slots, asked or sum(slots.values()))
    else:
        most = None if num_ranks is None else -(-num_ranks // (ranks_per_host or 1))
        places = place(dict.fromkeys(list(slots)[:most], ()), num_ranks, ranks_per_host)
    addresses, own = _addresses([one.host for one in places], None)
    return Placement(places, {} if list(addresses) == [own] else addresses, own)


def placed_again(
    places: Sequence[tuple[str, int, Sequence[str]]], inventory: Path | None, *, is_here: bool
) -> Placement:
    """Return the placement of a job that has run before, for a launcher on this machine.

    A host whose name is unknown here is left out, and the note of the placement names it.

    Args:
        places: the hosts, each with its number of ranks and its devices.
        inventory: as for place_ranks.
        is_here: the job runs on this machine alone.

    Raises:
        ConfigError: no name is known.
    """
    if is_here:
        ((host, num_ranks, devices),) = places
        return Placement((Place(host, 0, num_ranks, tuple(devices)),), own=host)
    path = inventory or find_inventory(_LOCALLY)
    cluster = read_inventory(path) if path else None
    known: dict[str, str] = {}
    unknown: dict[str, str] = {}
    for host, _, _ in places:
        try:
            known[host] = _address(host, cluster)
        except ConfigError as error:
            unknown[host] = str(error)
    if not known:
        raise ConfigError("; ".join(unknown.values()))
    placed: list[Place] = []
    for host, num_ranks, devices in places:
        if host in known:
            placed.append(Place(host, sum(before.num_ranks for before in placed), num_ranks, tuple(devices)))
    addresses, own = _addresses(list(known), cluster, known)
    note = f"the job continues without {', '.join(unknown)}: {'; '.join(unknown.values())}" if unknown else ""
    return Placement(tuple(placed), {} if list(addresses) == [own] else addresses, own, note)


def widened(placement: Placement, hosts: str, inventory: Path | None) -> Placement:
    """Return the placement of a running job with more hosts, the new ones last.

    A host without devices gets as many ranks as the largest number on a host of the job.

    Args:
        placement: of the job.
        hosts: the new hosts, in the form of --hosts.
        inventory: as for place_ranks.

    Raises:
        ConfigError: a name is unknown, or a host of the job; or only some hosts would have devices.
    """
    new = parse_hosts(hosts)
    present = [host for host in new if host in placement.hosts]
    if present:
        raise ConfigError(f"{present[0]} is a host of it already; its hosts are {', '.join(placement.hosts)}")
    if names_devices(new) != bool(placement.devices):
        example = f"{next(iter(new))}/cuda:0" if placement.devices else next(iter(new))
        raise ConfigError(
            f"--hosts {hosts} names {'devices' if names_devices(new) else 'no devices'}, and the hosts of the job have "
            f"{'some' if placement.devices else 'none'}; write --hosts {example}"
        )
    path = inventory or find_inventory(_LOCALLY)
    cluster = read_inventory(path) if path else None
    # The name of a host that is set aside may be unknown by now.
    addresses, own = _addresses([*placement.hosts, *new], cluster, placement.addresses)
    if own != placement.own:
        raise ConfigError(f"the job knows this machine as {placement.own}, and its name among the hosts is {own}")
    each = None if any(new.values()) else max(place.num_ranks for place in placement.places)
    added = [replace(one, first_rank=placement.num_ranks + one.first_rank) for one in place(new, None, each)]
    return Placement((*placement.places, *added), addresses, own)


def listed_hosts(hosts: str | None, inventory: Path | None) -> Listed:
    """Return what tells the hosts that a job may use at any time. The arguments are those of place_ranks.

    The inventory is read again only when it has changed.

    Raises:
        ConfigError: the job runs on this machine alone, or an inventory cannot be read.
    """
    is_given = hosts is None and inventory is None and find_allocation(os.environ) is not None
    if is_given or (hosts is not None and not _is_local(hosts)):
        return lambda: None
    path = inventory or (find_inventory() if hosts is None else None)
    cluster = read_inventory(path) if path else None
    if cluster is None or hosts is not None or (inventory is None and _own_name(cluster) is None):
        raise ConfigError(
            "--nnodes lets hosts come and go, and this job runs on this machine alone; name hosts with --hosts A,B, "
            "or an inventory with -i PATH, or start the job on a node of a cluster"
        )
    seen: tuple[object, ...] = ()
    names: Sequence[str] = ()

    def listed() -> Sequence[str]:
        nonlocal seen, names
        try:
            status = cluster.path.stat()
        except OSError as error:
            raise ConfigError(f"{cluster.path}: {error.strerror}") from None
        if seen != (now := (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)):
            if inventory is None:
                refuse_foreign(cluster.path)
            names = [host.name for host in read_inventory(cluster.path).hosts]
            seen = now
        return names

    return listed


def _addresses(
    hosts: list[str], cluster: Inventory | None, before: Mapping[str, str] = MappingProxyType({})
) -> tuple[dict[str, str], str]:
    """Return the addresses of the hosts and of this machine, by name, and the name of this machine among them.

    `before` has the addresses that were found for some of them; those of the inventory come first.
    """
    known = {**before, **_listed(cluster)}
    addresses = {host: known.get(host) or _resolved(host, cluster) for host in hosts}
    _refuse_same(addresses)
    own = next((name for name, address in addresses.items() if _is_own(address)), None)
    if own is None:  # this machine only starts the job
        own = (_own_name(cluster) if cluster else None) or socket.gethostname()
        if own in addresses:  # another machine has the same name
            own += " (this machine)"
        addresses[own] = known.get(own, "127.0.0.1")
    others = [address for name, address in addresses.items() if name != own]
    if others and addresses[own].startswith("127."):  # Debian's /etc/hosts gives the machine's own name this address
        addresses[own] = _source_address(others[0])
    return addresses, own


def _address(host: str, cluster: Inventory | None) -> str:
    return _listed(cluster).get(host) or _resolved(host, cluster)


def _listed(cluster: Inventory | None) -> dict[str, str]:
    return {host.name: host.address for host in cluster.hosts} if cluster else {}


def _is_local(hosts: str) -> bool:
    return re.split("[/:]", hosts)[0] in _LOCAL_NAMES


def _own_name(cluster: Inventory) -> str | None:
    """Return the name of this machine in the cluster; None if it is not a node."""
    return next((host.name for host in cluster.hosts if _is_own(host.address)), None)


def _is_own(address: str) -> bool:
    """True if the address belongs to this machine: packets to it also come from it."""
    if ipaddress.ip_address(address).is_loopback:
        return True
    try:
        return _source_address(address) == address
    except ConfigError:
        return False


def _source_address(peer: str) -> str:
    """Return this machine's address on the way to `peer`, without sending anything."""
    with socket.socket(socket.AF_INET6 if ":" in peer else socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect((peer, 22))
        except OSError as error:
            raise ConfigError(f"there is no route to {peer}: {error.strerror}; see `ip route get {peer}`") from None
        return str(way.getsockname()[0])


def _resolved(name: str, cluster: Inventory | None) -> str:
    try:
        resolved = socket.getaddrinfo(name, 22, type=socket.SOCK_STREAM)
    except OSError:
        hint = f"; {cluster.path} has {', '.join(host.name for host in cluster.hosts)}" if cluster else ""
        raise ConfigError(
            f"there is no host {name!r}{hint}; `getent hosts {name}` shows what a name stands for"
        ) from None
    return str(resolved[0][4][0])


def _refuse_same(addresses: dict[str, str]) -> None:
    names: dict[str, str] = {}
    for name, address in addresses.items():
        if address in names:
            raise ConfigError(f"{names[address]} and {name} are one host, {address}; for two ranks there, use --ppn 2")
        names[address] = name
