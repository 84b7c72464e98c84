"""The work of one rank of a pipeline in a step: its passes, in the schedule's order, and the messages between them.

    gpipe, 4 micro-batches, stage 1 of 2        F0 F1 F2 F3 B0 B1 B2 B3
    1f1b, 4 micro-batches, stage 0 of 2         F0 F1 B0 F2 B1 F3 B2 B3
    eager_1f1b, 4 micro-batches, stage 0 of 2   F0 F1 F2 B0 F3 B1 B2 B3

Each takes (m + s - 1) times the time of a micro-batch, for m micro-batches and s stages, if messages take no time.
GPipe keeps the activations of m micro-batches, 1F1B those of at most s, and eager 1F1B those of at most 2 s - 1. In
1F1B, the stage before the last has two micro-batches under way, so in the time of two it waits for two messages. In
eager 1F1B it has three, and computes the third in that time. With `interleaved`, each rank has several pieces of the
model, and waits less.

Messages are activations and their gradients: arrays, without pickle. A message gives dtype and shape before the values,
because micro-batches may have different numbers of samples. A send does not wait. Between nodes, the next arrays of a
rank arrive while it computes. No MPI library moves a large message while its ranks compute, so a thread calls MPI
during the computation.

Sources: Huang et al., GPipe, arXiv:1811.06965; Harlap et al., PipeDream, SOSP 2019 (1F1B); Narayanan et al., Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, arXiv:2104.04473, section 2.2 (1F1B with a flush,
and interleaved); Zhuang et al., On Optimizing the Communication of Model Parallelism, MLSys 2023, arXiv:2211.05322,
section 4 (eager 1F1B).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy

from mpitrain import errors
from mpitrain.adapters.staged import LayerPiece
from mpitrain.allreduce.algorithm import BFLOAT16, FLOATS
from mpitrain.arrays import Array, is_array, is_device_array, namespace
from mpitrain.errors import ConfigError, GradientError, MismatchError, NonFiniteError, everywhere
from mpitrain.reducer.driver import allows_threads, make_driver
from mpitrain.tree import Tree, leaves, rebuild
from mpitrain.waiting.control import patient_naps, until
from mpitrain.watching.activity import count_moved
from mpitrain.world.shard import part_of
from mpitrain.world.world import World

if TYPE_CHECKING:
    from mpi4py import MPI


_HEADER = 16  # numbers of 8 bytes: the dtype, whether bfloat16 travels, the number of dimensions, the dimensions
_MOST_DIMENSIONS = _HEADER - 3
# Shorter messages are sent at once, in any call of MPI (the libraries' limits are 4 to 64 KiB).
_LONG_BYTES = 4096
_NAP_SECONDS = 300e-6
# How many of the next arrays may arrive while a rank computes. With two, a forward and a backward pass have theirs in
# time; the others are for messages that arrive in another order.
_AHEAD = 4


class _Arrival:
    """An array that this rank will receive.

    Attributes:
        is_here: all of it has arrived.
    """

    def __init__(self, source: int, tag: int) -> None:
        self.place = self.source, self.tag = source, tag
        self.content: numpy.ndarray = numpy.empty(0, numpy.uint8)
        self.request: MPI.Request | None = None
        self.is_here = False


class Activations:
    """The messages of one rank. Making it is collective, and so is `close`.

    Attributes:
        apart: the same ranks, with a communicator for these messages and for those of `send` and `recv`.
    """

    def __init__(self, world: World, *, narrow: bool) -> None:
        """With `narrow`, float32 and float64 values travel as bfloat16, rounded to nearest."""
        self._world, self._narrow = world, narrow
        self.apart = world.apart()
        self._sent: list[tuple[MPI.Request, numpy.ndarray]] = []
        self._coming: deque[_Arrival] = deque()
        # Within a node, to receive is to copy with a core that computes.
        self._is_ahead = world.num_nodes > 1
        self._driver = make_driver(world, self._progress, allows_threads())

    def send(self, array: Array, to: int, tag: int) -> None:
        """Begin to send a floating array to a rank. The array may change after the call. Arrays with the same tag stay
        in order.

        Raises:
            ConfigError: the array is not floating-point, or has more than 13 dimensions.
        """
        host = array.get() if is_device_array(array) else array
        kind = FLOATS.index(host.dtype) if host.dtype in FLOATS else -1
        if kind < 0 or host.ndim > _MOST_DIMENSIONS:
            raise ConfigError(
                f"{self._world.name()}: a layer gives {host.dtype} {host.shape} to the next stage; allowed are "
                f"floating arrays of at most {_MOST_DIMENSIONS} dimensions. Cut the model where one such array passes"
            )
        travels = BFLOAT16 if self._narrow and host.dtype.itemsize > 2 else host.dtype
        message = numpy.empty(8 * _HEADER + host.size * travels.itemsize, numpy.uint8)
        header = message[: 8 * _HEADER].view(numpy.int64)
        header[:3] = kind, travels == BFLOAT16, host.ndim
        header[3 : 3 + host.ndim] = host.shape
        message[8 * _HEADER :].view(travels).reshape(host.shape)[...] = host
        self._pause()
        self._sent.append((self.apart.comm.Isend(message, to, tag), message))
        count_moved()
        self._resume()

    def expect(self, places: Iterable[tuple[int, int]]) -> None:
        """Begin a step with the arrays that this rank will receive, in order, each by its source and tag."""
        self._coming = deque(_Arrival(*place) for place in places)

    def receive(self, source: int, tag: int) -> numpy.ndarray:
        """Wait for the next expected array, which is from this rank with this tag.

        Return a new CPU array in the dtype that was sent.
        """
        next_one = self._coming[0]
        assert next_one.place == (source, tag), f"expected are {next_one.place}, not {(source, tag)}"
        control, doing = self._world.control, f"activations from {self._world.name(source)}"
        self._pause()

        def begun() -> bool:
            self._take_in()
            return next_one.request is not None

        def arrived() -> bool:
            self._take_in()
            return next_one.is_here

        control.wait(until(begun, patient_naps()), doing, (source,))
        control.wait(until(arrived), doing, (source,))  # naps would slow down its data
        content = self._coming.popleft().content
        count_moved()
        self._resume()
        kind, is_narrow, ndim = content[: 8 * _HEADER].view(numpy.int64)[:3].tolist()
        shape = content[24 : 24 + 8 * ndim].view(numpy.int64).tolist()
        values: numpy.ndarray = content[8 * _HEADER :].view(BFLOAT16 if is_narrow else FLOATS[kind]).reshape(shape)
        return values.astype(FLOATS[kind], copy=False)

    def _take_in(self) -> bool:
        """Continue to receive the next arrays. Return whether they are here."""
        from mpi4py import MPI

        status, later = MPI.Status(), set()
        for one in islice(self._coming, _AHEAD):
            if one.request is None and one.place not in later:
                message = self.apart.comm.Improbe(one.source, one.tag, status)
                if message is None:
                    later.add(one.place)  # those of one place stay in order
                else:
                    one.content = numpy.empty(status.Get_count(MPI.BYTE), numpy.uint8)
                    one.request = message.Irecv(one.content)
            if one.request is not None and not one.is_here:
                one.is_here = one.request.Test()
        return all(one.is_here for one in islice(self._coming, _AHEAD))

    def finish(self) -> None:
        """Wait until everything has been sent."""
        self._pause()
        self._world.control.wait(until(self._is_empty, patient_naps()), "activations to the next stages")

    def close(self) -> None:
        """End the thread and free the communicator. Collective; in a broken World only the thread ends."""
        if self._driver:
            self._driver.stop()
            self._driver.close()
        if not self._world.control.is_broken:
            self.apart.queue.finish()
            self.apart.free()

    def _is_empty(self) -> bool:
        self._sent = [(request, message) for request, message in self._sent if not request.Test()]
        return not self._sent

    def _progress(self) -> float | None:
        """Called by the thread, while this rank computes."""
        is_here = not self._is_ahead or self._take_in()
        return None if self._is_empty() and is_here else _NAP_SECONDS

    def _pause(self) -> None:
        if self._driver:
            self._driver.stop()

    def _resume(self) -> None:
        is_long = any(message.nbytes > _LONG_BYTES for _, message in self._sent)
        if self._driver and (is_long or (self._is_ahead and self._coming)):
            self._driver.start()


SCHEDULES = ("1f1b", "eager_1f1b", "gpipe", "interleaved")


class Pass(NamedTuple):
    """One forward or backward pass: of a micro-batch, through one of this rank's pieces of the model."""

    is_forward: bool
    piece: int
    micro: int


