"""The judges of what `mpitrain run` needs on a node before it starts a job, and the calls that ask for it."""

from __future__ import annotations

import os
import pwd
import sys
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from check.made_up import SET_UP, here, judged, of_each, only, sound, verdicts
from mpitrain import facts
from mpitrain.check.check import Seen
from mpitrain.check.node import children, jobs, shell

FOLDERS = {"folder": "/tmp", "socket": "", "mode": "1777", "owner": "root", "scripts": "/tmp", "mount": "/tmp"}
FOLDERS |= {"programs": ""}
BIN = "/usr/local/lib/mpitrain/bin"
TYPED = {name: f"{BIN}/{name}" for name in ("mpitrain", "python", "mpiexec")}
LOGIN = {"shell": "/bin/bash", "is_set_up": True, "has_profile": True, "programs": TYPED}
LOGIN |= {"last_read": "/home/cluster/.profile"}


def temporary(**fields: str) -> Seen:
    return of_each(1, {"temporary": {**FOLDERS, **fields}})


def shells(**fields: Any) -> Seen:
    return of_each(1, {"login shell": {**LOGIN, **fields}})


def inventory(says: str | None) -> Seen:
    return of_each(1, {"programs": {"python": {"inventory": says}}})


FOREIGN = "/etc/mpitrain/hosts is not used, since others may write there: mode 0666"
WRONG = "/etc/mpitrain/hosts:3: the section [gpu] is not known; allowed are [head], [workers]"
CONDA = {**TYPED, "python": "/c/python", "mpiexec": "/c/mpiexec"}
NOTHING = dict.fromkeys(TYPED, "")
DENIED = "Permission denied"
IN_SHELL = "in a login shell of cluster, "
NO_FILE = "cluster cannot make a file in /tmp, of root, mode "
NO_PROGRAMS = f"{IN_SHELL}there is no mpitrain and there is no python and there is no mpiexec"


@pytest.mark.parametrize(
    ("id_", "looked", "observed", "remedy", "allowed"),
    [
        ("RUN01", temporary(socket=DENIED, mode="0700"), f"{NO_FILE}0700: {DENIED}", "1 'sudo chmod 1777 /tmp'", ""),
        ("RUN01", temporary(socket=DENIED, mode="0755"), f"{NO_FILE}0755: {DENIED}", "1 'sudo chmod 1777 /tmp'", ""),
        ("RUN02", shells(programs=CONDA), f"{IN_SHELL}python is /c/python and mpiexec is /c/mpiexec", "", ""),
        # Set-up writes the file, if it is missing and if its content is wrong.
        ("RUN02", shells(programs=NOTHING), NO_PROGRAMS, SET_UP.format(tag="runtime"), ""),
        ("RUN02", shells(programs=NOTHING, has_profile=False), NO_PROGRAMS, SET_UP.format(tag="runtime"), ""),
        (
            "RUN03",
            inventory(f"{FOREIGN}. Allowed is owner root. See it"),
            FOREIGN,
            SET_UP.format(tag="hosts"),
            "only root",
        ),
        ("RUN03", inventory(WRONG), WRONG, SET_UP.format(tag="hosts"), "an inventory as set-up writes it"),
    ],
)
def test_findings(id_: str, looked: Seen, observed: str, remedy: str, allowed: str) -> None:
    one = only(id_, looked, "fail", "node1", observed, remedy, allowed)
    assert one.observed == observed
    if "/c/" in observed:
        line = rf"printf '\nPATH={BIN}:$PATH\n' | sudo tee -a /home/cluster/.profile"
        assert line in one.remedy.replace("'\"'\"'", "'")


def test_what_jobs_may_use_and_what_is_not_known() -> None:
    in_venv = {name: f"/home/cluster/nfs/venv/bin/{name}" for name in TYPED}
    sound("RUN01", temporary())
    sound("RUN02", shells(), shells(programs=in_venv))
    sound("RUN03", inventory(""))
    only("RUN03", inventory(None), "skip", "node1", "")
    only("RUN02", shells(is_set_up=False), "skip", "node1", "")
    only("RUN02", shells(programs=None, shell="/bin/tcsh"), "skip", "node1", "")
    looked = here({"temporary": {**FOLDERS, "socket": "Permission denied", "mode": "0700"}})
    assert judged("RUN01", looked)[0].remedy == "sudo chmod 1777 /tmp"


def test_a_tmp_that_runs_no_programs() -> None:
    """It fails on the head, where jobs start. On other nodes it is a warning."""
    looked = of_each(2, {"temporary": {**FOLDERS, "programs": "it is mounted noexec"}})
    head, worker = judged("RUN01", looked)
    assert (head.verdict, worker.verdict) == ("fail", "warn")
    assert head.observed == worker.observed == "programs in /tmp cannot be run: it is mounted noexec"
    assert head.remedy.startswith("ssh 10.0.0.1 'sudo mount -o remount,exec /tmp'  # ")


