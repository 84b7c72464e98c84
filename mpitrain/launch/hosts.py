"""On which hosts a job runs: those of --hosts, else the cluster's that this machine is a node of, else this machine."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path

from mpitrain.errors import ConfigError
from mpitrain.launch.devices import Wanted, parse_hosts
from mpitrain.launch.hostfile import Inventory, find_inventory, read_inventory
from mpitrain.launch.placement import Place, place

_LOCAL_NAMES = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Layout:
    """Where the ranks go.

    Attributes:
        places: the hosts with their ranks; one if it is this machine alone.
        addresses: of the hosts, by name, and of this machine; none if it is this machine alone.
        own: the name of this machine among them.
        note: what the user should know about the choice; empty if there is nothing to say.
    """

    places: tuple[Place, ...]
    addresses: dict[str, str]
    own: str
    note: str = ""


def lay_out(hosts: str | None, inventory: Path | None, num_ranks: int | None, ranks_per_host: int | None) -> Layout:
    """The layout that the options of `mpitrain run` ask for.

    Args:
        hosts: `--hosts`, with or without devices.
        inventory: `-i`; None: ./cluster/hosts, else /etc/mpitrain/hosts.
        num_ranks: `-n`.
        ranks_per_host: `--ppn`.

    Raises:
        ConfigError: options that contradict each other, a name that is no host's, an inventory that cannot be read.
    """
    path = inventory or (find_inventory() if hosts is None or not _is_local(hosts) else None)
    cluster = read_inventory(path) if path else None
    note = ""
    if hosts is not None:
        wanted = parse_hosts(hosts)
        if any(host.host in _LOCAL_NAMES for host in wanted):
            if len(wanted) > 1:
                raise ConfigError(f"--hosts {hosts}: localhost is another machine on every host; write its name")
            return _alone(place(wanted, num_ranks, ranks_per_host))
    elif cluster is not None and (inventory is not None or _own_name(cluster) is not None):
        wanted = tuple(Wanted(host.name) for host in cluster.hosts)
        if num_ranks is not None and ranks_per_host is None:
            wanted = wanted[:num_ranks]
        elif num_ranks is not None and ranks_per_host is not None:
            wanted = wanted[: -(-num_ranks // ranks_per_host)]
    else:
        if cluster is not None:
            note = (
                f"this machine is no node of {cluster.path}, so the job runs here alone; "
                f"start it on {cluster.head.name} to use the cluster, or name --hosts"
            )
        return _alone(place([Wanted("localhost")], num_ranks, ranks_per_host), note)
    places = place(wanted, num_ranks, ranks_per_host)
    known = {host.name: host.address for host in cluster.hosts} if cluster else {}
    addresses = {one.host: known.get(one.host) or _resolved(one.host, cluster) for one in places}
    _refuse_same(addresses)
    own = next((name for name, address in addresses.items() if _is_own(address)), None)
    if len(places) == 1 and own is not None:
        return _alone(places)
    if own is None:  # it only starts the job
        own = (_own_name(cluster) if cluster else None) or socket.gethostname()
        if own in addresses:  # another machine of the same name
            own += " (this machine)"
        addresses[own] = known.get(own, "127.0.0.1")
    if addresses[own].startswith("127."):  # Debian's /etc/hosts gives a machine's own name such an address
        addresses[own] = _source_address(next(address for name, address in addresses.items() if name != own))
    return Layout(places, addresses, own)


def without(layout: Layout, hosts: Set[str]) -> Layout:
    """The layout without some hosts: the others keep their numbers of ranks, which are counted anew."""
    places: list[Place] = []
    for one in layout.places:
        if one.host not in hosts:
            places.append(replace(one, first_rank=sum(before.num_ranks for before in places)))
    if [one.host for one in places] == [layout.own]:
        return _alone(tuple(places))
    # This machine starts the job, with or without ranks of its own.
    addresses = {host: at for host, at in layout.addresses.items() if host not in hosts or host == layout.own}
    return replace(layout, places=tuple(places), addresses=addresses)


def _alone(places: tuple[Place, ...], note: str = "") -> Layout:
    return Layout(places, {}, places[0].host, note)


def _is_local(hosts: str) -> bool:
    return hosts.split("/")[0] in _LOCAL_NAMES


def _own_name(cluster: Inventory) -> str | None:
    """The name of this machine in the cluster; None if it is no node."""
    return next((host.name for host in cluster.hosts if _is_own(host.address)), None)


def _is_own(address: str) -> bool:
    """True if the address is one of this machine's: what is sent there comes from there."""
    if ipaddress.ip_address(address).is_loopback:
        return True
    try:
        return _source_address(address) == address
    except ConfigError:
        return False


def _source_address(peer: str) -> str:
    """This machine's address on the way to `peer`; nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in peer else socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect((peer, 22))
        except OSError as error:
            raise ConfigError(f"there is no way from here to {peer}: {error.strerror}; `ip route get {peer}`") from None
        return str(way.getsockname()[0])


def _resolved(name: str, cluster: Inventory | None) -> str:
    try:
        found = socket.getaddrinfo(name, 22, type=socket.SOCK_STREAM)
    except OSError:
        hint = f"; {cluster.path} has {', '.join(host.name for host in cluster.hosts)}" if cluster else ""
        raise ConfigError(
            f"there is no host {name!r}{hint}; `getent hosts {name}` shows what a name stands for"
        ) from None
    return str(found[0][4][0])


def _refuse_same(addresses: dict[str, str]) -> None:
    names: dict[str, str] = {}
    for name, address in addresses.items():
        if address in names:
            raise ConfigError(f"{names[address]} and {name} are one host, {address}; for two ranks there say --ppn 2")
        names[address] = name
