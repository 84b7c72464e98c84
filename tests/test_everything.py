"""tests/everything.py runs every test once, side by side, and ends a part and all the jobs in it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import everything
import side_by_side
from jobs import HANG_SECONDS, REPOSITORY, run_command, until
from side_by_side import Part, run

# A part that will not end by SIGTERM, with a job in a session of its own, as the tests start them.
PART = f"""
import os, pathlib, signal, sys
sys.path.insert(0, {str(REPOSITORY / "tests")!r})
from jobs import run_command
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], "part").write_text(str(os.getpid()))
run_command(["sh", "-c", 'echo $$ > "$0/job.new" && mv "$0/job.new" "$0/job" && exec sleep 1000', sys.argv[1]])
"""


def test_every_folder_of_tests_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run on all ranks of a job are modules to run, one for each world size; no other part collects them."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    modules = {f"tests.{path.parent.name}" for path in (REPOSITORY / "tests").glob("*/__main__.py")}
    commands = {part.name: list(part.command) for part in everything.parts(nightly=False)}
    assert {command[command.index("-m") + 1] for name, command in commands.items() if "ranks on " in name} == modules
    assert "torch_ranks on 3" in commands
    files = Counter(
        path
        for name, command in commands.items()
        if command[:3] == [sys.executable, "-m", "pytest"]
        for path in files_of(command)
    )
    folders = [REPOSITORY / module.replace(".", "/") for module in modules]
    every = (path for path in (REPOSITORY / "tests").rglob("test_*.py") if not set(folders) & set(path.parents))
    assert files == dict.fromkeys(every, 1)


def test_one_process_can_collect_all_tests() -> None:
    """pytest takes two files of one name for one module, unless the folder of either is a package."""
    bare = [path for path in (REPOSITORY / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    assert {name: count for name, count in Counter(path.name for path in bare).items() if count > 1} == {}


def test_the_parts_of_the_faults_begin_before_all_others_but_the_beds() -> None:
    """They take longest. What they name is there: a file of another name would be in the last of them."""
    names = [part.name for part in everything.parts(nightly=False)]
    assert names[: len(everything.ON_NODES) + len(everything.FAULTS)] == [*everything.ON_NODES, *everything.FAULTS]
    paths = [path for paths in (everything.ON_NODES | everything.FAULTS).values() for path in paths]
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
    assert {part.cores for part in everything.parts(nightly=False) if part.name in everything.FAULTS} == {0.2}


def files_of(command: list[str]) -> set[Path]:
    """The files of tests below the folders that are given to pytest, but for those that it is to ignore."""
    ignored = {REPOSITORY / word.partition("=")[2] for word in command if word.startswith("--ignore=")}
    given = [REPOSITORY / word for word in command if word.startswith("tests")]
    files = {file for path in given for file in ([path] if path.is_file() else path.rglob("test_*.py"))}
    return {file for file in files if not ignored & {file, *file.parents}}


def pids(folder: Path) -> list[int]:
    until((folder / "job").exists, "the job did not start")
    return [int((folder / name).read_text()) for name in ("part", "job")]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "GRACE_SECONDS", 0.3)


def part(source: str, folder: Path, **options: Any) -> Part:
    return Part(folder.name, [sys.executable, "-c", source, str(folder)], **{"is_pytest": False, **options})


def test_parts_run_side_by_side_and_are_printed_one_by_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As many as there are cores for; what waits counts as none. Each of these waits until the other has begun."""
    source = """
import pathlib, sys, time
own, other = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1]).with_name(sys.argv[2])
print("first line", flush=True)
own.joinpath("begun").touch()
while not other.joinpath("begun").exists(): time.sleep(0.02)
print("second line", file=sys.stderr)
"""
    cores = {"a": 1, "b": 1, "c": 7, "d": 0}
    for name in cores:
        (tmp_path / name).mkdir()
    parts = []
    for (name, count), other in zip(cores.items(), "badc", strict=True):
        given = part(source, tmp_path / name, cores=count, deadline_seconds=HANG_SECONDS)
        parts.append(replace(given, command=[*given.command, other]))
    counts = run(parts, cores=2)
    assert counts == {name: {"passed": 1} for name in cores}
    printed = capfd.readouterr().out
    assert printed.index("... d begins") < printed.index("=== ") < printed.index("... c begins")
    for name in cores:
        assert f"\n=== {name}\nfirst line\nsecond line\n--- {name}: {{'passed': 1}}, " in printed


