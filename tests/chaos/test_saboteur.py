"""What is sent to a host as a saboteur, what it finds of a job that is over, and its own end."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jobs import HANG_SECONDS
from mpitrain.launch.shared_files import FOLDER, lock, of_ranks
from testbed.chaos import crew, saboteur
from testbed.chaos.saboteur import Saboteur


def test_what_a_saboteur_imports_is_sent_with_it() -> None:
    *sent, (name, text) = crew.saboteur()
    assert name == "testbed.chaos.saboteur"
    own = [line.split()[1] for line in text.splitlines() if line.startswith(("from mpitrain", "from testbed"))]
    assert own and set(own) <= {module for module, _ in sent}


def test_what_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in /tmp, and a folder that a rank has left which was killed while MPI started."""
    monkeypatch.setattr(saboteur, "_LEAVE_SECONDS", 0.0)
    here, token = Saboteur({"launcher": "nowhere 1 2", "folder": ""}), secrets.token_hex(4)
    here._tokens.append(token)
    assert here._left() == []
    with (
        tempfile.NamedTemporaryFile(prefix=f"mpitrain-roll-call-{token}", dir="/tmp") as file,
        tempfile.TemporaryDirectory(prefix=of_ranks(token), dir=FOLDER) as folder,
        tempfile.TemporaryDirectory(prefix=of_ranks(secrets.token_hex(4)), dir=FOLDER),
    ):
        (Path(folder) / "sm_segment.a").touch()
        descriptor = lock(folder)  # else another job on this machine may remove it
        assert here._left() == [folder, file.name]
        os.close(descriptor)


SABOTEUR = """
import pathlib, sys
from testbed.chaos import saboteur
from testbed.chaos.saboteur import Outage
saboteur._SILENCE_SECONDS = 1.0
one = saboteur.Saboteur({"launcher": "nowhere 1 2", "folder": ""})
one._outage = Outage(7, lambda: None, lambda: pathlib.Path(sys.argv[1]).touch(), 600.0)
one.run()
"""


@pytest.mark.parametrize("is_cut", [True, False], ids=["a cable that was cut", "chaos killed"])
def test_without_chaos_it_undoes_its_fault_and_ends(tmp_path: Path, is_cut: bool) -> None:
    command = [sys.executable, "-c", SABOTEUR, str(tmp_path / "as before")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        if not is_cut:
            process.stdin.close()
        said = process.stdout.read()
        assert process.wait(HANG_SECONDS) == 0
    assert '{"undone": 7}' in said and (tmp_path / "as before").exists()
