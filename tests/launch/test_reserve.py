"""The spares of a job as its launcher sees them: what it does without a holder. tests/faults has spares in jobs."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from mpitrain.job.spare import may_differ
from mpitrain.launch.libraries import Vendor
from mpitrain.launch.placement import Place
from mpitrain.launch.reserve import Reserve
from mpitrain.launch.tuning import Conditions, settings
from mpitrain.launch.variables import pin


def test_a_name_that_is_taken(capfd: pytest.CaptureFixture[str]) -> None:
    """A line says that there is no holder. The stub finds none either, so the ranks start as programs."""
    with Reserve("here") as reserve, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind("\0" + reserve._name)
        reserve.begin(["here"])
        assert reserve.stub(["program"])[-1] == "program"
        said = capfd.readouterr().err
        assert said.startswith("mpitrain: here: no spares can be kept there (")
        assert "Address already in use" in said
        reserve.begin(["here"])
        assert not reserve.processes(), "what happened would happen again"
        assert reserve.news([Place("here", 0, 1)], {}) == []


def test_a_host_that_takes_no_part_loses_its_spares() -> None:
    with Reserve("here") as reserve:
        reserve.begin(["here"])
        reserve.stub(["program"])
        assert len(reserve.processes()) == 1
        reserve.begin([])
        assert not reserve.processes()
        reserve.begin(["here"])
        reserve.stub(["program"])
        assert len(reserve.processes()) == 1


@pytest.mark.parametrize("vendor", ["mpich", "impi", "openmpi"])
def test_spares_of_several_hosts_fit_a_try_on_one(vendor: Vendor) -> None:
    """The launcher gives the two other variables for the network. A spare that refused them would be of no use."""
    route = {"interface": "eno1", "network": "10.0.0.0/24"}
    facts = {"a": {"rdma": False, "routes": {"b": route}}, "b": {"rdma": False, "routes": {"a": route}}}
    pinned = pin(facts, ["a", "b"], vendor, {}).common
    several = Conditions(vendor, num_hosts=2, has_rdma=False, is_oversubscribed=False, glibc=(2, 36))
    tuned = settings(several, {}).items() ^ settings(replace(several, num_hosts=1), {}).items()
    changed = {*pinned, *(name for name, _ in tuned)}
    if vendor == "mpich":  # its mpiexec sets this one because of HYDRA_IFACE
        changed.add("MPIR_CVAR_NEMESIS_TCP_NETWORK_IFACE")
    assert "FI_TCP_IFACE" in changed
    assert [name for name in sorted(changed) if not may_differ(name)] == []
    assert not may_differ("OMP_NUM_THREADS")
