"""The facts of a host, each asked by a child; and the differences that keep hosts from working together."""

from __future__ import annotations

import os
import re
import socket
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from programs import program

from jobs import HANG_SECONDS, TOKEN, processes_of
from mpitrain import facts as common
from mpitrain.errors import LaunchError
from mpitrain.facts import hidden
from mpitrain.launch import facts, served
from mpitrain.launch.conditions import (
    HostFacts,
    differences,
    faults_by_host,
    listing,
    mixed_processors,
    shared_addresses,
)

PROBE = Path(common.__file__).read_text()


def test_more_files_than_a_pipe_holds(tmp_path: Path) -> None:
    for number in range(1000):
        (tmp_path / f"a_module_with_a_rather_long_name_{number}.py").touch()
    script = tmp_path / "train.py"
    script.touch()
    found = facts.environment(sys.executable, str(script), {}, PROBE)
    assert len(found["files"]) == 1001
    assert found["mpi"]


def test_a_python_that_fails_says_why(tmp_path: Path) -> None:
    script = str(tmp_path / "train.py")
    found = facts.environment(sys.executable, script, {}, "raise SystemExit('no such thing')")
    assert found == {"error": f"{sys.executable} failed: no such thing"}
    assert "error" in facts.environment(str(tmp_path / "python"), script, {}, PROBE)
    found = facts.environment(sys.executable, script, {"PYTHONHOME": "/nowhere"}, PROBE)
    assert f"{sys.executable} failed: " in found["error"]


@pytest.mark.parametrize(("load", "seconds"), [(0.0, "0.1"), (0.5, "0.1"), (1.5, "0.15"), (100.0, "0.2")])
def test_a_busy_machine_has_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: float, seconds: str
) -> None:
    """`load` is per processor. The message says how long the agent waited for a Python that never answers."""
    average = load * (os.cpu_count() or 1)
    monkeypatch.setattr(facts, "_PROBE_SECONDS", 0.1)
    monkeypatch.setattr(os, "getloadavg", lambda: (average, 0.0, 0.0))
    found = facts.environment(sys.executable, str(tmp_path / "train.py"), {}, "import time; time.sleep(600)")
    assert found == {"error": f"{sys.executable} did not answer within {seconds} s"}


def test_who_holds_up_nobody_waits_longer_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As `mpitrain serve` and `mpitrain work` do. A Python that begins late has its answer, and one that hangs none."""
    script = tmp_path / "train.py"
    script.touch()
    slow = program(tmp_path / "python", f'sleep 1\nexec {sys.executable} "$@"')
    expected = served.environment_here(str(script))
    monkeypatch.setattr(facts, "_PROBE_SECONDS", 0.1)  # of those for whom others wait
    monkeypatch.setattr(facts, "_TELL_SECONDS", 0.4)
    monkeypatch.setattr(sys, "executable", str(slow))
    assert served.environment_here(str(script)) == expected
    said = rf"mpitrain: {socket.gethostname()} has waited \d+ s for {slow}, .* It has 600 s\n"
    assert re.match(said, capfd.readouterr().err)
    program(slow, "exec sleep 1000")
    monkeypatch.setattr(served, "_MOST_SECONDS", 0.7)
    with pytest.raises(
        LaunchError, match=rf"the packages of {slow} cannot be compared: .* did not answer within 0.7 s"
    ):
        served.environment_here(str(script))


def test_a_path_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    outputs = facts._outputs
    # The other questions get enough time, however slow this machine is.
    shorter = {True: 0.5, False: HANG_SECONDS}
    monkeypatch.setattr(facts, "_outputs", lambda child, _: outputs(child, shorter["slow" in child.args[-1]]))
    slow = f"import sys, time; time.sleep(600 if 'slow' in sys.argv[1] else 0)\n{facts._LOOK_AT_PATH}"
    monkeypatch.setattr(facts, "_LOOK_AT_PATH", slow)
    paths = {str(tmp_path / name): name for name in ("empty/train.py", "no/train.py", "slow", "")}
    found = facts.look_at_paths(list(paths))
    assert {paths[path]: words[0] for path, words in found.items()} == {
        "empty/train.py": "empty",
        "no/train.py": "missing",
        "slow": "hangs",
        "": "there",
    }


def test_a_look_that_hangs_ends_with_its_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that stays would be adopted by the launcher, as a process that the job has left."""
    hangs = program(tmp_path / "bin/ls", "exec sleep 1000")
    token = uuid.uuid4().hex
    monkeypatch.setenv(TOKEN, token)  # a busy machine may not have come to start the program
    monkeypatch.setenv("PATH", f"{hangs.parent}:/usr/bin:/bin")
    monkeypatch.setattr(facts, "_PATH_SECONDS", 2.0)
    assert facts.look_at_paths(["/"]) == {"/": ["hangs"]}
    assert processes_of(token, patience=HANG_SECONDS) == []


