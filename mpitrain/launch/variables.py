"""Variables that choose networks and ports for MPI, NCCL and Gloo: a file of variables, and the devices they name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from mpitrain.errors import ConfigError

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
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"the file of variables {path} cannot be read: {reason}") from None
    variables = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            words = [line, ""]
        if not words:
            continue
        name, is_set, value = words[0].partition("=")
        if len(words) > 1 or not is_set or not _NAME.fullmatch(name):
            raise ConfigError(f"{path}:{number}: {line!r} is not a variable; a line must be NAME=value")
        variables[name] = value
    return variables


def is_of_login(name: str) -> bool:
    """True for a variable that says what this machine or this login is."""
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
    """True if a machine has what a variable names.

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
    matches = {name: re.fullmatch(r"(\d+)[:-](\d+)", environ.get(name, "").strip()) for name in _RANGES}
    ranges = {name: (int(match[1]), int(match[2])) for name, match in matches.items() if match}
    for low, high in _RANGE_ENDS:
        if environ.get(low, "").isdecimal() and environ.get(high, "").isdecimal():
            ranges[low] = (int(environ[low]), int(environ[high]))
    return ranges
