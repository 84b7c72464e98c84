"""`mpitrain run --nnodes` over the nodes of a cluster: hosts go and come back by themselves, and no step is lost."""

from __future__ import annotations

import ast
import re
import time

import pytest
from launching import NODES, SHARE, Job, as_user, drop_kept, run, stop_waiting, training, write
from test_joining import COPIES, SCRIPT, change

from testbed import Bed

pytestmark = [pytest.mark.timeout(3000), pytest.mark.usefixtures("healed"), pytest.mark.nightly]

# A host that was away is set aside for a minute. The ranks need not compute much in that minute.
SAVES = SCRIPT.replace("Show()]", "Show(), mt.Checkpoint('saved', steps=100000)]")
AWAY_SECONDS = 20.0
SLOW = SAVES.replace("time.sleep(0.05)", "time.sleep(0.25)")


def inventory(bed: Bed, *nodes: str) -> None:
    """Replace the inventory of the job at once, as an editor does."""
    lines = [f"{node} ansible_host={bed.address(node)}" for node in nodes]
    text = "\n".join(["[head]", lines[0], "[workers]", *lines[1:], "[cluster:children]", "head", "workers", ""])
    write(bed, "node1", "new_hosts", text)
    assert as_user(bed, "node1", "mv new_hosts hosts").returncode == 0


def counted_steps(output: str) -> dict[int, tuple[int, list[int], str]]:
    """Do as steps_of in test_joining.py does. Steps of a failed try after its last copy are repeated and do not count.

    A change of hosts repeats no step.
    """
    steps: dict[int, tuple[int, list[int], str]] = {}
    changes_at = -1  # the hosts change after this step
    kinds = (
        r"mpitrain: .* after step (\d+); continuing",
        r"(?:\[0\] )?resumed from memory at step (\d+)$",
        r"(?:\[0\] )?step (\d+) (\d+) (\[.*\]) ([0-9a-f]+)$",
    )
    for changed, resumed, step, size, samples, bits in re.findall(f"(?m)^(?:{'|'.join(kinds)})", output):
        if changed:
            assert int(changed) == len(steps), output
            changes_at = int(changed)
        elif resumed:
            assert int(resumed) == changes_at or changes_at < 0, output
            steps, changes_at = {made: one for made, one in steps.items() if made <= int(resumed)}, -1
        else:
            assert int(step) == len(steps) + 1, output
            steps[int(step)] = int(size), ast.literal_eval(samples), bits
    return steps


@pytest.mark.parametrize(
    "returns", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["", "with a power cut"]
)
def test_hosts_go_and_come_back(bed: Bed, python: str, returns: bool) -> None:
    """node3 differs at the start, node4 is new, and node2 leaves the inventory.

    In the slow one node4 loses its power before that, is set aside for a minute, and comes back by itself. (With a
    clock of its own, tests/launch/test_intake.py has that too.)
    """
    for node in NODES:
        write(bed, node, "/home/cluster/moves.py", SLOW + "# changed\n" * (node == "node3"))
    as_user(bed, "node1", "rm -rf enough record saved; mkdir record")
    inventory(bed, "node1", "node2", "node3")
    arguments = "-i hosts --ppn 1 --max-restarts 5 --nnodes 2:4 /home/cluster/moves.py 4000"
    job = Job(bed, arguments, python=python, setting=COPIES)
    job.wait_for("node3 cannot take part: moves.py differs; starting on node1, node2 with 2 ranks, without node3\n")
    job.wait_for("has begun")
    write(bed, "node3", "/home/cluster/moves.py", SLOW)
    change(bed, python, "+node3")
    job.wait_for("node3 joins after step ")
    job.wait_for("resumed from memory at step ")
    inventory(bed, "node1", "node2", "node3", "node4")
    job.wait_for("node4 joins after step ")
    job.wait_for("resumed from memory at step ", 2)
    if returns:
        bed.kill("node4")
        job.wait_for("node4 fell silent; starting again on node1, node2, node3 with 3 ranks, without node4\n")
        bed.start("node4")
        job.wait_for("node4 joins after step ", 2)
        job.wait_for("resumed from memory at step ", 4)
    inventory(bed, "node1", "node3", "node4")
    job.wait_for("node2 leaves (not in the inventory any more) after step ")
    job.wait_for("resumed from memory at step ", 5 if returns else 3)
    bed.cut("node3")
    bed.cut("node4")
    stop_waiting(bed, job, python)
    end = job.end()
    assert end.code == 1, end.output
    assert "Starting again on node1 only to save the state\n" in end.output
    steps = counted_steps(end.output)
    ended = re.search(
        r"only node1 of node1, node\d, node\d can take part, and --nnodes is 2:4: "
        r"the job has ended after step (\d+), which is saved\n",
        end.output,
    )
    assert ended, end.output
    saved = int(ended[1])  # of the newest copy: there is one every 5 steps, and one may be lost while it is made
    assert saved % 5 == 0, end.output
    assert len(steps) - 5 <= saved <= len(steps), end.output
    assert f"saved/step-{saved:08d} is saved" in end.output
    assert {size for size, _, _ in steps.values()} == {2, 3, 4}  # one host alone only saves
    for first in range(1, len(steps) - 4, 5):  # an epoch
        read = [number for step in range(first, first + 5) for number in steps[step][1]]
        assert sorted(read) == list(range(60)), first
    bits = undisturbed(bed, python, len(steps))
    bed.heal("node3")
    bed.heal("node4")
    drop_kept(bed, "node3", "node4")
    assert [bits for _, _, bits in steps.values()] == bits


def undisturbed(bed: Bed, python: str, num_steps: int) -> list[str]:
    """The parameters of each step of a run that nothing disturbs, always with 2 ranks."""
    write(bed, "node1", f"{SHARE}/whole.py", SAVES.replace("time.sleep(0.05)", "pass"))
    as_user(bed, "node1", "rm -rf record saved; mkdir record")
    whole = run(bed, f"--hosts node1,node2 --ppn 1 whole.py {num_steps}", python=python)
    assert whole.code == 0, whole.output
    return [bits for _, _, bits in counted_steps(whole.output).values()]


def test_three_of_four_hosts_are_away_for_a_while(bed: Bed, python: str) -> None:
    """One is frozen, one has no cable, one loses its power. The job waits for them, and no step is lost."""
    arguments = "--hosts node1,node2,node3,node4 --ppn 1 --max-restarts 5 --nnodes 3:4 moves.py 4000"
    job = training(bed, "moves.py", SAVES, arguments, python=python, setting=COPIES)
    bed.freeze("node2")
    bed.cut("node3")
    bed.kill("node4")
    job.wait_for("can take part, and --nnodes is 3:4. Waiting for ")
    listed = as_user(bed, "node1", f"{python} -m mpitrain ps --hosts localhost").stdout
    assert re.search(r" waits for (node\d, ){1,2}node\d until \d\d:\d\d:\d\d ", listed), listed
    time.sleep(AWAY_SECONDS)
    bed.thaw("node2")
    bed.heal("node3")
    bed.start("node4")
    job.wait_for("; starting again on node1, ")
    job.wait_for("resumed from memory at step ")
    write(bed, "node1", "enough", "")
    end = job.end()
    assert end.code == 0, end.output
    assert re.search(r"mpitrain: (node\d, )*node\d answers?; starting again on node1, node\d, node\d", end.output), (
        end.output
    )
    assert "only to save" not in end.output
    steps = counted_steps(end.output)
    assert steps[len(steps)][0] >= 3
    assert [bits for _, _, bits in steps.values()] == undisturbed(bed, python, len(steps))