def test_a_path_that_is_there_needs_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python only says what is wrong, as with a link to nothing."""
    file, link = tmp_path / "-a file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path / "nothing")
    assert facts.look_at_paths([str(link)]) == {str(link): ["missing", str(link)]}
    monkeypatch.setattr(facts, "_LOOK_AT_PATH", "print('a Python was started')")
    found = facts.look_at_paths([str(tmp_path), str(file), str(link)])
    assert list(found.values()) == [["there"], ["there"], ["a Python was started"]]


def test_cores_and_the_way_to_a_peer(tmp_path: Path) -> None:
    found = facts.collect({"paths": [str(tmp_path / "none")], "peers": {"self": "127.0.0.1"}}, PROBE)
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["routes"]["self"]["interface"] == "lo"
    assert "environment" not in found


def lines_of(own: str, facts: Mapping[str, HostFacts]) -> list[str]:
    return listing(differences(own, facts))


def host(**changes: Any) -> dict[str, Any]:
    environment = {
        "python": "3.11.2",
        "machine": "x86_64",
        "packages": {"numpy": "2.4.6", "mpi4py": "4.1.2"},
        "mpitrain": "abc",
        "files": {"train.py": "1", "model/net.py": "2"},
        "mpi": "MPICH 5.0.2",
    }
    return {"paths": {"/share": ["there"]}, "environment": {**environment, **changes}}


def test_two_machines_have_one_address() -> None:
    way = {"interface": "eth0", "network": "10.0.0.0/24"}
    facts = {"a": {"routes": {"b": way, "c": way}}, "b": {"routes": {"a": way, "c": way}}, "c": {"routes": {}}}
    assert shared_addresses(facts) == []
    facts["c"]["routes"] = {"a": way, "b": {"interface": "lo", "taken": "10.0.0.2/24 dev eth0"}}
    (text,) = map(str, shared_addresses(facts))
    assert text.startswith("c: it has the address 10.0.0.2 of b too. ")
    assert "`sudo ip address del 10.0.0.2/24 dev eth0`" in text


def test_processors_of_one_size_may_be_mixed() -> None:
    facts = {"a": host(), "b": host(machine="aarch64"), "c": host(machine="aarch64")}
    assert lines_of("a", facts) == []
    assert mixed_processors(facts) == (
        "the hosts have different processors (x86_64: a; aarch64: b, c), which round differently: the parameters of "
        "their ranks may differ in the last bits"
    )
    assert mixed_processors({"a": host(), "b": host()}) == ""
    for machine in ("armv7l", "i686", "s390x", "riscv64"):  # 32 bits, another order of bytes, or never tried
        assert lines_of("a", {"a": host(), "b": host(machine=machine)}) == [f"b: the processor {machine}, here x86_64"]


def test_every_difference_is_named() -> None:
    other = host(
        python="3.12.1",
        packages={"numpy": "2.3.1", "six": "1.0"},
        mpitrain="xyz",
        files={"train.py": "9", "old.py": "3"},
    )
    del other["environment"]["mpi"]
    other["environment"]["mpi_error"] = "RuntimeError: cannot load MPI library"
    assert lines_of("a", {"a": host(), "b": host(), "c": other}) == [
        "c: Python 3.12.1, here 3.11.2",
        "c: mpitrain's code differs",
        "c: the MPI library RuntimeError: cannot load MPI library, here MPICH 5.0.2",
        "c: mpi4py (not there), here 4.1.2",
        "c: numpy 2.3.1, here 2.4.6",
        "c: six 1.0, here (not there)",
        "c: model/net.py is not there",
        "c: old.py is there, but not here",
        "c: train.py differs",
    ]
    many = host(packages={f"p{number}": "1" for number in range(9)})
    facts = {"a": host(), "b": host(python="3.12.1", files={"train.py": "9", "model/net.py": "2"}), "c": many}
    packages = "mpi4py (not there), here 4.1.2; numpy (not there), here 2.4.6; p0 1, here (not there)"
    assert faults_by_host(differences("a", facts)) == {
        "b": "Python 3.12.1, here 3.11.2; train.py differs",
        "c": f"{packages}; and 8 more differences",
    }


def test_missing_paths_come_alone() -> None:
    def with_path(*found: str) -> dict[str, Any]:
        return {"paths": {"/share/venv/bin/python": list(found)}}

    facts = {
        "a": host(),
        "b": with_path("missing", "/share/venv"),
        "c": with_path("empty", "/share"),
        "d": with_path("hangs"),
        "e": with_path("error", "/share", "Stale file handle"),
    }
    assert lines_of("a", facts) == [
        "b: /share/venv does not exist; is the shared folder mounted?",
        "c: /share is empty, so /share/venv/bin/python does not exist; is the shared folder mounted?",
        "d: /share/venv/bin/python does not answer; is the file server up?",
        "e: /share: Stale file handle",
    ]


def test_the_list() -> None:
    """This machine comes first, and a long list is cut."""
    broken = {"paths": {"/share": ["there"]}, "environment": {"error": "/share/python failed: no module x"}}
    for own in "ab":
        assert lines_of(own, {"a": broken, "b": host()}) == ["a: /share/python failed: no module x"]
    lines = lines_of("a", {"a": host(), "b": host(packages={f"p{number}": "1" for number in range(100)})})
    assert (len(lines), lines[-1]) == (31, "and 72 more differences")


def test_a_copy_in_pythonpath() -> None:
    """It hides the environment's package, and may have no version."""
    copy = host(hidden={"numpy": ["/scratch/lib", ""]})
    expected = "numpy is that of /scratch/lib (PYTHONPATH), here that of the environment"
    assert lines_of("a", {"a": host(), "b": copy}) == [f"b: {expected}"]
    assert lines_of("a", {"a": copy, "b": copy}) == []
    other = host(hidden={"numpy": ["/scratch/lib", "2.3.1"]}, packages={"numpy": "2.3.1", "mpi4py": "4.1.2"})
    expected = "numpy 2.3.1 of /scratch/lib (PYTHONPATH), here 2.4.6"
    assert lines_of("a", {"a": host(), "b": other}) == [f"b: {expected}"]


def test_what_a_folder_of_pythonpath_hides(tmp_path: Path) -> None:
    installed = ("installed/numpy", "installed/six", "installed/mpi4py")
    for name in (*installed, "first/numpy", "first/data", "second/six-1.0.dist-info"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("first/numpy/__init__.py", "installed/six.py", "second/six.py", "second/mpi4py.py"):
        (tmp_path / name).touch()
    path = os.pathsep.join(["", *(str(tmp_path / name) for name in ("first", "missing", "second", "installed"))])
    assert hidden(path, [str(tmp_path / "installed")]) == {
        "numpy": [str(tmp_path / "first"), ""],
        "six": [str(tmp_path / "second"), "1.0"],
        "mpi4py": [str(tmp_path / "second"), ""],  # a file in place of a folder
    }