def test_failed_tests_are_counted(tmp_path: Path) -> None:
    """A part that ends badly without a failed test counts as one."""
    test = tmp_path / "test_these.py"
    test.write_text("import pytest\ndef test_a(): pass\ndef test_b(): assert False\ndef test_c(): pytest.skip('why')")
    pytest_run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    parts = [Part("tests", pytest_run), Part("none", [sys.executable, "-c", "", "--"], is_pytest=True)]
    parts += [Part("bad", ["false"]), Part("worse", ["false"], is_pytest=False)]
    assert run(parts, cores=2) == {
        "tests": {"passed": 1, "failed": 1, "skipped": 1},
        "none": {},
        "bad": {"failed": 1},
        "worse": {"failed": 1},
    }


def test_paths_and_options_are_given_to_pytest() -> None:
    """Tests that run on all ranks get a job; what fails is named with the command that runs it alone."""
    words = ["tests/test_tree.py::test_a", "tests/ranks/test_world.py", "-k", "mean", "tests/device_ranks", "-x"]
    parts = {part.name: part for part in everything.parts_of(words, 2, "openmpi")}
    (one,) = [part for name, part in parts.items() if "test_tree" in name]
    assert one.command[1:] == ["-m", "pytest", "-q", "-k", "mean", "-x", "tests/test_tree.py::test_a"]
    on_ranks = parts["ranks on 2, openmpi"]
    assert on_ranks.command[-5:] == ["tests.ranks", "-k", "mean", "-x", "tests/ranks/test_world.py"]
    assert on_ranks.alone == "scripts/test --ranks 2 --mpi openmpi"
    emulated = parts["device_ranks on 2, openmpi"].command
    assert emulated[-6:] == ["tests.device_ranks", "--emulated=2", "-k", "mean", "-x", "tests/device_ranks"]


def test_a_path_that_is_not_there() -> None:
    command = [sys.executable, "tests/everything.py", "tests/test_treee.py"]
    job = run_command(command)
    assert job.code == 2
    assert "tests/test_treee.py: no such file or folder" in job.stderr


def test_the_command_that_repeats_a_failed_test() -> None:
    """It is the name that pytest takes, also of a test with parameters on all ranks."""
    names = ["tests/ranks/test_world.py::test_a[1-b c]", "tests/test_tree.py"]
    for classname, name, wanted in (
        ("tests.ranks.test_world", "test_a[1-b c]", names[0]),
        ("tests.test_tree", "test_x", f"{names[1]}::test_x"),
        ("tests.test_tree.TestIt", "test_x", f"{names[1]}::TestIt::test_x"),
    ):
        assert side_by_side._node_id({"classname": classname, "name": name}) == wanted


# Each of them fails beside the others and leaves a note; where there is a note, the first two pass.
AGAIN = """
import pathlib, pytest
@pytest.mark.parametrize("name", ["first", "second", "third", "fourth"])
def test_it(name):
    note = pathlib.Path(__file__).with_name(name)
    has_failed = note.exists()
    note.touch()
    assert has_failed and name in {passing}
def test_fine(): pass
"""


def run_again(folder: Path, names: list[str], passing: list[str], **options: Any) -> Counter[str]:
    """The counts of a part whose tests of these names fail; those that are passing do so the second time."""
    test = folder / "test_again.py"
    test.write_text(AGAIN.replace("{passing}", repr(passing)))
    chosen = ["-k", " or ".join([*names, "fine"])]
    part = Part("tests", [sys.executable, "-m", "pytest", "-q", str(test), *chosen], **{"again": True, **options})
    return run([part, Part("other", ["true"], is_pytest=False)], cores=2)["tests"]


def test_a_failed_test_is_tried_again_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_again(tmp_path, ["first", "second"], ["first", "second"]) == {"passed": 3}
    printed = capfd.readouterr().out
    assert printed.index("--- other") < printed.index("... tests, again begins")
    last = printed.splitlines()[-1]
    assert last.startswith("failed beside other parts and passed alone, so mend it: ")
    assert re.findall(r"test_again.py::test_it\[\w+\]", last) == [
        "test_again.py::test_it[first]",
        "test_again.py::test_it[second]",
    ]


