"""The spares of a job as its launcher sees them: what it does without a holder. tests/faults has spares in jobs."""

from __future__ import annotations

import socket

import pytest

from mpitrain.launch.placement import Place
from mpitrain.launch.reserve import Reserve


def test_a_name_that_is_taken(capfd: pytest.CaptureFixture[str]) -> None:
    """A line says that there is no holder. The stub finds none either, so the ranks start as programs."""
    with Reserve("here") as reserve, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind("\0" + reserve._name)
        reserve.begin(["here"])
        assert reserve.stub(["program"], [Place("here", 0, 1)])[-1] == "program"
        said = capfd.readouterr().err
        assert said.startswith("mpitrain: here: no spares can be kept there (")
        assert "Address already in use" in said
        reserve.begin(["here"])
        assert not reserve.processes(), "what happened would happen again"
        assert reserve.news({}) == []


def test_a_host_that_takes_no_part_loses_its_spares() -> None:
    with Reserve("here") as reserve:
        reserve.begin(["here"])
        reserve.stub(["program"], [Place("here", 0, 1)])
        assert len(reserve.processes()) == 1
        reserve.begin([])
        assert not reserve.processes()
        reserve.begin(["here"])
        reserve.stub(["program"], [Place("here", 0, 1)])
        assert len(reserve.processes()) == 1
