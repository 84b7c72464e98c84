"""`mpitrain run --starter agent`: the agents of the hosts start the ranks. How such jobs end, and what they print."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import pretended_ssh
from jobs import REPOSITORY, Job, run_command, until
from mpitrain.launch.processes import command_line
from pretended_hosts import NAMES, Hosts, address

MPITRAIN = [sys.executable, "-m", "mpitrain"]
RANK = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
# The others tell, by a file, how they end.
OTHERS = """
def end(number, frame):
    open(f"ended-{rank}", "w").write(str(number))
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
open(f"ready-{rank}", "w").close()
while not all(os.path.exists(f"ready-{other}") for other in range(3)): time.sleep(0.01)
"""


def run(folder: Path, source: str, *options: str, during: Callable[[subprocess.Popen[str]], None] | None = None) -> Job:
    (folder / "train.py").write_text(RANK + source)
    words = ["--starter", "agent", "--max-restarts", "0", *options, "train.py"]
    return run_command([*MPITRAIN, "run", *words], cwd=folder, during=during)


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, r"was killed by signal 9; mpitrain ended the others"),
        ("os._exit(9)", 9, r"left with exit code 9; mpitrain ended the others"),
        ("sys.exit(7)", 7, r"left with exit code 7 \(train.py:\d+\)"),
        ("1 / 0", 1, r"failed at \d\d:\d\d:\d\d: ZeroDivisionError: division by zero"),
    ],
)
def test_a_rank_that_ends_ends_the_others(tmp_path: Path, how: str, code: int, said: str) -> None:
    job = run(tmp_path, f"{OTHERS}\nif rank == 1: {how}\ntime.sleep(1000)", "-n", "3")
    assert (job.code, job.left) == (code, []), job.output
    assert re.search(rf"^mpitrain: rank 1 on \S+ {said}$", job.stderr, re.M), job.output
    ended = {path.name: path.read_text() for path in tmp_path.glob("ended-*")}
    assert ended == dict.fromkeys(["ended-0", "ended-2"], str(int(signal.SIGTERM)))


def test_a_rank_that_does_not_heed_sigterm(tmp_path: Path) -> None:
    source = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif rank: os._exit(3)\ntime.sleep(1000)"
    job = run(tmp_path, source, "-n", "2")
    assert (job.code, job.left) == (3, []), job.output


def test_ranks_that_end_before_the_last_one(tmp_path: Path) -> None:
    job = run(tmp_path, "time.sleep(3.0 if rank == 1 else 0.0)\nprint('end of', rank)", "-n", "3")
    assert (job.code, job.left) == (0, []), job.output
    assert sorted(job.stdout.splitlines()) == [f"[{rank}] end of {rank}" for rank in range(3)]
    assert job.stdout.splitlines()[-1] == "[1] end of 1"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    def send(process: subprocess.Popen[str]) -> None:
        until(lambda: len(list(tmp_path.glob("ready-*"))) == 3, "the ranks have not begun")
        process.send_signal(number)

    source = OTHERS.replace("signal.SIGTERM", f"signal.{number.name}") + "time.sleep(1000)"
    job = run(tmp_path, source, "-n", "3", during=send)
    assert (job.code, job.left) == (128 + number, []), job.output
    assert f"mpitrain: {number.name}: ending the job; a second signal kills it at once" in job.stderr
    assert {path.read_text() for path in tmp_path.glob("ended-*")} == {str(int(number))}
    assert len(list(tmp_path.glob("ended-*"))) == 3


def test_all_output_arrives(tmp_path: Path) -> None:
    """Also what is written in the last moment, and more than an agent reads ahead."""
    source = (
        "for number in range(20000): print(rank, number, 'x' * 100, file=(sys.stdout, sys.stderr)[number % 2])\n"
        "sys.stdout.flush(); os.write(1, b'last'); os._exit(0)\n"
    )
    job = run(tmp_path, source, "-n", "2")
    assert (job.code, job.left) == (0, []), job.output[-2000:]
    for rank in (0, 1):
        for part, lines in enumerate((job.stdout.splitlines(), job.stderr.splitlines())):
            mine = [line.split()[2] for line in lines if line.startswith(f"[{rank}] {rank} ")]
            assert mine == [str(number) for number in range(part, 20000, 2)]
    assert job.stdout.count("last") == 2 or "[0,1] last" in job.stdout


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{RANK}while True: print(rank, time.time())")
    line = f"{sys.executable} -m mpitrain run --starter agent -n 2 train.py | head -3; echo ${{PIPESTATUS[0]}}"
    job = run_command(["bash", "-c", line], cwd=tmp_path)
    assert (len(job.stdout.splitlines()), job.left) == (4, []), job.output
    assert job.stdout.splitlines()[-1] != "0"


def test_what_a_rank_leaves_is_ended_and_named(tmp_path: Path) -> None:
    job = run(tmp_path, "import subprocess\nif rank: subprocess.Popen(['sleep', '1000'])", "-n", "2")
    assert (job.code, job.left) == (1, []), job.output
    assert "mpitrain: the ranks ended before 1 processes of the job, which were killed:" in job.stderr
    assert "sleep 1000" in job.stderr


def child_of(pid: int, word: str) -> int:
    """The child of a process whose command line has this word."""
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return next(child for child in children if word in command_line(child))


def test_an_agent_that_is_killed(tmp_path: Path) -> None:
    def kill(process: subprocess.Popen[str]) -> None:
        until(lambda: len(list(tmp_path.glob("ready-*"))) == 3, "the ranks have not begun")
        os.kill(child_of(process.pid, " -I "), signal.SIGKILL)

    job = run(tmp_path, OTHERS + "time.sleep(1000)", "-n", "3", during=kill)
    assert job.code != 0, job.output
    assert job.left == [], job.output
    assert "was killed by signal 9" in job.stderr


def test_a_program_that_cannot_be_started(tmp_path: Path) -> None:
    """The working folder vanishes behind the launcher."""
    (tmp_path / "gone").mkdir()
    (tmp_path / "train.py").write_text(RANK)
    script = (
        "import os, shutil, sys\n"
        "from mpitrain.launch import started_ranks\n"
        "begin = started_ranks.AgentRanks.start\n"
        "def start(self):\n"
        "    begin_folder = os.getcwd(); os.rmdir(begin_folder)\n"
        "    started_ranks.Path.cwd = staticmethod(lambda: started_ranks.Path(begin_folder))\n"
        "    begin(self)\n"
        "started_ranks.AgentRanks.start = start\n"
        "from mpitrain.cli import main\n"
        "sys.exit(main(['run', '--starter', 'agent', '-n', '2', '../train.py']))\n"
    )
    job = run_command([sys.executable, "-c", script], cwd=tmp_path / "gone")
    assert (job.code, job.left) == (1, []), job.output
    assert re.search(
        r"^mpitrain: \S+: rank 0 cannot be started: \S+python\S* in \S+gone: .*No such file", job.stderr, re.M
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("from mpi4py import MPI", r"ImportError: rank 0 on \S+ asks for MPI, and mpitrain run has started the ranks "),
        (
            "import mpitrain as mt; mt.init()",
            r"rank 0 on \S+ asks for MPI, and mpitrain run has started the ranks with",
        ),
    ],
)
def test_a_script_that_needs_mpi_after_all(tmp_path: Path, source: str, said: str) -> None:
    job = run(tmp_path, f"if rank: time.sleep(1000)\n{source}", "-n", "2")
    assert (job.code, job.left) == (1, []), job.output
    assert re.search(said, job.stderr), job.output
    assert "Start them with MPI: mpitrain run --starter mpiexec" in job.stderr


@pytest.mark.parametrize("option", [["--exchange", "mpitrain"], ["--servers", "1"], ["--recover"]])
def test_options_that_need_mpi(tmp_path: Path, option: list[str]) -> None:
    job = run(tmp_path, "", "-n", "2", *option)
    assert (job.code, job.stdout) == (2, ""), job.output
    assert f"{option[0]} needs MPI, and --starter agent starts ranks without it; leave out one of them" in job.stderr


@pytest.fixture
def without_mpi(tmp_path: Path) -> Path:
    """The Python of an environment that has NumPy and mpitrain, and no mpi4py."""
    packages, folder = Path(sysconfig.get_paths()["purelib"]), tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (own,) = folder.glob("lib/python*/site-packages")
    for package in packages.glob("numpy*"):
        (own / package.name).symlink_to(package)
    (own / "mpitrain.pth").write_text(f"{REPOSITORY}\n")
    return folder / "bin/python"


def test_an_environment_without_mpi4py(tmp_path: Path, without_mpi: Path) -> None:
    (tmp_path / "train.py").write_text(f"{RANK}print(rank, 'of', os.environ['WORLD_SIZE'])")
    job = run_command([str(without_mpi), "-m", "mpitrain", "run", "-n", "2", "train.py"], cwd=tmp_path)
    assert (job.code, job.left) == (0, []), job.output
    assert sorted(job.stdout.splitlines()) == ["[0] 0 of 2", "[1] 1 of 2"]
    assert f"the ranks start without MPI: {without_mpi} has no mpi4py (--starter mpiexec: with MPI)" in job.stderr


def test_others_see_the_job(tmp_path: Path) -> None:
    """`mpitrain ps`, `top` and `kill` know it as they know a job of mpiexec."""
    seen: dict[str, str] = {}

    def look(process: subprocess.Popen[str]) -> None:
        until(lambda: len(list(tmp_path.glob("ready-*"))) == 3, "the ranks have not begun")
        token = (tmp_path / "job").read_text()
        seen["ps"] = next((line for line in tell("ps").splitlines() if token in line), "")
        seen["top"] = tell("top", "--json", token)
        tell("kill", token)

    def tell(*words: str) -> str:
        done = subprocess.run([*MPITRAIN, *words], capture_output=True, text=True, timeout=300, check=False)
        return done.stdout + done.stderr

    note = "if rank == 0: open('job', 'w').write(os.environ['_MPITRAIN_JOB'])\n"
    job = run(tmp_path, f"{note}{OTHERS}\ntime.sleep(1000)", "-n", "3", during=look)
    assert job.code != 0, job.output
    assert job.left == [], job.output
    assert "0-2 on" in seen["ps"], seen
    assert [rank["rank"] for rank in json.loads(seen["top"])["jobs"][0]["ranks"]] == [0, 1, 2]


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[str]]]:
    """What makes the words of a program on one of three hosts, which reach each other by ssh."""
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "bin").mkdir()
    pretended_ssh.install(folder / "bin")
    with Hosts(folder, [folder, tmp_path_factory.getbasetemp()]) as there:
        servers = []
        for name in NAMES:
            words = [*there.enter(name, Path("/")), "/usr/bin/python3", pretended_ssh.__file__, "serve", address(name)]
            servers.append(subprocess.Popen(words))
        path = f"PATH={folder / 'bin'}:{os.environ['PATH']}"
        yield lambda name, cwd, *words: [*there.enter(name, cwd), "env", path, *words]
        for server in servers:
            server.kill()
            server.wait()


def over_hosts(
    hosts: Callable[..., list[str]],
    folder: Path,
    source: str,
    during: Callable[..., None] | None = None,
    options: Sequence[str] = ("--max-restarts", "0"),
) -> Job:
    (folder / "train.py").write_text(RANK + source)
    words = ["run", "--starter", "agent", *options, "--hosts", "n1:1,n2:2", "train.py"]
    return run_command(hosts("n1", folder, *MPITRAIN, *words), cwd=folder, during=during, timeout=200.0)


def test_ranks_of_two_hosts(tmp_path: Path, hosts: Callable[..., list[str]]) -> None:
    names = "['RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'MASTER_ADDR']"
    job = over_hosts(hosts, tmp_path, f"print(os.uname().nodename, *map(os.environ.get, {names}))")
    assert (job.code, job.left) == (0, []), job.output
    places = ["[0] n1 0 0 1 0 10.77.0.1", "[1] n2 1 0 2 1 10.77.0.1", "[2] n2 2 1 2 1 10.77.0.1"]
    assert sorted(job.stdout.splitlines()) == places


def test_a_rank_of_another_host_is_killed(tmp_path: Path, hosts: Callable[..., list[str]]) -> None:
    job = over_hosts(hosts, tmp_path, f"{OTHERS}\nif rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(1000)")
    assert (job.code, job.left) == (137, []), job.output
    assert "mpitrain: rank 1 on n2 was killed by signal 9; mpitrain ended the others" in job.stderr
    assert sorted(path.name for path in tmp_path.glob("ended-*")) == ["ended-0", "ended-2"]


def test_a_host_that_falls_silent(tmp_path: Path, hosts: Callable[..., list[str]]) -> None:
    def cut(_: subprocess.Popen[str]) -> None:
        until(lambda: len(list(tmp_path.glob("ready-*"))) == 3, "the ranks have not begun")
        subprocess.run(hosts("n2", Path("/"), "ip", "link", "set", "eth0", "down"), check=True, timeout=60)

    job = over_hosts(hosts, tmp_path, OTHERS + "time.sleep(1000)", during=cut)
    assert job.code == 1, job.output
    assert "n2" in job.stderr
    assert "silent" in job.stderr or "heard" in job.stderr, job.output


def test_a_launcher_that_is_killed(tmp_path: Path, hosts: Callable[..., list[str]]) -> None:
    def kill(process: subprocess.Popen[str]) -> None:
        until(lambda: len(list(tmp_path.glob("ready-*"))) == 3, "the ranks have not begun")
        os.kill(child_of(process.pid, "mpitrain"), signal.SIGKILL)

    job = over_hosts(hosts, tmp_path, OTHERS + "time.sleep(1000)", during=kill)
    assert (job.code, job.left) == (-signal.SIGKILL, []), job.output


def test_a_job_that_continues_on_fewer_hosts(tmp_path: Path, hosts: Callable[..., list[str]]) -> None:
    """The ranks on the lost host end too: the network is cut there, and its agent hears no launcher."""
    source = (
        "import subprocess\n"
        "count, size = os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['WORLD_SIZE']\n"
        "print(f'rank {rank} of {size} in try {count}', flush=True)\n"
        "if count == '0':\n"
        "    if rank == 1: subprocess.run(['/usr/sbin/ip', 'link', 'set', 'eth0', 'down'], check=True)\n"
        "    time.sleep(1000)\n"
    )
    job = over_hosts(hosts, tmp_path, source, options=["--max-restarts", "1", "--nnodes", "1:2"])
    assert (job.code, job.left) == (0, []), job.output
    assert "\nrank 0 of 1 in try 1\n" in job.stdout
    assert "n2 fell silent" in job.stderr
