"""How fast a job with a server goes on: when a worker joins, when one is killed, and when the server is killed.

    python benchmarks/serve_join.py [--trials 20]

Real processes on this machine: `mpitrain serve`, and `mpitrain work` twice. A job takes a worker 0.2 s. In each trial a
third worker joins, and is killed in the middle of a job. Then, in as many trials, the server is killed and started
again at once with the same command; it goes on from its newest checkpoint. All kills are SIGKILL. Printed are seconds,
as median, lowest and highest:

    first job          from the end of the worker's imports to its first job; and from the command on
    job done again     from the kill of the worker to the end of the same job at another worker
    next update        from the kill of the server to the first update of the new one; and from the end of its imports
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mpitrain.bench.rounds import versions_line

DEADLINE_SECONDS = 120.0
# When, by which process, what, the first sample of the job or the number of the step, and CPU seconds of the process.
Line = tuple[float, int, str, int, float]

SCRIPT = """
import os, sys, time
import numpy
import mpitrain as mt

folder = sys.argv[1]
file = os.open(folder + "/noted", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def note(*words):
    words = time.time(), os.getpid(), *words, time.process_time()
    os.write(file, (" ".join(map(str, words)) + "\\n").encode())

note("imported", 0)

def sleeping(parameters, batch, on_gradient):
    note("began", batch[0])
    time.sleep(0.2)
    on_gradient("w", numpy.full(10_000, 1e-3, "float32"))
    note("ended", batch[0])
    return 0.0

def build(world):
    data = mt.ArrayData(world, numpy.arange(10**6), global_batch=4)
    model = mt.ArrayFunction(sleeping, {"w": numpy.zeros(10_000, "float32")}, mt.Sgd(0.1))
    return mt.Parts(model, mt.ParameterServer("async"), data)

class Note(mt.Hook):
    def after_step(self, trainer, step):
        note("updated", step.number)

mt.Trainer(build, [mt.StopAtStep(10**6), Note(), mt.Checkpoint(folder + "/saved", steps=10)]).run()
"""


class Run:
    """A server and workers, and what they have noted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "train.py").write_text(SCRIPT)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = str(free.getsockname()[1])
        self._environment = {**os.environ, "XDG_STATE_HOME": str(folder)}
        self._started: list[subprocess.Popen[bytes]] = []

    def serve(self) -> subprocess.Popen[bytes]:
        return self._start("serve", "--port", self._port)

    def work(self) -> subprocess.Popen[bytes]:
        return self._start("work", f"127.0.0.1:{self._port}")

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        with (self._folder / "output").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "mpitrain", *words, str(self._folder / "train.py"), str(self._folder)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    def noted(self) -> list[Line]:
        """All that was noted so far."""
        path = self._folder / "noted"
        content = path.read_text() if path.exists() else ""
        split = [line.split() for line in content.splitlines()[: content.count("\n")]]
        return [(float(at), int(process), what, int(number), float(cpu)) for at, process, what, number, cpu in split]

    def wait_for(self, found: Callable[[Line], object], after: float = 0.0) -> Line:
        """The first line after this moment that is looked for."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            for line in self.noted():
                if line[0] > after and found(line):
                    return line
            time.sleep(0.02)
        raise SystemExit(f"the run does not go on: {(self._folder / 'output').read_text()[-3000:]}")

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    trials = parser.parse_args().trials
    print(f"{versions_line('pyzmq')}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name))
        try:
            server = run.serve()
            run.wait_for(lambda line: line[2] == "imported")  # the key is there
            workers = [run.work().pid, run.work().pid]
            for worker in workers:
                run.wait_for(lambda line, worker=worker: line[1] == worker and line[2] == "began")  # type: ignore[misc]
            joins_and_kills(run, trials)
            restarts(run, server, workers, trials)
        finally:
            run.close()
    print(f"load {os.getloadavg()[0]:.1f}")


def joins_and_kills(run: Run, trials: int) -> None:
    first: list[float] = []
    cpu: list[float] = []
    whole: list[float] = []
    again: list[float] = []
    for number in range(trials):
        started = time.time()
        process = run.work()
        worker = process.pid
        imported = run.wait_for(lambda line, worker=worker: line[1:3] == (worker, "imported"))  # type: ignore[misc]
        began = run.wait_for(lambda line, worker=worker: line[1:3] == (worker, "began"))  # type: ignore[misc]
        first.append(began[0] - imported[0])
        cpu.append(began[4] - imported[4])
        whole.append(began[0] - started)
        run.wait_for(lambda line, worker=worker: line[1:3] == (worker, "began"), time.time())  # type: ignore[misc]
        time.sleep(0.01 * (number % 10))
        killed = time.time()
        process.send_signal(signal.SIGKILL)
        process.wait()
        last = [line for line in run.noted() if line[1] == worker][-1]
        if last[2] == "began":  # else it was between two jobs, because the machine is busy
            ended = run.wait_for(lambda line, last=last: line[2:4] == ("ended", last[3]))  # type: ignore[misc]
            again.append(ended[0] - killed)
    show("first job, after the imports", first)
    show("CPU seconds of that", cpu)
    show("first job, after the command", whole)
    show("job done again", again)


def restarts(run: Run, server: subprocess.Popen[bytes], workers: Sequence[int], trials: int) -> None:
    updated: list[float] = []
    after_imports: list[float] = []
    for _ in range(trials):
        begun = time.time()
        run.wait_for(lambda line: line[2] == "updated" and line[3] % 10 == 9, begun)  # a checkpoint is there
        time.sleep(0.5)
        killed = time.time()
        server.send_signal(signal.SIGKILL)
        server.wait()
        server = run.serve()
        process = server.pid
        imported = run.wait_for(lambda line, process=process: line[1:3] == (process, "imported"))  # type: ignore[misc]
        first = run.wait_for(lambda line, process=process: line[1:3] == (process, "updated"))  # type: ignore[misc]
        updated.append(first[0] - killed)
        after_imports.append(first[0] - imported[0])
        for worker in workers:  # both have come back
            run.wait_for(lambda line, worker=worker: line[1:3] == (worker, "began"), first[0])  # type: ignore[misc]
    show("next update, after the kill", updated)
    show("next update, after the imports", after_imports)


def show(name: str, seconds: Sequence[float]) -> None:
    print(
        f"{name:<32} {statistics.median(seconds):6.2f} s  [{min(seconds):.2f} to {max(seconds):.2f}], "
        f"{len(seconds)} times, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
