"""Hosts of a batch system, the script of `mpitrain slurm`, and an early SIGUSR1. tests/slurm has a real Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from programs import program

from jobs import run_command
from mpitrain.cli import main
from mpitrain.cli.slurm import _seconds
from mpitrain.errors import ConfigError
from mpitrain.launch import batch
from mpitrain.launch.batch import Allocation, advice_on_lost, find_allocation, slurm_hosts
from mpitrain.launch.connections import command_on
from mpitrain.launch.hosts import listed_hosts, place_ranks
from mpitrain.launch.placement import Placement
from mpitrain.launch.time_limit import BatchJob, batch_script

# As salloc -N3 -n5 of Slurm 22.05 sets them.
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_TASKS_PER_NODE": "3,1(x2)",
    "SLURM_NTASKS": "5",
    "SLURM_JOB_CPUS_PER_NODE": "3,1(x2)",
}


@pytest.fixture(autouse=True)
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of Slurm's own, which may not be installed: it says what Slurm said of this list."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    batch._expanded.cache_clear()
    says = '[ "$3" = n1 ] && echo n1 && exit\n[ "$3" = "n[1-3]" ] && printf "n1\\nn2\\nn3\\n" && exit'
    return program(tmp_path / "scontrol", f'{says}\nprintf "bad list\\nmore\\n" >&2; exit 1')


def given(environ: dict[str, str]) -> Allocation:
    found = find_allocation(environ)
    assert found is not None
    return found


def test_outside_of_a_job_nothing_is_given() -> None:
    assert find_allocation({"PATH": "/bin"}) is None
    assert slurm_hosts({}) == ()


@pytest.mark.parametrize(
    ("tasks", "slots"),
    [
        ("3,1(x2)", [3, 1, 1]),
        ("2(x3)", [2, 2, 2]),
        ("1,2,3", [1, 2, 3]),
        ("2(x2),1", [2, 2, 1]),
        ("16(x1),8(x2)", [16, 8, 8]),
    ],
)
def test_the_tasks_of_slurm(tasks: str, slots: list[int]) -> None:
    hosts = dict(zip(("n1", "n2", "n3"), slots, strict=True))
    expected = Allocation("Slurm job 7", hosts, sum(slots), "sbatch --ntasks=RANKS")
    assert find_allocation(SLURM | {"SLURM_TASKS_PER_NODE": tasks}) == expected


@pytest.mark.parametrize(
    "tasks", ["2", "2(x2)", "2(x4)", "2(x3),1", "0(x3)", "a,b,c", "2(x3", "1,,1", "9999999999(x3)"]
)
def test_other_forms_are_refused(tasks: str) -> None:
    said = f"Slurm job 7: SLURM_TASKS_PER_NODE is {tasks!r}; for its 3 hosts it must be of the form 2(x3),1"
    with pytest.raises(ConfigError, match=re.escape(said)):
        find_allocation(SLURM | {"SLURM_TASKS_PER_NODE": tasks})


@pytest.mark.parametrize("variables", [{}, {"SLURM_TASKS_PER_NODE": ""}])
def test_a_job_whose_nodes_have_changed(variables: dict[str, str]) -> None:
    """Slurm's script to renew the variables takes these two away."""
    rest = {name: text for name, text in SLURM.items() if name not in ("SLURM_TASKS_PER_NODE", "SLURM_NTASKS")}
    said = "Slurm job 7: SLURM_TASKS_PER_NODE is not set, as after a change of the job's nodes, so the number of ranks"
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        find_allocation(rest | variables)
    assert str(caught.value).endswith("Name the hosts and the ranks: --hosts n1,n2,n3 --ppn N")


ONLY = "Slurm job 7 has only n1 now, and this shell still has the list of before. "


