"""`mpitrain run --restarts`: a killed training resumes from memory, with the same bits as an undisturbed one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from faults.outcome import failed, succeeded
from faults.remembering import HERE, STEPS, not_from_memory, result, resumed, train, went_on

Undisturbed = Callable[..., tuple[bytes, dict[int, float]]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The result of a training without faults. The sums of different MPI libraries differ."""
    results: dict[tuple[int, str], tuple[bytes, dict[int, float]]] = {}

    def of(ranks: int = 2, vendor: str = "mpich") -> tuple[bytes, dict[int, float]]:
        if (ranks, vendor) not in results:
            folder = tmp_path_factory.mktemp("undisturbed")
            job = train(folder, ranks=ranks, vendor=vendor)
            succeeded(job)
            assert job.stderr == ""
            assert (resumed(job), not_from_memory(job)) == ([], [])
            results[ranks, vendor] = result(folder)
        return results[ranks, vendor]

    return of


@pytest.mark.parametrize(
    ("ranks", "vendor"),
    [
        (1, "mpich"),
        (3, "mpich"),
        (2, "openmpi"),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in product((2, 5), ["mpich"])),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in product((1, 3, 5), ["openmpi"])),
    ],
    indirect=["vendor"],
)
def test_a_killed_rank(tmp_path: Path, ranks: int, vendor: str, undisturbed: Undisturbed) -> None:
    job = train(tmp_path, f"if rank == {ranks - 1} and step == 7 and once('killed'): die()", ranks=ranks, vendor=vendor)
    went_on(job, tmp_path, [6], undisturbed(ranks, vendor))
    assert not_from_memory(job) == []


def test_a_rank_and_then_all_at_once(tmp_path: Path, undisturbed: Undisturbed) -> None:
    wrong = "if ((rank, step) == (0, 5) or step == 6) and once(f'killed-{rank}-{step}'): die()"
    went_on(train(tmp_path, wrong, ranks=3), tmp_path, [4, 5], undisturbed(3))


def test_as_often_as_it_costs_little(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """By default the first copy comes after the first step."""
    job = train(tmp_path, "if rank == 1 and step == 2 and once('killed'): die()", every=None)
    went_on(job, tmp_path, [1], undisturbed())


def test_behind_the_last_step(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The code after the training fails, so no step is repeated."""
    job = train(tmp_path, after="if rank == 1 and once('killed'): die()", every=1000)
    succeeded(job)
    assert resumed(job) == [STEPS]
    assert result(tmp_path) == (undisturbed()[0], {})


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


def test_a_rank_that_is_killed_while_it_copies(tmp_path: Path, undisturbed: Undisturbed) -> None:
    job = train(tmp_path, before=HALF)
    went_on(job, tmp_path, [8], undisturbed())


def test_a_newer_checkpoint(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Copies come every 5 steps, checkpoints every 3. After step 8, the checkpoint of step 6 is newer."""
    hooks = "[mt.Checkpoint(folder / 'checkpoints', steps=3)]"
    saved = "(folder / 'checkpoints' / 'step-00000006').exists()"
    wrong = (
        f"if rank == 1 and step == 8 and once('killed'):\n        while not {saved}: time.sleep(0.01)\n        die()"
    )
    job = train(tmp_path, wrong, hooks=hooks, every=5)
    succeeded(job)
    assert resumed(job) == []
    assert not_from_memory(job) == ["its newest copy is of step 5. The training goes on after step 6"]
    assert result(tmp_path)[0] == undisturbed()[0]


# The launcher's process that holds the memory.
KEEPER = """
def parent(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

def holds(pid):
    return any("memfd:mpitrain-state" in os.readlink(path) for path in pathlib.Path(f"/proc/{pid}/fd").iterdir())

def keeper():
    launcher = parent(parent(os.getppid()))
    children = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    (holder,) = [int(pid) for pid in children if holds(pid)]
    return holder
"""


def test_a_killed_keeper(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The next try resumes from the disk, and says so. Later its new keeper has a copy newer than the checkpoint."""
    hooks = "[mt.Checkpoint(folder / 'checkpoints', steps=3)]"
    wrong = """if rank == 1 and step == 8 and once("killed"):
        saved = folder / "checkpoints" / "step-00000006"
        while not saved.exists():
            time.sleep(0.01)
        os.kill(keeper(), signal.SIGKILL)
        die()
    if rank == 0 and step == 15 and once("again"):
        while not (folder / "checkpoints" / "step-00000012").exists():
            time.sleep(0.01)
        die()"""
    job = train(tmp_path, wrong, hooks=hooks, before=KEEPER)
    succeeded(job)
    (said,) = not_from_memory(job)
    assert said == "no host that takes part has a whole copy. The training goes on after step 6"
    assert resumed(job) == [14]
    assert job.stdout.count("resumed from /") == 1
    assert result(tmp_path)[0] == undisturbed()[0]


def test_too_little_memory(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Nothing is copied. A line says so at the first step, and another line at the restart, which begins at step 0."""
    before = "from mpitrain.state import memory_slot\nmemory_slot._limits = lambda: [(100, 10**9, 'this machine')]"
    job = train(tmp_path, "if rank == 1 and step == 8 and once('killed'): die()", before=before)
    succeeded(job)
    assert re.search(
        rf"mpitrain: rank 0 on {HERE}: the state is not copied to memory here, .* are free, and 5% must stay free",
        job.stderr,
    )
    assert not_from_memory(job) == ["no host that takes part has a whole copy. The training starts over"]
    assert result(tmp_path) == undisturbed()


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
    succeeded(killed)
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "killed").touch()
    whole = train(tmp_path / "whole", after=after)
    succeeded(whole)
    assert resumed(whole) == []
    assert resumed(killed) == [5]
    assert killed.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]
    assert result(tmp_path / "killed") == result(tmp_path / "whole")


def test_copies_every_other_step_and_the_record(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The first row of the try that resumes has the event. Every row has the interval of the copies."""
    hooks = "[mt.Record([mt.writers.JsonLines(folder), mt.writers.Csv(folder)], steps=1)]"
    job = train(tmp_path, "if rank == 1 and step == 8 and once('killed'): die()", hooks=hooks, every=2)
    went_on(job, tmp_path, [6], undisturbed())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    ((row, event),) = [(row["step"], event) for row in rows for event in row.get("events", [])]
    assert 0 < event.pop("seconds") < 300
    assert event == {
        "after_step": 6,
        "text": f"rank 1 on {HERE} was killed by signal 9",
        "source": "memory",
        "lost_ranks": [],
        "num_ranks": 2,
        "repeated_steps": 1,
    }
    assert row == 7
    assert {row["copy_steps"] for row in rows} == {2}


def test_a_state_that_no_copy_can_hold(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """No hook saves the state, so the state does not end the training."""
    before = "class Odd(mt.Hook):\n    def state(self):\n        return {'what': {1, 2}}"
    job = train(tmp_path, before=before, hooks="[Odd()]")
    succeeded(job)
    assert "hooks/Odd/what is a set" in job.stderr
    assert result(tmp_path) == undisturbed()


def test_without_restarts_nothing_is_copied(tmp_path: Path) -> None:
    job = train(tmp_path, "if rank == 1 and step == 8: die()", "--restarts", "0")
    failed(job)
    assert "memory" not in job.output
