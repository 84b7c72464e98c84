"""The state of a whole model, from the stages of a pipeline that have the layers."""

from __future__ import annotations

from mpitrain.adapters.staged import StagedAdapter, joined
from mpitrain.errors import LostRankError
from mpitrain.strategies.passes import StagePlace
from mpitrain.world import World


def lend_state(world: World, place: StagePlace, apart: World, staged: StagedAdapter, *, reads: bool) -> None:
    """Bring the state of all stages to the ranks that read it, each from its own pipeline. Collective.

    Args:
        apart: the same ranks, with a communicator for these messages.
        reads: whether this rank reads the state.

    Raises:
        LostRankError: a rank has been lost, and its layers with it.
    """
    if world.control.is_broken and world.committer is not None:
        raise LostRankError(
            f"{world.name()}: a rank has been lost, and with it the layers of its stage. The job cannot go on in "
            "place. With --restarts it starts again from the copy in memory"
        )
    readers = world.allgather(reads)
    begin = place.pipeline * place.num_stages
    pipeline, states = range(begin, begin + place.num_stages), []
    for source in pipeline:  # one after the other, so that a rank that reads has room for one more at a time
        if source == world.rank:
            own = staged.own_state()
            states.append(own)
            for rank in pipeline:
                if rank != source and readers[rank]:
                    apart.send(own, rank)
        elif reads:
            states.append(apart.receive(source))
    if reads:
        staged.lend(joined(states))
