"""The compression for links of a rate that a user names: `network=` of mpitrain.torch.prepare and of mt.AutoSync.

It chooses among the codecs that some measured training has had without loss (mpitrain/measured_loss.py), and says what
it has chosen, why, and what that cost in loss. Local updates are not among them: whether they cost nothing depends on
the number of steps, and between outer steps the script must not evaluate. `mpitrain plan` knows both.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import replace

import numpy

from mpitrain.allreduce.costs import Topology, best_codec, codec_seconds
from mpitrain.allreduce.group import num_lanes
from mpitrain.compression import CODECS, coding_rate
from mpitrain.errors import ConfigError, everywhere
from mpitrain.measured_loss import shown_millions, without_loss
from mpitrain.reading import shown
from mpitrain.reducer.bucket import Parameter
from mpitrain.units import rate_gbit
from mpitrain.world.world import World


def codecs_by_network() -> list[str]:
    """The codecs among which `network=` chooses."""
    return [name for name in CODECS if without_loss(name)]


def compression_by_network(world: World, network: str, parameters: Sequence[Parameter]) -> str:
    """Choose a compression, and print it on rank 0. Collective. The result is the same on every rank.

    Args:
        network: the rate of each node's link with its unit: "1Gbit/s", "100Mbit/s".
        parameters: those that have gradients.

    Returns:
        The name of a codec, or "none".

    Raises:
        ConfigError: it is not a rate, or the job's settings name a compression. Raised on every rank.
        MismatchError: the ranks gave other rates. Raised on every rank.
    """
    world.agree("choose a compression", [f"network={shown(network)}"])
    rate = _bytes_per_second(network)
    if world.config.compression != "none":
        raise everywhere(
            ConfigError(
                f"network={network} together with the setting compression={world.config.compression}: both choose the "
                "compression. Leave out one of the two"
            )
        )
    others = [str(one) for one in parameters if one.dtype != numpy.float32]
    reason = ""
    if world.num_nodes == 1:
        reason = "all ranks are on one node"
    elif world.config.reduction == "exact":
        reason = "reduction=exact sends gradients as they are"
    elif others:
        reason = f"codecs take float32, and there is {others[0]}"
    if reason:
        world.print(f"mpitrain: network={network}: no compression, because {reason}")
        return "none"
    chosen = "none"
    with world.together("choose a compression"):
        if world.is_root:
            chosen, text = _chosen(world, rate, sum(one.count for one in parameters))
            world.print(f"mpitrain: network={network}: {text}")
    return str(world.broadcast_object(chosen))


def _bytes_per_second(network: object) -> float:
    try:
        if not isinstance(network, str):
            raise ArgumentTypeError(f"{shown(network)} is not a text, as in '1Gbit/s'")
        return rate_gbit(network) * 1e9 / 8
    except ArgumentTypeError as error:
        raise everywhere(ConfigError(f"network: {error}")) from None


def _chosen(world: World, bytes_per_second: float, num_values: int) -> tuple[str, str]:
    """The compression, and the line about it without its beginning."""
    names, known = codecs_by_network(), dict(world.profile.codecs)
    rates = tuple((name, known.get(name) or coding_rate(name)) for name in names)
    profile = replace(world.profile, bytes_per_second=bytes_per_second, codecs=rates)
    topology = Topology(profile, (1,) * world.num_nodes, num_lanes(world))
    chosen = best_codec(names, num_values, topology)
    plain, _ = codec_seconds("none", num_values, topology)
    of_model = f"{shown_millions(num_values)} parameters on {world.num_nodes} nodes"
    row = without_loss(chosen)
    if row is None:
        return "none", (
            f"no compression, because {of_model} take {plain:.2g} s a step on the network, and none of "
            f"{', '.join(names)} saves twice the time that it takes on a core"
        )
    wire, coding = codec_seconds(chosen, num_values, topology)
    return chosen, (
        f"compression {chosen}, because {of_model} take {wire:.2g} s a step on the network and {coding:.2g} s on a "
        f"core, in place of {plain:.2g} s on the network; {row}. With fewer steps, compare the loss"
    )
