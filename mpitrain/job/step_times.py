"""The times of a script's steps on one rank, for `mpitrain plan`: their length, and when each gradient is ready.

    end of a step   update, next batch, forward ...  backward                     end of the step
         0          ──────────────────────────────>  ready ready     ready ready  seconds

Each rank trains alone, with the part of a batch that it would have among 1, 2, 4, ... ranks, one after the other. So
the time of smaller parts is measured. Ranks on several hosts do this in parallel, and communicate only at the end.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy

from mpitrain.allreduce import ALGORITHMS
from mpitrain.context import LEAST_PLAN_STEPS
from mpitrain.errors import ConfigError
from mpitrain.job import rehearsal
from mpitrain.job.worlds import own_cores
from mpitrain.tree import Tree, leaves
from mpitrain.world.shard import largest_part
from mpitrain.world.world import World

# The first steps load libraries and allocate memory. After a change of the part, batches may have been read ahead.
_FIRST_STEPS, _NEXT_STEPS = 3, 2
_LONG_SECONDS = 15.0  # If steps are long, fewer of them are enough.
# After this many steps without the expected number of samples, the script does not divide its batch by the World.
_MOST_OTHERS = 40
# Where all links are busy at once, a switch or the processors may carry less than one pair of nodes was measured with.
SUMS, SUM_WITH_SEVERAL_RANKS_ON_A_NODE = ("ring", "direct"), "hierarchical"
SUM_BYTES = 2**22
_SUM_ROUNDS = 5


class StepTimes:
    """Measures the steps of this rank, and ends the script after the last one. See world.StepWatch.

    Attributes:
        divisor: the number of ranks among which the batch is divided for the current part.
    """

    def __init__(self, everyone: World) -> None:
        """`everyone`: the World of all ranks, of which each trains alone."""
        context = everyone.context
        self._everyone, self._wanted = everyone, context.plan.steps
        self._path = Path(context.plan.record)
        self._sizes = [int(number) for number in context.plan.ranks]
        self.divisor = self._sizes[0]
        self._layout: list[tuple[str, int]] = []
        self._parts: list[dict[str, Any]] = []
        self._weight = self._whole = 0.0
        self._since = -math.inf  # when the previous step ended
        self._processor = 0.0  # seconds of this process at the first measured step
        self._began = 0.0  # of the first measured step
        self._busy_cores = 0.0  # from there to the end of the last measured step
        self._ready: list[float] = []
        self._skip = _FIRST_STEPS
        self._first_weights: list[float] = []  # until the whole batch is known
        self._others: list[float] = []  # weights of the last steps, if none of them had the expected one
        self._num_steps = 0
        self._is_fixed = False  # each rank takes the same number of samples, however many ranks there are
        self._is_written = False
        self._front, self._total_steps = "", 0

    def begin(self, layout: Sequence[tuple[str, int]], weight: float) -> None:
        """Note that gradients will follow: names and bytes by index, and the number of their samples.

        Raises:
            ConfigError: the script trains several models.
        """
        if self._layout and self._layout != list(layout):
            raise ConfigError(
                f"{self._everyone.name()}: mpitrain plan has seen steps of a model with {len(self._layout)} "
                f"parameters, and now of one with {len(layout)}; allowed is one model. Plan a script that trains one"
            )
        if rehearsal.current is not None:
            rehearsal.current.stepped()
        self._layout = list(layout)
        self._weight = float(weight)
        self._ready = [0.0] * len(layout)

    def trains(self, front: str, steps: int | None) -> None:
        """Note what trains, such as "prepare", and the number of steps of the whole training; None: not known."""
        self._front, self._total_steps = front, steps or 0

    def ready(self, index: int) -> None:
        """Note that a gradient is in its bucket."""
        self._ready[index] = time.perf_counter() - self._since

    def end(self) -> None:
        """Note that the step's means are available. End the script if that was the last step.

        Raises:
            ConfigError: the numbers of samples differ too much for one of them to be the whole batch.
        """
        now, processor = time.perf_counter(), time.process_time()
        self._num_steps += 1
        if not self._whole:
            self._first_weights.append(self._weight)
        if self._skip > 0:
            self._skip -= 1
        elif self._is_expected():
            self._busy_cores = (processor - self._processor) / (now - self._began)
            self._add(now - self._since)
        elif len(self._others) > _MOST_OTHERS:
            if not self._parts:
                self._refuse_weights()
            self._is_fixed = statistics.mode(self._others) == self._whole
            self._leave()
        if not self._skip and not self._began:
            self._began, self._processor = time.perf_counter(), time.process_time()
        self._since = time.perf_counter()

    def write(self) -> None:
        """Gather the times of all ranks, and write them on rank 0. Collective; a second call does nothing."""
        if self._is_written:
            return
        self._is_written = True
        if rehearsal.current is not None:
            rehearsal.current.is_over = True
        own = {
            "host": self._everyone.host,
            "parameters": self._layout,
            "parts": [part for part in self._parts if part["steps"]],
            "num_steps": self._num_steps,
            "is_fixed": self._is_fixed,
            "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "cores": own_cores(self._everyone),
            "busy_cores": self._busy_cores,
            "front": self._front,
            "total_steps": self._total_steps,
        }
        of_all = self._everyone.allgather({**own, "sums": self._sums()})  # last, when nothing else is being measured
        with self._everyone.together("write the times of the steps"):
            if self._everyone.is_root:
                self._path.write_text(json.dumps(of_all))

    def _is_expected(self) -> bool:
        """Whether the step had the samples of the current part. The last batch of an epoch may have fewer."""
        if not self._whole:
            self._whole = statistics.mode(self._first_weights) * self.divisor
            if not self._whole > 0:
                self._refuse_weights()
        is_expected = math.isclose(self._weight, largest_part(self._whole, self.divisor))
        self._others = [] if is_expected else [*self._others, self._weight]
        return is_expected

    def _refuse_weights(self) -> NoReturn:
        raise ConfigError(
            f"{self._everyone.name()}: mpitrain plan found no typical number of samples in the steps; the first "
            f"ones had {', '.join(f'{one:g}' for one in self._first_weights)}. Allowed are steps of which most have "
            "the same number, above 0. Plan the script with batches of one size"
        )

    def _add(self, seconds: float) -> None:
        if not self._parts or self._parts[-1]["ranks"] != self.divisor:
            self._parts.append({"ranks": self.divisor, "samples": self._weight, "steps": []})
        steps = self._parts[-1]["steps"]
        steps.append({"seconds": seconds, "ready": self._ready})
        if rehearsal.current is not None:
            rehearsal.current.is_measured = len(self._parts) > 1 or len(steps) >= LEAST_PLAN_STEPS
        total = sum(step["seconds"] for step in steps)
        if len(steps) >= self._wanted or (len(steps) >= LEAST_PLAN_STEPS and total > _LONG_SECONDS):
            self._sizes.pop(0)
            if not self._sizes or self._sizes[0] > self._whole:
                self._leave()
            self.divisor, self._skip = self._sizes[0], _NEXT_STEPS

    def _sums(self) -> dict[str, tuple[float, float]]:
        """The time of a sum of SUM_BYTES over all hosts at once, by algorithm; {} on one host. Collective.

        Returns:
            By algorithm: seconds of the slowest rank, and processor seconds of the rank with the most. Both are the
            median of all rounds, as a step is: where several senders share a link, most sums lose some time to
            packets that are sent again, and the least loses none.
        """
        everyone, times = self._everyone, {}
        if everyone.num_nodes == 1:
            return {}
        for name in SUMS if everyone.num_nodes == everyone.size else (SUM_WITH_SEVERAL_RANKS_ON_A_NODE,):
            algorithm = ALGORITHMS[name].make(everyone)
            flat = algorithm.allocate(SUM_BYTES // 4, numpy.dtype(numpy.float32))
            flat.fill(0.0)
            taken, worked = [], []
            for _ in range(_SUM_ROUNDS):
                everyone.barrier()
                began, processor = time.perf_counter(), time.process_time()
                algorithm.start(flat, agreed=True).wait()
                own = time.perf_counter() - began, time.process_time() - processor
                slowest = [max(values) for values in zip(*everyone.allgather(own), strict=True)]
                taken.append(slowest[0])
                worked.append(slowest[1])
            times[name] = statistics.median(taken), statistics.median(worked)
        return times

    def called(self, operation: str, tree: Tree) -> None:
        """Note a call of world.mean or world.sum. Without other steps, calls with arrays count as the script's
        steps."""
        if rehearsal.current is not None and any(getattr(leaf, "shape", ()) for _, leaf in leaves(tree)):
            rehearsal.current.unseen(f"by world.{operation}", 0.5)

    def _leave(self) -> None:
        """Exit from the script: its end, such as saving a model, must not run."""
        self.write()
        if rehearsal.current is not None:
            rehearsal.current.leave(0)
        raise SystemExit(0)
