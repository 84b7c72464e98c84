"""`scripts/testbed chaos`: real faults in real jobs on this machine, how they are undone, and the report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from faults.conftest import need
from faults.failing import HERE
from jobs import HANG_SECONDS, REPOSITORY, TOKEN, VENVS, clean_environment, processes_of, until, without_restarts
from mpitrain.watching.view import process_state

# Steps of 50 ms, with a checkpoint every 10, until a file "enough" exists.
SCRIPT = """
import os, pathlib, sys, time
import mpitrain as mt
from mpitrain.cli.new_project.train import build

folder = pathlib.Path(sys.argv[1])
world = mt.init()
(folder / "token").write_text(os.environ["_MPITRAIN_JOB"])

class Enough(mt.Hook):
    def after_step(self, trainer, step):
        time.sleep(0.05)
        (folder / f"rank{world.rank}").write_text(str(os.getpid()))
        trainer.report({"enough": float((folder / "enough").exists())})

hooks = [Enough(), mt.StopWhen("enough", at_least=1.0), mt.Checkpoint(folder / "checkpoints", steps=10)]
mt.Trainer(build, hooks).run()
"""


@dataclass
class RunningJob:
    """A job under a launcher whose output goes to a file."""

    launcher: subprocess.Popen[bytes]
    folder: Path

    @property
    def token(self) -> str:
        """The id of the current attempt."""
        return (self.folder / "token").read_text()

    def said(self) -> str:
        """The output of the launcher so far."""
        return (self.folder / "output").read_text()

    def pids(self) -> list[int]:
        """The processes of the ranks."""
        return [int(path.read_text() or 0) for path in self.folder.glob("rank*")]


@contextmanager
def running(folder: Path, ranks: int, *options: str, vendor: str, before: tuple[str, ...] = ()) -> Iterator[RunningJob]:
    """Start a job that makes steps. `before`: words before its command."""
    (folder / "train.py").write_text(SCRIPT)
    mark = f"chaos{os.getpid()}{folder.name}"
    command = [str(VENVS[vendor] / "bin/python"), "-m", "mpitrain", "run", "--hosts", "localhost", "-n", str(ranks)]
    with (folder / "output").open("wb") as output:
        launcher = subprocess.Popen(
            [*before, *command, *without_restarts(options), str(folder / "train.py"), str(folder)],
            env=clean_environment({TOKEN: mark}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
        )
    job = RunningJob(launcher, folder)
    try:
        until(lambda: len(job.pids()) == ranks or launcher.poll() is not None)
        assert launcher.poll() is None, job.said()
        yield job
    finally:
        launcher.terminate()
        launcher.wait(HANG_SECONDS)
        assert processes_of(mark, patience=60.0) == []


def chaos(job: RunningJob, *options: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start chaos in a job. `before`: words before its command."""
    command = [f"{REPOSITORY}/scripts/testbed", "chaos", "--hosts", "localhost", job.token, "--yes"]
    return subprocess.Popen(
        [*before, *command, *options],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=job.folder,
    )


def wait_for(process: subprocess.Popen[str], words: str, count: int = 1) -> str:
    """Read the output of chaos until lines with these words have come so many times."""
    said = ""
    assert process.stdout is not None
    for line in process.stdout:
        said += line
        if said.count(words) >= count:
            return said
    raise AssertionError(f"{words!r} did not come {count} times:\n{said}")


def finish(
    job: RunningJob, process: subprocess.Popen[str], faults: int, words: str = "the job continued after"
) -> dict:
    """Let the job end when chaos has printed these words about so many faults. Return the report."""
    said = wait_for(process, words, faults)
    (job.folder / "enough").touch()
    rest, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, said + rest + job.said()
    assert job.launcher.wait(HANG_SECONDS) == 0, job.said()
    folder = next(job.folder.glob("chaos-*"))
    assert sorted(path.name for path in folder.iterdir()) == ["chaos.json", "chaos.png", "chaos.txt"]
    assert (folder / "chaos.txt").read_text() in rest
    report = json.loads((folder / "chaos.json").read_text())
    assert (report["has_ended"], report["error"], report["left"]) == (True, "", {HERE: []})
    return report


def test_killed_ranks_and_restarts(tmp_path: Path) -> None:
    with running(tmp_path, 2, "--max-restarts", "9", vendor=need("mpich")) as job:
        report = finish(job, chaos(job, "--faults", "rank", "--every", "3s", "--hold", "1s", "--count", "2"), 2)
    assert [fault["kind"] for fault in report["faults"]] == ["rank", "rank"]
    for fault in report["faults"]:
        assert fault["went_on_seconds"] > 0
        assert fault["from_step"] > 0
        assert f"{fault['victim']} " in fault["named"]
    assert report["kinds"]["rank"]["named"] == report["kinds"]["rank"]["to_name"] == 2
    assert 0 < report["throughput_kept"] < 1


