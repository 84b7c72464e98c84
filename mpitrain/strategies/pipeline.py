"""pipeline: consecutive layers on consecutive ranks, through which micro-batches pass.

    2 pipelines of 2 stages, 4 ranks                    stage 0, layers 0 1      stage 1, layers 2 3
                                        pipeline 0      rank 0  ─activations─>   rank 1
                                                        <─gradients of these─
                                        pipeline 1      rank 2                   rank 3
                                                          │ means of the          │ means of the
                                                          └ stage: ranks 0, 2     └ stage: ranks 1, 3

Each rank has the parameters, gradients and optimizer state of its own layers only. Means, and the norm for clipping,
are those of Sync, up to the order of additions. passes.py has the schedules and their sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mpitrain.adapters.adapter import Adapter
from mpitrain.adapters.staged import Cut, LayerCost, StagedAdapter, is_staged, joined, staged_of
from mpitrain.arrays import is_device_array
from mpitrain.errors import ConfigError, GradientError, LostRankError, everywhere
from mpitrain.job.worlds import make_world
from mpitrain.reducer.exchange import Exchange, make_exchange
from mpitrain.reducer.means import Means
from mpitrain.reducer.reducer import GradientReducer
from mpitrain.strategies.passes import Activations, StagePasses, StagePlace
from mpitrain.strategies.stage_cut import (
    Stages,
    balanced_cut,
    check_arguments,
    check_num_layers,
    costs_of_stages,
    cut_layers,
    num_stages_of,
    table_of,
)
from mpitrain.strategies.strategy import MeanStrategy, applied, share_parameters
from mpitrain.tree import Tree
from mpitrain.world.world import World


def lend_state(world: World, place: StagePlace, apart: World, staged: StagedAdapter, *, reads: bool) -> None:
    """Send the state of all stages to the ranks that read it, each from its own pipeline. Collective.

    Args:
        apart: the same ranks, with a communicator for these messages.
        reads: whether this rank reads the state.

    Raises:
        LostRankError: a rank has been lost, and its layers with it.
    """
    if world.control.is_broken and world.committer is not None:
        raise LostRankError(
            f"{world.name()}: a rank has been lost, and with it the layers of its stage. The job cannot continue in "
            "place. If it may restart (--max-restarts), it starts again from the in-memory checkpoint"
        )
    readers = world.allgather(reads)
    begin = place.pipeline * place.num_stages
    pipeline, states = range(begin, begin + place.num_stages), []
    for source in pipeline:  # one after the other, so that a reading rank needs room for only one more at a time
        if source == world.rank:
            own = staged.own_state()
            states.append(own)
            for rank in pipeline:
                if rank != source and readers[rank]:
                    apart.send(own, rank)
        elif reads:
            states.append(apart.recv(source))
    if reads:
        staged.lend(joined(states))


class Pipeline(MeanStrategy):
    """Pipelines of stages, with data parallelism across them; see Strategy for the calls, and large-models.md.

    Checkpoints contain the whole model and nothing about stages: they are those of Sync with the same adapter, and load
    with any number of stages. While one is taken, the ranks that write it need the memory of the whole model's state.

    The layers of a lost rank are lost. So with several stages, a job of `mpitrain run --recover` restarts from the
    in-memory checkpoint, as without --recover. Together with --max-restarts 0, it is refused.

    Attributes:
        layers: since `begin`: the layers of each piece, in the order of the model; piece i is on stage i % num_stages.
        costs: since `begin`, with stages="auto": the cost of each layer on each stage. Otherwise empty.
    """

    keeps_own_state = True

    def __init__(
        self,
        stages: Stages = 1,
        schedule: str = "1f1b",
        micro_batches: int = 1,
        *,
        num_stages: int | None = None,
        sample: Tree = None,
        pieces: int | None = None,
        recompute: bool = False,
        activations: str | None = None,
        exchange: Callable[[World], Exchange] = make_exchange,
    ) -> None:
        """Give the same values on every rank.

        Args:
            stages: the number of stages, whose numbers of layers differ by at most one; or the number of layers of each
                stage. The number of ranks must be a multiple of it. With 1, any adapter is allowed, and this is Sync.
                "auto": `begin` measures each layer on every rank, and cuts the model so that the slowest stage takes
                the least time. That takes about as long as 5 passes of `sample` through the whole model. A resumed run
                measures again, and may cut elsewhere.
            schedule: "1f1b", "eager_1f1b", "gpipe" or "interleaved". Between nodes, eager 1F1B hides messages for which
                1F1B waits, and keeps the activations of up to twice as many micro-batches.
            micro_batches: the number of parts into which each pipeline's part of a batch is divided. If that has fewer
                samples, each sample is a part.
            num_stages: only with stages="auto": the number of stages. Default: as many as there are ranks.
            sample: only with stages="auto": the batch to measure with, as large as a micro-batch. Only times depend on
                its values.
            pieces: only with "interleaved": the number of pieces of the model on each rank. Default: 2.
            recompute: keep only the inputs of a piece, and compute its forward pass twice.
            activations: "bf16": activations and their gradients travel as bfloat16, and so are rounded to 8 bits.
                Default: the dtype that the layers return.
            exchange: a function of the World of a stage's ranks that returns the object which computes means over them.

        Raises:
            ConfigError: a value is not allowed.
        """
        check_arguments(stages, schedule, micro_batches, num_stages, sample, pieces, activations)
        self._stages, self._num_stages, self._sample = stages, num_stages, sample
        self._schedule, self._num_micro = schedule, micro_batches
        self._num_pieces = (2 if pieces is None else pieces) if schedule == "interleaved" else 1
        self._recompute, self._narrow, self._make_exchange = recompute, activations == "bf16", exchange
        self.layers: list[range] = []
        self.costs: list[list[LayerCost]] = []
        self._made_for: World | None = None
        self._replicas: World | None = None

    @property
    def divides_model(self) -> bool:
        """Since `begin`: whether there are several stages."""
        return self._place.num_stages > 1

    def replicas(self, world: World) -> World:
        """Return the World of the ranks with the same stage as this one: one rank of each pipeline. Collective.

        Make the data for this World: then all stages of a pipeline get the same part of each batch. `close` frees it.

        Raises:
            ConfigError: the number of stages does not divide that of the ranks. Raised on every rank.
            MismatchError: the ranks have different stages. Raised on every rank.
        """
        if self._replicas is None or self._made_for is not world:
            world.agree("pipelines", [f"stages={self._stages}", f"num_stages={self._num_stages}"])
            count = num_stages_of(world, self._stages, self._num_stages)
            self._made_for, self._replicas = world, world
            if count > 1:
                comm = world.comm.Split(world.rank % count, world.rank)
                own = make_world(comm, world.config, world.generation, parent=world)
                comm.Free()
                self._replicas = own.replaced(profile=world.profile)
        return self._replicas

    def begin(self, world: World, adapter: Adapter) -> None:
        """See Strategy. All ranks of a stage get the parameters of the first one.

        Raises:
            ConfigError: the model cannot be cut this way, or some part of it does not work with stages. Raised on every
                rank.
            MismatchError: the ranks differ in settings or model. Raised on every rank.
        """
        self._world, self._adapter, replicas = world, adapter, self.replicas(world)
        self._place = StagePlace(world.rank, world.size // replicas.size, self._num_pieces)
        self._passes: StagePasses | None = None
        self._activations: Activations | None = None
        needs_layers = self.divides_model or self._num_micro > 1 or self._stages == "auto"
        kind = (
            f"{type(adapter).__name__} of {staged_of(adapter).num_layers} layers" if is_staged(adapter) else "no layers"
        )
        settings = [self._schedule, f"{self._num_micro} micro-batches", f"{self._num_pieces} pieces", kind]
        world.agree("begin a pipeline", [*settings, f"recompute={self._recompute}", f"bf16={self._narrow}"])
        try:  # errors here are the same on every rank
            self._check_job()
            staged = staged_of(adapter) if needs_layers or is_staged(adapter) else None
            self.layers, self.costs = self._cut(staged) if staged else ([], [])
        except ConfigError as error:
            raise everywhere(error) from None
        if staged is not None:
            self._begin_stages(staged, self.layers)
        on_device = any(is_device_array(value) for value in adapter.parameters().values())
        self._reducer = GradientReducer(replicas, adapter.layout, exchange=self._make_exchange, on_device=on_device)
        self._scale = adapter.loss_scale
        share_parameters(replicas, adapter)

    def _cut(self, staged: StagedAdapter) -> tuple[list[range], list[list[LayerCost]]]:
        """Return the layers of each piece, and the costs from which they were chosen. Collective."""
        world, count = self._world, self._place.num_stages
        if not isinstance(self._stages, str):
            return cut_layers(self._stages, self._num_pieces, staged.num_layers), []
        check_num_layers(count, self._num_pieces, staged.num_layers)
        with world.together("measure the layers"):
            own = staged.layer_costs(self._sample, recompute=self._recompute)
        costs = costs_of_stages(world.allgather(own), count)  # equal on every rank, and so is the cut
        return balanced_cut(costs, self._num_pieces), costs

    def table(self) -> str:
        """Return lines with the stage, milliseconds and MiB of each layer, since `begin`, with stages="auto".

        They are for one micro-batch, on the slowest rank of the stage. Parameters are counted without gradients and the
        optimizer's state, and activations as a layer keeps them for its backward pass. A rank keeps the activations of
        several micro-batches; the schedule determines how many. Not collective; the lines are the same on every rank.

        Raises:
            ConfigError: nothing was measured.
        """
        if not self.costs:
            raise ConfigError("the layers of this Pipeline were not measured; stages='auto' measures them in begin()")
        return table_of(self.layers, self.costs)

    def _check_job(self) -> None:
        """Raise ConfigError for settings that do not work with several stages."""
        if not self.divides_model:
            return
        if self._world.committer is not None and not self._world.context.keeper:
            raise ConfigError(
                "--recover alone does not work with several stages: the others cannot continue without the layers of a "
                "lost rank. Leave out --max-restarts 0: then the job starts again from the in-memory checkpoint"
            )
        if self._world.config.compression != "none":
            raise ConfigError(
                f"compression {self._world.config.compression} does not work with several stages: its residual "
                "belongs to one stage. Leave MPITRAIN_COMPRESSION out; activations='bf16' shortens "
                "activations"
            )

    def _begin_stages(self, staged: StagedAdapter, layers: Sequence[range]) -> None:
        """Make this rank's layers, and connect the stages."""
        world, place = self._world, self._place
        count = place.num_stages
        if count > 1:
            self._activations = Activations(world, narrow=self._narrow)
        self._passes = StagePasses(world, place, self._schedule, self._num_micro, self._activations)
        owners = [number % count for number, part in enumerate(layers) for _ in part]
        own = [part for number, part in enumerate(layers) if number % count == place.stage]
        with world.together(f"make the layers of stage {place.stage}"):
            self._passes.pieces = staged.cut(Cut(own, owners, self._recompute, self._passes.run, self._norm_of_all))
            if any(is_device_array(value) for value in staged.parameters().values()) and count > 1:
                raise ConfigError("parameters are on a GPU; stages work on the CPU only. Use mt.Sync on GPUs")
        shapes = (
            world.allgather({name: value.shape for name, value in staged.parameters().items()}) if count > 1 else []
        )
        staged.expect({name: shape for own_shapes in shapes for name, shape in own_shapes.items()})

    def finish_step(self, adapter: Adapter, loss: float) -> tuple[Means, float]:
        """See Strategy.

        Raises:
            NonFiniteError: the error names the rank, stage and micro-batch where NaN or infinity first occurred. Raised
                on every rank.
        """
        problem: GradientError | None = None
        try:
            means = self._reducer.finish(loss, may_skip=self._may_skip, note=adapter.note())
        except GradientError as error:
            if not self.divides_model:
                raise
            problem = error
        if self.divides_model:
            loss_here, heard = (0.0, 0) if problem else (means.loss, means.order_number)
            operation, code = "end of a step of all stages", int(problem is not None)
            assert self._passes is not None
            own = self._passes.num_samples
            records = self._world.agree(operation, value=loss_here, weight=float(heard), code=code, detail=own)
            self._passes.compare_counts(records["detail"].tolist())
            if records["code"].any():
                raise self._passes.objection(problem)
            loss_of_all = float(records["value"][self._place.num_stages - 1])  # the first rank with the last stage
            means = replace(means, loss=loss_of_all, order_number=int(records["weight"].max()))
        self._world.commit()
        return means, applied(adapter, self._reducer.flats, means, self._scale)

    def own_state(self) -> dict[str, Any]:
        """See Strategy. From now until the next step, `state` of the adapter returns the state of the whole model.

        Raises:
            LostRankError: a rank has been lost, and its layers with it.
        """
        return self.own_state_for(reads=True)

    def own_state_for(self, reads: bool) -> dict[str, Any]:
        """See the function of that name. Only ranks with `reads` get the state. Raises as `own_state` does."""
        if self.divides_model:
            assert self._activations is not None
            lend_state(self._world, self._place, self._activations.apart, staged_of(self._adapter), reads=reads)
        return self._reducer.state()

    def close(self) -> None:
        """See Strategy."""
        super().close()
        if self._activations:
            self._activations.close()
        if self._replicas is not None and self._replicas is not self._world:
            self._replicas.free()
        self._replicas = None

    def _norm_of_all(self, norm: float) -> float:
        """The norm of the gradients of all stages, bitwise identical on every rank."""
        norms = self._world.agree("norm of the mean gradient", value=norm)["value"].tolist()
        return math.hypot(*norms[: self._place.num_stages])