@pytest.mark.parametrize(
    ("answer", "asked", "said"),
    [
        ("echo 7 n1", ["n2", "n3"], ONLY),
        # With the other tasks of an array, which has the number of its last task.
        ("echo 6 n2; echo 7 n1; echo 8 n3", ["n2"], ONLY),
        ("echo 6 n1; echo 8 n1", ["n2"], ""),
        ("echo 7 n1", ["n1"], ""),  # it does not answer, for another reason
        ("echo 7 n1", ["elsewhere"], ""),
        ("echo 7 n1", ["n1", "elsewhere"], ""),
        ("echo 7", ["n2"], ""),  # the job has no nodes
        ("echo 7 unknown", ["n2"], ""),
        ("exit 1", ["n2"], ""),
    ],
)
def test_hosts_that_slurm_has_taken(
    answer: str, asked: list[str], said: str, scontrol: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(scontrol.parent / "squeue", answer)
    for name, text in SLURM.items():
        monkeypatch.setenv(name, text)
    assert advice_on_lost(asked) == (said and f"{said}Name the hosts and the ranks: --hosts n1 --ppn N. ")


def test_ranks_for_cpus_and_the_tasks_of_a_step() -> None:
    environ = SLURM | {"SLURM_TASKS_PER_NODE": "4(x3)", "SLURM_JOB_CPUS_PER_NODE": "4(x3)"}
    del environ["SLURM_NTASKS"]  # nodes alone have a rank each, and may have one for each CPU
    found = given(environ)
    assert (found.slots, found.most_ranks) == ({"n1": 1, "n2": 1, "n3": 1}, 12)
    found = given(environ | {"SLURM_NTASKS_PER_NODE": "4"})
    assert (found.slots, found.most_ranks) == ({"n1": 4, "n2": 4, "n3": 4}, 12)
    # A task with several CPUs, as salloc -n1 -c8 sets them.
    one = {"SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1"}
    found = given(SLURM | one | {"SLURM_JOB_CPUS_PER_NODE": "8"})
    assert (found.slots, found.most_ranks) == ({"n1": 1}, 8)
    # A step has its own tasks, and a batch script those of the job.
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}
    assert given(SLURM | step).slots == {"n1": 2, "n2": 2, "n3": 2}
    assert given(SLURM | step | {"SLURM_STEP_ID": str(2**32 - 5)}).slots == {"n1": 3, "n2": 1, "n3": 1}


def test_a_list_that_slurm_cannot_expand_is_an_error() -> None:
    said = "'scontrol show hostnames n[' failed: bad list. Make it work here, or name the hosts: --hosts A,B"
    with pytest.raises(ConfigError, match=re.escape(said)):
        slurm_hosts(SLURM | {"SLURM_JOB_NODELIST": "n["})


def test_without_scontrol(scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no host was named, naming them helps. Hosts that are named might each be a node of the job."""
    scontrol.unlink()
    monkeypatch.setenv("PATH", str(scontrol.parent))
    with pytest.raises(ConfigError, match=re.escape("Put Slurm's commands on PATH, or name the hosts: --hosts A,B")):
        slurm_hosts(SLURM)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    assert place_ranks("198.51.100.1,198.51.100.2", None, None, 1).num_ranks == 2
    with pytest.raises(ConfigError, match="Put Slurm's commands on PATH, or unset SLURM_JOB_ID to use ssh") as caught:
        command_on("198.51.100.1", "true")
    assert "name the hosts" not in str(caught.value)


def test_the_file_of_pbs_and_of_lsf(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("b\nb\na\nb\n")
    found = find_allocation({"PBS_JOBID": "3.server", "PBS_NODEFILE": str(file)})
    assert found == Allocation("PBS job 3.server", {"b": 3, "a": 1}, 4, "qsub -l select=NODES:mpiprocs=RANKS")
    found = find_allocation({"LSB_JOBID": "4", "LSB_DJOB_HOSTFILE": str(file), "LSB_MCPU_HOSTS": "c 1"})
    assert found == Allocation("LSF job 4", {"b": 3, "a": 1}, 4, "bsub -n RANKS")
    found = find_allocation({"LSB_JOBID": "4", "LSB_MCPU_HOSTS": "a 4 b 2 a 1"})
    assert found == Allocation("LSF job 4", {"a": 5, "b": 2}, 7, "bsub -n RANKS")
    with pytest.raises(
        ConfigError, match="PBS job 3: the file of its hosts, PBS_NODEFILE=/none, cannot be read: No such"
    ):
        find_allocation({"PBS_JOBID": "3", "PBS_NODEFILE": "/none"})
    file.write_text("\n")
    with pytest.raises(ConfigError, match=r"LSF job: the file of its hosts, LSB_DJOB_HOSTFILE=.*nodes, is empty"):
        find_allocation({"LSB_DJOB_HOSTFILE": str(file)})
    for pairs in ("", "a", "a 1 b", "a x", "a 0"):
        said = f"LSB_MCPU_HOSTS is {pairs!r}; it must be of the form 'a 4 b 4'"
        with pytest.raises(ConfigError, match=re.escape(said)):
            find_allocation({"LSB_MCPU_HOSTS": pairs})


# Addresses of this machine and of a network for documentation, so that no name need be resolved.
HOSTS = ["127.0.0.2", "198.51.100.2", "198.51.100.3"]


@pytest.fixture
def in_pbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job with two ranks on the first two hosts, and one on the third."""
    (tmp_path / "nodes").write_text("\n".join([HOSTS[0], HOSTS[0], HOSTS[1], HOSTS[1], HOSTS[2]]))
    monkeypatch.setenv("PBS_JOBID", "3")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))


