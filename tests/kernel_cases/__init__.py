"""Every kernel against NumPy, over awkward sizes and unaligned views; what is around the arrays must stay as it was.

Test functions, and a fixture that they need, for modules that have a fixture `cupy` and import all that is here:
tests/cuda/test_emulated_kernels.py runs them on the CPU, and the tests on a GPU there. Bits are compared; which NaN a
sum is differs between devices.
"""

from .buckets import *  # noqa: F403
from .codecs import *  # noqa: F403
from .common import values_like_any_other as values_like_any_other
from .misuse import *  # noqa: F403
from .norms import *  # noqa: F403
from .optimizer_steps import *  # noqa: F403
