"""The error of ranks that cannot meet."""

from __future__ import annotations

from mpitrain.errors import NonFiniteError, everywhere


def cannot_meet(error: NonFiniteError) -> NonFiniteError:
    """Return the error for an outer step, in which `error` says that a rank's distance is NaN or infinite."""
    if error.gradient_of is None:  # a codec has made infinity of finite distances
        return error
    rank_name, name = error.gradient_of
    return everywhere(
        NonFiniteError(
            f"{rank_name}: {name} has become NaN or infinity in the steps of this round, so the ranks cannot "
            "meet. Try a smaller learning rate or gradient clipping, or examine that rank's data"
        )
    )
