"""A job on this machine alone until its start. There is nothing to compare, and one agent without ssh."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpitrain.errors import LaunchError
from mpitrain.launch import torchrun
from mpitrain.launch.agents import Agents
from mpitrain.launch.dialects import JobSpec, command_for
from mpitrain.launch.facts import devices
from mpitrain.launch.holders import Holders
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.orders import Orders
from mpitrain.launch.rank import command_of
from mpitrain.launch.run import Run
from mpitrain.launch.variables import absent
from mpitrain.launch.watch import AttemptOnHosts
from mpitrain.launch.watched import WatchedJob, identified


def show_here(job: JobSpec, from_file: Mapping[str, str]) -> None:
    """Print the command. The arguments are those of JobHere."""
    _refuse_absent(from_file)
    print(command_for(job, os.environ))


class JobHere:
    """Call `connect`, `ask` and `ready`, in this order, as with a JobOverHosts.

    Attributes:
        job: what is started; its context has the id.
        attempt: as the agent sees it, after `connect`.
    """

    def __init__(
        self,
        stack: ExitStack,
        agents: Agents,
        job: JobSpec,
        from_file: Mapping[str, str],
        holders: Holders | None,
        orders: Orders,
    ) -> None:
        """Nothing is started yet. The arguments are those of JobOverHosts."""
        self.job = replace(job, context=identified(job.context, Path(tempfile.gettempdir())))
        self.attempt: AttemptOnHosts
        self._stack, self._agents, self._from_file = stack, agents, from_file
        self._holders, self._orders = holders, orders
        self._facts: Mapping[str, Mapping[str, Any]] = {}

    def connect(self, keepers: Keepers | None) -> None:
        """Begin to ask the agent. The attempt gives `keepers` their beats. Call this in the main thread.

        Raises:
            LaunchError: a device of the file of variables does not exist; or the agent cannot be started.
        """
        _refuse_absent(self._from_file)
        own, context = self.job.placement.own, self.job.context
        wish: dict[str, Any] = {"token": context.job, "roll_call": context.roll_call, "peers": {}}
        wish["port"] = torchrun.wanted_port(os.environ)
        wish["num_worker_ports"] = self.job.placement.num_ranks if context.tf_config else 0
        self.attempt = self._stack.enter_context(AttemptOnHosts(self._agents, [own], {own: wish}, keepers))

    def ask(self) -> None:
        """Wait for the facts.

        Raises:
            LaunchError: the agent does not answer, or cannot take part.
        """
        self._facts = self.attempt.facts()

    def ready(self) -> Run:
        """Return the job, ready to be started."""
        job, context = self.job, self.job.context
        watched = WatchedJob(
            job.placement.places,
            self.attempt,
            Path(context.roll_call),
            start_seconds=0.0,
            recovers=bool(context.recover),
            holders=self._holders,
            orders=self._orders,
        )
        # With mpiexec, each rank makes itself known before it becomes the program, which may end before init().
        program = job.program
        if job.mpiexec is not None:
            program = command_of("{}", program) if self._holders is None else self._holders.command()
        added = torchrun.of_job(job, self._facts, os.environ)
        return Run(replace(job, program=program, variables={**job.variables, **added}), watched)


def _refuse_absent(from_file: Mapping[str, str]) -> None:
    if missing := absent(from_file, devices()):
        raise LaunchError(f"the file of variables does not fit this machine: {missing[0]}, which does not exist here")
