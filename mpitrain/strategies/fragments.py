"""A fragment: a part of the parameters that the ranks exchange at once, and what they had in common in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy

from mpitrain.adapters.adapter import LocalModel
from mpitrain.arrays import Array, is_device_array, namespace
from mpitrain.cuda.staging import like
from mpitrain.errors import NonFiniteError
from mpitrain.exchange.bucket import Parameter
from mpitrain.exchange.exchange import Exchange
from mpitrain.exchange.reducer import GradientReducer
from mpitrain.strategies.carried import GONE, SAMPLES, Carried
from mpitrain.strategies.flat_ranges import FlatRange
from mpitrain.strategies.not_finite import cannot_meet
from mpitrain.training.optimizers import Optimizer
from mpitrain.world import World

# What a codec has left out: so far, and before the message that is under way.
_LEFT, _LEFT_BEFORE = "left out/", "left out before/"


class Fragment:
    """`note` what is common, train, `start` to send how far this rank has gone, `finish`, and `update`.

    The distances of ranks that take part no more may be carried along; they are sent with those of this rank.

    Attributes:
        offset: the fragment is sent when so many steps of a round have been made; see LocalSGD.
        samples: that this rank has trained with since the fragment was sent last.
        all_samples: the same of all ranks.
        is_apart: the ranks do not have the same values in this fragment.
        flying: the fragment is under way, with the numbers of samples as above; None: it is not.
        steps_left: for one that is under way: the steps to make before it arrives.
        has_arrived: the mean of one that is under way is here.
        num_updates: the number of its outer steps since this object was made.

    A message that is taken back is as if it had not been sent: what a codec has left out of it does not count.
    """

    def __init__(
        self,
        world: World,
        model: LocalModel,
        pieces: Sequence[FlatRange],
        offset: int,
        outer: Optimizer | None,
        exchange: Callable[[World], Exchange],
    ) -> None:
        """Collective.

        Args:
            outer: moves the common parameters. None: they become the mean of the ranks' parameters.
        """
        self.offset = offset
        self.samples = self.all_samples = 0.0
        self.is_apart = False
        self.flying: tuple[float, float] | None = None
        self.steps_left, self.has_arrived, self.num_updates = 0, False, 0
        self._world, self._model, self.pieces = world, model, pieces
        values = [piece.of(model.parameters()) for piece in pieces]
        parameters = [
            Parameter(str(piece), value.shape, numpy.dtype(value.dtype))
            for piece, value in zip(pieces, values, strict=True)
        ]
        on_device = any(is_device_array(value) for value in values)
        unseen = replace(world, observer=None)  # a distance is not the gradient that `mpitrain verify` compares
        self._reducer = GradientReducer(unseen, parameters, exchange=exchange, on_device=on_device)
        self._reducer.sends_gradients = False
        self._origin = {dtype: namespace(flat).empty_like(flat) for dtype, flat in self._reducer.flats.items()}
        self.origins: list[Array] = self._reducer.layout.views(self._origin)
        # Buffers come last, so what is trained begins the flat buffer of its dtype.
        self._trained = dict.fromkeys(self._origin, 0)
        for piece, parameter in zip(pieces, parameters, strict=True):
            self._trained[parameter.dtype] += parameter.count * piece.is_trained
        self.optimizers: dict[numpy.dtype, Optimizer] = {}
        if outer is not None:
            for dtype in [dtype for dtype, count in self._trained.items() if count]:
                self.optimizers[dtype] = of_dtype = deepcopy(outer)
                count = self._trained[dtype]
                of_dtype.start(self._origin[dtype][:count], [])
        self._carried = Carried()
        # Of the codec, before the last message was sent; {} once the message has been used, or taken back.
        self._left_before: dict[str, Any] = {}

    @property
    def weight(self) -> float:
        """The samples of what this rank would send now."""
        return self.samples + self._carried.samples

    @property
    def is_idle(self) -> bool:
        """The ranks have the same values, and nothing is carried or under way."""
        return not (self.is_apart or self.flying or self._carried or self._reducer.state())

    @property
    def counts(self) -> tuple[float, float, bool]:
        """What `count` changes."""
        return self.samples, self.all_samples, self.is_apart

    @counts.setter
    def counts(self, counts: tuple[float, float, bool]) -> None:
        self.samples, self.all_samples, self.is_apart = counts

    def note(self) -> None:
        """Note that the parameters of all ranks are equal now."""
        values = self._model.parameters()
        for piece, origin in zip(self.pieces, self.origins, strict=True):
            origin[...] = piece.of(values)

    def count(self, samples: float, all_samples: float) -> None:
        """Count the samples of one more step."""
        self.samples += samples
        self.all_samples += all_samples
        self.is_apart |= all_samples > 0

    def expect(self, all_samples: float) -> None:
        """Count the samples that the ranks still have of this round, after a resume. They may be fewer than before."""
        is_lost = self.all_samples > 0 and not all_samples
        self.all_samples = all_samples
        if is_lost and not self.flying:
            self.go_back()

    def start(self, steps: int) -> None:
        """Begin to send how far this rank has gone, if any rank has. It arrives when `steps` more steps are made."""
        if not self.all_samples:
            return
        assert self.flying is None
        self._left_before = self._reducer.state()
        self._reducer.begin(self.weight)
        values = self._model.parameters()
        for index in reversed(range(len(self.pieces))):
            piece, gone = self.pieces[index], self._reducer.gradients[index]
            self._distance(index, values, gone)
            self._carried.join(str(piece), gone, self.samples)
            self._reducer.ready(index, gone)
        self.flying, self.steps_left, self.has_arrived = (self.samples, self.all_samples), steps, False
        self._sent = time.perf_counter()
        self.samples = self.all_samples = 0.0

    def finish(self) -> None:
        """Wait for the mean of how far the ranks have gone. Collective. Nothing changes yet.

        Raises:
            NonFiniteError: a rank's parameters hold NaN or infinity. Raised on every rank, names rank and parameter.
                What was under way is forgotten.
        """
        if not self.flying or self.has_arrived:
            return
        try:
            self._reducer.finish()
        except NonFiniteError as error:
            self.has_arrived = True  # nothing is under way any more
            self.forget()
            raise cannot_meet(error) from None
        self.has_arrived = True
        if spans := self._world.control.spans:
            about = {"samples": self.flying[1], "first": str(self.pieces[0]), "last": str(self.pieces[-1])}
            spans.add("wire", "outer step", self._sent, time.perf_counter(), **about)

    def update(self, kept: float) -> None:
        """Move the common parameters by the mean. This rank goes on from `kept` of its own, and the rest of those."""
        if not self.flying:
            return
        self.flying, self.has_arrived = None, False
        self._carried.clear()
        self._left_before, self.num_updates = {}, self.num_updates + 1
        for dtype, mean in self._reducer.flats.items():
            trained = self._trained[dtype] if self.optimizers else 0
            if trained:
                self.optimizers[dtype].update(mean[:trained])
            self._origin[dtype][trained:] -= mean[trained:]
        self.go_back(kept)

    def go_back(self, kept: float = 0.0) -> None:
        """Give the common parameters to this rank; see update."""
        self.is_apart = kept > 0 or self.all_samples > 0
        values = dict(self._model.parameters())
        changed: dict[str, Array] = {}
        for piece, origin in zip(self.pieces, self.origins, strict=True):
            own, whole = piece.of(values), values[piece.name]
            new = origin if kept == 0 else own.dtype.type(kept) * own + own.dtype.type(1 - kept) * origin
            if piece.is_whole:  # load_parameters copies it
                changed[piece.name] = new.reshape(whole.shape)
                continue
            if piece.name not in changed:
                changed[piece.name] = whole.copy()
            piece.of(changed)[...] = new
        self._model.load_parameters({**values, **changed})

    def means(self) -> list[tuple[FlatRange, Array]]:
        """Return the mean that has arrived, with its pieces; views."""
        return list(zip(self.pieces, self._reducer.gradients, strict=True))

    def forget(self) -> None:
        """Take back what is under way: this rank's own parameters hold it, and send it the next time."""
        if not self.flying:
            return
        flying, had_arrived, self.flying, self.has_arrived = self.flying, self.has_arrived, None, False
        self.count(*flying)
        if had_arrived and self._left_before:  # otherwise a rank is lost, and MPI may still write there
            self._reducer.restore(self._left_before)
            self._left_before = {}

    def drop(self) -> None:
        """Wait for what is under way, and throw it away with what is counted. Collective."""
        with suppress(NonFiniteError):
            self.finish()
        self.flying, self.has_arrived, self._left_before = None, False, {}
        self.samples = self.all_samples = 0.0

    def own_state(self) -> dict[str, dict[str, numpy.ndarray]]:
        """Return, on the host, what this rank adds to the next outer steps: `residual`, and `carried` from other ranks.

        Their entries may be added up over ranks.
        """
        samples = self.samples + (self.flying[0] if self.flying else 0.0)
        # A message that was under way when a rank was lost is taken back.
        left = {_LEFT: self._reducer.state() if self.flying or not self._left_before else self._left_before}
        if self.flying:
            left[_LEFT_BEFORE] = self._left_before
        residual, carried = (
            {f"{prefix}{name}": value for prefix, codec in left.items() for name, value in codec.get(key, {}).items()}
            for key in ("residual", "carried")
        )
        carried |= self._carried.state()
        if samples:
            residual[SAMPLES] = numpy.array(samples)
            values = self._model.parameters()
            for index, (piece, origin) in enumerate(zip(self.pieces, self.origins, strict=True)):
                gone = namespace(origin).empty_like(origin)
                self._distance(index, values, gone)
                host = gone.get() if is_device_array(gone) else gone
                residual[f"{GONE}{piece}"] = host.astype(numpy.result_type(host.dtype, numpy.float32)) * samples
        return {"residual": residual, "carried": carried}

    def restore_own(self, state: Mapping[str, Mapping[str, numpy.ndarray]]) -> None:
        """Go on from an `own_state` of this rank, which has its parameters again; or from `carried` sums alone.

        Call it when `flying` is as it is to be.

        Raises:
            CheckpointError: the state belongs to other parameters.
        """
        now, before = (
            {key: left for key, part in state.items() if (left := _under(prefix, part))}
            for prefix in (_LEFT, _LEFT_BEFORE)
        )
        self._reducer.restore(now if self.flying or not before else before)
        self._left_before = before if self.flying else {}
        self._carried.restore(state.get("carried", {}), [str(piece) for piece in self.pieces])

    def _distance(self, index: int, values: Mapping[str, Array], out: Array) -> None:
        """Write the common values of a piece minus those of this rank."""
        origin, value = self.origins[index], self.pieces[index].of(values)
        xp = namespace(out)
        if self.pieces[index].is_trained:
            xp.subtract(origin, value, out=out)
        else:  # a buffer may hold infinity, such as that of a mask
            with numpy.errstate(invalid="ignore"):
                out[...] = xp.where(origin == value, xp.zeros_like(value), origin - value)

    def place(self) -> str:
        """A text that is equal if a rank's codec would leave out the same values."""
        state = self._reducer.state()
        return str(state["place"]) if "residual" in state else ""

    def arrive(self, flying: tuple[float, float], steps_left: int, means: Mapping[str, numpy.ndarray]) -> None:
        """Take in a mean that has arrived before a resume. `flying[0]` is of this rank, or 0."""
        self.flying, self.steps_left, self.has_arrived = flying, steps_left, True
        for piece, mean in self.means():
            mean[...] = like(means[str(piece)], mean)

    def close(self) -> None:
        """Give back the communicator. Collective, except in a broken World."""
        self._reducer.close()


def finish_all(fragments: Sequence[Fragment]) -> None:
    """Let each of these `finish`. If one cannot be used, take all of them back. Collective.

    Raises:
        NonFiniteError: of the first one that cannot; see Fragment.finish.
    """
    problem: NonFiniteError | None = None
    for fragment in fragments:
        try:
            fragment.finish()
        except NonFiniteError as error:
            problem = problem or error
    if problem:
        for fragment in fragments:
            fragment.forget()
        raise problem


def _under(prefix: str, part: Mapping[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
    return {name.removeprefix(prefix): value for name, value in part.items() if name.startswith(prefix)}
