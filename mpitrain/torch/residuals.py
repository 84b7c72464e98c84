"""The error-feedback residuals of gradients, saved with a model and restored with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from mpitrain.errors import CheckpointError, ConfigError, everywhere
from mpitrain.job.start import init
from mpitrain.torch.compress import RESIDUALS, group_of
from mpitrain.torch.gradients import Gradients
from mpitrain.torch.prepare import gradients_of
from mpitrain.torch.uncompiled import uncompiled


@uncompiled
def residuals(model: torch.nn.Module) -> dict[str, Any]:
    """Return what the codec has not yet sent of the ranks' gradients, for `save`: a number per parameter element and
    rank.

    With local updates it is the whole state that belongs to one rank: see docs/how-to/pytorch.md.

        mpitrain.torch.save({"model": net.state_dict(), "residuals": mpitrain.torch.residuals(model)}, path)

    Every rank calls it, between two steps. Rank 0 gets the residuals, the others get none.

    Args:
        model: that `prepare` had, or a DistributedDataParallel with the hook `compress`.

    Raises:
        ConfigError: the model is neither.
        NonFiniteError: with local updates: an outer step that is under way cannot be made. Raised on every rank, names
            rank and parameter.
    """
    of_ranks = init().gather(residuals_of(model).state())
    return {"of_ranks": of_ranks or []}


@uncompiled
def restore_residuals(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Continue from the result of `residuals`, so that a resumed run is bitwise identical to an uninterrupted one.

    Every rank calls it with the whole `state`, as `load` gives it, before the first step: after `prepare`, or after
    `register_comm_hook`. If the number of ranks or their nodes differ from those that were saved, nothing is restored,
    and rank 0 prints a warning: the residual of one step is then lost. With local updates, all ranks then begin with
    the parameters of the last outer step, and what was learned since goes into the next outer step.

    Raises:
        ConfigError: see `residuals`.
        CheckpointError: the state belongs to another model, or only one of the two has local updates. Raised on every
            rank.
    """
    world, of_ranks, kept = init(), state["of_ranks"], residuals_of(model)
    saved = next((one.get("rounds", "") for one in of_ranks if one), kept.rounds)
    if bool(saved) != bool(kept.rounds):
        raise everywhere(
            CheckpointError(
                f"the residuals are of a model that was trained {_in_words(saved)}, and this one is trained "
                f"{_in_words(kept.rounds)}. Train it as before, or continue without the residuals from a model that "
                "was saved after end_round(model)"
            )
        )
    own = of_ranks[world.rank] if len(of_ranks) == world.size else {}
    places = world.allgather((kept.state().get("place"), own.get("place")))
    if not any(of_ranks):
        return
    if any(here != before for here, before in places):
        cause = "it was saved on other nodes, in other buckets or with another codec"
        if len(of_ranks) != world.size:
            cause = f"it was saved by {len(of_ranks)} ranks, and these are {world.size}"
        elif saved != kept.rounds:
            cause = f"it was saved by {saved}, and this is {kept.rounds}"
        world.print(f"mpitrain: {kept.kept} is not restored: {cause}. {kept.instead}")
        with world.together("restore residuals"):
            kept.restore_elsewhere(of_ranks)
        return
    with world.together("restore residuals"):
        kept.restore({**of_ranks[0], **own})  # rank 0's has the common state


class OfHook:
    """The residuals of a DistributedDataParallel with the hook `compress`; the calls are those of Gradients."""

    kept, instead, rounds = Gradients.kept, Gradients.instead, ""

    def __init__(self, model: DistributedDataParallel) -> None:
        hooks = [(hook, state) for hook, state in model._comm_hooks if hook in RESIDUALS]
        if not hooks:
            raise ConfigError(f"{init().name()}: this model has no hook of mpitrain.torch.compress; register it first")
        ((hook, state),) = hooks  # DDP accepts only one
        self._model = model
        self._residuals, self._world = RESIDUALS[hook], group_of(state)._channel.world
        self._named = dict(model.module.named_parameters())

    def state(self) -> dict[str, Any]:
        if self._world.num_nodes == 1:
            return {}
        self._model.reducer._rebuild_buckets()  # as its next forward pass would
        self._residuals.move([bucket.parameters() for bucket in self._model.reducer._get_zeros_like_grad_buckets()])
        names = {id(parameter): name for name, parameter in self._named.items()}
        return {"place": str(self._world.node_ranks), **self._residuals.state(names)}

    def restore_elsewhere(self, of_ranks: Sequence[Mapping[str, Any]]) -> None:
        """Nothing belongs to all ranks."""

    def restore(self, state: Mapping[str, Any]) -> None:
        self._residuals.restore(state, self._named)


def _in_words(rounds: str) -> str:
    return f"with local updates, by {rounds}" if rounds else "without local updates"


def residuals_of(model: torch.nn.Module) -> OfHook | Gradients:
    """Return the object that keeps the residuals of a model. Raises ConfigError: see `residuals`."""
    return OfHook(model) if isinstance(model, DistributedDataParallel) else gradients_of(model, "residuals")
