"""What the launcher says when ssh to a host fails."""

from __future__ import annotations

import pytest

from mpitrain.launch.connections import explain


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (
            "@@@ REMOTE HOST IDENTIFICATION HAS CHANGED! @@@\nHost key verification failed.",
            "`mpitrain cluster trust b`",
        ),
        ("No ED25519 host key is known for b\nHost key verification failed.", "For a node of this cluster, run"),
        ("u@b: Permission denied (publickey).", "Is this the cluster's user"),
        ("ssh: Could not resolve hostname b: Name or service not known", "`getent hosts b`"),
        ("ssh: connect to host b port 22: Connection refused", "`systemctl start ssh`"),
        ("ssh: connect to host b port 22: Connection timed out", "Is it switched on"),
        ("bash: line 1: /usr/bin/python3: No such file or directory", "Install python3 there"),
    ],
)
def test_why_ssh_failed(words: str, remedy: str) -> None:
    text = explain("b", words, 255)
    assert text.startswith(f"b: {words.splitlines()[-1]}: ")
    assert remedy in text


def test_an_end_without_a_word() -> None:
    assert explain("b", "", 137) == "b: ended with code 137 and wrote nothing"
