"""Does training reach the same loss when gradients are shortened on the wire?

    mpiexec -n 2 python benchmarks/compression_loss.py --plot losses.png

Shorter runs of the examples, each with several seeds; losses.py has the models, and says what the columns are.
Gradients in full, bf16 and int8 with error feedback, and int8 without it, to show what it is for; or what `--gradients`
names (top_k:0.05, sign, power_sgd:2, "sign without feedback"), always beside `none`. The exchange takes every rank for
a node of its own, so that everything is shortened as between hosts.
"""

import argparse
from collections.abc import Callable

import losses
import mpitrain as mt
from mpitrain.allreduce.algorithm import AllreduceHandle
from mpitrain.forecast.rounds import versions_line
from mpitrain.reducer.exchange import CompressedExchange, Exchange, make_exchange
from mpitrain.reducer.slot import Slot


class Forgetful(CompressedExchange):
    """Drops what the codec leaves out."""

    def mean(self, slot: Slot, part: slice, share: float) -> AllreduceHandle:
        slot.residual[part] = 0
        return super().mean(slot, part, share)


def as_nodes(world: mt.World) -> mt.World:
    return world.replaced(node_ranks=tuple(range(world.size)))


_WITHOUT = " without feedback"


def exchange_of(name: str) -> Callable[[mt.World], Exchange]:
    """The exchange for a compression; "NAME without feedback" is for codecs only."""
    if name.endswith(_WITHOUT):
        return lambda world: Forgetful(as_nodes(world), name.removesuffix(_WITHOUT))
    return lambda world: make_exchange(as_nodes(world), compression=name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    losses.add_arguments(parser, ["mlp", "gpt"], [938, 200])
    parser.add_argument("--gradients", nargs="*", default=["none", "bf16", "int8", "int8 without feedback"])
    arguments = parser.parse_args()
    names = dict.fromkeys(["none", *arguments.gradients])
    variants = {name: lambda name=name: mt.Sync(exchange_of(name)) for name in names}
    world = mt.init()
    world.print(f"{world.size} ranks, as if each were on a node of its own; {versions_line('ml_dtypes', 'numba')}")
    panels = {}
    for runs in losses.study(world, arguments, variants):
        world.print(f"\n{runs[0].model}, {runs[0].steps} steps, {arguments.seeds} seeds\n\n{losses.table(runs)}")
        panels[runs[0].model] = losses.curves(runs)
    if arguments.plot and world.is_root:
        losses.plot(panels, arguments.plot)


if __name__ == "__main__":
    main()
