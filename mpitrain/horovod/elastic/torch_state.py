"""TorchState: models, optimizers and samplers, beside other objects."""

from __future__ import annotations

from typing import Any

import torch

from mpitrain.horovod.elastic.sampler import ElasticSampler
from mpitrain.horovod.elastic.state import ObjectState
from mpitrain.torch.keep import TorchRankState
from mpitrain.training.keep import RankState


class TorchState(ObjectState):
    """A model, an optimizer and more, each an attribute of the state. What has a state_dict is loaded in place."""

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        """
        Args:
            model: a torch.nn.Module, or None.
            optimizer: of torch or of hvd.DistributedOptimizer, or None.
            kwargs: more of them by name, samplers, learning rate schedules, and other objects that pickle can write.
        """
        given = {"model": model, "optimizer": optimizer, **kwargs}
        super().__init__(**{name: value for name, value in given.items() if value is not None or name in kwargs})
        for name in given.keys() - set(self._names):
            setattr(self, name, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict of what has one, with its tensors on the host, and the other objects, by name."""
        values = super().state_dict()
        return {name: _on_host(value.state_dict()) if _is_loaded(value) else value for name, value in values.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load into what has a state_dict, and set the other objects. See ObjectState."""
        loaded = {name for name in self._names if _is_loaded(getattr(self, name))}
        super().load_state_dict({name: getattr(self, name) if name in loaded else state[name] for name in state})
        for name in loaded:
            getattr(self, name).load_state_dict(state[name])

    def sync(self) -> None:
        """Take over rank 0's state, and save it. Samplers divide what is left among the present ranks. Collective."""
        super().sync()
        for name in self._names:
            if isinstance(sampler := getattr(self, name), ElasticSampler):
                sampler.reset()

    def of_rank(self) -> RankState:
        """Return the random numbers on the host."""
        return TorchRankState(())


def _is_loaded(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _on_host(value: Any) -> Any:
    """The same nesting of dicts, lists and tuples, with its tensors on the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_host(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on_host(entry) for entry in value)
    return value
