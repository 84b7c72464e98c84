"""Whether one time is shorter than another by more than noise. Every recommendation that ranks two times uses this."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# Differences below this share, or below so many standard errors, are noise.
SHARE, _ERRORS = 0.02, 2.0
# The standard error of a median of values with a normal distribution is 1.25 sigma / sqrt(n); its quartiles lie 1.35
# sigma apart.
_ERROR_OF_QUARTERS = 1.25 / 1.35


def error_of_median(first_quarter: float, third_quarter: float, count: int) -> float:
    """Return the standard error of a median of `count` values, from their quartiles."""
    return _ERROR_OF_QUARTERS * (third_quarter - first_quarter) / math.sqrt(count)


def median_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and its standard error, which is 0 for one value."""
    if len(values) < 2:
        return values[0], 0.0
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return median, error_of_median(first, third, len(values))


def error_of_mean(values: Sequence[float]) -> float:
    """Return the standard error of the mean of values; 0 for one value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def noise(value: float, *errors: float) -> float:
    """Return the largest difference from `value` that counts as noise.

    Args:
        value: seconds, or a rate.
        errors: the standard errors of both.
    """
    return max(SHARE * abs(value), _ERRORS * math.hypot(*errors))
