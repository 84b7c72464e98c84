"""The data of a job with servers: samples that have numbers, so that any worker can read any of them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from mpitrain.errors import ConfigError
from mpitrain.training.data.prefetch import Prefetch
from mpitrain.tree import Tree


@runtime_checkable
class JobSource(Protocol):
    """A data source from which jobs are cut, such as ArrayData."""

    num_samples: int
    global_batch: int

    def read(self, epoch: int, begin: int, end: int) -> Tree: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


def source_of(data: object) -> JobSource:
    """Return the source to cut jobs from: `data`, or what it reads ahead of.

    Raises:
        ConfigError: its samples have no numbers.
    """
    source = data.source if isinstance(data, Prefetch) else data
    if not isinstance(source, JobSource):
        raise ConfigError(
            f"a server hands out samples by their numbers, and {type(source).__name__} has no method "
            "read(epoch, begin, end); ArrayData and MapData have it"
        )
    return source