@pytest.mark.parametrize(
    ("folder", "login"), [("/home/cluster/nfs/work", "10.0.0.1"), ("/opt/work", "10.0.0.2")], ids=["share", "local"]
)
def test_a_file_with_the_name_of_a_library(folder: str, login: str) -> None:
    """The file is on the shared folder, so the repair renames it once, on the head."""

    def beside(python: dict[str, Any], script: str | None = f"{folder}/train.py") -> Seen:
        return of_each(2, {"programs": {"python": python}}, **({"script": script} if script else {}))

    known = {"files": {"train.py": "1"}}
    one, other = judged("RUN04", beside({**known, "shadows": {"numpy": f"{folder}/numpy.py"}}))
    assert (one.verdict, one.where, other.where) == ("fail", ("node1",), ("node2",))
    assert one.observed == f"Python takes {folder}/numpy.py, beside the script, for the library numpy"
    rename = f"sudo -u cluster mv -n {folder}/numpy.py {folder}/my_numpy.py"
    assert other.remedy.startswith(f"ssh {login} '{rename}'  # ")
    sound("RUN04", beside({**known, "shadows": {}}))
    one = judged("RUN04", beside({**known, "shadows": None, "why_no_shadows": "it ended with code 134"}))[0]
    words = "the environment's python did not get to it: it ended with code 134"
    assert (one.verdict, one.observed) == ("unknown", words)
    assert verdicts("RUN04", beside({}, None)) == {"skip"}
    assert verdicts("RUN04", beside({"files": None, "shadows": None}, "/none.py")) == {"skip"}


def test_folders_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell.tempfile, "tempdir", str(tmp_path))
    answer = shell.temporary({"is_here": True})
    own = pwd.getpwuid(os.getuid()).pw_name
    assert (answer["folder"], answer["socket"], answer["owner"]) == (str(tmp_path), "", own)
    assert list(tmp_path.iterdir()) == []
    assert facts.why_no_socket(str(tmp_path / "none")) == "No such file or directory"


@pytest.mark.parametrize(("flags", "expected"), [(os.ST_NOEXEC | os.ST_NODEV, "it is mounted noexec"), (0, "")])
def test_noexec_is_seen(flags: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts.os, "statvfs", lambda _path: SimpleNamespace(f_flag=flags))
    assert facts.why_no_programs("/tmp") == expected


def test_a_login_shell_is_asked_as_a_person_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """.profile is read, and what it prints is no program."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text("")
    (tmp_path / "bin/python").chmod(0o755)
    (tmp_path / ".profile").write_text(f"echo Welcome\nPATH={tmp_path}/bin:$PATH\n")
    entry = pwd.struct_passwd(("ada", "x", os.getuid(), os.getgid(), "", str(tmp_path), "/bin/bash"))
    monkeypatch.setattr(shell.pwd, "getpwuid", lambda _uid: entry)
    answer = shell.login_shell({"commands": str(tmp_path), "names": ["python", "no-such-program"]})
    assert answer["programs"] == {"python": f"{tmp_path}/bin/python", "no-such-program": ""}
    assert answer["last_read"] == f"{tmp_path}/.profile"
    assert answer["is_set_up"]


def test_the_jobs_python_says_what_stands_beside_a_script(tmp_path: Path) -> None:
    """A file is reported if NumPy, mpi4py or mpitrain would import it. Other files with a library's name do no harm."""
    for name in ("train.py", "numpy.py", "json.py", "this.py", "helpers.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py/__init__.py").write_text("")
    probe = files("mpitrain").joinpath("facts.py").read_text()
    wish = {"address": "", "venv": "", "probe": probe, "script": str(tmp_path / "train.py"), "python": sys.executable}
    python = jobs.programs(wish)["python"]
    assert python["shadows"] == {name: str(tmp_path / f"{name}.py") for name in ("json", "numpy")} | {
        "mpi4py": str(tmp_path / "mpi4py")
    }
    assert "inventory" in python


def test_a_python_that_dies_of_its_mpi_is_told_from_a_slow_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mpi4py.py").write_text("import os\nos.abort()\n")
    (tmp_path / "script").mkdir()
    (tmp_path / "script/train.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probe = files("mpitrain").joinpath("facts.py").read_text()
    wish = {"address": "", "venv": "", "probe": probe, "script": str(tmp_path / "script/train.py")}
    answer = jobs.programs({**wish, "python": sys.executable})
    why = answer["mpi"]["why"]  # some shells print the signal's name
    assert "Aborted" in why or why == "it ended with code 134"
    assert answer["python"]["shadows"] is None
    assert answer["python"]["why_no_shadows"] == why


@pytest.mark.parametrize(("load", "expected"), [(0.5, 1.0), (5.0, 2.5), (60.0, 3.0)])
def test_a_busy_machine_has_more_time(load: float, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(children.os, "cpu_count", lambda: 2)
    assert children.patience() == expected


def test_a_deadline_is_that_of_a_machine_that_is_not_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "patience", lambda: 1e5)
    assert children.run(["sleep", "0.2"], 0.01) == (0, "", "")


def test_the_deadline_that_is_told_is_the_one_that_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "patience", lambda: 3.0)
    with pytest.raises(children.SlowError, match=r"`sleep 60` did not end within 2 s") as raised:
        children.run(["sleep", "60"], 0.5)
    assert raised.value.seconds == 1.5
    monkeypatch.setattr(shell, "SSH_SECONDS", 0.5)
    monkeypatch.setattr(shell, "_SHELL", "import time\ntime.sleep(60)")
    monkeypatch.setattr(shell, "startup", str)
    assert shell.shell({"address": ""}) == {"refused": "does not end within 2 s", "startup": ""}
    monkeypatch.setattr(
        jobs, "in_job", lambda *_: (0, f"{jobs.MARK}\n/v/python\n{jobs.MARK}124\n/m\n{jobs.MARK}0\n\n{jobs.MARK}\n", "")
    )
    wish = {"address": "", "venv": "", "probe": "", "script": "", "python": ""}
    assert jobs.programs(wish)["python"]["why"] == "it does not end within 90 s"
