"""A file of variables, and the devices that variables name."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.errors import ConfigError
from mpitrain.launch.variables import absent, named_devices, read_env_file

DEVICES = {"lo": ["127.0.0.0/8"], "eth0": ["10.0.0.0/24"], "mlx5_0": []}


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mpi.env"
    path.write_text("# made by hand\n\nUCX_NET_DEVICES=eth0\nA='two words'  # a note\nEMPTY=\n")
    assert read_env_file(path) == {"UCX_NET_DEVICES": "eth0", "A": "two words", "EMPTY": ""}


@pytest.mark.parametrize("line", ["export A=1", "A", "1A=2", "A=one two", "A='open", "=x"])
def test_what_is_no_variable_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "mpi.env"
    path.write_text(f"B=1\n{line}\n")
    with pytest.raises(ConfigError, match=r"mpi\.env:2: .* NAME=value"):
        read_env_file(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.env cannot be read: No such file"):
        read_env_file(tmp_path / "nothing.env")
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is not text in UTF-8"):
        read_env_file(path)


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


def test_the_beginning_of_a_name_will_do_for_nccl() -> None:
    assert absent({"NCCL_SOCKET_IFNAME": "eth"}, DEVICES) == []


def test_a_machine_that_does_not_say_what_it_has_is_not_judged() -> None:
    assert absent({"FI_TCP_IFACE": "eth1"}, {}) == []