def order(schedule: str, stage: int, num_stages: int, num_pieces: int, num_micro: int) -> list[Pass]:
    """Return the passes of a rank, in order.

    The order is free of deadlocks, even if all ranks of a pipeline leave out the same micro-batches.

    Args:
        schedule: one of SCHEDULES.
        stage: of the rank, from 0.
        num_pieces: of each rank; 1 unless the schedule is "interleaved". Then num_stages divides num_micro.
    """
    count = num_pieces * num_micro
    if schedule == "gpipe":
        num_first = count
    elif schedule == "1f1b":
        num_first = num_stages - stage - 1
    elif schedule == "eager_1f1b":
        num_first = 2 * (num_stages - stage - 1)
    else:
        num_first = 2 * (num_stages - stage - 1) + (num_pieces - 1) * num_stages
    num_first = min(num_first, count)
    passes = [_nth(True, number, num_stages, num_pieces) for number in range(num_first)]
    for number in range(num_first, count):
        passes.append(_nth(True, number, num_stages, num_pieces))
        passes.append(_nth(False, number - num_first, num_stages, num_pieces))
    return passes + [_nth(False, number, num_stages, num_pieces) for number in range(count - num_first, count)]


def _nth(is_forward: bool, number: int, num_stages: int, num_pieces: int) -> Pass:
    """The pieces take turns, each with as many micro-batches as there are stages. In backward passes, the last piece is
    first."""
    if num_pieces == 1:
        return Pass(is_forward, 0, number)
    group, place = divmod(number, num_stages * num_pieces)
    piece, micro = divmod(place, num_stages)
    return Pass(is_forward, piece if is_forward else num_pieces - 1 - piece, group * num_stages + micro)