def ranks(placement: Placement) -> list[int]:
    assert list(placement.hosts) == HOSTS[: len(placement.places)]
    return [place.num_ranks for place in placement.places]


@pytest.mark.usefixtures("in_pbs")
def test_ranks_go_where_the_batch_system_puts_them() -> None:
    assert ranks(place_ranks(None, None, None, None)) == [2, 2, 1]
    assert ranks(place_ranks(None, None, 5, None)) == [2, 2, 1]
    assert ranks(place_ranks(None, None, 3, None)) == [2, 1]
    assert ranks(place_ranks(None, None, 1, None)) == [1]
    assert place_ranks(None, None, 2, None).is_here
    assert ranks(place_ranks(None, None, None, 1)) == [1, 1, 1]
    assert ranks(place_ranks(None, None, 3, 1)) == [1, 1, 1]
    placement = place_ranks(None, None, None, None)
    assert [place.first_rank for place in placement.places] == [0, 2, 4]
    assert (placement.own, placement.addresses[HOSTS[2]]) == (HOSTS[0], HOSTS[2])


@pytest.mark.usefixtures("in_pbs")
def test_more_ranks_than_were_given_are_refused() -> None:
    said = f"-n 6 is more than PBS job 3 has been given: 5 ranks on {', '.join(HOSTS)}. Ask for more with `qsub"
    with pytest.raises(ConfigError, match=re.escape(said)):
        place_ranks(None, None, 6, None)
    said = f"--ppn 2 on each of {','.join(HOSTS)} is more than PBS job 3 has been given: 5 ranks on "
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        place_ranks(None, None, None, 2)
    named = f"or leave out --ppn. Hosts that are named have no such limit: --hosts {','.join(HOSTS)}, or --hosts local"
    assert named in str(caught.value)
    assert ranks(place_ranks(",".join(HOSTS), None, None, 4)) == [4, 4, 4]
    assert ranks(place_ranks(None, None, 5, 2)) == [2, 2, 1]


@pytest.mark.usefixtures("in_pbs")
def test_hosts_that_are_named_win() -> None:
    assert place_ranks("localhost", None, 7, None).num_ranks == 7
    assert place_ranks("127.0.0.3", None, 7, None).hosts == ("127.0.0.3",)
    assert listed_hosts(None, None)() is None  # an elastic job may use what was given


JOB = BatchJob(
    name="train",
    folder="/home/ada/my runs",
    command=["python", "-m", "mpitrain", "run", "train.py", "--note", "it's new"],
    written_by="mpitrain slurm --nodes 4 train.py",
    nodes=4,
    ranks_per_node=1,
)


def options_of(job: BatchJob) -> list[str]:
    return [line for line in batch_script(job).splitlines() if line.startswith("#SBATCH")]


def test_what_is_asked_of_slurm() -> None:
    assert options_of(JOB) == [
        "#SBATCH --job-name=train",
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --chdir='/home/ada/my runs'",
        "#SBATCH --output=train-%j.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=B:USR1@120",
        "#SBATCH --requeue",
    ]


