"""`mpitrain run --max-restarts`: a killed training resumes from memory, with the same bits as an undisturbed one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from faults.conftest import Undisturbed
from faults.failing import HERE, nightly
from faults.outcome import failed, succeeded
from faults.training import STEPS, not_from_memory, result, resumed, train, went_on
from jobs import Job
from keeping import keeper

AT_8 = "if rank == 1 and step == 8 and once('killed'): die()"
NO_ROOM = "from mpitrain.state import memory_slot\nmemory_slot._limits = lambda: [(100, 10**9, 'this machine')]"


@pytest.mark.parametrize(
    ("ranks", "vendor"),
    [
        (3, "mpich"),
        *nightly((1, "mpich"), (2, "openmpi"), (5, "mpich"), (1, "openmpi"), (3, "openmpi"), (5, "openmpi")),
    ],
    indirect=["vendor"],
)
def test_a_killed_rank(tmp_path: Path, ranks: int, vendor: str, undisturbed: Undisturbed) -> None:
    job = train(tmp_path, f"if rank == {ranks - 1} and step == 7 and once('killed'): die()", ranks=ranks, vendor=vendor)
    went_on(job, tmp_path, [6], undisturbed(ranks, vendor))
    assert not_from_memory(job) == []


# Rank 0 makes the copies. It dies when it has copied half of the state after step 9.
HALF = """
from mpitrain.state import memory_slot

copy_to_host, arrays = memory_slot.copy_to_host, []

def half(*arguments):
    arrays.append(0)
    if trainer.step_number == 9 and len(arrays) % 2 == 0 and once("killed"):
        die()
    copy_to_host(*arguments)

if rank == 0:
    memory_slot.copy_to_host = half
"""


@pytest.mark.parametrize(
    ("how", "after"),
    [
        ({"before": HALF}, [8]),  # a rank is killed while it copies
        *nightly(
            # By default the first copy comes after the first step.
            ({"wrong": "if rank == 1 and step == 2 and once('killed'): die()", "every": None}, [1]),
            # A rank, and then all at once.
            ({"wrong": "if ((rank, step) == (0, 5) or step == 6) and once(f'killed-{rank}-{step}'): die()"}, [4, 5]),
        ),
    ],
    ids=["half", "default", "all"],
)
def test_it_goes_on(tmp_path: Path, how: dict, after: list[int], undisturbed: Undisturbed) -> None:
    went_on(train(tmp_path, **how), tmp_path, after, undisturbed())


@pytest.mark.nightly
def test_behind_the_last_step(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The code after the training fails, so no step is repeated."""
    job = train(tmp_path, after="if rank == 1 and once('killed'): die()", every=1000)
    succeeded(job)
    assert resumed(job) == [STEPS]
    assert result(tmp_path) == (undisturbed()[0], {})


