"""PyTorch's flight recorder: its files as PyTorch itself writes them, and what is said of them."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs import VENVS, run_command
from mpitrain.watching.flight_recorder import last_calls, written_calls
from mpitrain.watching.recorded_calls import report_of_calls

# PyTorch's own recorder takes down gloo's calls in the form of NCCL's.
CALLS = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
def train():
    for _ in range(2): dist.all_reduce(torch.ones(4))
train()
dist.broadcast(torch.ones(2, 3), 0)
sys.stdout.buffer.write(torch._C._distributed_c10d._dump_fr_trace())
"""


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What PyTorch writes of a process alone: two calls of all_reduce, then one of broadcast."""
    pytest.importorskip("torch")
    script = tmp_path_factory.mktemp("calls") / "calls.py"
    script.write_text(CALLS)
    return subprocess.run([sys.executable, str(script)], capture_output=True, check=True, timeout=300).stdout


def of_rank(dump: bytes, number: int, ranks: str = "[0, 1, 2]", state: str = "started") -> bytes:
    """The same of a rank of NCCL that has made its first `number` calls, the last of which is in this state."""
    told: dict[str, Any] = pickle.loads(dump)
    told["entries"] = [{**entry, "state": "completed"} for entry in told["entries"][:number]]
    for entry in told["entries"]:
        entry["profiling_name"] = entry["profiling_name"].replace("gloo:", "nccl:")
    told["entries"][-1]["state"] = state
    told["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    return pickle.dumps(told, protocol=2)


def test_what_pytorch_writes(dump: bytes) -> None:
    (call,) = last_calls(dump)
    place = "calls.py:7 (<module>)"
    assert (call["group"], call["number"], call["call"]) == ("default_pg", 3, "broadcast")
    assert (call["what"], call["place"]) == ("Float [2, 3]", place)
    (before,) = last_calls(of_rank(dump, 2))
    assert (before["ranks"], before["number"], before["call"]) == ([0, 1, 2], 2, "all_reduce")
    assert before["place"] == "calls.py:5 (train)"


def test_files_that_are_edited_here_are_read_by_pytorch_too(dump: bytes, tmp_path: Path) -> None:
    loader = pytest.importorskip("torch.distributed.flight_recorder.components.loader")
    (tmp_path / "recorder-1").write_bytes(of_rank(dump, 2))
    told = loader.read_dump("recorder-", str(tmp_path / "recorder-1"))
    assert (told["rank"], len(told["entries"]), told["pg_config"]["0"]["ranks"]) == (1, 2, "[0, 1, 2]")
    assert written_calls(f"{tmp_path}/recorder-", [0, 1])[1] == last_calls(of_rank(dump, 2))


class Foreign:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made-by-a-pickle",)


@pytest.mark.parametrize(
    "data", [b"", b"no pickle", pickle.dumps([1]), pickle.dumps({"pg_config": {}, "entries": [Foreign()]}, protocol=2)]
)
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a file of the flight recorder|objects of other kinds"):
        last_calls(data)
    assert not Path("made-by-a-pickle").exists()


def test_a_file_that_is_not_complete(dump: bytes) -> None:
    for size in range(0, len(dump) - 1, 97):
        with pytest.raises(ValueError, match="not a file of the flight recorder"):
            last_calls(dump[:size])


BROADCAST, SUM = "broadcast 3 (Float [2, 3], calls.py:7 (<module>))", "all_reduce 2 (Float [4], calls.py:5 (train))"
LATE = f"rank 1 has not: its last call is {SUM}"
ALL = "all have called it, and it has not ended on all"


@pytest.mark.parametrize(
    ("numbers", "ranks", "state", "said"),
    [
        ({0: 3, 1: 2, 2: 3}, "[0, 1, 2]", "started", [f"ranks 0,2 have called {BROADCAST}; {LATE}"]),
        ({0: 3, 2: 3}, "[0, 1, 2]", "started", [f"ranks 0,2 have called {BROADCAST}; nothing is recorded of rank 1"]),
        ({0: 3, 1: 3}, "[0, 1]", "started", [f"ranks 0,1 have called {BROADCAST}; {ALL}"]),
        ({0: 3, 1: 3}, "[0, 1]", "completed", []),
        ({0: 3, 1: 2}, "[]", "completed", [f"rank 0 has called {BROADCAST}; {LATE}"]),
    ],
)
def test_who_has_not_made_the_call(
    dump: bytes, numbers: dict[int, int], ranks: str, state: str, said: list[str]
) -> None:
    recorded = {rank: last_calls(of_rank(dump, number, ranks, state)) for rank, number in numbers.items()}
    lines = [f"PyTorch's flight recorder, group default_pg: {line}" for line in said]
    assert report_of_calls(recorded) == lines


def test_calls_that_differ(dump: bytes) -> None:
    told = pickle.loads(of_rank(dump, 2))
    told["entries"][1]["profiling_name"] = "nccl:all_gather"
    recorded = {0: last_calls(of_rank(dump, 2)), 1: last_calls(pickle.dumps(told)), 2: last_calls(of_rank(dump, 2))}
    (line,) = report_of_calls(recorded)
    other = SUM.replace("all_reduce", "all_gather")
    assert line.endswith(f"the calls differ: ranks 0,2 have called {SUM}; rank 1 has called {other}")


# A thread does here what PyTorch's does where there is NCCL: it waits at the pipe, and writes the file.
HANGS = """
import os, threading, time, torch, torch.distributed as dist
rank = os.environ["RANK"]
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe"
os.mkfifo(pipe)
def serve():
    asked = os.open(pipe, os.O_RDWR)
    while os.read(asked, 128):
        with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank, "wb") as file:
            file.write(torch._C._distributed_c10d._dump_fr_trace())
