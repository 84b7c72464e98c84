"""The variables that ranks get: a file of the user's, the interfaces of the hosts, and settings that are tuned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpitrain.errors import ConfigError
from mpitrain.launch.tuning import SETTINGS, Conditions, glibc_version, settings
from mpitrain.launch.variables import absent, named_devices, pin, read_env_file

DEVICES = {"lo": ["127.0.0.0/8"], "eth0": ["10.0.0.0/24"], "mlx5_0": []}


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mpi.env"
    path.write_text("# made by hand\n\nUCX_NET_DEVICES=eth0\nA='two words'  # a note\nEMPTY=\n")
    assert read_env_file(path) == {"UCX_NET_DEVICES": "eth0", "A": "two words", "EMPTY": ""}
    for line in ("export A=1", "A", "1A=2", "A=one two", "A='open", "=x"):
        path.write_text(f"B=1\n{line}\n")
        with pytest.raises(ConfigError, match=r"mpi\.env:2: .* NAME=value"):
            read_env_file(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is not text in UTF-8"):
        read_env_file(path)
    with pytest.raises(ConfigError, match=r"nothing\.env cannot be read: No such file"):
        read_env_file(tmp_path / "nothing.env")


def test_named_devices() -> None:
    environ = {
        "UCX_NET_DEVICES": "mlx5_0:1,eth0",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "GLOO_SOCKET_IFNAME": "^docker0",  # an exclusion names no interface
        "PRTE_MCA_prte_if_include": "10.0.0.0/24",
        "FI_TCP_IFACE": "",
        "PATH": "eth9",
    }
    assert list(named_devices(environ)) == [
        ("UCX_NET_DEVICES", "mlx5_0"),
        ("UCX_NET_DEVICES", "eth0"),
        ("NCCL_SOCKET_IFNAME", "=eth0"),
        ("PRTE_MCA_prte_if_include", "10.0.0.0/24"),
    ]
    assert list(named_devices({"UCX_NET_DEVICES": "all"})) == []
    assert absent(environ, DEVICES) == []
    assert absent({"NCCL_SOCKET_IFNAME": "eth"}, DEVICES) == []  # the beginning of a name will do for NCCL
    assert absent({"FI_TCP_IFACE": "eth1"}, {}) == []  # this machine does not say what it has


@pytest.mark.parametrize(
    ("variable", "value", "missing"),
    [
        ("FI_TCP_IFACE", "eth1", "eth1"),
        ("UCX_NET_DEVICES", "eth0,mlx5_1:1", "mlx5_1"),
        ("OMPI_MCA_btl_tcp_if_include", "10.1.0.0/16", "10.1.0.0/16"),
        ("NCCL_SOCKET_IFNAME", "ib", "ib"),
        ("NCCL_SOCKET_IFNAME", "=eth", "eth"),
    ],
)
def test_devices_that_are_not_there(variable: str, value: str, missing: str) -> None:
    assert absent({variable: value}, DEVICES) == [f"{variable} names {missing}"]


HOSTS = ["a", "b", "c"]
BY_NAME = {
    "UCX_NET_DEVICES": "eno1",
    "FI_TCP_IFACE": "eno1",
    "NCCL_SOCKET_IFNAME": "=eno1",
    "GLOO_SOCKET_IFNAME": "eno1",
}
BY_NETWORK = ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include", "PRTE_MCA_prte_if_include")


def facts(**names: str) -> dict[str, dict[str, Any]]:
    """Of hosts that reach all others by an interface of this name."""
    way = {host: {"interface": name, "network": "10.0.0.0/24"} for host, name in names.items()}
    return {host: {"rdma": False, "routes": {peer: way[host] for peer in names if peer != host}} for host in names}


def test_one_interface_everywhere() -> None:
    found = facts(a="eno1", b="eno1", c="eno1")
    pinning = pin(found, HOSTS, "mpich", {})
    assert pinning.common == {**BY_NAME, "HYDRA_IFACE": "eno1"}
    assert (pinning.by_host, pinning.note) == ({}, "")
    assert pin(found, HOSTS, "impi", {}).common == {**BY_NAME, "I_MPI_HYDRA_IFACE": "eno1"}
    assert pin(found, HOSTS, "openmpi", {}).common == {**BY_NAME, **dict.fromkeys(BY_NETWORK, "10.0.0.0/24")}
    # What the user has set stays.
    environ = {"UCX_NET_DEVICES": "mlx5_0:1", "PRTE_MCA_prte_if_include": "eth7", "HYDRA_IFACE": "eth7"}
    for vendor in ("mpich", "openmpi"):
        assert not pin(found, HOSTS, vendor, environ).common.keys() & environ.keys()
    # RDMA hardware is left to UCX.
    found["b"]["rdma"] = True
    assert pin(found, HOSTS, "mpich", {}).common.keys() == {*BY_NAME, "HYDRA_IFACE"} - {"UCX_NET_DEVICES"}


def test_interfaces_that_differ() -> None:
    """They are set in each rank. mpiexec must not look on one machine for the interfaces of the others."""
    pinning = pin(facts(a="eno1", b="enp3s0", c="eno1"), HOSTS, "openmpi", {"FI_TCP_IFACE": "x"})
    assert pinning.common == dict.fromkeys(BY_NETWORK, "10.0.0.0/24")
    names = {"UCX_NET_DEVICES": "enp3s0", "NCCL_SOCKET_IFNAME": "=enp3s0", "GLOO_SOCKET_IFNAME": "enp3s0"}
    assert pinning.by_host["b"] == names
    assert pinning.note.endswith("eno1 on a, enp3s0 on b, eno1 on c")
    assert "HYDRA_IFACE" not in pin(facts(a="eno1", b="enp3s0"), ["a", "b"], "mpich", {}).common
    # The launching machine is another one, which has another interface; one host needs the way to it only.
    assert pin(facts(a="eno1", b="eno1", desk="wlan0"), ["a", "b"], "mpich", {}).common == BY_NAME
    assert pin(facts(a="eno1", b="eno1"), ["b"], "mpich", {}).common == {**BY_NAME, "HYDRA_IFACE": "eno1"}
    assert pin(facts(a="eth0", b="eno1"), ["b"], "mpich", {}).common == BY_NAME


def test_what_cannot_be_pinned_is_said() -> None:
    found = facts(a="eno1", b="eno1", c="eno1")
    found["b"]["routes"]["c"] = {"interface": "wg0", "network": "10.9.0.0/24"}
    pinning = pin(found, HOSTS, "mpich", {})
    assert (pinning.common, pinning.note) == ({}, "b reaches the others by eno1 and wg0; none is pinned")
    del found["b"]["routes"]["c"]
    assert pin(found, HOSTS, "mpich", {}).note.startswith("b does not say by which interface")


ONE_HOST = Conditions("mpich", num_hosts=1, has_rdma=False, is_oversubscribed=False, glibc=(2, 36))
TCP, RDMA, CROWD = {"num_hosts": 2}, {"num_hosts": 2, "has_rdma": True}, {"is_oversubscribed": True}
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592"}
WITHOUT_OFI, YIELDS = {"OMPI_MCA_btl": "^ofi"}, {"OMPI_MCA_mpi_yield_when_idle": "1"}


@pytest.mark.parametrize(
    ("conditions", "tuned"),
    [
        *(({"vendor": vendor}, MALLOC) for vendor in ("mpich", "impi")),
        ({"vendor": "openmpi"}, {**WITHOUT_OFI, **MALLOC}),
        (TCP, {"UCX_RNDV_THRESH": "inf", **MALLOC}),
        ({**TCP, "vendor": "openmpi"}, {"OMPI_MCA_btl_tcp_flags": "send", **WITHOUT_OFI, **YIELDS, **MALLOC}),
        ({**TCP, "vendor": "impi"}, MALLOC),
        *(({**RDMA, "vendor": vendor}, MALLOC) for vendor in ("mpich", "impi", "openmpi")),
        ({**CROWD, "vendor": "openmpi"}, {**YIELDS, **WITHOUT_OFI, **MALLOC}),
        (CROWD, MALLOC),
        # Some C libraries refuse such thresholds.
        ({"glibc": (2, 31)}, {}),
        ({"glibc": (0, 0)}, {}),
        ({"glibc": (3, 0)}, MALLOC),
    ],
)
def test_settings(conditions: dict[str, Any], tuned: dict[str, str]) -> None:
    assert settings(replace(ONE_HOST, **conditions), {}) == tuned


def test_settings_that_the_user_has_made_stay() -> None:
    environ = {"UCX_RNDV_THRESH": "8k", "MALLOC_TRIM_THRESHOLD_": ""}
    assert settings(replace(ONE_HOST, **TCP), environ) == {"MALLOC_MMAP_THRESHOLD_": "4294967296"}


def test_each_setting_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs/reference/configuration.md").read_text()
    for one in SETTINGS:
        assert f"`{one.name}={one.value}`" in text
        assert one.why
        assert one.source.startswith("https://")


@pytest.mark.parametrize(
    ("text", "version"),
    [("glibc 2.36", (2, 36)), ("glibc 2.5.1", (2, 5)), ("musl 1.2", (0, 0)), ("glibc new", (0, 0)), (None, (0, 0))],
)
def test_version_of_the_c_library(text: str | None, version: tuple[int, int]) -> None:
    assert glibc_version(text) == version