@dataclass(frozen=True)
class StagePlace:
    """A rank's place: rank r is stage r % num_stages of pipeline r // num_stages.

    So a pipeline's ranks are neighbours: on one node, if it has enough ranks. Activations, which ranks wait for many
    times per step, stay in the memory of the node. Gradients travel between nodes once per step; each rank sends those
    of its own stage.
    """

    rank: int
    num_stages: int
    num_pieces: int

    @property
    def stage(self) -> int:
        """The number of this rank's stage."""
        return self.rank % self.num_stages

    @property
    def pipeline(self) -> int:
        """The number of this rank's pipeline."""
        return self.rank // self.num_stages

    @property
    def has_loss(self) -> bool:
        """Whether this rank has the last layer."""
        return self.stage == self.num_stages - 1

    def neighbour(self, step: int) -> int:
        """The rank of the stage before (-1) or after (1). The stages of a pipeline form a ring."""
        return self.pipeline * self.num_stages + (self.stage + step) % self.num_stages


class StagePasses:
    """Runs the passes of this rank. Every rank of a pipeline calls `run` with the same part of the batch.

    Attributes:
        num_samples: this rank's samples in this step.
        not_finite: where NaN or infinity was first found in this step: the position in the order of places, and its
            description.
    """

    def __init__(
        self, world: World, place: StagePlace, schedule: str, num_micro: int, activations: Activations | None
    ) -> None:
        self._world, self._place, self._num_micro = world, place, num_micro
        self._order = order(schedule, place.stage, place.num_stages, place.num_pieces, num_micro)
        self._activations = activations
        self._is_compared = False
        self.pieces: Sequence[LayerPiece] = ()
        self.num_samples = 0
        self.not_finite: tuple[tuple[int, int], str] | None = None

    def run(self, inputs: Array, targets: Tree, count: int) -> float:
        """See RunPasses. Micro-batches have equal numbers of samples or differ by one; those without any are left out.

        Raises:
            MismatchError: in the first step, the ranks of a pipeline have different parts. Raised on every rank.
        """
        if not self._is_compared:
            self._compare([inputs, targets])
        self.num_samples, self.not_finite, loss = count, None, 0.0
        parts = [part_of(count, micro, self._num_micro) for micro in range(self._num_micro)]
        passes = [one for one in self._order if parts[one.micro].start != parts[one.micro].stop]
        last = {one.piece: one for one in passes if not one.is_forward}
        if self._activations:
            self._activations.expect(place for place in map(self._source, passes) if place is not None)
        for one in passes:
            if one.is_forward:
                loss += self._forward(one, inputs, targets, parts[one.micro], count)
            else:
                self._backward(one, is_last=one == last[one.piece])
        if self._activations:
            self._activations.finish()
        return loss

    def _source(self, one: Pass) -> tuple[int, int] | None:
        """From whom, and with which tag, the array comes that this pass needs. None: it needs none."""
        place = self._place
        number = one.piece * place.num_stages + place.stage  # the number of the piece, in the order of the model
        if one.is_forward:
            return (place.neighbour(-1), 2 * number) if number else None
        is_last = number == place.num_pieces * place.num_stages - 1
        return None if is_last else (place.neighbour(1), 2 * number + 1)

    def _forward(self, one: Pass, inputs: Array, targets: Tree, part: slice, count: int) -> float:
        place, piece = self._place, self.pieces[one.piece]
        number = one.piece * place.num_stages + place.stage
        source = self._source(one)
        here = inputs[part] if source is None else self._messages.receive(*source)
        if number == place.num_pieces * place.num_stages - 1:
            share: float = (part.stop - part.start) / count
            loss = piece.loss(one.micro, here, _cut(targets, part), share)
            self._look(numpy.float64(loss), (number, one.micro), f"the loss of micro-batch {one.micro}")
            return loss * share
        output = piece.forward(one.micro, here)
        self._look(output, (number, one.micro), f"the output of micro-batch {one.micro}")
        self._messages.send(output, place.neighbour(1), 2 * (number + 1))
        return 0.0

    def _backward(self, one: Pass, *, is_last: bool) -> None:
        place, piece = self._place, self.pieces[one.piece]
        last = place.num_pieces * place.num_stages - 1
        number = one.piece * place.num_stages + place.stage
        source = self._source(one)
        given = None if source is None else self._messages.receive(*source)
        gradient = piece.backward(one.micro, given, is_last=is_last)
        if number:
            assert gradient is not None, f"piece {number} gives no gradient of its inputs"
            # Forward passes come first, so a backward pass is ordered after all of them.
            where = 2 * last - number + 1, one.micro
            self._look(gradient, where, f"the gradient by the inputs of micro-batch {one.micro}")
            self._messages.send(gradient, place.neighbour(-1), 2 * number - 1)

    @property
    def _messages(self) -> Activations:
        assert self._activations is not None, "there are several stages"
        return self._activations

    def _look(self, values: Array, where: tuple[int, int], words: str) -> None:
        """Note the first place that holds NaN or infinity: one sum is cheap compared with the pass that made the
        values."""
        if self.not_finite is not None:
            return
        is_finite = namespace(values).isfinite
        with numpy.errstate(all="ignore"):  # the sum of finite values may overflow, most likely in float16
            if not bool(is_finite(values.sum())) and not bool(is_finite(values).all()):
                self.not_finite = where, words

    def _compare(self, batch: Tree) -> None:
        """Make sure that the ranks of each pipeline have the same part of the batch."""
        self._is_compared = True
        digest = hashlib.blake2b(digest_size=7)
        for _, leaf in leaves(batch):
            host = leaf.get() if is_device_array(leaf) else leaf
            digest.update(numpy.ascontiguousarray(host).data if is_array(leaf) else repr(leaf).encode())
        digests = self._world.agree("batch of a pipeline", detail=int.from_bytes(digest.digest()))["detail"].tolist()
        for rank, one in enumerate(digests):
            first = rank - rank % self._place.num_stages
            if one != digests[first]:
                raise self._other_part(rank, first)

    def compare_counts(self, counts: list[int]) -> None:
        """Raise MismatchError if ranks of a pipeline had different numbers of samples, given in rank order."""
        for rank, count in enumerate(counts):
            first = rank - rank % self._place.num_stages
            if count != counts[first]:
                raise self._other_part(rank, first, f" ({count} samples, not {counts[first]})")

    def objection(self, problem: GradientError | None) -> GradientError:
        """Return the error of the stage with a problem, for every rank to raise. `problem`: this rank's. Collective."""
        objected = None if problem is None else (type(problem).__name__, str(problem))
        of_all = self._world.allgather((objected, self.not_finite))
        stages = self._place.num_stages
        kind, text = next(told for told, _ in of_all if told is not None)
        if kind == NonFiniteError.__name__:
            places = [(place[0], rank, place[1]) for rank, (_, place) in enumerate(of_all) if place is not None]
            if places:
                _, rank, words = min(places)
                return everywhere(
                    NonFiniteError(
                        f"{self._world.name(rank)}, stage {rank % stages} of pipeline {rank // stages}: {words} was "
                        "the first to hold NaN or infinity; nothing was changed by this step. Try a smaller learning "
                        "rate or gradient clipping, or examine the data of that micro-batch"
                    )
                )
        error: GradientError = getattr(errors, kind)(text)
        return everywhere(error)

    def _other_part(self, rank: int, first: int, words: str = "") -> MismatchError:
        """The error of two ranks of a pipeline, for every rank to raise."""
        return everywhere(
            MismatchError(
                f"{self._world.name(rank)} has another part of the batch than {self._world.name(first)}{words}, which "
                "is in the same pipeline. All stages of a pipeline need the same part: make the data for "
                "pipeline.replicas(world) in place of world"
            )
        )


def _cut(tree: Tree, part: slice) -> Tree:
    """Return these samples of every array."""
    cut = (leaf[part] if is_array(leaf) else leaf for _, leaf in leaves(tree))
    return rebuild(tree, cut.__next__)
