"""JAX over MPI: `import mpitrain.jax`.

    params = mpitrain.jax.broadcast(params)
    step = mpitrain.jax.mean(jax.value_and_grad(loss), weight=lambda params, x, y: len(x))

docs/how-to/jax.md explains the move from one process or another library, derivatives, and limits.
"""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError(f"mpitrain.jax needs JAX ({error}); install it: pip install 'mpitrain[jax]'") from error

from mpitrain.jax.compressed import compressed_mean
from mpitrain.jax.distributed import initialize
from mpitrain.jax.exchange import broadcast, mean, shard, sum, weighted_mean
from mpitrain.jax.rounds import rounds
from mpitrain.jax.virtual import virtual_mean

__all__ = [
    "broadcast",
    "compressed_mean",
    "initialize",
    "mean",
    "rounds",
    "shard",
    "sum",
    "virtual_mean",
    "weighted_mean",
]
