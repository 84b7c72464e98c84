"""The judges of keys and of files that only their owner may write."""

from __future__ import annotations

from typing import Any

import pytest

from check.made_up_logins import KEY, first, judged, of_node


@pytest.mark.parametrize(
    ("fields", "verdict", "words", "allowed"),
    [
        ({"mode": "0644"}, "fail", "has mode 0644", "0600"),
        ({"is_own": False, "is_readable": False}, "fail", "may not read", "its own, mode 0600"),
        ({"fingerprint": ""}, "fail", "not a key that ssh can read", ""),
        ({"kind": "RSA", "bits": 2048}, "warn", "RSA key of 2048 bits", "ed25519, or RSA of 3072 bits or more"),
    ],
)
def test_keys(fields: dict[str, Any], verdict: str, words: str, allowed: str) -> None:
    looked = of_node("ssh keys", {"offers": [], "keys": [{**KEY, **fields}], "writable_by_others": [], "loose": []})
    result = first("SSH08", looked)
    assert result is not None
    assert (result.verdict, result.allowed) == (verdict, allowed)
    assert words in result.observed and "--tags ssh" in result.remedy


def test_no_key_and_a_home_that_others_may_write() -> None:
    looked = of_node(
        "ssh keys", {"offers": ["/x/key"], "keys": [], "writable_by_others": ["/home/cluster"], "loose": []}
    )
    missing, home = (one for one in judged("SSH08", looked) if one.where == ("node1",))
    assert "there is no /x/key" in missing.observed
    assert missing.remedy == "ansible-playbook cluster/setup.yml --tags ssh"  # all nodes must learn the new key
    assert (home.verdict, home.remedy) == ("warn", "ssh 10.0.0.1 'sudo chmod go-w /home/cluster'")


def test_keys_and_lists_that_others_may_write() -> None:
    loose = ["/etc/ssh/mpitrain", "/etc/ssh/mpitrain/known_hosts"]
    one = first("SSH08", of_node("ssh keys", {"offers": [], "keys": [KEY], "writable_by_others": [], "loose": loose}))
    assert one is not None and one.verdict == "fail"
    assert one.observed.startswith(
        "other users than root may write to /etc/ssh/mpitrain, /etc/ssh/mpitrain/known_hosts"
    )
    assert one.remedy == "ansible-playbook cluster/setup.yml --tags ssh --limit {limit}"


def test_the_same_key_on_two_nodes() -> None:
    answer = {"offers": [], "keys": [KEY], "writable_by_others": [], "loose": []}
    looked = of_node("ssh keys", answer)
    assert first("SSH08", looked) is None
    looked.nodes["node2"] = {"ssh keys": answer}
    assert [one.where for one in judged("SSH08", looked)] == [("node1",), ("node2",)]
