"""`mpitrain scale`: what its words say; the changes themselves: tests/launch/test_policy.py, tests/cluster."""

from __future__ import annotations

import pytest

from mpitrain.cli import main
from mpitrain.cli.scale import wish_of


@pytest.mark.parametrize(
    ("words", "wish"),
    [
        (["+c"], {"join": "c"}),
        (["-b"], {"leave": ["b"]}),
        (["+c/cuda:0-1,d/cuda:0", "-a", "-b"], {"join": "c/cuda:0-1,d/cuda:0", "leave": ["a", "b"]}),
        (["-inode,hosts", "+c", "+d"], {"leave": ["inode", "hosts"], "join": "c,d"}),
    ],
)
def test_wishes(words: list[str], wish: dict[str, object]) -> None:
    assert wish_of(words) == wish


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "nothing changes; name hosts: +HOST lets a host join, -HOST lets it leave"),
        (["c"], "'c' has no sign: +c lets a host join, -c lets it leave"),
        (["-b", "--json"], "--json comes after JOB, where hosts are; options come before JOB"),
        (["+", "c"], "+ names no host; write +HOST without a space"),
        (["+c_"], "'c_' in +c_ does not begin with the name of a host"),
        (["+c", "-b", "-c"], "+c and -c contradict each other; name a host once"),
        (["-b:2"], "-b:2 names devices or numbers of ranks, but only a whole host can leave; name hosts alone"),
    ],
)
def test_what_is_refused(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "1a2b3c4d", *words]) == 2
    assert f"mpitrain scale: {why}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["scale", "resume"])
def test_no_id_of_a_job(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([command, "1a2b"])
    assert "'1a2b' is not the id of a job; an id has 8 characters" in capsys.readouterr().err
