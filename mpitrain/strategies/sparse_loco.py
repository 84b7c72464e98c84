"""sparse_loco: rounds whose outer step sends the largest parts of what each rank has learned, in a few bits."""

from __future__ import annotations

import numpy

from mpitrain.adapters.adapter import LocalModel
from mpitrain.compression.quantised_top_k import MOST_BITS
from mpitrain.compression.top_k import BLOCK_VALUES, HIGHEST, LOWEST
from mpitrain.errors import ConfigError, everywhere
from mpitrain.exchange.exchange import CompressedExchange, Exchange, make_exchange
from mpitrain.strategies.meetings import Meetings
from mpitrain.strategies.rounds import Rounds
from mpitrain.world import World


class SparseLoCo(Rounds):
    """As LocalSGD, but a rank sends a few values of its part in an outer step, and keeps the rest for the next ones.

    In round t, with the common parameters c, the parameters w of this rank after `sync_every` steps, its share s of the
    samples of the round, and the values e that it has kept:

        e = decay x e + s x (c - w)
        sent = of each 4096 values of e the largest, a part `density` of them, rounded to `bits` bits
        e = e - sent
        c = c - the sum of what all ranks have sent

    So the outer optimizer is SGD with a rate of 1 and without momentum; what is kept takes the place of the momentum.
    With equal shares, e is that of the source divided by the number of ranks, and c is the same.

    Each rank sends its values to every other rank, also inside a node; compression/quantised_top_k.py has the format.
    The bytes grow with the number of ranks. On one rank nothing is sent, and it is plain training, bit for bit. What is
    left of e at the end of a run is in no parameter, but in a checkpoint.

    Source: Sarfi, Therien, Lidin and Belilovsky, Communication Efficient LLM Pre-training with SparseLoCo, arXiv
    2508.15706 (2025). The defaults are those of the authors' code (github.com/tplr-ai/templar, version 2.1.3: 30 inner
    steps, 64 of 4096, 4 bins, momentum_decay 0.95, outer_learning_rate 1). Other than there, blocks are 4096 values of
    the flat parameters, not of one tensor, and ranks count by their samples.
    """

    def __init__(self, sync_every: int = 30, *, density: float = 1 / 64, bits: int = 2, decay: float = 0.95) -> None:
        """Give the same values on all ranks.

        Args:
            sync_every: see LocalSGD.
            density: the part of the values that a rank sends, 1/4096 to 0.5. A block sends at least one.
            bits: of each value that is sent, its sign included, 1 to 4.
            decay: the factor of what a rank has kept, at each outer step, 0 to 1. 0: what is not sent is lost. 1:
                nothing is lost.

        Raises:
            ConfigError: a value is not allowed.
        """
        if not isinstance(density, (int, float)) or not LOWEST <= density <= HIGHEST:
            raise ConfigError(
                f"SparseLoCo: density={density!r}; it must be a number from {LOWEST:.5f} (one of "
                f"{BLOCK_VALUES} values) to {HIGHEST}"
            )
        if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= MOST_BITS:
            raise ConfigError(f"SparseLoCo: bits={bits!r}; it must be an int from 1 to {MOST_BITS}")
        if not isinstance(decay, (int, float)) or not 0 <= decay <= 1:
            raise ConfigError(f"SparseLoCo: decay={decay!r}; it must be a number from 0 to 1")
        self._codec, self._decay = f"top_k:{float(density)}:{bits}", float(decay)
        super().__init__(sync_every, exchange=self._make_exchange, by_rank=True)

    def meetings(self, world: World, model: LocalModel) -> Meetings:
        """See Rounds.

        Raises:
            MismatchError: the ranks differ in the arguments or in the model. Raised on every rank.
            ConfigError: on several ranks: a parameter is not float32; the model has buffers that change by a mean; the
                World's compression is a codec; or its reduction is exact. Raised on every rank.
        """
        values, num_buffers = model.parameters(), getattr(model, "num_buffers", 0)
        names = [parameter.name for parameter in model.layout]
        others = [f"{name} is {values[name].dtype}" for name in names if values[name].dtype != numpy.float32]
        buffers, compression = names[len(names) - num_buffers :], world.config.compression
        settings = f"SparseLoCo({self._codec}, decay={self._decay}), compression {compression}"
        world.agree("begin", [settings, f"buffers: {buffers}", f"not float32: {others}"])
        problem = ""
        if compression not in ("none", "auto"):
            problem = f"compression={compression}: it has a form of its own. Leave compression out, or use mt.DiLoCo"
        elif world.config.reduction == "exact":
            problem = (
                "reduction=exact: it adds up what it keeps of each rank in float32. Take reduction=plain, or mt.DiLoCo"
            )
        elif buffers:
            problem = (
                f"it sends only the largest values, and the model has {num_buffers} buffers whose mean all ranks need, "
                f"such as {buffers[0]}. Use layers without running means, or mt.DiLoCo"
            )
        elif others:
            problem = f"it sends float32, and {others[0]}. Make all parameters float32, or use mt.DiLoCo"
        if problem and world.size > 1:
            raise everywhere(ConfigError(f"SparseLoCo: {problem}"))
        if compression == "auto" and world.size > 1:
            world.print(f"mpitrain: compression auto: none; SparseLoCo sends its values as {self._codec}")
        return super().meetings(world, model)

    def _make_exchange(self, world: World) -> Exchange:
        if world.size == 1:
            return make_exchange(world, compression="none")
        return CompressedExchange(world, self._codec, self._decay)