@pytest.mark.nightly
def test_a_newer_checkpoint(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Copies come every 5 steps, checkpoints every 3. After step 8, the checkpoint of step 6 is newer."""
    hooks = "[mt.Checkpoint(folder / 'checkpoints', steps=3)]"
    job = train(tmp_path, "if rank == 1 and step == 8 and once('killed'): kill(3)", hooks=hooks, every=5)
    succeeded(job)
    assert resumed(job) == []
    assert not_from_memory(job) == ["its newest copy is of step 5. The training continues after step 6"]
    assert result(tmp_path)[0] == undisturbed()[0]


# The agent of the job, and its keeper, which holds the memory.
AGENT = """
def parent(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

def children(pid):
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

def agent():
    launcher = parent(parent(os.getppid()))
    words = {pid: pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\\0") for pid in children(launcher)}
    (pid,) = [pid for pid in words if b"-u" in words[pid]]
    return pid

def keeper():
    def holds(pid):
        return any("memfd:mpitrain-state" in os.readlink(path) for path in pathlib.Path(f"/proc/{pid}/fd").iterdir())
    (pid,) = [pid for pid in children(agent()) if holds(pid)]
    return pid
"""


@pytest.mark.parametrize("late_seconds", [0, *nightly(5)])
def test_a_killed_agent(tmp_path: Path, undisturbed: Undisturbed, late_seconds: int) -> None:
    """Its keeper outlives it. The next attempt has a new agent, and continues from memory.

    An agent says every second that steps were made. If it dies before, the launcher looks at the ranks itself.
    """
    wrong = f"""if rank == 1 and step == 8 and once("killed"):
        time.sleep({late_seconds})
        os.kill(agent(), signal.SIGKILL)
        time.sleep(60)"""
    job = train(tmp_path, wrong, before=AGENT)
    succeeded(job)
    assert f"mpitrain: {HERE}: the agent of the job there was killed by signal 9\n" in job.stderr
    assert resumed(job) == [7]
    assert result(tmp_path)[0] == undisturbed()[0]


def test_a_killed_keeper(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The next attempt resumes from the disk. Later its new keeper has a copy newer than the checkpoint."""
    wrong = """if rank == 1 and step == 8 and once("killed"):
        wait_for("checkpoints/step-00000006")
        os.kill(keeper(), signal.SIGKILL)
        die()
    if rank == 0 and step == 15 and once("again"):
        kill(3)"""
    job = train(tmp_path, wrong, hooks="[mt.Checkpoint(folder / 'checkpoints', steps=3)]", before=AGENT)
    succeeded(job)
    assert not_from_memory(job) == ["no host that takes part has a whole copy. The training continues after step 6"]
    assert resumed(job) == [14]
    assert job.stdout.count("resumed from /") == 1
    assert result(tmp_path)[0] == undisturbed()[0]


def test_too_little_memory(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Nothing is copied. A line says so at the first step, and another line at the restart, which begins at step 0."""
    job = train(tmp_path, AT_8, before=NO_ROOM)
    succeeded(job)
    said = (
        rf"mpitrain: rank 0 on {HERE}: the state has no in-memory checkpoint here, .* are free, and 5% must stay free"
    )
    assert re.search(said, job.stderr)
    assert not_from_memory(job) == ["no host that takes part has a whole copy. The training starts over"]
    assert result(tmp_path) == undisturbed()


@pytest.mark.nightly
def test_two_trainings_in_a_script(tmp_path: Path) -> None:
    """The second training is killed. It resumes from its own copy, after the first training has been repeated."""
    after = """
def build_other(world):
    data = mt.data.ArrayData(world, (numpy.ones((8, 2)), numpy.arange(8.0)), global_batch=4)
    def function(parameters, batch, on_gradient):
        if rank == 1 and other.step_number == 5 and once("killed"): die()
        on_gradient("v", parameters["v"] * 0.5 + batch[1].sum())
        return 0.0
    return mt.Parts(mt.ArrayFunction(function, {"v": numpy.ones(3)}, mt.optim.SGD(0.1)), mt.Sync(), data)
other = mt.Trainer(build_other, [mt.StopAtStep(9)])
other.run()
world.print("the other:", other.adapter.parameters()["v"].tobytes().hex())
"""
    killed = train(tmp_path / "killed", after=after)
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "killed").touch()
    whole = train(tmp_path / "whole", after=after)
    for job, steps in ((killed, [5]), (whole, [])):
        succeeded(job)
        assert resumed(job) == steps
    assert killed.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]
    assert result(tmp_path / "killed") == result(tmp_path / "whole")


@pytest.mark.nightly
def test_copies_every_other_step_and_the_record(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The first row of the try that resumes has the event. Every row has the interval of the copies."""
    hooks = "[mt.Record([mt.writers.JsonLines(folder), mt.writers.Csv(folder)], steps=1)]"
    job = train(tmp_path, AT_8, hooks=hooks, every=2)
    went_on(job, tmp_path, [6], undisturbed())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    ((row, event),) = [(row["step"], event) for row in rows for event in row.get("events", [])]
    assert 0 < event.pop("seconds") < 300
    text = f"rank 1 on {HERE} was killed by signal 9"
    expected = {"after_step": 6, "text": text, "source": "memory", "lost_ranks": [], "num_ranks": 2}
    assert (row, event) == (7, expected | {"repeated_steps": 1})
    assert {row["copy_steps"] for row in rows} == {2}


@pytest.mark.nightly
def test_a_state_that_no_copy_can_hold(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """No hook saves the state, so the state does not end the training."""
    before = "class Odd(mt.Hook):\n    def state(self):\n        return {'what': {1, 2}}"
    job = train(tmp_path, before=before, hooks="[Odd()]")
    succeeded(job)
    assert "hooks/Odd/what is a set" in job.stderr
    assert result(tmp_path) == undisturbed()


@pytest.mark.nightly
def test_without_restarts_nothing_is_copied(tmp_path: Path) -> None:
    job = train(tmp_path, AT_8.replace(" and once('killed')", ""), "--max-restarts", "0")
    failed(job)
    assert "memory" not in job.output


# -- what each rank keeps for itself ----------------------------------------------------------------------------------

# Each rank keeps a part of its own. Rank 1 dies before it copies its part of step 9. The others have copied theirs.
OWN = """
from mpitrain.state.memory_slot import MemorySlot

class Own(mt.Sync):
    left = numpy.zeros(3)

    def finish_step(self, adapter, loss):
        self.left = self.left * 0.5 + rank + trainer.step_number
        return super().finish_step(adapter, loss)

    def own_state(self):
        return {"place": "here", "residual": {"w": self.left}}

    def restore_own(self, state):
        self.left = state["residual"]["w"]

mt.Sync = Own
write = MemorySlot.write

def dying_write(self, step, *rest):
    if rank == 1 and step == 9 and not (folder / "killed").exists():
        time.sleep(1)
        once("killed")
        die()
    write(self, step, *rest)

MemorySlot.write = dying_write
"""


def test_what_a_rank_keeps_for_itself(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """A step counts only if all ranks have copied their parts of it."""
    after = "world.print('left', world.allgather(trainer.strategy.left.tolist()))"
    job = train(tmp_path, ranks=3, before=OWN, after=after)
    went_on(job, tmp_path, [8], undisturbed(3))
    left = [0.0] * 3
    for step in range(STEPS):
        left = [0.5 * before + rank + step for rank, before in enumerate(left)]
    assert job.stdout.splitlines()[-1].endswith(f"left {[[one] * 3 for one in left]}"), job.output


# Ranks 1 and 2 believe that they are on another host. The test starts that host's keeper.
TWO_HOSTS = """
import socket
import mpitrain.state.state_copies as copies

if int(os.environ["PMI_RANK"]) >= 1:
    socket.gethostname = lambda: "other"
    line = copies.KeeperLine
    copies.KeeperLine = lambda name, of: line("OTHER", of)
"""
# Rank 2 is killed, and its host has lost these of its copies.
LOSES = 'if rank == 2 and step == 8 and once("killed"): copies.KeeperLine("", "").keep_only(%s, 9); die()'


def train_on_two_hosts(folder: Path, wrong: str = "pass", first: str = "", **how: str) -> Job:
    with keeper() as name:
        job = train(folder, wrong, ranks=3, first=TWO_HOSTS.replace("OTHER", name) + first, **how)
    succeeded(job)
    return job


# Without a codec there is less to restore.
@pytest.mark.parametrize("codec", ["int8", *nightly("none")])
def test_two_hosts(tmp_path: Path, codec: str) -> None:
    """What the codec has left out also comes back, bit for bit."""
    train_on_two_hosts(tmp_path / "whole", codec=codec)
    job = train_on_two_hosts(tmp_path / "killed", AT_8.replace("rank == 1", "rank == 2"), codec=codec)
    went_on(job, tmp_path / "killed", [7], result(tmp_path / "whole"))
    assert "had left to send is lost" not in job.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("codec", ["int8", "none"])
def test_a_host_without_a_copy(tmp_path: Path, codec: str) -> None:
    """The host gets the state from the other host. What its ranks had left out is lost, and a line says so."""
    job = train_on_two_hosts(tmp_path / "killed", LOSES % "[]", codec=codec)
    assert resumed(job) == [7]
    lost = re.findall(r"the copy of step 7 in memory: what rank (\d) had left to send is lost", job.stdout)
    assert lost == ([] if codec == "none" else ["1", "2"])
    if codec == "none":
        train_on_two_hosts(tmp_path / "whole", codec=codec)
        assert result(tmp_path / "killed")[0] == result(tmp_path / "whole")[0]


@pytest.mark.nightly
def test_a_host_without_room(tmp_path: Path) -> None:
    """It makes no copy, and says so at the first step of each attempt. The copy of the other host serves both."""
    train_on_two_hosts(tmp_path / "whole")
    lacks = 'if int(os.environ["PMI_RANK"]) >= 1:\n    ' + NO_ROOM.replace("\n", "; ")
    job = train_on_two_hosts(tmp_path / "killed", AT_8.replace("rank == 1", "rank == 2"), lacks)
    went_on(job, tmp_path / "killed", [7], result(tmp_path / "whole"))
    said = re.findall(
        r"mpitrain: rank (\d) on (\S+): the state has no in-memory checkpoint here, .* are free", job.stderr
    )
    assert said == [("1", "other")] * 2, job.output


ROUNDS = """
mt.Sync = lambda: mt.DiLoCo(4)

class Tell(mt.Hook):
    def before_run(self, trainer):
        self.after_step(trainer, None)

    def after_step(self, trainer, step):
        speed = next(iter(trainer.adapter.state()["optimizer"]["velocity"].values()))
        of_all = trainer.world.allgather(speed.tobytes().hex())
        trainer.world.print(f"after step {trainer.step_number}:", *of_all)
"""


@pytest.mark.nightly
def test_the_optimizers_within_a_round(tmp_path: Path) -> None:
    """In a round, each rank has an optimizer of its own. If some of them are lost, all ranks get that of rank 0."""
    job = train_on_two_hosts(tmp_path / "killed", LOSES % '["1/state"]', before=ROUNDS, hooks="[Tell()]")
    assert resumed(job) == [7]
    before, after = (line.split() for line in re.findall(r"after step 7: (.*)", job.stdout))
    assert len(set(before)) == 3
    assert after == [before[0]] * 3