@pytest.mark.parametrize(
    ("names", "passing", "again"),
    [
        (["first", "second"], ["first"], True),
        (["first", "second", "third", "fourth"], ["first", "second", "third", "fourth"], True),
        pytest.param(["first"], ["first"], False, marks=pytest.mark.nightly),
    ],
    ids=["one fails again", "many fail", "the part may not be tried again"],
)
def test_a_failed_test_stays_failed(tmp_path: Path, names: list[str], passing: list[str], again: bool) -> None:
    assert run_again(tmp_path, names, passing, again=again) == Counter(passed=1, failed=len(names))


def test_a_part_that_hangs(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of a part counts from the start of its job."""
    monkeypatch.setattr(side_by_side.Running, "seconds", property(lambda _: 9.0 * (tmp_path / "job").exists()))
    counts = run([part(PART, tmp_path, deadline_seconds=5.0)], cores=1)
    assert counts == {tmp_path.name: {"failed": 1}}
    assert "ended: it ran longer than 5 s" in capfd.readouterr().out
    assert [is_alive(pid) for pid in pids(tmp_path)] == [False, False]


def interrupted(source: str, folder: Path) -> list[Path]:
    """Run two parts and press Ctrl-C once both have begun; return their folders."""
    folders = [folder / "a", folder / "b"]
    for one in folders:
        one.mkdir()

    def interrupt() -> None:
        for one in folders:
            until((one / "job").exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run([part(source, one, deadline_seconds=HANG_SECONDS) for one in folders], cores=2)
    thread.join()
    return folders


def test_ctrl_c(tmp_path: Path) -> None:
    assert [is_alive(pid) for folder in interrupted(PART, tmp_path) for pid in pids(folder)] == [False] * 4


# A part that clears up when it is asked to end, the one called b for longer, and counts how often it is asked.
CLEARS_UP = """
import os, pathlib, signal, sys, time
folder, asked = pathlib.Path(sys.argv[1]), []
signal.signal(signal.SIGTERM, lambda *_: asked.append("asked"))
(folder / "part").write_text(str(os.getpid()))
(folder / "job").touch()
while not asked:
    time.sleep(0.02)
while folder.name == "b" and not (folder.parent / "a/cleared").exists():
    time.sleep(0.02)
for _ in range(50):
    time.sleep(0.02)
(folder / "cleared").write_text(" ".join(asked))
"""


def test_what_is_clearing_up_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second SIGTERM came in the middle of it, and a bed of nodes stayed."""
    monkeypatch.setattr(side_by_side, "GRACE_SECONDS", HANG_SECONDS)
    folders = interrupted(CLEARS_UP, tmp_path)
    assert [(folder / "cleared").read_text() for folder in folders] == ["asked", "asked"]


def test_the_end_of_the_run_is_no_failed_job() -> None:
    """Else the run continued after SIGTERM, until it was killed, and its bed stayed."""
    with pytest.raises(pytest.exit.Exception):
        run_command([sys.executable, "-c", "pass"], during=lambda _: pytest.exit("SIGTERM"))


def test_sigterm(tmp_path: Path) -> None:
    """A user or a CI runner ends a run by SIGTERM. A script that starts it in the background makes it ignore Ctrl-C."""
    source = f"""
import signal, sys
sys.path.insert(0, {str(REPOSITORY / "tests")!r})
signal.signal(signal.SIGINT, signal.SIG_IGN)
import everything, side_by_side
side_by_side.GRACE_SECONDS = 0.3
command = [sys.executable, "-c", {PART!r}, {str(tmp_path)!r}]
everything.parts = lambda nightly: [side_by_side.Part("a part", command, is_pytest=False)]
sys.argv = ["everything"]
everything.main()
"""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.DEVNULL, env=environment) as process:
        started = pids(tmp_path)
        assert len(list(temporary.iterdir())) == 1
        process.terminate()
        assert process.wait(timeout=HANG_SECONDS) == 128 + signal.SIGTERM
    assert [is_alive(pid) for pid in started] == [False, False]
    assert list(temporary.iterdir()) == []
