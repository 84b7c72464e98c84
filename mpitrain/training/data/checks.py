"""The checks of options that all data sources share."""

from __future__ import annotations

import numpy

from mpitrain.errors import ConfigError, DataError
from mpitrain.world import World


def check_counts(world: World, num_samples: int | None, global_batch: int, seed: int) -> None:
    """Raise unless every rank can have samples. Call this with the same values on all ranks.

    Args:
        num_samples: the number of samples; None: unknown.

    Raises:
        DataError: there are no samples, or fewer than ranks.
        ConfigError: the global batch is not an int, or leaves ranks without samples in every step; the seed is not an
            int of at least 0.
    """
    if num_samples == 0:
        raise DataError("the data set has no samples")
    if num_samples is not None and num_samples < world.size:
        raise DataError(
            f"the data set has {num_samples} samples for {world.size} ranks; start at most {num_samples} ranks"
        )
    if not _is_int(global_batch):
        raise ConfigError(f"global_batch={global_batch!r}; it must be an int")
    if global_batch < world.size:
        raise ConfigError(
            f"global_batch={global_batch} for {world.size} ranks; each rank needs a sample, so at least {world.size}"
        )
    if not _is_int(seed) or seed < 0:
        raise ConfigError(f"seed={seed!r}; it must be an int of at least 0")


def _is_int(value: object) -> bool:
    return isinstance(value, int | numpy.integer) and not isinstance(value, bool)
