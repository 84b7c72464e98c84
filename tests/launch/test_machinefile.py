"""Hosts from the files of other launchers."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.errors import ConfigError
from mpitrain.launch.hosts import read_hostfile


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a\nb\n", "a,b"),
        ("# head\n\na slots=4\nb  slots = 2 # slow\n", "a:4,b:2"),
        ("a:4\nb:2\n", "a:4,b:2"),
        ("a:4\nb\n", "a:4,b:1"),
        ("a\nb\na\na\n", "a:3,b:1"),  # PBS_NODEFILE
        ("a:2\na slots=3", "a:5"),
        ("10.0.0.1:2\nnode-2.lab\n", "10.0.0.1:2,node-2.lab:1"),
    ],
)
def test_forms(text: str, hosts: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    assert read_hostfile(tmp_path / "hosts") == hosts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no host"),
        ("# nothing\n", "names no host"),
        ("a\nb:x\n", "line 2: 'b:x' is none of HOST, HOST:N and HOST slots=N"),
        ("a b\n", "line 1: 'a b' is none of"),
        ("a\nb slots=0\n", "line 2: 'b slots=0' is none of HOST, HOST:N and HOST slots=N, with N above 0"),
        ("a:00\n", "line 1: 'a:00' is none of"),
        ("a.\n", "line 1: 'a.' is none of"),
        ("a max_slots=2\n", "line 1: 'a max_slots=2' is none of"),
        (
            "[head]\na\n",
            "line 1: '[head]' is none of HOST, HOST:N and HOST slots=N; an Ansible inventory is given by -i",
        ),
    ],
)
def test_what_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_hostfile(tmp_path / "hosts")
    assert said in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        read_hostfile(tmp_path / "nowhere")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read: it is not text in UTF-8"):
        read_hostfile(tmp_path / "bytes")
