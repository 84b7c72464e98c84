"""parameter_server: a server holds the parameters, and workers, which may come and go, compute gradients of its
units."""

from __future__ import annotations

from typing import Any, Literal

from mpitrain.adapters.adapter import Adapter, divided_of
from mpitrain.arrays import Array
from mpitrain.errors import ConfigError, GradientError, LaunchError, LostServerError, everywhere
from mpitrain.job.start import the_job
from mpitrain.reducer.means import Means
from mpitrain.role import Role
from mpitrain.server.coordinator import Coordinator
from mpitrain.server.gradients import codec_of
from mpitrain.server.parameters import check_rate_factor
from mpitrain.server.participant import Participant, first_server, serve_part, tell_division, work
from mpitrain.server.status import ServerStats
from mpitrain.server.work_units import Asynchronous, BoundedStaleness, ConsistencyMode, Synchronous, WorkQueue
from mpitrain.server.worker import IndexedSource, source_of
from mpitrain.strategies.strategy import ServedStrategy, refuse_round, without_rounds
from mpitrain.strategies.sync import Sync
from mpitrain.world.world import World

MODES = ("sync", "async", "bounded")


class ParameterServer(ServedStrategy):
    """Training with a server and workers, as `mpitrain serve`, `mpitrain work` and `mpitrain run --servers` start them.

    A worker pulls a unit (some samples of the epoch) with the parameters, and pushes the gradient. The server makes an
    update from one or several gradients, depending on the mode; docs/how-to/parameter-server.md compares the modes.
    Workers may join and leave at any time. Each sample of an epoch is in exactly one update, whatever happens to
    workers. Several servers divide the parameters.

    In one process without servers, the strategy trains as Sync does. It cannot train on several equal ranks.
    """

    def __init__(
        self,
        mode: Literal["sync", "async", "bounded"] = "bounded",
        *,
        staleness: int = 4,
        backup: int = 0,
        unit_samples: int | None = None,
        staleness_correction: bool = False,
        servers: int | None = None,
    ) -> None:
        """Give the same values in all processes.

        Args:
            mode: "sync": all gradients of a step are computed with the same parameters, and the step is that of one
                process, to rounding. "async": each gradient makes an update when it arrives. "bounded": as async, but a
                worker waits while it is more than `staleness` units ahead of the slowest one.
            staleness: for "bounded", at least 0.
            backup: for "sync": the number of results per step that the server does not wait for. Their samples are
                handed out again.
            unit_samples: samples of a work unit. Default for "sync": the global batch is cut into one unit for each
                worker. It cannot be set with `backup`. Default for the others: the global batch.
            staleness_correction: not for "sync": the learning rate of an update is divided by its staleness, the number
                of updates between its pull and its push, if that is above 1. Source: Zhang et al., Staleness-aware
                Async-SGD for Distributed Deep Learning, arXiv 1511.05950 (2015).
            servers: another number of servers is refused. Default: as many as were started.

        Raises:
            ConfigError: a value is not allowed, or does not go with the mode.
        """
        problem = ""
        if mode not in MODES:
            problem = f"mode={mode!r}; allowed: {', '.join(MODES)}"
        elif not _is_count(staleness, 0) or not _is_count(backup, 0):
            problem = f"staleness={staleness!r} backup={backup!r}; both must be ints of at least 0"
        elif unit_samples is not None and not _is_count(unit_samples, 1):
            problem = f"unit_samples={unit_samples!r}; it must be an int of at least 1"
        elif servers is not None and not _is_count(servers, 1):
            problem = f"servers={servers!r}; it must be an int of at least 1"
        elif backup and (mode != "sync" or unit_samples is not None):
            problem = f"backup={backup} goes with mode='sync', without unit_samples"
        elif staleness_correction and mode == "sync":
            problem = "staleness_correction=True: in mode='sync' no gradient is stale; leave it out"
        if problem:
            raise ConfigError(f"ParameterServer: {problem}")
        self._mode, self._staleness, self._backup = mode, staleness, backup
        self._unit_samples, self._corrects = unit_samples, staleness_correction
        self._servers = servers
        self._role = Role()
        self._alone = Sync()
        self._carried: dict[str, Any] = {}
        self._server: Coordinator | None = None
        self._stats = ServerStats()

    @property
    def role(self) -> str:
        """See ServedStrategy."""
        return self._role.kind

    @property
    def stats(self) -> ServerStats:
        """See ServedStrategy."""
        return self._stats

    def begin(self, world: World, adapter: Adapter) -> None:
        """See Strategy.

        Raises:
            ConfigError: the World has several ranks; or the learning rate of this adapter cannot be corrected for
                staleness; or the compression is "auto"; or the number of servers is not the given one, or there are
                several servers and this adapter's parameters cannot be divided between them.
        """
        job = the_job()
        self._world, self._adapter = world, adapter
        self._role = job.role
        if self._corrects:
            check_rate_factor(adapter)
        if self._role.kind:
            self._check_servers()
            optimizer = divided_of(adapter).dividable_optimizer() if job.role.num_servers > 1 else ""
            if self._role.division:
                tell_division(self._role, adapter)
            codec = codec_of(world.config.compression)
            if world.config.reduction == "exact":
                raise everywhere(
                    ConfigError(
                        "reduction=exact: a server adds up gradients in the order in which they arrive; use "
                        "reduction=plain, or train with mt.Sync"
                    )
                )
            self._participant = Participant(job.role, job.everyone, world, adapter, codec, optimizer)
            return
        if world.size > 1:
            raise everywhere(
                ConfigError(
                    f"ParameterServer trains with servers and workers, and {world.size} equal ranks were started; make "
                    f"the first one a server, `mpitrain run -n {world.size} --servers 1`, or take mt.Sync()"
                )
            )
        self._alone.begin(world, adapter)

    # -- a server -------------------------------------------------------------------------------------------------

    def begin_serving(self, data: Any) -> None:
        """See ServedStrategy.

        Raises:
            ConfigError: the samples of the data have no numbers; or required processes have ended with an earlier run.
        """
        if self._server is not None:
            return
        source, job = source_of(data), the_job()
        if self._participant.ends_with_run:
            if job.has_served:
                raise ConfigError(
                    f"{self._participant.name} begins a second run with --servers; the other processes have ended with "
                    "the first one. Start a job for each run"
                )
            job.has_served = True
        self._placed = data.state()
        queue = WorkQueue(
            source.num_samples, self._placed["epoch"], self._placed["cursor"], self._placed.get("left", ())
        )
        mode = self._consistency(queue, source)
        self._server = first_server(
            self._participant, source, queue, mode, self._carried, corrects_staleness=self._corrects
        )
        self._carried = {}
        self._stats = self._server.stats

    def next_update(self, data: Any) -> tuple[Means, float]:
        """See ServedStrategy.

        Raises:
            ConfigError: this process is a worker, or a further server; or a hook has restored another state, and the
                required processes cannot be started again. In that case the error is raised on every rank.
            GradientError: several workers have sent unusable gradients for the same samples.
            LaunchError: another server is gone.
        """
        if self.role != "server":
            raise ConfigError(
                f"{self._world.name()} is a {self.role}, which makes no step by itself; call Trainer.run()"
            )
        if self._server is not None and data.state() != self._placed:  # a hook has restored another state
            if self._participant.ends_with_run:
                raise everywhere(
                    ConfigError(
                        f"{self._participant.name} was restored to another state within a run with --servers, whose "
                        "processes start only once. Restore before Trainer.run(), or start the job again"
                    )
                )
            text = "the server continues from another state; start this worker again"
            self._server.close(LaunchError(text), tells=True)
            self._server = None
        self.begin_serving(data)
        assert self._server is not None
        made = self._server.next_update()
        data.restore({**self._placed, **self._server.queue.position()})
        self._placed = data.state()
        return made

    def end_serving(self, error: BaseException | None) -> None:
        """See ServedStrategy. Workers keep waiting for a failed server, unless the cause is the gradients, or a
        ConfigError in a job whose server cannot restart."""
        if self._server is None:
            return
        server, self._server = self._server, None
        try:
            server.fetch()
        except BaseException as failed:
            if error is None or not isinstance(failed, Exception):
                error = failed
                raise
            if not isinstance(error, LostServerError):  # its message is complete
                self._participant.say(f"after {type(error).__name__}, the model here is incomplete: {failed}")
        finally:
            if error is None:
                self._participant.say(self._stats.line())
            is_final = isinstance(error, ConfigError) and self._participant.everyone is not None
            server.close(error, tells=is_final or isinstance(error, GradientError))

    def fetch(self) -> None:
        """See ServedStrategy.

        Raises:
            LaunchError: another server is gone.
        """
        if self._server is not None:
            self._server.fetch()

    # -- a worker, or a further server ----------------------------------------------------------------------------

    def work(self, data: Any) -> None:
        """See ServedStrategy.

        Raises:
            ConfigError: the samples of the data have no numbers.
            LaunchError: the server refuses this worker, or is gone.
        """
        if self.role == "shard":
            serve_part(self._participant, data)
        else:
            work(self._participant, data)

    # -- in one process: see Sync ---------------------------------------------------------------------------------

    def begin_step(self, weight: float) -> None:
        """See Strategy."""
        self._alone.begin_step(weight)

    def on_gradient(self, index: int, gradient: Array | None) -> None:
        """See Strategy."""
        self._alone.on_gradient(index, gradient)

    def finish_step(self, adapter: Adapter, loss: float) -> tuple[Means, float]:
        """See Strategy."""
        return self._alone.finish_step(adapter, loss)

    def restore(self, state: dict[str, Any]) -> None:
        """See Strategy and Sync.restore. A server needs no part of the state."""
        if self.role:
            refuse_round(state)
        else:
            self._alone.restore(state)

    def check(self, state: dict[str, Any]) -> None:
        """See Strategy. `state` has no entries of Sync."""
        if self.role:
            refuse_round(state)
        else:
            self._alone.check(state)

    def own_state(self) -> dict[str, Any]:
        """See Strategy."""
        return {} if self.role else self._alone.own_state()

    def restore_own(self, state: dict[str, Any]) -> None:
        """See Strategy. The ranks' residuals are added to the first update of a server."""
        if self.role:
            self._carried = without_rounds(state).get("carried", {})
        else:
            self._alone.restore_own(state)

    def close(self) -> None:
        """See Strategy."""
        self.end_serving(None)
        if not self.role:
            self._alone.close()

    # -- what both sides need -------------------------------------------------------------------------------------

    def _consistency(self, queue: WorkQueue, source: IndexedSource) -> ConsistencyMode:
        if self._mode == "sync":
            return Synchronous(queue, source.global_batch, self._unit_samples, self._backup)
        unit_samples = source.global_batch if self._unit_samples is None else self._unit_samples
        if self._mode == "async":
            return Asynchronous(queue, unit_samples)
        return BoundedStaleness(queue, unit_samples, self._staleness)

    def _check_servers(self) -> None:
        number = self._role.num_servers
        if number and self._servers not in (None, number):  # 0: the first server has checked it and will send it
            raise ConfigError(
                f"{self._world.name()}: ParameterServer(servers={self._servers}), and {number} were started; start "
                f"them with `--servers {self._servers}` of `mpitrain run` or `mpitrain serve`, or leave servers out"
            )


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
