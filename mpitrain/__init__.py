"""mpitrain: data-parallel training over MPI for a few ordinary Linux machines.

import mpitrain as mt

world = mt.init()
w = world.sync(w)
for x, y in world.shard(batches):
    w = step(w, world.mean(grad(w, x, y), weight=len(x)))
"""

from mpitrain.errors import MpitrainError
from mpitrain.start import init
from mpitrain.world import World

__version__ = "0.1.0"

__all__ = ["MpitrainError", "World", "__version__", "init"]
