"""What the launcher says when ssh to a host fails."""

from __future__ import annotations

import subprocess
from pathlib import Path

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


def test_another_host_answers_at_the_address(tmp_path: Path) -> None:
    """ssh names the key that it was shown, and the file of those that are known."""
    known = tmp_path / "known_hosts"
    for name in ("b", "c"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    known.write_text("".join(f"{name},10.0.0.1 {(tmp_path / name).with_suffix('.pub').read_text()}" for name in "bc"))
    listed = subprocess.check_output(["ssh-keygen", "-l", "-f", str(known)], text=True).splitlines()
    known.write_text(f"# keys\n{known.read_text()}")
    for line, expected in zip(listed, ("`mpitrain cluster trust b`", "c answers at its address"), strict=True):
        words = (
            f"@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\n{line.split()[1]}.\n"
            f"Offending ED25519 key in {known}:1\nHost key verification failed."
        )
        assert expected in explain("b", words, 255)


def test_an_end_without_a_word() -> None:
    assert explain("b", "", 137) == "b: ended with code 137 and wrote nothing"
