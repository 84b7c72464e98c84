"""What `mpitrain plan` does about a script that writes, and about one whose steps it cannot measure."""

from __future__ import annotations

import importlib.util
import socket
import sys
from pathlib import Path

import pytest

from cli.test_plan_command import TRAINER, profile
from jobs import Job, run_command

NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
# Steps that are measured: the line #WRITE runs once, after the third step of the whole batch.
MEASURED = TRAINER.replace("    made.append(len(batch))", "    made.append(len(batch))\n    if len(made) == 9: write()")
HELPER = (
    "import shutil, os, sqlite3, subprocess, pickle, logging\nfrom pathlib import Path\nimport numpy\ndef write():\n  "
)
UNSEEN = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters())
for step in range(10**6):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    open("steps.txt", "w").write(str(step)) if step > 50 else None
"""


def plan(folder: Path, source: str, *options: str) -> Job:
    folder.joinpath("train.py").write_text(source)
    folder.joinpath("old").mkdir()
    for name in ("best.pt", "old/best.pt"):
        folder.joinpath(name).write_text("precious")
    given = profile(folder, socket.gethostname(), "other")
    command = [sys.executable, "-m", "mpitrain", "plan", "--profile", given.name, "--steps", "10", *options]
    job = run_command(
        [*command, "train.py", "--milliseconds", "2"], cwd=folder, env={"XDG_STATE_HOME": str(folder / "s")}
    )
    assert job.left == []
    assert "Traceback" not in job.stderr, job.output
    return job


def is_kept(folder: Path) -> bool:
    return all(
        path.is_file() and path.read_text() == "precious" for path in (folder / "best.pt", folder / "old/best.pt")
    )


LOSSES = [
    "open('best.pt', 'w')",
    "numpy.save(open('best.pt', 'wb'), numpy.zeros(3))",
    "pickle.dump(1, open('best.pt', 'wb'))",
    "Path(__file__).resolve().parent.joinpath('old', 'best.pt').write_text('x')",
    "Path('new').write_text('x'); os.replace('new', 'best.pt')",
    "os.rename('best.pt', 'other.pt')",
    "shutil.copy(__file__, 'best.pt')",
    "os.open('best.pt', os.O_WRONLY | os.O_TRUNC)",
    "shutil.rmtree('old')",
    "shutil.move('old', 'moved')",
    "os.unlink('best.pt', dir_fd=os.open('old', os.O_RDONLY))",
    "os.chmod('best.pt', 0o600); os.truncate('best.pt', 0)",
    "os.symlink('best.pt', 'link'); open('link', 'w')",
    "logging.FileHandler('best.pt', 'w')",
    "import torch; torch.save({}, 'best.pt')",
]


@pytest.mark.parametrize(
    "losses",
    [LOSSES[:-1], pytest.param([LOSSES[3], LOSSES[-1]], marks=[NEEDS_TORCH, pytest.mark.nightly])],
    ids=["python", "torch"],
)
def test_nothing_that_was_there_is_lost(tmp_path: Path, losses: list[str]) -> None:
    """The script is ended before each write; here it continues, to try them all."""
    source = (
        HELPER
        + f"""
  for loss in {losses!r}:
    try:
      exec(loss)
    except SystemExit as end:
      assert end.code == 0, "the steps before are enough"
    else:
      raise AssertionError(loss)
  if os.fork() == 0:
    open("best.pt", "w")
  assert os.wait()[1]
  open("best.pt", "w")
