"""What one rank of a pipeline does in a step: its passes, in the schedule's order, and the messages between them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from mpitrain import errors
from mpitrain.adapters.staged import LayerPiece
from mpitrain.arrays import Array, is_array, is_device_array, namespace
from mpitrain.errors import GradientError, MismatchError, NonFiniteError, everywhere
from mpitrain.shard import part_of
from mpitrain.strategies.activations import Activations
from mpitrain.strategies.pipeline_order import Pass, order
from mpitrain.tree import Tree, leaves, rebuild
from mpitrain.world import World


@dataclass(frozen=True)
class StagePlace:
    """Where a rank is: rank r is stage r % num_stages of pipeline r // num_stages.

    So a pipeline's ranks are neighbours: on one node, if it fits there. Activations are waited for many times a step,
    and stay in the memory of the node. Gradients go between nodes once in a step, each rank's those of its own stage.
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
        not_finite: where NaN or infinity was first seen in this step: an order of these places, and words for it.
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
        for one in passes:
            if one.is_forward:
                loss += self._forward(one, inputs, targets, parts[one.micro], count)
            else:
                self._backward(one, is_last=one == last[one.piece])
        if self._activations:
            self._activations.finish()
        return loss

    def _forward(self, one: Pass, inputs: Array, targets: Tree, part: slice, count: int) -> float:
        place, piece = self._place, self.pieces[one.piece]
        number = one.piece * place.num_stages + place.stage  # of the piece, in the order of the model
        here = inputs[part] if number == 0 else self._messages.receive(place.neighbour(-1), 2 * number)
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
        given = None if number == last else self._messages.receive(place.neighbour(1), 2 * number + 1)
        gradient = piece.backward(one.micro, given, is_last=is_last)
        if number:
            assert gradient is not None, f"piece {number} gives no gradient of its inputs"
            # What comes forwards comes first, so a backward pass is behind all of those.
            where = 2 * last - number + 1, one.micro
            self._look(gradient, where, f"the gradient by the inputs of micro-batch {one.micro}")
            self._messages.send(gradient, place.neighbour(-1), 2 * number - 1)

    @property
    def _messages(self) -> Activations:
        assert self._activations is not None, "there are several stages"
        return self._activations

    def _look(self, values: Array, where: tuple[int, int], words: str) -> None:
        """Note the first place that holds NaN or infinity: one sum is cheap beside the pass that made the values."""
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
        """Return the error of the stage that objects, for every rank to raise. `problem`: this one's. Collective."""
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
