"""hvd.elastic: a training that continues when ranks are lost, or when hosts join and leave. See docs/how-to/horovod.md.

    run(train)(state) ─> sync ─> train(state) ─> state.commit() ─> state.commit() ...
          ^                                           └─ copy to memory; another host set continues from it
          └─ --recover: a rank is lost: restore the last commit, in a new World, and call the reset callbacks

TorchState and ElasticSampler need PyTorch, the rest does not.
"""

from __future__ import annotations

from typing import Any

from mpitrain.errors import HorovodInternalError
from mpitrain.horovod.elastic.state import ElasticState, HostsUpdatedInterrupt, ObjectState, run
from mpitrain.horovod.names import part_or_refusal

State = ElasticState

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "run",
]

# Names that need PyTorch are loaded when first used: module and name.
_PARTS = {
    "ElasticSampler": ("mpitrain.horovod.elastic.torch_state", "ElasticSampler"),
    "TorchState": ("mpitrain.horovod.elastic.torch_state", "TorchState"),
}


def __getattr__(name: str) -> Any:
    return part_or_refusal(__name__, name, _PARTS, __all__)
