"""The facts of a host. A child answers each question that may take too long or print too much."""

from __future__ import annotations

import os
import re
import socket
import sys
import uuid
from pathlib import Path

import pytest
from programs import program

from jobs import HANG_SECONDS, TOKEN, processes_of
from mpitrain import facts as common
from mpitrain.errors import LaunchError
from mpitrain.launch import facts, served

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
    """`load` is per processor. The message says how long the guard waited for a Python that never answers."""
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
