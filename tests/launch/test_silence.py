"""Which hosts are lost: from how long each has been silent. The launcher runs on host a."""

from __future__ import annotations

import pytest

from mpitrain.launch.trouble import account_of, lost_hosts


@pytest.mark.parametrize(
    ("silent", "lost"),
    [
        pytest.param({"a": 1, "b": 4.9, "c": 1, "d": 1}, [], id="paused for 4 s"),
        pytest.param({"a": 1, "b": 5.1, "c": 1, "d": 1}, ["b"], id="cut off"),
        pytest.param({"a": 1, "b": 5.1, "c": 4.9, "d": 1}, [], id="another one may be cut off too"),
        pytest.param({"a": 1, "b": 5.9, "c": 5.1, "d": 1}, ["b", "c"], id="two are cut off"),
        pytest.param({"a": 1, "b": 6.3, "c": 0.2, "d": 1}, ["b"], id="the other one was only late"),
        pytest.param({"a": 1, "b": 15.1, "c": 4.9, "d": 1}, ["b"], id="the other one is always late"),
        pytest.param({"a": 1, "b": 14, "c": 14, "d": 14}, [], id="this machine may be cut off"),
        pytest.param({"a": 1, "b": 15.1, "c": 15.2, "d": 15.3}, ["b", "c", "d"], id="this machine is cut off"),
        pytest.param({"a": 14, "b": 1, "c": 1, "d": 1}, [], id="a guard here is late"),
        pytest.param({"a": 15.1, "b": 1, "c": 1, "d": 1}, ["a"], id="a guard here is stopped"),
        pytest.param({"a": 1, "b": 5.1}, ["b"], id="the only other one is cut off"),
        pytest.param({"a": 14}, [], id="no other one"),
    ],
)
def test_lost(silent: dict[str, float], lost: list[str]) -> None:
    assert lost_hosts(silent, "a") == lost


def test_words() -> None:
    text = account_of(["b", "c"], {"a": 1, "b": 6, "c": 5.1})
    assert text.startswith("b, c: no message from these hosts since ")
    assert "for 6 s: each of them lost power or its network" in text
    assert "`ssh b true`" in text
