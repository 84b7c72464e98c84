"""What the servers and workers of a job must have in common, as lines that are compared."""

from __future__ import annotations

from mpitrain.adapters.adapter import Adapter
from mpitrain.config import Config
from mpitrain.serve.source import JobSource
from mpitrain.serve.store import layout_of


def facts_of(config: Config, adapter: Adapter, source: JobSource, num_servers: int) -> list[str]:
    """Return the lines of this process."""
    from mpitrain import __version__

    state, scale = source.state(), "with" if adapter.loss_scale else "without"
    parameters = layout_of(adapter.parameters()).parameters
    return [
        f"mpitrain {__version__}",
        f"compression={config.compression}, {scale} loss scale",
        f"servers={num_servers}",
        *(f"{name}={state[name]}" for name in ("num_samples", "seed", "shuffle")),
        *(f"gradient {parameter}" for parameter in adapter.layout),
        *(f"parameter {parameter}" for parameter in parameters),
    ]


def most_bytes_of(adapter: Adapter) -> int:
    """Return the most bytes of arrays in a message."""
    layouts = (layout_of(adapter.parameters()).parameters, adapter.layout)
    return max(sum(one.count * one.dtype.itemsize for one in layout) for layout in layouts)
