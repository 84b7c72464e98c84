"""Routes become variables."""

from __future__ import annotations

from typing import Any

from mpitrain.launch.variables import pin

HOSTS = ["a", "b", "c"]
BY_NAME = {
    "UCX_NET_DEVICES": "eno1",
    "FI_TCP_IFACE": "eno1",
    "NCCL_SOCKET_IFNAME": "=eno1",
    "GLOO_SOCKET_IFNAME": "eno1",
}
BY_NETWORK = ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include", "PRTE_MCA_prte_if_include")


def facts(names: dict[str, str], network: str = "10.0.0.0/24") -> dict[str, dict[str, Any]]:
    return {
        host: {
            "rdma": False,
            "routes": {peer: {"interface": name, "network": network} for peer in names if peer != host},
        }
        for host, name in names.items()
    }


def test_one_name_everywhere() -> None:
    found = facts(dict.fromkeys(HOSTS, "eno1"))
    pinning = pin(found, HOSTS, "mpich", {})
    assert pinning.common == {**BY_NAME, "HYDRA_IFACE": "eno1"}
    assert (pinning.by_host, pinning.note) == ({}, "")
    assert pin(found, HOSTS, "impi", {}).common == {**BY_NAME, "I_MPI_HYDRA_IFACE": "eno1"}
    assert pin(found, HOSTS, "openmpi", {}).common == {**BY_NAME, **dict.fromkeys(BY_NETWORK, "10.0.0.0/24")}


def test_one_host_needs_the_way_to_the_launching_machine_only() -> None:
    pinning = pin(facts({"a": "eno1", "b": "eno1"}), ["b"], "mpich", {})
    assert pinning.common == {**BY_NAME, "HYDRA_IFACE": "eno1"}
    assert pin(facts({"a": "eth0", "b": "eno1"}), ["b"], "mpich", {}).common == BY_NAME


def test_what_the_user_has_set_stays() -> None:
    environ = {"UCX_NET_DEVICES": "mlx5_0:1", "PRTE_MCA_prte_if_include": "eth7", "HYDRA_IFACE": "eth7"}
    found = facts(dict.fromkeys(HOSTS, "eno1"))
    assert not pin(found, HOSTS, "mpich", environ).common.keys() & environ.keys()
    assert not pin(found, HOSTS, "openmpi", environ).common.keys() & environ.keys()


def test_differing_names_are_set_in_each_rank() -> None:
    pinning = pin(facts({"a": "eno1", "b": "enp3s0", "c": "eno1"}), HOSTS, "openmpi", {"FI_TCP_IFACE": "x"})
    assert pinning.common == dict.fromkeys(BY_NETWORK, "10.0.0.0/24")
    assert pinning.by_host["b"] == {
        "UCX_NET_DEVICES": "enp3s0",
        "NCCL_SOCKET_IFNAME": "=enp3s0",
        "GLOO_SOCKET_IFNAME": "enp3s0",
    }
    assert pinning.note.endswith("eno1 on a, enp3s0 on b, eno1 on c")
    assert "HYDRA_IFACE" not in pin(facts({"a": "eno1", "b": "enp3s0"}), ["a", "b"], "mpich", {}).common


def test_a_launching_machine_with_another_interface() -> None:
    """mpiexec must not look on the launching machine for the interfaces of the other hosts."""
    found = facts({"a": "eno1", "b": "eno1", "desk": "wlan0"})
    assert "HYDRA_IFACE" not in pin(found, ["a", "b"], "mpich", {}).common
    assert pin(found, ["a", "b"], "mpich", {}).common["UCX_NET_DEVICES"] == "eno1"


def test_rdma_hardware_is_left_to_ucx() -> None:
    found = facts(dict.fromkeys(HOSTS, "eno1"))
    found["b"]["rdma"] = True
    common = pin(found, HOSTS, "mpich", {}).common
    assert "UCX_NET_DEVICES" not in common
    assert common["FI_TCP_IFACE"] == "eno1"


def test_what_cannot_be_pinned_is_said() -> None:
    found = facts(dict.fromkeys(HOSTS, "eno1"))
    found["b"]["routes"]["c"] = {"interface": "wg0", "network": "10.9.0.0/24"}
    pinning = pin(found, HOSTS, "mpich", {})
    assert (pinning.common, pinning.note) == ({}, "b reaches the others by eno1 and wg0; none is pinned")
    del found["b"]["routes"]["c"]
    assert pin(found, HOSTS, "mpich", {}).note.startswith("b does not say by which interface")
