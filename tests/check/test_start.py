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

from check.made_up import here, seen
from mpitrain import facts
from mpitrain.check.check import Result, Seen
from mpitrain.check.checks import CHECKS
from mpitrain.check.node import children, jobs, shell
from mpitrain.check.run import judge

FOLDERS = {
    "folder": "/tmp",
    "socket": "",
    "mode": "1777",
    "owner": "root",
    "scripts": "/tmp",
    "mount": "/tmp",
    "programs": "",
}
BIN = "/usr/local/lib/mpitrain/bin"
TYPED = {name: f"{BIN}/{name}" for name in ("mpitrain", "python", "mpiexec")}
LOGIN = {
    "shell": "/bin/bash",
    "is_set_up": True,
    "has_profile": True,
    "programs": TYPED,
    "last_read": "/home/cluster/.profile",
}


def judged(id_: str, looked: Seen) -> list[Result]:
    return [one for one in judge([CHECKS[id_]], looked) if one.verdict != "pass"]


def of_each(section: str, answer: Any, **fields: Any) -> Seen:
    looked = seen(2, **fields)
    looked.nodes = {name: {section: answer} for name in looked.target.names}
    return looked


def test_folders_that_jobs_may_use() -> None:
    assert judged("RUN01", of_each("temporary", FOLDERS)) == []


@pytest.mark.parametrize("mode", ["0700", "0755"])
def test_a_tmp_that_users_may_not_write(mode: str) -> None:
    one, other = judged("RUN01", of_each("temporary", {**FOLDERS, "socket": "Permission denied", "mode": mode}))
    assert (one.verdict, one.where, other.where) == ("fail", ("node1",), ("node2",))
    assert one.observed == f"cluster cannot make a file in /tmp, of root, mode {mode}: Permission denied"
    assert one.remedy == "ssh 10.0.0.1 'sudo chmod 1777 /tmp'"
    looked = here({"temporary": {**FOLDERS, "socket": "Permission denied", "mode": mode}})
    assert judged("RUN01", looked)[0].remedy == "sudo chmod 1777 /tmp"


def test_a_tmp_that_runs_no_programs() -> None:
    """It fails on the head, where jobs start. On other nodes it is a warning."""
    head, worker = judged("RUN01", of_each("temporary", {**FOLDERS, "programs": "it is mounted noexec"}))
    assert (head.verdict, worker.verdict) == ("fail", "warn")
    assert head.observed == worker.observed == "programs in /tmp cannot be run: it is mounted noexec"
    assert head.remedy.startswith("ssh 10.0.0.1 'sudo mount -o remount,exec /tmp'  # ")


def test_programs_that_a_person_types() -> None:
    assert judged("RUN02", of_each("login shell", LOGIN)) == []
    in_venv = {name: f"/home/cluster/nfs/venv/bin/{name}" for name in TYPED}
    assert judged("RUN02", of_each("login shell", {**LOGIN, "programs": in_venv})) == []


def test_conda_in_the_profile() -> None:
    programs = {**TYPED, "python": "/opt/conda/bin/python", "mpiexec": "/opt/conda/bin/mpiexec"}
    one = judged("RUN02", of_each("login shell", {**LOGIN, "programs": programs}))[0]
    assert one.verdict == "fail"
    assert one.observed == (
        "in a login shell of cluster, python is /opt/conda/bin/python and mpiexec is /opt/conda/bin/mpiexec"
    )
    line = rf"printf '\nPATH={BIN}:$PATH\n' | sudo tee -a /home/cluster/.profile"
    assert line in one.remedy.replace("'\"'\"'", "'")


@pytest.mark.parametrize("has_profile", [True, False])
def test_no_programs_for_a_person(has_profile: bool) -> None:
    """Set-up writes the file, if it is missing and if its content is wrong."""
    programs = dict.fromkeys(TYPED, "")
    one = judged("RUN02", of_each("login shell", {**LOGIN, "programs": programs, "has_profile": has_profile}))[0]
    assert one.observed == (
        "in a login shell of cluster, there is no mpitrain and there is no python and there is no mpiexec"
    )
    assert one.remedy == "ansible-playbook cluster/setup.yml --tags runtime --limit {limit}"


@pytest.mark.parametrize("fields", [{"is_set_up": False}, {"programs": None, "shell": "/bin/tcsh"}])
def test_shells_of_which_nothing_is_known(fields: dict[str, Any]) -> None:
    assert {one.verdict for one in judged("RUN02", of_each("login shell", {**LOGIN, **fields}))} == {"skip"}


def test_an_inventory_that_others_may_write() -> None:
    text = "/etc/mpitrain/hosts is not used, since others may write there: mode 0666. Allowed is owner root. See it"
    one = judged("RUN03", of_each("programs", {"python": {"inventory": text}}))[0]
    assert (one.verdict, one.observed) == ("fail", text.partition(". Allowed")[0])
    assert one.remedy == "ansible-playbook cluster/setup.yml --tags hosts --limit {limit}"
    assert one.allowed == "files that only root may write"
    assert judged("RUN03", of_each("programs", {"python": {"inventory": ""}})) == []
    assert judged("RUN03", of_each("programs", {"python": {"inventory": None}}))[0].verdict == "skip"


def test_an_inventory_that_cannot_be_read() -> None:
    text = "/etc/mpitrain/hosts:3: the section [gpu] is not known; allowed are [head], [workers]"
    one = judged("RUN03", of_each("programs", {"python": {"inventory": text}}))[0]
    assert (one.observed, one.allowed) == (text, "an inventory as set-up writes it")
    assert one.remedy == "ansible-playbook cluster/setup.yml --tags hosts --limit {limit}"


@pytest.mark.parametrize(
    ("folder", "login"), [("/home/cluster/nfs/work", "10.0.0.1"), ("/opt/work", "10.0.0.2")], ids=["share", "local"]
)
def test_a_file_with_the_name_of_a_library(folder: str, login: str) -> None:
    """The file is on the share, so the repair renames it once, on the head."""

    def looked_at(shadows: dict[str, str] | None, why: str = "") -> Seen:
        python = {"files": {"train.py": "1"}, "shadows": shadows, "why_no_shadows": why}
        return of_each("programs", {"python": python}, script=f"{folder}/train.py")

    looked = looked_at({"numpy": f"{folder}/numpy.py"})
    one, other = judged("RUN04", looked)
    assert (one.verdict, one.where, other.where) == ("fail", ("node1",), ("node2",))
    assert one.observed == f"Python takes {folder}/numpy.py, beside the script, for the library numpy"
    rename = f"sudo -u cluster mv -n {folder}/numpy.py {folder}/my_numpy.py"
    assert other.remedy.startswith(f"ssh {login} '{rename}'  # ")
    assert judged("RUN04", looked_at({})) == []
    one = judged("RUN04", looked_at(None, "it ended with code 134"))[0]
    assert (one.verdict, one.observed) == (
        "unknown",
        "the environment's python did not get to it: it ended with code 134",
    )
    assert judged("RUN04", of_each("programs", {"python": {}}))[0].verdict == "skip"
    nowhere = of_each("programs", {"python": {"files": None, "shadows": None}}, script="/none.py")
    assert judged("RUN04", nowhere)[0].verdict == "skip"


WISH = {"is_here": True}


def test_folders_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell.tempfile, "tempdir", str(tmp_path))
    answer = shell.temporary(WISH)
    assert (answer["folder"], answer["socket"], answer["owner"]) == (
        str(tmp_path),
        "",
        pwd.getpwuid(os.getuid()).pw_name,
    )
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
