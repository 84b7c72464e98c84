"""A guard on this machine, without ssh: its facts, what it sees of the job, and that it leaves nothing of the job."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest

from jobs import HANG_SECONDS, until
from mpitrain.job.context import JOB
from mpitrain.launch.connections import Connection, connect, explain
from mpitrain.launch.host_report import HostReport
from mpitrain.launch.placement import Place
from mpitrain.launch.shared_files import FOLDER
from mpitrain.launch.stalls import Stalls
from mpitrain.launch.watch import Guards
from mpitrain.launch.watched import WatchedJob
from mpitrain.watching.census import FirstEnd
from mpitrain.watching.rank_record import BEGUN, DONE, PHASES, STARTED, WAITS, RankRecord
from mpitrain.watching.view import RankView


@pytest.fixture
def wish(tmp_path: Path) -> dict[str, Any]:
    """The request of a launcher."""
    script = tmp_path / "code/train.py"
    script.parent.mkdir()
    script.write_text("print('hello')\n")
    return {
        "python": sys.executable,
        "paths": [str(script), str(tmp_path)],
        "script": str(script),
        "variables": {},
        "peers": {"self": "127.0.0.1"},
        "token": uuid.uuid4().hex,
        "roll_call": str(tmp_path / "roll_call"),
        "silence_seconds": HANG_SECONDS,
    }


@pytest.fixture
def connections() -> Iterator[list[Connection]]:
    """The connections that a test opens. They are closed after the test."""
    opened: list[Connection] = []
    yield opened
    for connection in opened:
        connection.hang_up()
        connection.close(HANG_SECONDS)


@pytest.fixture
def job(wish: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A process with the mark of the job, and a child of it without the mark."""
    program = "import subprocess; print(subprocess.Popen(['sleep', '600'], env={}).pid, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, JOB: wish["token"]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def wait_for(connection: Connection, key: str, fits: Callable[[Any], bool] = lambda _: True) -> Any:
    """Wait for the message with this key."""
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline and not connection.is_closed:
        connection.flush()  # a pipe takes 64 KiB at once
        for message in connection.receive(time.monotonic()):
            if key in message and fits(message[key]):
                return message
        time.sleep(0.02)
    raise AssertionError(f"no {key}: {connection.why_closed() if connection.is_closed else 'silence'}")


def begin(wish: dict[str, Any], connections: list[Connection]) -> Connection:
    connection = connect("here", is_this_machine=True, wish=wish, now=0.0)
    connections.append(connection)
    wait_for(connection, "facts")
    return connection


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(*pids: int) -> None:
    until(lambda: not any(map(is_alive, pids)), "still there")


def test_facts(wish: dict[str, Any], connections: list[Connection], tmp_path: Path) -> None:
    (tmp_path / "code/.venv").mkdir()
    (tmp_path / "code/.venv/hidden.py").touch()
    (tmp_path / "code/model").mkdir()
    (tmp_path / "code/model/net.py").touch()
    connection = connect("here", is_this_machine=True, wish=wish, now=0.0)
    connections.append(connection)
    facts = wait_for(connection, "facts")["facts"]
    assert facts["paths"] == {path: ["there"] for path in wish["paths"]}
    assert facts["routes"]["self"]["interface"] == "lo"
    environment = facts["environment"]
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["packages"]["numpy"]
    assert set(environment["files"]) == {"train.py", "model/net.py"}
    assert "MPICH" in environment["mpi"]


