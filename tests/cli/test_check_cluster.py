"""`mpitrain check-cluster`: what needs no nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.cli import main


def say(*words: str) -> int | str | None:
    """The exit code."""
    try:
        return main(["check-cluster", *words])
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--levle", "quick"], "unknown argument --levle; did you mean --level?"),
        (["--level", "fast"], "invalid choice: 'fast'"),
        (["--json"], "not allowed with argument"),
        (["--only", "SSH99"], "there is no check SSH99"),
        (["-i", "missing"], "missing: there is no such file"),
    ],
)
def test_wrong_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    """2 for people; for Nagios, where 2 is CRITICAL, UNKNOWN and one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["mpitrain", "check-cluster", "--nagios", *words])
    assert say("--nagios", *words) == 3
    out, err = capsys.readouterr()
    assert out.startswith("MPITRAIN UNKNOWN - ") and says in out
    assert len(out.splitlines()) == 1 and err == ""
    if words != ["--json"]:
        monkeypatch.setattr("sys.argv", ["mpitrain", "check-cluster", *words])
        assert say(*words) == 2
        out, err = capsys.readouterr()
        assert out == "" and says in err
