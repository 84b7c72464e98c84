"""`mpitrain run --restarts`: copies in memory of what each rank keeps for itself, and copies on two hosts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from faults.outcome import succeeded
from faults.remembering import result, resumed, train, went_on
from jobs import Job
from keeping import keeper

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


def test_what_a_rank_keeps_for_itself(tmp_path: Path) -> None:
    """A step counts only if all ranks have copied their parts of it."""
    after = "world.print('left', world.allgather(trainer.strategy.left.tolist()))"
    job = train(tmp_path / "killed", ranks=3, before=OWN, after=after)
    succeeded(job)
    assert resumed(job) == [8]
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "killed").touch()
    whole = train(tmp_path / "whole", ranks=3, before=OWN, after=after)
    succeeded(whole)
    assert "left" in whole.stdout
    assert job.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]
    assert result(tmp_path / "killed")[0] == result(tmp_path / "whole")[0]


# Ranks 1 and 2 believe that they are on another host. The test starts that host's keeper.
TWO_HOSTS = """
import socket
import mpitrain.state.state_copies as copies

if int(os.environ["PMI_RANK"]) >= 1:
    socket.gethostname = lambda: "other"
    line = copies.KeeperLine
    copies.KeeperLine = lambda name, of: line("OTHER", of)
"""


def train_on_two_hosts(folder: Path, codec: str, wrong: str = "pass") -> Job:
    with keeper() as name:
        return train(folder, wrong, ranks=3, first=TWO_HOSTS.replace("OTHER", name), codec=codec)


# Without a codec there is less to restore.
@pytest.mark.parametrize("codec", [pytest.param("none", marks=pytest.mark.nightly), "int8"])
def test_two_hosts(tmp_path: Path, codec: str) -> None:
    """What the codec has left out also comes back, bit for bit."""
    whole = train_on_two_hosts(tmp_path / "whole", codec)
    succeeded(whole)
    wrong = "if rank == 2 and step == 8 and once('killed'): die()"
    job = train_on_two_hosts(tmp_path / "killed", codec, wrong)
    went_on(job, tmp_path / "killed", [7], result(tmp_path / "whole"))
    assert "had left to send is lost" not in job.stdout


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_host_without_a_copy(tmp_path: Path, codec: str) -> None:
    """The host gets the state from the other host. What its ranks had left out is lost, and a line says so."""
    wrong = """if rank == 2 and step == 8 and once("killed"):
        copies.KeeperLine("", "").keep_only([], 9)
        die()"""
    job = train_on_two_hosts(tmp_path / "killed", codec, wrong)
    succeeded(job)
    assert resumed(job) == [7]
    lost = re.findall(r"the copy of step 7 in memory: what rank (\d) had left to send is lost", job.stdout)
    assert lost == ([] if codec == "none" else ["1", "2"])
    if codec == "none":
        whole = train_on_two_hosts(tmp_path / "whole", codec)
        succeeded(whole)
        assert result(tmp_path / "killed")[0] == result(tmp_path / "whole")[0]


LACKS = """
from mpitrain.state import memory_slot
if int(os.environ["PMI_RANK"]) >= 1:
    memory_slot._limits = lambda: [(100, 10**9, "this machine")]
"""


def test_a_host_without_room(tmp_path: Path) -> None:
    """It makes no copy, and says so at the first step of each try. The copy of the other host serves both."""
    whole = train_on_two_hosts(tmp_path / "whole", "none")
    succeeded(whole)
    with keeper() as name:
        first, wrong = TWO_HOSTS.replace("OTHER", name) + LACKS, "if rank == 2 and step == 8 and once('killed'): die()"
        job = train(tmp_path / "killed", wrong, ranks=3, first=first)
    went_on(job, tmp_path / "killed", [7], result(tmp_path / "whole"))
    said = re.findall(r"mpitrain: rank (\d) on (\S+): the state is not copied to memory here, .* are free", job.stderr)
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


def test_the_optimizers_within_a_round(tmp_path: Path) -> None:
    """In a round, each rank has an optimizer of its own. If some of them are lost, all ranks get that of rank 0."""
    wrong = """if rank == 2 and step == 8 and once("killed"):
        copies.KeeperLine("", "").keep_only(["1/state"], 9)
        die()"""
    with keeper() as name:
        first = TWO_HOSTS.replace("OTHER", name)
        job = train(tmp_path / "killed", wrong, ranks=3, first=first, before=ROUNDS, hooks="[Tell()]")
    succeeded(job)
    assert resumed(job) == [7]
    before, after = (line.split() for line in re.findall(r"after step 7: (.*)", job.stdout))
    assert len(set(before)) == 3
    assert after == [before[0]] * 3
