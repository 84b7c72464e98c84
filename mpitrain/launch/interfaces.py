"""Which network interface each MPI, NCCL and Gloo must use: the one that the route to the other hosts leaves by.

Left to themselves they may choose one that leads nowhere: docker0 has the same address on every machine. Each has
variables of its own for it; what the user has set stays. A pure function of the hosts' routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpitrain.launch.libraries import Vendor

# Which take the name of an interface, and how they want it written.
_BY_NAME = {
    "UCX_NET_DEVICES": "{}",  # MPICH and Open MPI with UCX
    "FI_TCP_IFACE": "{}",  # MPICH and Intel MPI with libfabric
    "NCCL_SOCKET_IFNAME": "={}",  # exactly this one, not all that begin so
    "GLOO_SOCKET_IFNAME": "{}",
}
# Which take networks in CIDR form, so that the names may differ from host to host: Open MPI's, and those of the
# runtime below it: version 4's, and version 5's.
_BY_NETWORK: dict[Vendor, tuple[str, ...]] = {
    "openmpi": ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include", "PRTE_MCA_prte_if_include")
}
# mpiexec's own; for all hosts the same.
_BY_MPIEXEC: dict[Vendor, str] = {"mpich": "HYDRA_IFACE", "impi": "I_MPI_HYDRA_IFACE"}
# RDMA hardware is not reached through a network interface; UCX finds it by itself.
_NOT_WITH_RDMA = ("UCX_NET_DEVICES",)


@dataclass(frozen=True)
class Pinning:
    """The variables to set.

    Attributes:
        common: on all hosts.
        by_host: on one host only, in each rank before MPI starts.
        note: what could not be pinned, or is pinned host by host; empty if there is nothing to say.
    """

    common: Mapping[str, str] = field(default_factory=dict)
    by_host: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    note: str = ""


def pin(
    facts: Mapping[str, Mapping[str, Any]], hosts: Sequence[str], vendor: Vendor, environ: Mapping[str, str]
) -> Pinning:
    """The variables that keep the job on the network between `hosts`.

    Args:
        facts: of every host, as facts.collect gives them; the launching machine may be one more.
        hosts: those with ranks.
        vendor: whose mpiexec it is.
        environ: the user's environment.
    """
    # One host has to reach the launching machine only.
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
        return Pinning(
            common, by_name, f"the hosts reach each other by differing interfaces, set in each rank: {shown}"
        )
    name = names[hosts[0]]
    # Also for this machine, if it has no ranks: its mpiexec tells the others its address.
    variable = _BY_MPIEXEC.get(vendor, "")
    is_everywhere = all(route.get("interface") == name for host in facts for route in facts[host]["routes"].values())
    if variable and variable not in environ and is_everywhere:
        common[variable] = name
    return Pinning(common | by_name[hosts[0]])


def _named(name: str, environ: Mapping[str, str], left_out: Sequence[str]) -> dict[str, str]:
    return {v: form.format(name) for v, form in _BY_NAME.items() if v not in environ and v not in left_out}
