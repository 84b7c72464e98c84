"""Variables that choose networks and ports for MPI, NCCL and Gloo: a file of them, and those that the launcher sets.

By themselves MPI, NCCL and Gloo may choose an interface that leads nowhere: docker0 has the same address on every
machine. Each must use the interface on the route to the other hosts, and has its own variables for that; variables that
the user has set stay. `pin` is a pure function of the hosts' routes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.launch.libraries import Vendor
from mpitrain.reading import read_text, shown, whole

# Variables that take names of interfaces or RDMA devices, and variables that also take networks.
_DEVICES = (
    "UCX_NET_DEVICES",
    "FI_TCP_IFACE",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "HYDRA_IFACE",
    "I_MPI_HYDRA_IFACE",
    "OMPI_MCA_btl_tcp_if_include",
    "OMPI_MCA_oob_tcp_if_include",
    "PRTE_MCA_prte_if_include",
)
# Variables that give jobs their ports: lowest and highest in one variable, or in two.
_RANGES = ("MPIEXEC_PORT_RANGE", "UCX_TCP_PORT_RANGE")
_RANGE_ENDS = (("FI_TCP_PORT_LOW_RANGE", "FI_TCP_PORT_HIGH_RANGE"),)
# Variables of an environment from which jobs and tools choose a network.
_CHOOSERS = re.compile(r"(UCX|FI|OMPI_MCA|PRTE_MCA|I_MPI|HYDRA|NCCL|GLOO|MPIEXEC)_\w+")
_NAME = re.compile(r"[A-Za-z_]\w*")
_OF_LOGIN = re.compile(
    r"(SSH|XDG|DBUS|SLURM|SRUN)_.*|HOME|USER|LOGNAME|SHELL|HOSTNAME|HOST|DISPLAY|PWD|OLDPWD|SHLVL|MAIL|TERM|_"
)


def read_env_file(path: Path) -> dict[str, str]:
    """Read a file of NAME=value lines, quoted for a shell, as check-cluster --write-env writes it.

    Raises:
        ConfigError: the file cannot be read, or a line has another form.
    """
    text = read_text(path, ConfigError, called=f"the file of variables {path}")
    variables = {}
    for number, line in enumerate(text.split("\n"), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            words = [line, ""]
        if not words:
            continue
        name, is_set, value = words[0].partition("=")
        if len(words) > 1 or not is_set or not _NAME.fullmatch(name):
            raise ConfigError(f"{path}:{number}: {shown(line)} is not a variable; a line must be NAME=value")
        variables[name] = value
    return variables


def is_of_login(name: str) -> bool:
    """True for a variable that describes this machine or this login."""
    return _OF_LOGIN.fullmatch(name) is not None


def named_devices(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Return (variable, device) for each interface, RDMA device or network that a variable names and does not exclude.

    For NCCL, a name stands for all devices whose names begin with it; the device "=NAME" is an exact name.
    """
    for variable in _DEVICES:
        value = environ.get(variable, "")
        if value.startswith("^") or value == "all":
            continue
        exactly = "=" if value.startswith("=") else ""
        for part in value.removeprefix("=").split(","):
            name = part.strip()
            # UCX: mlx5_0:1 is the first port of mlx5_0.
            name = re.sub(r":\d+$", "", name) if variable == "UCX_NET_DEVICES" else name
            if name:
                yield variable, exactly + name


def has_device(variable: str, device: str, devices: Mapping[str, list[str]]) -> bool:
    """True if a machine has the device that a variable names.

    Args:
        variable: the variable's name.
        device: the device, as returned by named_devices.
        devices: the machine's devices, with the networks of each.
    """
    if "/" in device:
        return any(device in networks for networks in devices.values())
    if device.startswith("="):
        return device.removeprefix("=") in devices
    if variable == "NCCL_SOCKET_IFNAME":
        return any(name.startswith(device) for name in devices)
    return device in devices


def absent(environ: Mapping[str, str], devices: Mapping[str, list[str]]) -> list[str]:
    """List "VARIABLE names DEVICE" for each device that the machine lacks; empty if its devices are unknown."""
    if not devices:
        return []
    return [
        f"{variable} names {device.removeprefix('=')}"
        for variable, device in named_devices(environ)
        if not has_device(variable, device, devices)
    ]


def only_loopback(environ: Mapping[str, str]) -> list[str]:
    """List "VARIABLE names DEVICE" if variables name only the loopback, which leads to no other host."""
    named: dict[str, list[str]] = {}
    for variable, device in named_devices(environ):
        named.setdefault(variable, []).append(device.removeprefix("="))
    return [
        f"{variable} names {', '.join(devices)}"
        for variable, devices in named.items()
        if all(device == "lo" or device.startswith("127.") for device in devices)
    ]


def network_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables from which jobs and tools choose interfaces and ports."""
    return {name: value for name, value in environ.items() if _CHOOSERS.fullmatch(name)}


def port_ranges(environ: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Return the ports that variables give to jobs: lowest and highest."""
    matches = {name: re.fullmatch(r"([0-9]{1,5})[:-]([0-9]{1,5})", environ.get(name, "").strip()) for name in _RANGES}
    ranges = {name: (int(match[1]), int(match[2])) for name, match in matches.items() if match}
    for low, high in _RANGE_ENDS:
        ends = whole(environ.get(low, ""), 0, 65535), whole(environ.get(high, ""), 0, 65535)
        if ends[0] is not None and ends[1] is not None:
            ranges[low] = (ends[0], ends[1])
    return ranges


# Variables that take the name of an interface, and the form in which they want the name.
_BY_NAME = {
    "UCX_NET_DEVICES": "{}",  # MPICH and Open MPI with UCX
    "FI_TCP_IFACE": "{}",  # MPICH and Intel MPI with libfabric
    "NCCL_SOCKET_IFNAME": "={}",  # exactly this name, not all names that begin with it
    "GLOO_SOCKET_IFNAME": "{}",
}
# Variables that take networks in CIDR form, so that the names may differ between hosts: those of Open MPI, and those of
# the runtimes of version 4 and version 5.
_BY_NETWORK: dict[Vendor | None, tuple[str, ...]] = {
    "openmpi": ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include", "PRTE_MCA_prte_if_include")
}
# mpiexec's own variables, the same for all hosts.
_BY_MPIEXEC: dict[Vendor | None, str] = {"mpich": "HYDRA_IFACE", "impi": "I_MPI_HYDRA_IFACE"}
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
    facts: Mapping[str, Mapping[str, Any]], hosts: Sequence[str], vendor: Vendor | None, environ: Mapping[str, str]
) -> Pinning:
    """Choose the variables that keep the job on the network between `hosts`.

    Args:
        facts: by host, as returned by facts.collect; the launching machine may be one more.
        hosts: those with ranks.
        vendor: whose mpiexec it is; None: there is none.
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
