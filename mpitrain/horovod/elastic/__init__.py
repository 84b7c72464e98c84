"""hvd.elastic: a training that goes on when ranks are lost, or when hosts join and leave. See docs/horovod_elastic.md.

    run(train)(state) ─> sync ─> train(state) ─> state.commit() ─> state.commit() ...
          ^                                           └─ --restarts: copy to memory; another host set goes on from it
          └─ --recover: a rank is lost: restore the last commit, in a new World, and call the reset callbacks

TorchState and ElasticSampler need PyTorch, the rest does not.
"""

from __future__ import annotations

from typing import Any

from mpitrain.horovod.elastic.decorator import run
from mpitrain.horovod.elastic.state import ElasticState, ObjectState
from mpitrain.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt

State = ElasticState

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]


def __getattr__(name: str) -> Any:
    """Load what needs PyTorch when it is first used."""
    if name == "TorchState":
        from mpitrain.horovod.elastic.torch_state import TorchState

        return TorchState
    if name == "ElasticSampler":
        from mpitrain.horovod.elastic.sampler import ElasticSampler

        return ElasticSampler
    raise AttributeError(f"hvd.elastic has no {name}; it has {', '.join(__all__)} (docs/horovod_elastic.md)")