@pytest.mark.nightly
def test_killed_ranks_in_place(tmp_path: Path) -> None:
    """Chaos does not kill the last rank, because the job would then end."""
    with running(tmp_path, 3, "--recover", vendor=need("openmpi")) as job:
        process = chaos(job, "--faults", "rank", "--every", "2s", "--hold", "1s", "--count", "3")
        wait_for(process, "skipped: one rank is left, and the job would end with it")
        (tmp_path / "enough").touch()
        process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == 0
        assert job.launcher.wait(HANG_SECONDS) == 0, job.said()
    report = json.loads(next(tmp_path.glob("chaos-*/chaos.json")).read_text())
    *killed, spared = report["faults"]
    assert len({fault["victim"] for fault in killed}) == 2
    for fault in killed:
        assert (fault["from_step"], fault["repeated_steps"]) == (0, 0)
        # The launcher says that it was killed, and a rank that it was lost: whichever line comes first.
        ends = (f"{fault['victim']} was lost", f"{fault['victim']} was killed by signal 9")
        assert any(end in fault["named"] for end in ends), fault["named"]
    assert spared["why_not"]


@pytest.mark.nightly
@pytest.mark.parametrize("recovers", [False, True])
def test_frozen_ranks_go_on(tmp_path: Path, recovers: bool) -> None:
    options = ["--recover"] if recovers else []
    with running(tmp_path, 2, *options, vendor=need("openmpi" if recovers else "mpich")) as job:
        options = ["--faults", "freeze", "--every", "3s", "--hold", "1s", "--count", "2", "--seed", "3"]
        report = finish(job, chaos(job, *options), 2)
    assert [fault["victim"].startswith("rank ") for fault in report["faults"]] == [True, False]
    for fault in report["faults"]:
        assert fault["went_on_seconds"] >= 1.0
        assert (fault["from_step"], fault["named"]) == (0, "")


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_chaos_ends_and_the_frozen_go_on(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path, 2, vendor=need("mpich")) as job:
        process = chaos(job, "--faults", "freeze", "--every", "2s", "--hold", "1000s")
        said = wait_for(process, "stopped for 1000 s")
        process.send_signal(number)
        rest, _ = process.communicate(timeout=HANG_SECONDS)
        until(lambda: all(process_state(pid) in ("R", "S") for pid in job.pids()), "a rank is still stopped")
        (tmp_path / "enough").touch()
        assert job.launcher.wait(HANG_SECONDS) == 0, job.said()
    if number == signal.SIGINT:
        assert process.returncode == 128 + signal.SIGINT
        assert "the job continues; all faults are undone" in rest, said + rest


@pytest.mark.nightly
def test_an_end_that_was_not_seen(tmp_path: Path) -> None:
    """The saboteur stands still while the job ends well. The one that replaces it cannot know how the job ended."""
    with running(tmp_path, 2, vendor=need("mpich")) as job:
        process = chaos(job, "--faults", "freeze", "--every", "2s", "--hold", "0.5s", "--count", "1")
        said = wait_for(process, "the job continued after")
        (saboteur,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(saboteur), signal.SIGSTOP)
        (tmp_path / "enough").touch()
        assert job.launcher.wait(HANG_SECONDS) == 0, job.said()
        os.kill(int(saboteur), signal.SIGKILL)
        rest, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1
    assert f"whether it has failed is not known, because chaos lost sight of {HERE}; it saw: " in rest, said + rest
    assert "the job has failed" not in rest


@pytest.mark.nightly
def test_a_full_disk(tmp_path: Path) -> None:
    """The disk is a tmpfs that only the job and chaos see. For a second no checkpoint is written; the job continues."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    disk = tmp_path / "checkpoints"
    disk.mkdir()
    mounted = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=2m none "$0" && exec "$@"', str(disk))
    with running(tmp_path, 2, vendor=need("mpich"), before=mounted) as job:
        inside = ("nsenter", "--target", str(job.launcher.pid), "--mount")
        options = f"--faults disk --disk {disk} --every 3s --hold 1s --count 2 --report {tmp_path}/chaos-report".split()
        report = finish(job, chaos(job, *options, before=inside), 2, "    undone")
    assert [fault["deed"] for fault in report["faults"]] == [f"{disk} filled for 1 s"] * 2
    assert "No space left on device" in job.said()
