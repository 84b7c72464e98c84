"""--write-env: the variables that `mpitrain run` would set, in a file that it and a shell can read."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from check.made_up_network import healthy
from mpitrain.check.run import write_variables
from mpitrain.errors import ClusterError
from mpitrain.launch.variables import read_env_file


def test_the_file_has_the_interface_for_every_library(tmp_path: Path) -> None:
    path = tmp_path / "mpi.env"
    write_variables(path, healthy())
    found = read_env_file(path)
    assert found["UCX_NET_DEVICES"] == found["FI_TCP_IFACE"] == found["GLOO_SOCKET_IFNAME"] == "eth0"
    assert found["HYDRA_IFACE"] == found["I_MPI_HYDRA_IFACE"] == "eth0"
    assert found["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert found["OMPI_MCA_btl_tcp_if_include"] == found["PRTE_MCA_prte_if_include"] == "10.0.0.0/24"
    said = subprocess.run(
        ["sh", "-ec", f". {path}; echo $NCCL_SOCKET_IFNAME"], capture_output=True, text=True, check=True
    )
    assert said.stdout == "=eth0\n"


def test_rdma_hardware_is_not_hidden(tmp_path: Path) -> None:
    looked = healthy()
    looked.nodes["node2"]["network"]["rdma"] = ["mlx5_0"]
    write_variables(tmp_path / "mpi.env", looked)
    assert "UCX_NET_DEVICES" not in read_env_file(tmp_path / "mpi.env")


def test_differing_names_leave_the_networks(tmp_path: Path) -> None:
    looked = healthy()
    for route in looked.nodes["node2"]["network"]["routes"].values():
        route["interface"] = "eno1"
    write_variables(tmp_path / "mpi.env", looked)
    found = read_env_file(tmp_path / "mpi.env")
    assert set(found.values()) == {"10.0.0.0/24"}


def test_what_cannot_be_known_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "mpi.env"
    looked = healthy()
    del looked.nodes["node3"]["network"]
    with pytest.raises(ClusterError, match="the network of node3 is not known"):
        write_variables(path, looked)
    looked = healthy()
    looked.nodes["node3"]["network"]["routes"]["node1"] = {}
    with pytest.raises(ClusterError, match="node3 does not say by which interface"):
        write_variables(path, looked)
    with pytest.raises(ClusterError, match="one node"):
        write_variables(path, healthy(1))
    assert not path.exists()
    with pytest.raises(ClusterError, match="cannot be written: No such file"):
        write_variables(tmp_path / "none" / "mpi.env", healthy())