def test_paths_that_are_not_there(wish: dict[str, Any], connections: list[Connection], tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    wish["paths"] = [str(tmp_path / "share/venv/bin/python"), str(tmp_path / "nothing/train.py")]
    connection = connect("here", is_this_machine=True, wish=wish, now=0.0)
    connections.append(connection)
    facts = wait_for(connection, "facts")["facts"]
    assert list(facts["paths"].values()) == [["empty", f"{tmp_path}/share"], ["missing", f"{tmp_path}/nothing"]]
    assert "environment" not in facts


def test_a_shell_that_takes_a_line_of_what_is_sent(
    wish: dict[str, Any], connections: list[Connection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a `read` in ~/.bashrc: the error says so, and the guard does not misread its input."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\n$READ\nfor line; do :; done\nexec sh -c "$line"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("READ", ":")
    connection = connect("b", is_this_machine=False, wish=wish, now=0.0)
    connections.append(connection)
    wait_for(connection, "facts")
    monkeypatch.setenv("READ", "read answer")
    connection = connect("b", is_this_machine=False, wish=wish, now=0.0)
    connections.append(connection)
    with pytest.raises(AssertionError, match="b: the shell takes a line of what is sent to a command: a startup file"):
        wait_for(connection, "facts")


def test_a_python_that_fails(wish: dict[str, Any], connections: list[Connection]) -> None:
    wish["variables"] = {"PYTHONHOME": "/nowhere"}
    connection = connect("here", is_this_machine=True, wish=wish, now=0.0)
    connections.append(connection)
    error = wait_for(connection, "facts")["facts"]["environment"]["error"]
    assert f"{sys.executable} failed: " in error


def test_it_gives_signs_of_life_while_it_is_busy(
    wish: dict[str, Any], connections: list[Connection], tmp_path: Path
) -> None:
    """Here with a Python that does not answer."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nuntil [ -e {tmp_path}/go ]; do sleep 0.1; done\n")
    python.chmod(0o755)
    connection = connect("here", is_this_machine=True, wish={**wish, "python": str(python)}, now=0.0)
    connections.append(connection)
    for _ in range(3):
        wait_for(connection, "alive")
    (tmp_path / "go").touch()
    wait_for(connection, "facts")


def test_two_names_of_one_machine(wish: dict[str, Any], connections: list[Connection]) -> None:
    Path(wish["roll_call"]).touch()
    connection = connect("here", is_this_machine=True, wish=wish, now=0.0)
    connections.append(connection)
    assert wait_for(connection, "error")["error"] == "this is the same machine as another host of the job"


RANK = """
import sys
from mpitrain.watching import watched_process
from mpitrain.watching.activity import publish
from mpitrain.watching.rank_record import CALLED
from mpitrain.watching.roll_call import appear
path, number, has_begun = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
if "old kernel" in has_begun:
    watched_process._PIDFD_OPEN = 1 << 20  # no kernel has a system call of this number
if has_begun:
    activity = publish(number)
    activity.enter(CALLED)
    activity.appear(path)
else:
    appear(path, number)
print("there", flush=True)
sys.stdin.read()
"""


@contextmanager
def rank_of(wish: dict[str, Any], number: int, *has_begun: str) -> Iterator[subprocess.Popen[str]]:
    """A process that answers the roll call as this rank, and optionally reports that it is in init()."""
    command = [sys.executable, "-c", RANK, wish["roll_call"], str(number), *has_begun]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
            yield process
        finally:
            process.kill()


def test_it_sees_how_far_ranks_are_and_who_is_gone(wish: dict[str, Any], connections: list[Connection]) -> None:
    connection = begin(wish, connections)
    with rank_of(wish, 3) as started, rank_of(wish, 4, "init") as called:
        views = wait_for(connection, "ranks", lambda ranks: len(ranks) == 2)["ranks"]
        assert [(view["record"]["rank"], view["record"]["phase"], view["pid"]) for view in views] == [
            (3, "started", started.pid),
            (4, "called", called.pid),
        ]
        assert [view["ended_seconds"] for view in views] == [None, None]
        started.kill()
        expected = {"rank": 3, "parent_of": [], "seconds": ANY, "pid": started.pid, "kernel": ANY, "code": -9}
        assert wait_for(connection, "first_end")["first_end"] == expected
        views = wait_for(connection, "ranks")["ranks"]
        assert [view["ended_seconds"] is None for view in views] == [False, True]


def test_another_process_becomes_the_rank(wish: dict[str, Any], connections: list[Connection]) -> None:
    connection = begin(wish, connections)
    with rank_of(wish, 1, "init") as first:
        wait_for(connection, "ranks", lambda ranks: [view["pid"] for view in ranks] == [first.pid])
    wait_for(connection, "ranks", lambda ranks: ranks[0]["ended_seconds"] is not None)
    with rank_of(wish, 1, "init") as second:
        (view,) = wait_for(connection, "ranks", lambda ranks: ranks[0]["pid"] == second.pid)["ranks"]
        assert view["ended_seconds"] is None


def test_told_to_end_it_names_and_kills_what_is_left(
    wish: dict[str, Any], connections: list[Connection], job: subprocess.Popen[str]
) -> None:
    assert job.stdout is not None
    below = int(job.stdout.readline())
    connection = begin(wish, connections)
    connection.send({"processes": 1})
    assert {entry[0] for entry in wait_for(connection, "processes")["processes"]} == {job.pid, below}
    connection.send({"end": 0.0})
    ended = wait_for(connection, "ended")
    assert {pid for pid, _ in ended["ended"]} == {job.pid, below}
    assert [below, "sleep 600"] in ended["ended"]
    assert ended["immortal"] == []
    wait_until_gone(job.pid, below)
    assert not Path(wish["roll_call"]).exists()


def test_when_the_launcher_is_gone_it_ends_the_job(
    wish: dict[str, Any], connections: list[Connection], job: subprocess.Popen[str]
) -> None:
    assert job.stdout is not None
    below = int(job.stdout.readline())
    connection = begin(wish, connections)
    connection.hang_up()
    wait_until_gone(job.pid, below)
    assert connection.process.wait(HANG_SECONDS) == 0
    assert not Path(wish["roll_call"]).exists()


def test_when_the_launcher_is_gone_it_removes_what_that_had_in_a_folder(
    wish: dict[str, Any], connections: list[Connection], tmp_path: Path
) -> None:
    agent, kept = tmp_path / "agent/ssh", tmp_path / "kept"
    agent.parent.mkdir()
    agent.touch()
    kept.touch()
    connection = begin({**wish, "agent": str(agent)}, connections)
    connection.hang_up()
    assert connection.process.wait(HANG_SECONDS) == 0
    assert not agent.parent.exists()
    assert kept.exists()


def test_in_place_of_a_killed_guard_another_one_ends_the_job(
    wish: dict[str, Any], job: subprocess.Popen[str], tmp_path: Path
) -> None:
    """The new guard ends the job's processes and its roll call, and removes MPI's files since the first guard began."""
    assert job.stdout is not None
    below = int(job.stdout.readline())
    with Guards("here", ["here"], {"here": wish}) as guards:
        guards.facts()
        guards.start()
        until(lambda: guards.reports["here"].since)
        file = Path(FOLDER) / f"mpich_shm_{uuid.uuid4().hex[:8]}_test"
        file.write_bytes(bytes(4096))
        try:
            os.kill(guards._connections["here"].process.pid, signal.SIGKILL)
            wait_for_trouble(guards)
            killed = "here: the guard of the job there was killed by signal 9"
            assert guards.trouble == f"{killed}\nThe job is ended on all hosts"
            assert is_alive(job.pid)
            assert is_alive(below)
            guards.end(0.0)
            assert {pid for pid, _ in guards.reports["here"].left or []} == {job.pid, below}
            assert guards.reports["here"].immortal == []
            assert not file.exists()
        finally:
            file.unlink(missing_ok=True)
    wait_until_gone(job.pid, below)
    assert not Path(wish["roll_call"]).exists()


def test_when_the_launcher_is_silent_it_ends_the_job(
    wish: dict[str, Any], connections: list[Connection], job: subprocess.Popen[str]
) -> None:
    wish["silence_seconds"] = 8.0
    connection = begin(wish, connections)
    for _ in range(20):
        connection.send({"beat": 1})
        time.sleep(0.5)
    assert is_alive(job.pid)
    wait_until_gone(job.pid)
    assert connection.process.wait(HANG_SECONDS) == 0


def wait_for_trouble(guards: Guards) -> None:
    until(lambda: guards.trouble is not None)


def test_it_may_open_as_many_files_as_there_may_be(wish: dict[str, Any], connections: list[Connection]) -> None:
    """Each rank takes three files, and the limit of a login is usually 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        connection = begin(wish, connections)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    connection.send({"processes": 1})
    wait_for(connection, "processes")
    assert resource.prlimit(connection.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def test_who_has_vanished() -> None:
    """Ranks that ended 10 s ago and had called init(), unless their program had ended."""
    views = {
        rank: RankView(RankRecord(rank, phase), 100 + rank, ended_seconds=10.1 + rank)
        for rank, phase in enumerate(PHASES)
    }
    assert (views[0].record.phase, views[3].record.phase) == (STARTED, DONE)
    assert HostReport(dict(reversed(views.items()))).vanished() == [1, 2, 4]  # in the order of ranks, not of arrival
    for ended_seconds in (9.9, None):
        recent = {rank: replace(view, ended_seconds=ended_seconds) for rank, view in views.items()}
        assert HostReport(recent).vanished() == []
    assert HostReport(views).vanished(recovers=True) == [1, 4]  # the others go on without a rank that had begun


WORDS = 'the kernel killed it for want of memory: "Killed process 7"'


@pytest.mark.parametrize(
    ("first", "dead", "expected"),
    [
        (FirstEnd(1, (), 10.0, 7, WORDS), (1,), f"rank 1 on a ended: {WORDS}"),
        (FirstEnd(1, (), 10.0, 7, WORDS), (0, 1), f"rank 1 on a ended: {WORDS}"),
        (FirstEnd(1, (), 10.0, 7), (0, 1), "rank 1 on a ended without a word (os._exit, or killed?)"),
        (None, (0, 1), "ranks 0,1 on a ended without a word (os._exit, or killed?)"),
        (FirstEnd(2, (), 10.0, 7, WORDS), (1,), "rank 1 on a ended without a word (os._exit, or killed?)"),
        (FirstEnd(None, (0,), 10.0, 7, WORDS), (1,), "rank 1 on a ended without a word (os._exit, or killed?)"),
    ],
)
def test_of_whom_the_kernel_speaks(first: FirstEnd | None, dead: tuple[int, ...], expected: str) -> None:
    """The kernel's words are about the first end on its host, and about no other."""
    views = {rank: RankView(RankRecord(rank, BEGUN), 100 + rank, ended_seconds=10.1) for rank in dead}
    report = HostReport(views, first_end=first)
    assert trouble_of(report) == [f"{expected}, and mpiexec goes on: the job is ended"]


@pytest.mark.parametrize(("rank", "why"), [(None, WORDS), (1, "it was killed, or has crashed")])
def test_of_which_process_of_mpiexec_the_kernel_speaks(rank: int | None, why: str) -> None:
    views = {0: RankView(RankRecord(0, BEGUN), 100, is_orphan=True)}
    report = HostReport(views, first_end=FirstEnd(rank, (0,) if rank is None else (), 10.0, 7, WORDS))
    assert trouble_of(report) == [f"the process of mpiexec on a that started rank 0 has gone: {why}"]


def trouble_of(report: HostReport) -> list[str]:
    """What the launcher says of a job on one host, `a`, from the report of its guard."""
    return trouble({"a": report}, [report.first_end] if report.first_end else [])


def trouble(reports: dict[str, HostReport], first_ends: list[FirstEnd], failed: RankRecord | None = None) -> list[str]:
    guards: Any = SimpleNamespace(
        trouble="",
        reports=reports,
        first_ends=lambda: first_ends,
        failed=lambda: failed,
        seen=lambda: ({}, []),
    )
    places = [Place(host, 2 * number, 2 * number + 2) for number, host in enumerate(reports)]
    return WatchedJob(places, guards, Path("/nowhere"), 0.0).trouble()


def test_who_vanished_first_on_several_hosts() -> None:
    """mpiexec has ended the others, and then waits for the processes that keep their output open."""
    views = {rank: RankView(RankRecord(rank, BEGUN), 100 + rank, ended_seconds=10.1) for rank in range(4)}
    reports = {
        host: HostReport({rank: views[rank] for rank in ranks}) for host, ranks in (("a", (0, 1)), ("b", (2, 3)))
    }
    first_ends = [FirstEnd(3, (), 10.0), FirstEnd(0, (), 10.1)]
    goes_on = ", and mpiexec goes on: the job is ended"
    assert trouble(reports, first_ends) == [f"rank 3 on b ended without a word (os._exit, or killed?){goes_on}"]
    assert trouble(reports, []) == [f"ranks 0-3 on a and b ended without a word (os._exit, or killed?){goes_on}"]
    assert trouble(reports, first_ends, views[1].record) == [f"rank 1 on a failed{goes_on}"]


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_lost_rank_waits_no_more(is_lost: bool) -> None:
    """The record of the rank still says that it waits, as when it was killed."""
    record = RankRecord(1, BEGUN, status=WAITS, stall_seconds=1.0, hang_seconds=2.0)
    view = RankView(record, 4711, seconds=100.0, state="S")
    report = HostReport({1: view}, seen=[view])
    guards: Any = SimpleNamespace(reports={"a": report}, lost=lambda: {1} if is_lost else set(), look_at_ranks=dict)
    stalls = Stalls([Place("a", 0, 2)], guards)
    assert (stalls.news() == []) is is_lost
    assert (stalls.fatal() == []) is is_lost


def test_a_network_is_suspected_only_where_a_host_does_not_answer() -> None:
    """Ranks that are merely slow wait in the same way."""
    record = RankRecord(0, BEGUN, status=WAITS, words="mean", stall_seconds=1.0, hang_seconds=0.0)
    views = {
        host: RankView(replace(record, rank=rank), 4711, seconds=2.0, state="S", host=host)
        for rank, host in [(0, "a"), (1, "b")]
    }
    reports = {host: HostReport({view.record.rank: view}, seen=[view]) for host, view in views.items()}
    asked: dict[str, list[str]] = {}

    def look() -> None:
        for host, report in reports.items():
            report.processes = [] if host in asked else None
            report.unreachable = asked.get(host, [])

    guards: Any = SimpleNamespace(reports=reports, lost=set, look_at_ranks=dict, look=look)

    def said() -> str:
        (line,) = Stalls([Place("a", 0, 1), Place("b", 1, 1)], guards).news()
        return line

    assert "all ranks are there: is the load too high" in said()
    asked |= {"a": [], "b": []}
    assert "all ranks are there, and their hosts answer each other: is the load too high" in said()
    asked["a"] = ["b"]
    assert "b does not answer a on the high ports that MPI uses: is a cable, a switch or a firewall at fault?" in said()


def test_reports_do_not_change_while_they_are_read(wish: dict[str, Any]) -> None:
    """The main thread reads the reports while the guards' thread receives new ones."""
    with Guards("here", ["here"], {"here": wish}) as guards:
        guards.facts()
        before = guards.reports["here"].ranks
        guards.start()
        with rank_of(wish, 5):
            until(lambda: guards.reports["here"].ranks)
        assert before == {}


def test_an_end_is_one_even_if_it_may_not_be_the_first(wish: dict[str, Any]) -> None:
    """The ranks that mpiexec then tells to end by SIGTERM must hear that the job fails."""
    told: list[bool] = []
    keepers: Any = SimpleNamespace(beat=lambda _records, *, is_ending, has_failed: told.append(is_ending or has_failed))
    with Guards("here", ["here"], {"here": wish}, keepers) as guards:
        guards.facts()
        guards.start()
        with rank_of(wish, 0, "init", "old kernel") as first, rank_of(wish, 1, "init", "old kernel"):
            until(lambda: len(guards.reports["here"].ranks) == 2)
            assert not any(told)
            first.kill()
            until(lambda: told[-1])
        assert guards.first_ends() == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watch_that_fails_is_trouble(wish: dict[str, Any]) -> None:
    """Otherwise the launcher would go on without the watch, and the guards would end the job for no visible reason."""
    with Guards("here", ["here"], {"here": wish}) as guards:
        assert guards.facts()["here"]["cores"] == len(os.sched_getaffinity(0))
        guards.start()
        guards.phases.when.clear()  # so that the next report fails
        with rank_of(wish, 0):
            wait_for_trouble(guards)
        assert guards.trouble == "the job is ended on all hosts, because it cannot be watched: KeyError('started')"


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


def test_an_end_without_a_word() -> None:
    assert explain("b", "", 137) == "b: ended with code 137 and wrote nothing"
