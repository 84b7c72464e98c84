"""`mpitrain resume`: the launcher of a training is killed, and another one continues, with the same bits."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from faults import training
from faults.conftest import Undisturbed
from faults.failing import HERE
from faults.outcome import succeeded
from faults.training import went_on
from jobs import VENVS, Job, clean_environment, run_command, until
from keeping import kept_id
from mpitrain.launch.roster import kept

# Rank 0 reports each step, and waits in the steps of the file `halts`.
HALTS = """if world.rank == 1 and step == 6 and (folder / "to-kill").exists():
        (folder / "to-kill").rename(folder / "killed")
        die()
    if world.rank == 0 and step in json.loads((folder / "halts").read_text()):
        (folder / "rank").write_text(str(os.getpid()))
        (folder / f"in-{step}").touch()
        while step in json.loads((folder / "halts").read_text()):
            time.sleep(0.01)"""
SECOND_TRY = """
if (folder / "killed").exists() and not (folder / "go").exists():
    (folder / "starting").touch()
    time.sleep(1000)
"""
SAYS = "world.print('the variable is', os.environ.get('OF_THE_USER'), 'in', os.getcwd())"


def mpitrain(*arguments: str, vendor: str = "mpich") -> Job:
    """The command, in another folder and with another environment than the job."""
    return run_command([str(VENVS[vendor] / "bin/python"), "-m", "mpitrain", *arguments], cwd=Path("/"))


def train(
    folder: Path,
    halts: list[int],
    during: Callable[[subprocess.Popen[str]], None] | None = None,
    vendor: str = "mpich",
) -> Job:
    """Run the training, which stands still in these steps. Its state is copied to memory after every step."""
    halt(folder, *halts)
    hooks = "[mt.Record([mt.writers.JsonLines(folder)], steps=1)]"
    how = {"first": SECOND_TRY, "after": SAYS, "hooks": hooks, "vendor": vendor}
    return training.train(folder, HALTS, during=during, env={"OF_THE_USER": "kept"}, **how)


def halt(folder: Path, *steps: int) -> None:
    """From now on, the training stands still in these steps."""
    new = folder / "halts.new"
    new.write_text(json.dumps(steps))
    new.replace(folder / "halts")


def lost_job(folder: Path) -> str:
    """Wait until the launcher is lost and rank 0, which stands still, has ended. Return the id of the job."""
    job = kept_id(folder)
    if (folder / "rank").exists():
        pid = int((folder / "rank").read_text())
        until(lambda: not Path(f"/proc/{pid}").exists())
    return job


def tries_of(folder: Path) -> list[str]:
    """Wait until one keeper alone has the job. Return the ids of its attempts."""
    found: list[list[str]] = []

    def is_there() -> bool:
        found[:] = [one["estate"]["tries"] for one in kept() if one["estate"]["folder"] == str(folder)]
        return len(found) == 1

    until(is_there, "no keeper has the job")
    return found[0]


def test_a_killed_launcher(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The launcher is killed twice. Any id of the job will do. Nothing of the job is left."""
    first = random.randint(2, 9)
    print(f"killed in step {first}")
    jobs: list[Job] = []
    ids: list[str] = []
    listed: list[Job] = []

    def kill_again(process: subprocess.Popen[str]) -> None:
        until((tmp_path / "in-14").exists)
        process.kill()

    def during(process: subprocess.Popen[str]) -> None:
        until((tmp_path / f"in-{first}").exists)
        process.kill()
        ids.append(lost_job(tmp_path))
        listed.append(mpitrain("ps", "--hosts", "localhost"))
        halt(tmp_path, 14)
        command = [sys.executable, "-m", "mpitrain", "resume", ids[0]]
        jobs.append(resume_and_kill(command, kill_again))
        ids.append(lost_job(tmp_path))
        halt(tmp_path)
        jobs.append(mpitrain("resume", ids[0]))
        jobs.append(mpitrain("resume", ids[1]))

    killed = train(tmp_path, [first], during)
    assert killed.code == -signal.SIGKILL
    assert killed.left == []
    job, other = ids
    assert len(set(ids)) == 2
    line = (
        rf"mpitrain: job {job} has lost its launcher; its state is kept in memory until \d\d:\d\d:\d\d. To continue: "
        rf"`mpitrain resume {job}`. To drop it: `mpitrain kill {job}`\n"
    )
    assert re.fullmatch(line, killed.stderr), killed.output
    row = rf"kept until \d\d:\d\d:\d\d: mpitrain resume {job} .* none, its state on {HERE} .*{tmp_path}$"
    assert re.search(rf"^{job} .*{row}", listed[0].stdout, re.M), listed[0].output
    again, last, too_late = jobs
    assert again.code == -signal.SIGKILL
    assert re.fullmatch(
        f"mpitrain: continuing with job {job} from what is kept on {HERE}\n" + line.replace(job, other), again.stderr
    ), again.output
    went_on(last, tmp_path, [13], undisturbed())
    assert f"the variable is kept in {tmp_path}\n" in last.stdout
    assert too_late.code == 1
    assert f"nothing is kept of a job {other} of yours on {HERE}." in too_late.stderr
    assert "start its command again: it continues from its newest checkpoint" in too_late.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    events = [event for row in rows for event in row.get("events", [])]
    assert [(event["after_step"], event["source"]) for event in events] == [(first - 1, "memory"), (13, "memory")]
    assert [event["text"] for event in events] == [f"the launcher on {HERE} was lost"] * 2


