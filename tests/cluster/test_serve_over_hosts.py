"""`mpitrain serve` and `mpitrain work` over the nodes of a cluster that the playbooks have set up, with real faults."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import sys
import sysconfig
import uuid

import numpy
import pytest
from launching import PYTHONS, SHARE, Job, as_user, write

import mpitrain as mt
from testbed import Bed

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("healed"), pytest.mark.nightly]

PORT = 5123
NUM_SAMPLES, BATCH = 1000, 10
# Counts how often each sample is in an update, until there is a file of the name that it is given.
SCRIPT = """
import json, pathlib, socket, sys, time
import numpy
import mpitrain as mt

class UntilFile(mt.Hook):
    ends_run = True

    def after_step(self, trainer, step):
        if step.number % 50 == 0:
            print("step", step.number, flush=True)
        if step.number % 10 == 0 and pathlib.Path(sys.argv[1]).exists():
            trainer.last_step = step.number

def loss_and_gradients(parameters, batch, on_gradient):
    time.sleep(0.02)
    gradient = numpy.zeros(NUM_SAMPLES)
    numpy.subtract.at(gradient, batch, 1.0)
    on_gradient("count", gradient)
    return 1.0

def build(world):
    data = mt.data.ArrayData(world, numpy.arange(NUM_SAMPLES), global_batch=BATCH, seed=5)
    adapter = mt.ArrayFunction(loss_and_gradients, {"count": numpy.zeros(NUM_SAMPLES)}, mt.optim.SGD(1.0))
    return mt.Parts(adapter, mt.ParameterServer(), data)

print("begins on", socket.gethostname(), mt.init().context.devices, flush=True)
trainer = mt.Trainer(build, [UntilFile(), mt.Checkpoint(sys.argv[2], steps=10, keep=2)])
trainer.run()
counts = trainer.adapter.parameters()["count"].tolist()
print("the training is over", json.dumps([counts, trainer.data.state()]), flush=True)
""".replace("NUM_SAMPLES", str(NUM_SAMPLES)).replace("BATCH", str(BATCH))


@pytest.fixture(scope="module", autouse=True)
def pyzmq(bed: Bed) -> None:
    """The script, and pyzmq of this environment, on the shared folder."""
    write(bed, "node1", f"{SHARE}/served.py", SCRIPT)
    there = as_user(bed, "node1", f"{PYTHONS['mpich']} -c 'import sys; print(*sys.version_info[:2])'").stdout.split()
    if there != [str(number) for number in sys.version_info[:2]]:
        pytest.skip(f"the nodes have Python {'.'.join(there)}, this environment another one")
    site = sysconfig.get_path("purelib")
    files = importlib.metadata.distribution("pyzmq").files or []
    tops = sorted({file.parts[0] for file in files})
    target = as_user(bed, "node1", f"echo {SHARE}/venv/lib/python3*/site-packages").stdout.strip()
    unpack = f"ssh node1 'sudo -u cluster tar -C {target} -x'"
    line = f"set -o pipefail; tar -C {site} -c {shlex.join(tops)} | {unpack}"
    copied = bed.run(["bash", "-c", line], timeout_seconds=300)
    assert copied.returncode == 0, copied.stderr


class Served:
    """A server on node1, with a file that ends it, and a folder for its checkpoints."""

    def __init__(self, bed: Bed, options: str = "") -> None:
        self._bed = bed
        self.file = f"{SHARE}/end-{uuid.uuid4().hex}"
        arguments = f"--port {PORT} {options} served.py {self.file} {SHARE}/saved-{uuid.uuid4().hex}"
        self.server = Job(bed, arguments, command="serve")

    def line(self) -> tuple[str, str]:
        """The variable and the arguments of the line that starts a worker."""
        self.server.wait_for("mpitrain work ")
        line = re.search(
            r"^    (MPITRAIN_KEY=\S+) mpitrain work (node1:\d+ served.py \S+ \S+)$", self.server.output(), re.M
        )
        assert line, self.server.output()
        return line[1], line[2]

    def work(self, node: str, setting: str = "") -> Job:
        """Start a worker on a node."""
        key, arguments = self.line()
        return Job(self._bed, arguments, command="work", node=node, setting=f"{key} {setting}")

    def finish(self) -> str:
        """End the training. Check that each sample counts once. Return the server's output."""
        as_user(self._bed, "node1", f"touch {self.file}")
        ended = self.server.end()
        assert ended.code == 0, ended.output
        (last,) = re.findall(r"the training is over (.*)", ended.output)
        counts, position = json.loads(last)
        data = mt.data.ArrayData(mt.init(), numpy.arange(NUM_SAMPLES), global_batch=BATCH, seed=5)
        expected = numpy.full(NUM_SAMPLES, position["epoch"])
        expected[data.read(position["epoch"], 0, position["cursor"])] += 1
        for epoch, begin, end in position.get("left", []):
            expected[data.read(epoch, begin, end)] -= 1
        assert counts == expected.tolist()
        return ended.output


def test_known_workers_and_one_that_joins(bed: Bed) -> None:
    """The clock of a node is a day ahead, and nobody notices."""
    bed.clock("node4", 86400.0)
    served = Served(bed, "--hosts node2/cpu,node3/cpux2")
    served.server.wait_for("3 here")
    joined = served.work("node4")
    served.server.wait_for("4 here")
    served.server.wait_for("step ", served.server.output().count("step ") + 3)
    output = served.finish()
    assert joined.end().code == 0, joined.output()
    assert "4 workers (0 gone)" in output
    assert "[node2:1] begins on node2 ('cpu',)" in output
    assert output.count("begins on node3") == 2
    assert "over" not in joined.output()


def test_a_link_that_goes_and_comes(bed: Bed) -> None:
    """The worker of a node without a cable is missed within seconds. Others get its job, and it comes back itself."""
    served = Served(bed)
    near, far = served.work("node2"), served.work("node3", "MPITRAIN_STALL_SECONDS=3")
    served.server.wait_for("2 here")
    bed.cut("node3")
    served.server.wait_for("has gone (its connection has ended); 1 here")
    served.server.wait_for("step ", served.server.output().count("step ") + 3)
    bed.heal("node3")
    served.server.wait_for("2 here", 2)
    output = served.finish()
    for worker in (near, far):
        assert worker.end().code == 0, worker.output()
    assert "the server has not been heard from for" in far.output()
    assert "3 workers (1 gone)" in output  # by connections


def test_a_firewall_in_front_of_the_server_and_a_host_that_cannot_be_reached(bed: Bed) -> None:
    served = Served(bed)
    bed.drop("node1", PORT)
    worker = served.work("node2", "MPITRAIN_STALL_SECONDS=2")
    worker.wait_for("nothing answers at node1:5123")
    assert "or a firewall drops the packets" in worker.output()
    bed.undrop("node1")
    served.server.wait_for("1 here")
    served.finish()
    assert worker.end().code == 0, worker.output()
    bed.cut("node3")
    ended = Job(bed, f"--port {PORT} --hosts node2/cpu,node3/cpu served.py none none", command="serve").end()
    assert ended.code == 1
    assert "node3" in ended.output
    assert "begins on" not in ended.output
