"""A fragment: a part of the parameters that the ranks exchange at once.

Each rank sends its *pseudo-gradient*: the common values of the last outer step minus its own. Their mean, weighted by
samples, moves the common values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy

from mpitrain.adapters.adapter import LocalModel
from mpitrain.arrays import Array, is_device_array, like, namespace
from mpitrain.errors import CheckpointError, ConfigError, NonFiniteError, everywhere
from mpitrain.optim.optimizers import Optimizer
from mpitrain.reducer.bucket import Parameter
from mpitrain.reducer.exchange import Exchange
from mpitrain.reducer.reducer import GradientReducer
from mpitrain.world.world import World

# Names in a state: the error-feedback residual now, and before the message under way; and, with the number of samples,
# samples x pseudo-gradient by piece.
_LEFT, _LEFT_BEFORE = "left out/", "left out before/"
_SAMPLES, _GONE = "samples", "gone/"


@dataclass(frozen=True)
class FlatRange:
    """A range of one array of a model's parameters, in elements.

    Attributes:
        is_trained: False for a buffer that changes by a mean over the samples.
    """

    name: str
    begin: int
    end: int
    is_whole: bool
    is_trained: bool

    def __str__(self) -> str:
        return self.name if self.is_whole else f"{self.name}[{self.begin}:{self.end}]"

    def of(self, values: Mapping[str, Array]) -> Array:
        """Return this range of the array with its name; a view."""
        return values[self.name].reshape(-1)[self.begin : self.end]


def cut(model: LocalModel, count: int) -> list[list[FlatRange]]:
    """Cut the trained parameters, in the order of the layout, into `count` parts with equal numbers of elements.

    Raises:
        ConfigError: there are fewer elements. Raised on every rank.
    """
    values, names = model.parameters(), [parameter.name for parameter in model.layout]
    num_trained = len(names) - getattr(model, "num_buffers", 0)
    total = sum(values[name].size for name in names)
    if count > total:
        raise everywhere(
            ConfigError(f"fragments={count} of a model with {total} trained elements; allowed are 1 to {total}")
        )
    bounds = [total * number // count for number in range(count + 1)]
    parts: list[list[FlatRange]] = [[] for _ in range(count)]
    first = 0  # of the array, in elements of the whole
    for index, name in enumerate(names):
        size = values[name].size
        for part, (low, high) in enumerate(pairwise(bounds)):
            begin, end = max(low - first, 0), min(high - first, size)
            # An array without elements belongs to the first part.
            if begin < end or (size == 0 and part == 0):
                parts[part].append(FlatRange(name, begin, end, end - begin == size, index < num_trained))
        first += size
    return parts


@dataclass
class InFlight:
    """A pseudo-gradient that is under way, or has arrived but has not been used yet.

    Attributes:
        samples: of this rank in it.
        all_samples: of all ranks.
        steps_left: the steps to make before it is used.
        has_arrived: whether the mean has arrived.
    """

    samples: float
    all_samples: float
    steps_left: int
    has_arrived: bool = False


class Fragment:
    """Call `note` when parameters are equal, train, then `start` to send the pseudo-gradient, `finish` and `update`.

    Pseudo-gradients of departed ranks may be carried along; they are sent with this rank's.

    Attributes:
        offset: the number of steps of a round after which the fragment is sent.
        samples: that this rank has trained with since the fragment was sent last.
        all_samples: the same, of all ranks together.
        is_apart: the ranks do not have the same values in this fragment.
        sent: what is under way; None: nothing.
        num_updates: the number of its outer steps since this object was made.

    A message that is taken back counts as never sent, and so does the residual that a codec left of it.
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
        self.sent: InFlight | None = None
        self.num_updates = 0
        self._world, self._model, self.pieces = world, model, pieces
        values = [piece.of(model.parameters()) for piece in pieces]
        parameters = [
            Parameter(str(piece), value.shape, numpy.dtype(value.dtype))
            for piece, value in zip(pieces, values, strict=True)
        ]
        on_device = any(is_device_array(value) for value in values)
        unseen = world.replaced(observer=None)  # this is not the gradient that `mpitrain verify` compares
        self._reducer = GradientReducer(unseen, parameters, exchange=exchange, on_device=on_device)
        self._reducer.sends_gradients = False
        self._common = {dtype: namespace(flat).empty_like(flat) for dtype, flat in self._reducer.flats.items()}
        self.common: list[Array] = self._reducer.layout.views(self._common)
        # Buffers come last, so what is trained begins the flat buffer of its dtype.
        self._trained = dict.fromkeys(self._common, 0)
        for piece, parameter in zip(pieces, parameters, strict=True):
            self._trained[parameter.dtype] += parameter.count * piece.is_trained
        self.optimizers: dict[numpy.dtype, Optimizer] = {}
        if outer is not None:
            for dtype, count in self._trained.items():
                if count:
                    self.optimizers[dtype] = of_dtype = deepcopy(outer)
                    of_dtype.start(self._common[dtype][:count], [])
        # From departed ranks: samples x pseudo-gradient by piece, and the samples.
        self._departed: dict[str, numpy.ndarray] = {}
        self._departed_samples = 0.0
        # The codec's residual before the last message was sent; {} once the message has been used, or taken back.
        self._left_before: dict[str, Any] = {}

    @property
    def weight(self) -> float:
        """The samples behind what this rank would send now."""
        return self.samples + self._departed_samples

    @property
    def is_idle(self) -> bool:
        """The ranks have the same values, and nothing is carried or under way."""
        return not (self.is_apart or self.sent or self._departed or self._reducer.state())

    @property
    def counts(self) -> tuple[float, float, bool]:
        """The values that `count` changes."""
        return self.samples, self.all_samples, self.is_apart

    @counts.setter
    def counts(self, counts: tuple[float, float, bool]) -> None:
        self.samples, self.all_samples, self.is_apart = counts

    def note(self) -> None:
        """Note that the parameters of all ranks are equal now."""
        values = self._model.parameters()
        for piece, common in zip(self.pieces, self.common, strict=True):
            common[...] = piece.of(values)

    def count(self, samples: float, all_samples: float) -> None:
        """Count the samples of one more step."""
        self.samples += samples
        self.all_samples += all_samples
        self.is_apart |= all_samples > 0

    def expect(self, all_samples: float) -> None:
        """Count the samples of this round that the ranks still have after a resume. They may be fewer than before."""
        is_lost = self.all_samples > 0 and not all_samples
        self.all_samples = all_samples
        if is_lost and not self.sent:
            self.go_back()

    # -- one outer step ----------------------------------------------------------------------------------------------

    def start(self, steps: int) -> None:
        """Begin to send the pseudo-gradient, if any rank has trained. It arrives when `steps` more steps are made."""
        if not self.all_samples:
            return
        assert self.sent is None
        self._left_before = self._reducer.state()
        self._reducer.begin(self.weight)
        values = self._model.parameters()
        for index in reversed(range(len(self.pieces))):
            gone = self._reducer.gradients[index]
            self._pseudo_gradient(index, values, gone)
            if self._departed_samples:  # the mean of this rank's and of theirs
                gone *= gone.dtype.type(self.samples / self.weight)
                departed = self._departed[str(self.pieces[index])]
                gone += like((departed / self.weight).astype(gone.dtype), gone)
            self._reducer.ready(index, gone)
        self.sent = InFlight(self.samples, self.all_samples, steps)
        self._sent_at = time.perf_counter()
        self.samples = self.all_samples = 0.0

    def finish(self) -> None:
        """Wait for the mean of the ranks' pseudo-gradients. Collective. Nothing changes yet.

        Raises:
            NonFiniteError: a rank's parameters hold NaN or infinity. Raised on every rank, names rank and parameter.
                The message under way is taken back.
        """
        if not self.sent or self.sent.has_arrived:
            return
        try:
            self._reducer.finish()
        except NonFiniteError as error:
            self.sent.has_arrived = True  # nothing is under way any more
            self.take_back()
            raise cannot_meet(error) from None
        self.sent.has_arrived = True
        if spans := self._world.control.spans:
            about = {"samples": self.sent.all_samples, "first": str(self.pieces[0]), "last": str(self.pieces[-1])}
            spans.add("wire", "outer step", self._sent_at, time.perf_counter(), **about)

    def update(self, kept: float) -> None:
        """Move the common parameters by the mean. This rank continues from a mix: `kept` of its own values, the rest
        common."""
        if not self.sent:
            return
        self.sent, self._left_before = None, {}
        self._departed, self._departed_samples = {}, 0.0
        self.num_updates += 1
        for dtype, mean in self._reducer.flats.items():
            trained = self._trained[dtype] if self.optimizers else 0
            if trained:
                self.optimizers[dtype].update(mean[:trained])
            self._common[dtype][trained:] -= mean[trained:]
        self.go_back(kept)

    def go_back(self, kept: float = 0.0) -> None:
        """Give the common parameters to this rank; see update."""
        self.is_apart = kept > 0 or self.all_samples > 0
        values = dict(self._model.parameters())
        changed: dict[str, Array] = {}
        for piece, common in zip(self.pieces, self.common, strict=True):
            own, whole = piece.of(values), values[piece.name]
            new = common if kept == 0 else own.dtype.type(kept) * own + own.dtype.type(1 - kept) * common
            if piece.is_whole:  # load_parameters copies it
                changed[piece.name] = new.reshape(whole.shape)
                continue
            if piece.name not in changed:
                changed[piece.name] = whole.copy()
            piece.of(changed)[...] = new
        self._model.load_parameters({**values, **changed})

    def take_back(self) -> None:
        """Take back the message under way: this rank's own parameters still contain it, and it is sent the next
        time."""
        if not self.sent:
            return
        sent, self.sent = self.sent, None
        self.count(sent.samples, sent.all_samples)
        if sent.has_arrived and self._left_before:  # otherwise a rank was lost, and MPI may still write there
            self._reducer.restore(self._left_before)
            self._left_before = {}

    def drop(self) -> None:
        """Wait for the message under way, and discard it together with the counts. Collective."""
        with suppress(NonFiniteError):
            self.finish()
        self.sent, self._left_before = None, {}
        self.samples = self.all_samples = 0.0

    def _pseudo_gradient(self, index: int, values: Mapping[str, Array], out: Array) -> None:
        """Write the common values of a piece minus those of this rank."""
        common, value = self.common[index], self.pieces[index].of(values)
        xp = namespace(out)
        if self.pieces[index].is_trained:
            xp.subtract(common, value, out=out)
        else:  # a buffer may hold infinity, such as that of a mask
            with numpy.errstate(invalid="ignore"):
                out[...] = xp.where(common == value, xp.zeros_like(value), common - value)

    # -- checkpoints: see outer_steps.py -----------------------------------------------------------------------------

    def means(self) -> dict[str, Array]:
        """Return the mean that has arrived, by piece; views."""
        return dict(zip(map(str, self.pieces), self._reducer.gradients, strict=True))

    def arrive(self, all_samples: float, steps_left: int, means: Mapping[str, numpy.ndarray]) -> None:
        """Restore a mean that had arrived before a resume. `restore_own` restores this rank's samples in it."""
        self.sent = InFlight(0.0, all_samples, steps_left, has_arrived=True)
        for piece, mean in self.means().items():
            mean[...] = like(means[piece], mean)

    def own_state(self) -> dict[str, dict[str, numpy.ndarray]]:
        """Return, as CPU arrays, what this rank adds to the next outer steps: `residual`, and `carried` from other
        ranks.

        Their entries may be added up over ranks.
        """
        samples = self.samples + (self.sent.samples if self.sent else 0.0)
        # A message that was under way when a rank was lost is taken back.
        left = {_LEFT: self._reducer.state() if self.sent or not self._left_before else self._left_before}
        if self.sent:
            left[_LEFT_BEFORE] = self._left_before
        residual, carried = (
            {f"{prefix}{name}": value for prefix, codec in left.items() for name, value in codec.get(key, {}).items()}
            for key in ("residual", "carried")
        )
        if self._departed:
            carried |= {f"{_GONE}{name}": value for name, value in self._departed.items()}
            carried[_SAMPLES] = numpy.array(self._departed_samples)
        if samples:
            residual[_SAMPLES] = numpy.array(samples)
            values = self._model.parameters()
            for index, (piece, common) in enumerate(zip(self.pieces, self.common, strict=True)):
                gone = namespace(common).empty_like(common)
                self._pseudo_gradient(index, values, gone)
                host = gone.get() if is_device_array(gone) else gone
                residual[f"{_GONE}{piece}"] = host.astype(numpy.result_type(host.dtype, numpy.float32)) * samples
        return {"residual": residual, "carried": carried}

    def restore_own(self, state: Mapping[str, Mapping[str, numpy.ndarray]]) -> None:
        """Continue from an `own_state` of this rank, which has its parameters again; or from `carried` sums alone.

        Call it after `sent` has been restored.

        Raises:
            CheckpointError: the state belongs to other parameters.
        """
        now, before = (
            {key: left for key, part in state.items() if (left := under(prefix, part))}
            for prefix in (_LEFT, _LEFT_BEFORE)
        )
        self._reducer.restore(now if self.sent or not before else before)
        self._left_before = before if self.sent else {}
        carried = state.get("carried", {})
        self._departed, self._departed_samples = under(_GONE, carried), float(carried.get(_SAMPLES, 0.0))
        if self._departed and (missing := {*map(str, self.pieces)} - self._departed.keys()):
            raise CheckpointError(f"the parts of the ranks have nothing for {', '.join(sorted(missing))}")

    def place(self) -> str:
        """A text that is equal if a rank's codec would leave the same residual."""
        state = self._reducer.state()
        return str(state["place"]) if "residual" in state else ""

    def close(self) -> None:
        """Free the communicator. Collective, except in a broken World."""
        self._reducer.close()


def finish_all(fragments: Sequence[Fragment]) -> None:
    """Call `finish` of each of these. If one cannot be used, take back all of them. Collective.

    Raises:
        NonFiniteError: the error of the first such fragment; see Fragment.finish.
    """
    problem: NonFiniteError | None = None
    for fragment in fragments:
        try:
            fragment.finish()
        except NonFiniteError as error:
            problem = problem or error
    if problem:
        for fragment in fragments:
            fragment.take_back()
        raise problem


def cannot_meet(error: NonFiniteError) -> NonFiniteError:
    """Return the error for an outer step, given the `error` that a rank's pseudo-gradient is NaN or infinite."""
    if error.gradient_of is None:  # a codec has made infinity of finite values
        return error
    rank_name, name = error.gradient_of
    return everywhere(
        NonFiniteError(
            f"{rank_name}: {name} has become NaN or infinity in the steps of this round, so the outer step is "
            "impossible. Try a smaller learning rate or gradient clipping, or examine that rank's data"
        )
    )


def under(prefix: str, part: Mapping[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
    """Return the entries whose names begin with this prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in part.items() if name.startswith(prefix)}