def resume_and_kill(command: list[str], kill: Callable[[subprocess.Popen[str]], None]) -> Job:
    """Do as run_command does, but let the job's keeper, which has the environment of this command, stay."""
    with subprocess.Popen(
        command,
        cwd="/",
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        kill(process)
        stdout, stderr = process.communicate(timeout=300)
    return Job(process.returncode, stdout, stderr, [])


@pytest.mark.nightly
def test_while_a_try_is_starting(tmp_path: Path, vendor: str, undisturbed: Undisturbed) -> None:
    """The first attempt has failed. The second one has made no step when the launcher is killed."""
    jobs: list[Job] = []
    (tmp_path / "to-kill").touch()

    def during(process: subprocess.Popen[str]) -> None:
        until((tmp_path / "starting").exists)
        process.kill()
        job = lost_job(tmp_path)
        (tmp_path / "go").touch()
        jobs.append(mpitrain("resume", job, vendor=vendor))

    killed = train(tmp_path, [], during, vendor=vendor)
    assert killed.code == -signal.SIGKILL
    assert killed.left == []
    assert "attempt 1 of 3 failed at step 6: rank 1 " in killed.stderr
    went_on(jobs[0], tmp_path, [5], undisturbed(vendor=vendor))


@pytest.mark.nightly
def test_the_id_of_an_earlier_try(tmp_path: Path) -> None:
    """The user has it from before a restart. It stands for the job."""
    said: list[Job] = []
    (tmp_path / "to-kill").touch()

    def during(process: subprocess.Popen[str]) -> None:
        until((tmp_path / "killed").exists)
        (tmp_path / "go").touch()
        until((tmp_path / "in-9").exists)
        first, second = tries_of(tmp_path)
        said.append(mpitrain("ps", "--hosts", "localhost", first))
        said.append(mpitrain("scale", first, f"-{HERE}"))
        halt(tmp_path)
        assert f"\n{second} " in said[0].stdout, said[0].output

    succeeded(train(tmp_path, [9], during))
    assert [job.code for job in said] == [0, 1]
    assert "no host would be left, and the job needs one" in said[1].stderr, said[1].output


@pytest.mark.nightly
def test_two_launchers_go_on_at_once(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """One of them wins. (tests/launch/test_resume.py has the other refusals.)"""
    both: list[Job] = []

    def during(process: subprocess.Popen[str]) -> None:
        until((tmp_path / "in-4").exists)
        process.kill()
        job = lost_job(tmp_path)
        with ThreadPoolExecutor() as pool:  # the launcher that wins stands still until the other one has ended
            two = [pool.submit(mpitrain, "resume", job) for _ in range(2)]
            until(lambda: any(one.done() for one in two))
            halt(tmp_path)
            both.extend(one.result() for one in two)

    assert train(tmp_path, [4], during).left == []
    loser, winner = sorted(both, key=lambda one: -one.code)
    assert loser.code == 1
    told = r"another `mpitrain resume` on .* continues with|somebody else continues|is alive|nothing is kept"
    assert re.search(told, loser.stderr), loser.output
    assert loser.stderr.count("has lost its launcher") == 0
    went_on(winner, tmp_path, [3], undisturbed())


@pytest.mark.nightly
def test_what_is_kept_is_dropped(tmp_path: Path) -> None:
    dropped: list[Job] = []
    jobs: list[str] = []

    def during(process: subprocess.Popen[str]) -> None:
        until((tmp_path / "in-4").exists)
        process.kill()
        jobs.append(lost_job(tmp_path))
        dropped.append(mpitrain("kill", "--hosts", "localhost", jobs[0]))

    killed = train(tmp_path, [4], during)
    assert killed.left == []
    assert (dropped[0].code, dropped[0].stdout) == (0, f"job {jobs[0]}: its kept state was dropped on {HERE}\n")
