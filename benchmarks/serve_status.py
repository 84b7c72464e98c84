"""What it costs a server to publish its workers for `mpitrain ps`: an update with and without, in turns.

    .venv/bin/python benchmarks/serve_status.py [--workers 100] [--parameters 100000] [--updates 1000] [--rounds 20]

This process is the server, and another one has all the workers, each with a connection of its own. They answer at once
with gradients of zeros, in mode async, so that the server never waits. A turn should last for several seconds: the
server publishes once a second. CPU is that of the server's main thread, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import Any

import numpy

import mpitrain as mt
from mpitrain.bench.rounds import alternate, ratio, spread, versions_line
from mpitrain.serve.attendance import ServerRules
from mpitrain.serve.jobs import JobQueue
from mpitrain.serve.keys import make_keys, parse_key
from mpitrain.serve.link import ServerLink
from mpitrain.serve.pace import Unbounded
from mpitrain.serve.server import JobServer
from mpitrain.serve.status import ServerStatus
from mpitrain.serve.store import ParameterStore
from mpitrain.serve.worker_link import WorkerLink
from mpitrain.watching.activity import publish


def main() -> None:
    parser = argparse.ArgumentParser(
        description="An update of a server that publishes its workers, and of one that does not."
    )
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=100_000, help="float32")
    parser.add_argument("--updates", type=int, default=1000, help="of a turn")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--of", help=argparse.SUPPRESS)  # in the process of the workers: address and key
    arguments = parser.parse_args()
    if arguments.of:
        work(arguments.of, arguments.workers, arguments.parameters)
        return
    world = mt.init()
    publish(0)
    server, address, key = serve(arguments.parameters)
    command = [sys.executable, __file__, f"--workers={arguments.workers}", f"--parameters={arguments.parameters}"]
    with subprocess.Popen([*command, "--of", f"{address} {key}"]) as workers:
        try:
            while len(server.ledger.workers) < arguments.workers:
                server.next_update()
            report(world, server, arguments)
        finally:
            workers.kill()


def serve(num_parameters: int) -> tuple[JobServer, str, str]:
    """Return a server, its address, and the key of its workers."""

    def none(*_: Any) -> float:
        raise AssertionError("a server computes no gradients")

    adapter = mt.ArrayFunction(none, {"w": numpy.zeros(num_parameters, numpy.float32)}, mt.Sgd(0.1))
    keys = make_keys()
    link = ServerLink("127.0.0.1:*", keys, 8 * num_parameters)
    queue = JobQueue(10**6)
    rules = ServerRules("life", [], None, "", "", None, False, 600.0, 600.0, 0, lambda _: None)
    return (
        JobServer(link, ParameterStore(adapter), queue, Unbounded(queue, 32), None, rules),
        link.address,
        keys.worker.text,
    )


def report(world: mt.World, server: JobServer, arguments: argparse.Namespace) -> None:
    shown = server._status
    silent = ServerStatus(server._attendance, server.queue, 0, time.monotonic, list)
    silent._activity = None

    cpu: dict[str, list[float]] = {"with": [], "without": []}

    def turn(name: str, status: ServerStatus) -> None:
        server._status = status
        begun = time.thread_time()
        for _ in range(arguments.updates):
            server.next_update()
        cpu[name].append(time.thread_time() - begun)

    calls = {"with": lambda: turn("with", shown), "without": lambda: turn("without", silent)}
    wall = alternate(world, calls, arguments.rounds)
    cpu = {name: times[1:] for name, times in cpu.items()}  # the first round does not count
    texts = []
    assert shown._activity is not None
    for _ in range(200):
        begun = time.thread_time()
        shown._activity.serve(shown._facts(time.monotonic()))
        texts.append(time.thread_time() - begun)
    print(versions_line("pyzmq"))
    print(f"{arguments.workers} workers, {arguments.parameters:,} float32, {arguments.updates} updates a turn")
    for kind, seconds in (("wall", wall), ("CPU", cpu)):
        for name, times in seconds.items():
            median, low, high = spread([1e3 * one / arguments.updates for one in times])
            print(f"{kind} {name}: {median:.3f} ms an update ({low:.3f} to {high:.3f})")
        print(f"{kind}, with / without: {'{:.3f} ({:.3f} to {:.3f})'.format(*ratio(seconds, 'with', 'without'))}")
    print("CPU of a text: {:.2f} ms ({:.2f} to {:.2f}), once a second".format(*spread([1e3 * one for one in texts])))


def work(where: str, num_workers: int, num_parameters: int) -> None:
    """Answer all jobs, as so many workers."""
    address, text = where.split()
    links = [WorkerLink([address], parse_key(text, "the key"), 8 * num_parameters) for _ in range(num_workers)]
    gradient = numpy.zeros(num_parameters, numpy.float32)
    told = dict.fromkeys(range(num_workers), 0.0)
    answer = {"life": "life", "loss": 1.0, "scale": 1.0, "unused": [], "note": None}
    while True:
        for number, link in enumerate(links):
            if number in told and time.monotonic() - told[number] > 5:
                link.send("hello", {"host": f"host{number // 8}", "facts": []})
                told[number] = time.monotonic()
            message = link.receive(0.0)
            if message is None:
                continue
            told.pop(number, None)
            if message.kind == "welcome":
                link.send("next", {"life": "life", "version": -1})
            elif message.kind == "job":
                known = {"number": message.fields["number"], "version": message.fields["version"]}
                link.send("done", {**answer, **known}, [gradient])


if __name__ == "__main__":
    main()
