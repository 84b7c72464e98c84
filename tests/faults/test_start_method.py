"""How multiprocessing starts the processes of a rank: by fork, or by forkserver where a fork is unsafe."""

from __future__ import annotations

import os
import re

import pytest

from faults import helping
from faults.helping import Script, a_device
from faults.outcome import failed, succeeded
from mpitrain.job import helpers

# A fixture: pytest finds it by this name.
script = helping.script

# No guard, functions inside a function, and sums of the ranks before, between and after.
LAMBDAS = """
import multiprocessing, os
import numpy
import mpitrain as mt

BEFORE
world = mt.init()
AFTER

def main():
    values = multiprocessing.Queue()
    total = world.sum(numpy.full(100_000, 1.0 + world.rank))
    for number in range(30):
        helper = multiprocessing.Process(target=lambda: values.put(total[number]))
        helper.start()
        total = world.sum(total)
        assert values.get() == sum(range(1, world.size + 1)) * world.size**number
        helper.join()
        assert helper.exitcode == 0
    world.print(multiprocessing.get_start_method())

main()
"""


def test_functions_inside_a_function_and_no_guard(script: Script, vendor: str) -> None:
    job = script(2, LAMBDAS.replace("BEFORE", "").replace("AFTER", ""), vendor)
    succeeded(job)
    assert (job.stdout, job.stderr) == ("fork\n", "")


def test_what_the_program_chooses_after_init(script: Script) -> None:
    source = """
import multiprocessing
import mpitrain as mt
mt.init()
assert multiprocessing.get_start_method(allow_none=True) is None
multiprocessing.set_start_method("spawn")
print(multiprocessing.get_start_method())
"""
    job = script(1, source)
    succeeded(job)
    assert job.stdout == "spawn\n"


REASONS = {
    "an open device": "device = os.open(NODE, os.O_PATH)",
    "JAX": "import types, sys; sys.modules['jax'] = types.ModuleType('jax')",
}


@pytest.mark.parametrize("reason", REASONS)
def test_where_a_fork_is_unsafe(script: Script, reason: str) -> None:
    """Rank 0 prints one line before the error that follows."""
    node = a_device()
    source = LAMBDAS.replace("BEFORE", REASONS[reason].replace("NODE", repr(node))).replace("AFTER", "")
    job = script(2, source)
    because = {"an open device": f"{node} is open, and a device ", "JAX": "JAX has threads, which "}[reason]
    begin = rf"mpitrain: rank 0 on \S+: multiprocessing starts processes by forkserver, because {re.escape(because)}"
    assert re.match(begin, job.stderr), job.output
    assert job.stderr.count("by forkserver, because") == 1, job.output
    failed(job, "lambda")


@pytest.mark.parametrize("when", ["BEFORE", "AFTER"])
def test_where_a_fork_is_unsafe_for_one_rank(script: Script, when: str) -> None:
    """That rank prints the line, whether it opened the device before or after init()."""
    source = """
import multiprocessing, os
import mpitrain as mt

BEFORE
world = mt.init()
AFTER
methods = world.allgather(multiprocessing.get_start_method())
assert methods == ["fork", "forkserver"], methods
"""
    opened = f"device = os.open({a_device()!r}, os.O_PATH) if os.environ['PMI_RANK'] == '1' else None"
    job = script(2, source.replace(when, opened).replace("BEFORE", "").replace("AFTER", ""))
    succeeded(job)
    assert re.findall(r"mpitrain: (.*) on \S+: multiprocessing starts", job.stderr) == ["rank 1"], job.output


LOCK = "lock = multiprocessing.Lock()"


@pytest.mark.parametrize(("before", "after", "method"), [(LOCK, "", "fork"), ("", LOCK, "forkserver")])
def test_a_lock_chooses_the_start_method(script: Script, before: str, after: str, method: str) -> None:
    """A lock made before init() keeps fork, and rank 0 says what to do. With that change the method is forkserver."""
    source = f"""
import multiprocessing, os
import mpitrain as mt
{before}
device = os.open({a_device()!r}, os.O_PATH)
world = mt.init()
{after}
world.print(multiprocessing.get_start_method())
"""
    job = script(2, source)
    succeeded(job)
    assert job.stdout == f"{method}\n"
    does = {
        "fork": "multiprocessing forks processes, though /dev/",
        "forkserver": "multiprocessing starts processes by ",
    }
    assert re.fullmatch(rf"mpitrain: rank 0 on \S+: {does[method]}.*\n", job.stderr), job.output


def test_where_a_fork_is_unsafe_a_program_that_can_be_pickled_works(script: Script) -> None:
    source = f"""
import multiprocessing, os
import mpitrain as mt

def square(number):
    return number**2

if __name__ == "__main__":
    world = mt.init()
    device = os.open({a_device()!r}, os.O_PATH)
    with multiprocessing.Pool(1) as pool:
        world.print(pool.map(square, [1, 2, 3]), multiprocessing.get_start_method())
"""
    job = script(2, source)
    succeeded(job)
    assert job.stdout == "[1, 4, 9] forkserver\n"


def test_memory_and_terminals_are_no_devices() -> None:
    before = helpers.open_device()
    opened = [os.open(path, os.O_PATH) for path in ("/dev/null", "/dev/urandom", "/dev/tty", "/dev/ptmx")]
    try:
        assert helpers.open_device() == before
    finally:
        for descriptor in opened:
            os.close(descriptor)


def test_a_console_of_whatever_kind_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pseudoterminal stands for such a console: its number is not among the known ones."""
    known = helpers._HARMLESS - {5, *range(128, 144)}
    before = helpers.open_device()
    ours, theirs = os.openpty()
    monkeypatch.setattr(helpers, "_HARMLESS", known)
    try:
        assert helpers.open_device() == before
    finally:
        os.close(ours)
        os.close(theirs)