"""
    )
    job = plan(tmp_path, source + MEASURED, "--ranks", "1")
    assert job.code == 0, job.output
    assert is_kept(tmp_path)
    assert "train.py would overwrite old/best.pt (train.py, line 8), which was there before" in job.stderr


def test_other_writes_are_named(tmp_path: Path) -> None:
    source = HELPER + (
        "open('old/best.pt', 'a').write('!'); numpy.save('new', 1)\n"
        "  sqlite3.connect('a.db').execute('create table t (x)')\n"
        "  subprocess.run('echo 1 > best.pt', shell=True); os.mkdir('out'); open('empty', 'w')"
    )
    job = plan(tmp_path, source + MEASURED, "--ranks", "1")
    assert job.code == 0, job.output
    line = next(line for line in job.stderr.splitlines() if " train.py wrote " in line)
    assert "or other users wrote, unseen by Python: best.pt (changed)" in job.stderr
    for name in (
        "old/best.pt (changed)",
        "new.npy (new)",
        "a.db (new)",
        "best.pt (changed)",
        "out (new)",
        "empty (new)",
    ):
        assert name in line
    assert f"has started sh; what they write outside of {tmp_path} was not seen" in job.stderr


def test_a_script_that_writes_where_it_may(tmp_path: Path) -> None:
    """Empty files such as locks, temporary files, caches; and with --writes all others."""
    source = (
        "import os; os.environ['XDG_CACHE_HOME'] = 'x'\n"
        + HELPER
        + (
            "import tempfile; open('a.lock', 'w'); open('best.pt', 'r+').read(); t = tempfile.mkdtemp();"
            "open(t + '/x', 'w').write('x'); open(t + '/x', 'w'); shutil.rmtree(t); open('data.bin', 'w').write('x');"
            "os.remove('data.bin'); assert open('../here').read() == 'x' and __name__ == '__main__'"
        )
    )
    tmp_path.joinpath("here").write_text("x")
    (tmp_path / "p").mkdir()
    (tmp_path / "p/a.lock").touch()
    job = plan(tmp_path / "p", source + MEASURED, "--ranks", "1")
    assert job.code == 0, job.output
    assert " wrote " not in job.stderr
    assert " ended" not in job.stderr
    (tmp_path / "q").mkdir()
    job = plan(tmp_path / "q", HELPER + "os.remove('best.pt')" + MEASURED, "--ranks", "1", "--writes")
    assert job.code == 0, job.output
    assert "train.py wrote best.pt (removed)" in job.stderr


# JAX makes an error of its own of an exit in a callback, and logs both.
CALLBACK = """
import jax, jax.numpy as jnp, numpy
from jax.experimental import io_callback
import mpitrain as mt
mean = lambda values: mt.init().mean(numpy.asarray(values))
step = jax.jit(lambda w: io_callback(mean, jax.ShapeDtypeStruct(w.shape, w.dtype), w, ordered=True))
w = jnp.ones(4)
while True:
    w = step(w).block_until_ready()
"""
NEEDS_JAX = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")


@pytest.mark.parametrize(
    ("source", "options", "expected"),
    [
        ("import numpy\nnumpy.save('new', [1])", (), "would write new.npy (train.py, line 2) and has not imported "),
        ("while True: pass", ("--step-timeout", "2s"), "was ended, because it has made no step that mpitrain plan can"),
        ("import mpitrain as mt, numpy as n\nwhile 1: mt.init().mean(n.ones(3))", (), "cannot measure (by world.mean)"),
        pytest.param(UNSEEN, (), "cannot measure (of Adam)", marks=[NEEDS_TORCH, pytest.mark.nightly]),
        pytest.param(CALLBACK, (), "cannot measure (by world.mean)", marks=[NEEDS_JAX, pytest.mark.nightly]),
        pytest.param(
            "import mpitrain.torch" + UNSEEN, (), "cannot measure (of Adam)", marks=[NEEDS_TORCH, pytest.mark.nightly]
        ),
    ],
)  # fmt: skip
def test_a_script_without_steps_is_ended(tmp_path: Path, source: str, options: tuple[str, ...], expected: str) -> None:
    job = plan(tmp_path, source, *options)
    assert job.code == 1, job.output
    assert expected in job.stderr, job.output
    assert "Traceback" not in job.stderr, job.output
    assert {path.name for path in tmp_path.iterdir()} <= {"train.py", "cluster.json", "old", "best.pt"}
