"""Which network interface each MPI, NCCL and Gloo must use: the one on the route to the other hosts.

By themselves they may choose an interface that leads nowhere: docker0 has the same address on every machine. Each has
its own variables for the interface; variables that the user has set stay. A pure function of the hosts' routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpitrain.launch.libraries import Vendor

# Variables that take the name of an interface, and the form in which they want the name.
_BY_NAME = {
    "UCX_NET_DEVICES": "{}",  # MPICH and Open MPI with UCX
    "FI_TCP_IFACE": "{}",  # MPICH and Intel MPI with libfabric
    "NCCL_SOCKET_IFNAME": "={}",  # exactly this name, not all names that begin with it
    "GLOO_SOCKET_IFNAME": "{}",
}
# Variables that take networks in CIDR form, so that the names may differ between hosts: those of Open MPI, and those of
# the runtimes of version 4 and version 5.
_BY_NETWORK: dict[Vendor, tuple[str, ...]] = {
    "openmpi": ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include", "PRTE_MCA_prte_if_include")
}
# mpiexec's own variables, the same for all hosts.
_BY_MPIEXEC: dict[Vendor, str] = {"mpich": "HYDRA_IFACE", "impi": "I_MPI_HYDRA_IFACE"}
# No network interface leads to RDMA hardware; UCX finds RDMA devices by itself.
_NOT_WITH_RDMA = ("UCX_NET_DEVICES",)


@dataclass(frozen=True)
class Pinning:
    """The variables to set.

    Attributes:
        common: variables for all hosts.
        by_host: variables for one host only, set in each rank before MPI starts.
        note: a remark for the user on what was pinned per host, or could not be pinned; else empty.
    """

    common: Mapping[str, str] = field(default_factory=dict)
    by_host: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    note: str = ""


def pin(
    facts: Mapping[str, Mapping[str, Any]], hosts: Sequence[str], vendor: Vendor, environ: Mapping[str, str]
) -> Pinning:
    """Choose the variables that keep the job on the network between `hosts`.

    Args:
        facts: by host, as returned by facts.collect; the launching machine may be one more.
        hosts: those with ranks.
        vendor: whose mpiexec it is.
        environ: the user's environment.
    """
    # A single host has to reach only the launching machine.
    peers = hosts if len(hosts) > 1 else list(facts)
    routes: dict[str, list[dict[str, str]]] = {
        host: [facts[host]["routes"].get(peer, {}) for peer in peers if peer != host] for host in hosts
    }
    names: dict[str, str] = {}
    for host, ways in routes.items():
        used = {way.get("interface", "") for way in ways}
        if "" in used:
            return Pinning(note=f"{host} does not say by which interface it reaches the others; none is pinned")
        if len(used) > 1:
            return Pinning(note=f"{host} reaches the others by {' and '.join(sorted(used))}; none is pinned")
        names[host] = used.pop()
    networks = {way["network"] for ways in routes.values() for way in ways if "network" in way}
    no_names = [v for v in _NOT_WITH_RDMA if any(facts[host]["rdma"] for host in hosts)]
    by_name = {host: _named(name, environ, no_names) for host, name in names.items()}
    common = {
        name: ",".join(sorted(networks)) for name in _BY_NETWORK.get(vendor, ()) if networks and name not in environ
    }
    if len(set(names.values())) > 1:
        shown = ", ".join(f"{name} on {host}" for host, name in names.items())
        return Pinning(common, by_name, f"the interfaces between the hosts differ, so each rank sets its own: {shown}")
    name = names[hosts[0]]
    # Also for this machine, even without ranks: its mpiexec tells the others its address.
    variable = _BY_MPIEXEC.get(vendor, "")
    is_everywhere = all(route.get("interface") == name for host in facts for route in facts[host]["routes"].values())
    if variable and variable not in environ and is_everywhere:
        common[variable] = name
    return Pinning(common | by_name[hosts[0]])


def _named(name: str, environ: Mapping[str, str], left_out: Sequence[str]) -> dict[str, str]:
    return {v: form.format(name) for v, form in _BY_NAME.items() if v not in environ and v not in left_out}