threading.Thread(target=serve, daemon=True).start()
dist.init_process_group("gloo")
for step in range(3):
    dist.all_reduce(torch.ones(4))
    if rank == "1" and step == 1:
        END
"""


@pytest.mark.parametrize("starter", ["agent", pytest.param("mpiexec", marks=pytest.mark.nightly)])
def test_a_rank_that_does_not_make_a_call(tmp_path: Path, starter: str) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(HANGS.replace("END", "open('job', 'w').write(pipe); time.sleep(1000)"))
    command = [str(VENVS["mpich"] / "bin/mpitrain"), "run", "--starter", starter, "-n", "2", "train.py"]
    limits = {"MPITRAIN_STALL_SECONDS": "4", "MPITRAIN_HANG_SECONDS": "6"}
    job = run_command(command, cwd=tmp_path, env=limits)
    assert (job.code, job.left) == (1, []), job.output
    said = (
        r"mpitrain: PyTorch's flight recorder, group default_pg: rank 0 has called all_reduce 3 \(Float \[4\], "
        r"train.py:14 \(<module>\)\); rank 1 has not: its last call is all_reduce 2 \(Float \[4\], train.py:14 "
    )
    assert re.search(said, job.stderr), job.output
    pipe = Path((tmp_path / "job").read_text())
    assert not list(pipe.parent.glob(f"{pipe.name.rpartition('-')[0]}-*")), "files are left"


def test_what_a_watchdog_has_written(tmp_path: Path) -> None:
    """NCCL's writes the file at the end of its timeout, and ends the process by SIGABRT."""
    pytest.importorskip("torch")
    file = 'os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank'
    wait = f"while not (os.path.exists({file}) and os.path.getsize({file})): time.sleep(0.1)"
    end = f"os.write(os.open(pipe, os.O_RDWR), b'1')\n        {wait}\n        time.sleep(0.5); os.abort()"
    (tmp_path / "train.py").write_text(HANGS.replace("END", end))
    words = ["run", "--starter", "agent", "--max-restarts", "0", "-n", "2", "train.py"]
    job = run_command([str(VENVS["mpich"] / "bin/mpitrain"), *words], cwd=tmp_path)
    assert (job.code, job.left) == (134, []), job.output
    assert "group default_pg: rank 1 has called all_reduce 2" in job.stderr
    assert "rank 1 on" in job.stderr
    assert "was killed by signal 6; mpitrain ended the others" in job.stderr