def test_all_options() -> None:
    more = replace(JOB, ranks_per_node=8, gpus_per_node=8, cpus_per_task=6, time="1-00:00:00", partition="long")
    more = replace(more, array="0-9%2", warn_seconds=300)
    assert options_of(more)[2:8] == [
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --cpus-per-task=6",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --time=1-00:00:00",
        "#SBATCH --partition=long",
        "#SBATCH --array=0-9%2",
    ]
    assert "#SBATCH --output=train-%A_%a.out" in options_of(more)
    assert "#SBATCH --signal=B:USR1@300" in options_of(more)
    assert 'mkdir -p "run-$SLURM_ARRAY_TASK_ID" && cd "run-$SLURM_ARRAY_TASK_ID" || exit 1' in batch_script(more)


@pytest.mark.parametrize(("code", "is_requeued"), [(0, False), (1, False), (127, False), (138, True), (143, False)])
def test_only_a_saved_training_is_started_again(code: int, is_requeued: bool, tmp_path: Path) -> None:
    """The script itself runs, with a program in place of scontrol that notes how it was called."""
    program(tmp_path / "scontrol", f'echo "$@" > {tmp_path}/called')
    script = batch_script(replace(JOB, command=["sh", "-c", f"exit {code}"]))
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "code": "0"}
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    called = tmp_path / "called"
    assert (called.read_text() if called.exists() else "") == ("requeue 7\n" if is_requeued else "")


def test_signals_reach_the_launcher_and_its_exit_code_counts(tmp_path: Path) -> None:
    told = tmp_path / "told"
    until_told = f"until [ -s {told} ]; do sleep 0.05; done; exit 3"
    child = f"trap 'echo told >> {told}' USR1; touch {tmp_path}/ready; {until_told}"
    script = batch_script(replace(JOB, command=["bash", "-c", child]))
    send = f"( until [ -e {tmp_path}/ready ]; do sleep 0.05; done; kill -USR1 $$ ) &\n"
    line, environ = ["bash", "-c", send + script], {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, told.read_text()) == (3, "told\n"), done.stderr


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("0", 0), ("4", 240), ("4:30", 270), ("1:02:03", 3723), ("1-2", 93600), ("1-02:03", 93780), ("1-02:03:04", 93784)],
)
def test_the_times_of_sbatch(time: str, seconds: int) -> None:
    assert _seconds(time) == seconds


def test_a_warning_at_the_start_of_each_try_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slurm sends the signal up to a minute early: with --time 3 a job could be started again without end."""
    (tmp_path / "train.py").touch()
    command = ["slurm", "--nodes", "1", "--time"]
    for time in ("2", "3", "3:59"):
        assert main([*command, time, str(tmp_path / "train.py")]) == 2
        said = capsys.readouterr().err
        assert f"--time {time} is " in said and "with --warn-seconds 120 it must be at least 240" in said
    for allowed in (["4"], ["0"], ["1-0"], ["3", "--warn-seconds", "60"]):
        assert main([*command, *allowed, str(tmp_path / "train.py")]) == 0


# Tells itself that its time is up, after the imports and before the ranks.
LAUNCHER = """
import os, signal, sys
from mpitrain.cli import main
from mpitrain.launch import placement

def refuse_crowds(*arguments, first=placement.refuse_crowds):
    os.kill(os.getpid(), signal.SIGUSR1)
    first(*arguments)

placement.refuse_crowds = refuse_crowds
sys.exit(main(["run", "-n", "2", "--hosts", "localhost", *sys.argv[1:]]))
"""
# Ends by itself after a minute.
TRAINING = """
import time
import numpy
import mpitrain as mt

def loss(parameters, batch, on_gradient):
    time.sleep(0.02)
    on_gradient("w", parameters["w"])
    return 1.0

def build(world):
    data = mt.data.ArrayData(world, (numpy.arange(50.0),), global_batch=13)
    return mt.Parts(mt.ArrayFunction(loss, {"w": numpy.ones(7)}, mt.optim.SGD(0.02)), mt.Sync(), data)

mt.Trainer(build, [mt.StopAtStep(3000), mt.Checkpoint("saved", steps=10_000)]).run()
"""


def test_a_signal_before_the_start_ends_the_training_saved(tmp_path: Path) -> None:
    """By its default action it would end the launcher, with the same exit code and nothing saved."""
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "train.py").write_text(TRAINING)
    job = run_command([sys.executable, "launcher.py", "train.py"], cwd=tmp_path)
    assert job.code == 138, job.output
    assert "the run ends, and is saved, after step" in job.output
    assert list((tmp_path / "saved").glob("step-*"))
    assert job.left == []
