"""A job over several hosts, from their facts to its end: compared, pinned to interfaces, started, watched.

agents connect ─> facts ─> compare, or refuse ─> pin interfaces ─> mpiexec ─> watch ─> agents end what is left
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from mpitrain.context import JobContext
from mpitrain.facts import OF_SOCKETS
from mpitrain.launch import torchrun
from mpitrain.launch.agents import Agents
from mpitrain.launch.batch import gpus_of_step, step_on
from mpitrain.launch.conditions import (
    Condition,
    HostFacts,
    Refusal,
    differences,
    faults_by_host,
    listing,
    mixed_processors,
    perhaps_late,
    refuse,
    shared_addresses,
    without_files,
)
from mpitrain.launch.dialects import JobSpec, command_for, ssh_agent
from mpitrain.launch.holders import Holders
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.libraries import Mpiexec
from mpitrain.launch.orders import Orders
from mpitrain.launch.placement import Placement, refuse_crowds
from mpitrain.launch.rank import command_of
from mpitrain.launch.run import Run
from mpitrain.launch.ssh import marking_ssh, open_masters
from mpitrain.launch.variables import Pinning, absent, pin
from mpitrain.launch.watch import AttemptOnHosts
from mpitrain.launch.watched import WatchedJob, identified

_FOLDER = Path(OF_SOCKETS)  # of the roll call
# So long hosts that differ are asked again, and so often. NFS shows a change at least 3 s late (acregmin).
_LATE_SECONDS, _AGAIN_SECONDS = 5.0, 0.5
_THREADS = "OMP_NUM_THREADS"

# Variables that decide which code and libraries Python finds.
_FOR_PYTHON = ("PYTHON", "LD_", "MPI4PY_")


def show(job: JobSpec, script: str, from_file: Mapping[str, str]) -> None:
    """Print the command, and on stderr what would keep the job from starting. Arguments as for run."""
    with (
        Agents(job.placement.own) as agents,
        _attempt(agents, job.placement, script, identified(job.context, _FOLDER)) as attempt,
    ):
        facts = _facts(attempt, from_file)
        pinning = _pinning(job, facts)
        _say([*listing(differences(job.placement.own, facts)), *_notes(facts, pinning)])
        print(command_for(_fitted(job, facts, pinning, {}), os.environ))


class JobOverHosts:
    """A job until its start: call `connect`, `ask` and `ready`, in this order. `ask` takes seconds, so a thread may.

    Attributes:
        job: what is started; its context has the id.
        attempt: as the agents of the hosts see it, after `connect`.
    """

    def __init__(
        self,
        stack: ExitStack,
        agents: Agents,
        job: JobSpec,
        script: str,
        start_seconds: float,
        from_file: Mapping[str, str],
        holders: Holders | None = None,
        orders: Orders | None = None,
    ) -> None:
        """Nothing is started yet. What is opened here is closed with `stack`.

        Args:
            stack: see above.
            agents: of the job's hosts.
            job: what to start, and on which hosts.
            script: the script, for the comparison of the code beside it.
            start_seconds: the time within which all ranks must have started; 0: no limit.
            from_file: variables of --env-file, already set; the devices that they name must exist on all hosts.
            holders: of the warm interpreters that fork ranks; None: the job is not started again.
            orders: what tellers tell the job.
        """
        self.job = replace(job, context=identified(job.context, _FOLDER))
        self.attempt: AttemptOnHosts
        self._stack, self._agents, self._script, self._from_file = stack, agents, script, from_file
        self._start_seconds = start_seconds
        self._holders, self._orders = holders, orders
        self._facts: Mapping[str, HostFacts] = {}
        self._ssh = Path(stack.enter_context(tempfile.TemporaryDirectory()), "ssh")
        self._masters: Sequence[str] = ()  # options of ssh

    def connect(self, keepers: Keepers | None, *, is_idle: bool = False) -> None:
        """Begin to ask the hosts. The attempt gives `keepers` their beats. Call this in the main thread.

        One that is idle costs little until the job is started.

        Raises:
            LaunchError, OSError: ssh cannot be started here.
        """
        self.attempt = self._stack.enter_context(
            _attempt(
                self._agents, self.job.placement, self._script, self.job.context, self._ssh, keepers, is_idle=is_idle
            )
        )

    def open_ways(self) -> None:
        """After `ask`: begin to open connections for MPICH's mpiexec. Call this in the main thread.

        Not with `connect`: a host that all logins pass (ProxyJump) refuses some of those that come together.

        Raises:
            OSError: ssh cannot be started here.
        """
        placement, mpiexec = self.job.placement, self.job.mpiexec
        if mpiexec is None:
            return
        _, ssh = ssh_agent(mpiexec, os.environ)  # another program may know no master connections
        if mpiexec.vendor == "mpich" and list(ssh) == ["ssh"]:  # not tried with the others
            others = [host for host in placement.addresses if host != placement.own and not step_on(host)]
            self._masters = self._stack.enter_context(open_masters(others, self._ssh.parent))

    def ask(self) -> None:
        """Ask the hosts for their facts, and compare them. Where files differ, ask again for some seconds.

        Raises:
            LaunchError: hosts cannot be reached, or differ from this one.
        """
        self._facts = _equal_facts(self.attempt, self._from_file, self.job.placement.own, self._script)

    def becomes(self, job: JobSpec) -> bool:
        """After `ask` and `attempt.keep`: make this `job`, with the same facts. False: they do not fit it."""
        placement, own = job.placement, self.job.context
        context = replace(job.context, job=own.job, launcher=own.launcher, roll_call=own.roll_call)
        hosts = placement.addresses.keys()
        if not hosts <= self._facts.keys():
            return False
        is_narrower = hosts != self._facts.keys()
        self.job = replace(job, context=context)
        self._facts = {host: self._facts[host] for host in hosts}
        if is_narrower and not self.attempt.narrow(hosts):
            return False
        return self.attempt.have_paths(_paths(self._script))

    def _ways_of(self, mpiexec: Mpiexec) -> dict[str, str]:
        """Return the variables by which mpiexec finds its ssh."""
        variable, ssh = ssh_agent(mpiexec, os.environ)
        marks = JobContext(job=self.job.context.job, launcher=self.job.context.launcher)
        in_steps = [host for host in self.job.placement.addresses if step_on(host)]
        return {
            variable: marking_ssh(self.job.placement.own, self._ssh, [*ssh, *self._masters], marks, in_steps),
            # The ssh script above exists on this machine only, so all connections must start here.
            **({"PRTE_MCA_plm_ssh_no_tree_spawn": "1"} if mpiexec.vendor == "openmpi" else {}),
        }

    def ready(self) -> Run:
        """Return the job, ready to be started.

        Raises:
            LaunchError: the hosts cannot be connected by their interfaces, or this one runs no programs in /tmp.
        """
        job, facts = self.job, self._facts
        pinning = _pinning(job, facts)
        _say(_notes(facts, pinning))
        added = {} if job.mpiexec is None else self._ways_of(job.mpiexec)
        path, recovers = Path(job.context.roll_call), bool(job.context.recover)
        watched = WatchedJob(
            job.placement.places,
            self.attempt,
            path,
            self._start_seconds,
            recovers=recovers,
            holders=self._holders,
            orders=self._orders,
        )
        return Run(_fitted(job, facts, pinning, added, self._holders), watched)


def check(placement: Placement, script: str, from_file: Mapping[str, str], outcome: str = "no host has joined") -> None:
    """Refuse hosts that cannot join a job: as `JobOverHosts` does, but nothing is started.

    Raises:
        LaunchError: a host cannot be reached, or differs from this one.
        ConfigError: a host would have too many ranks.
    """
    with (
        Agents(placement.own) as agents,
        _attempt(agents, placement, script, identified(JobContext(), _FOLDER)) as attempt,
    ):
        facts = _equal_facts(attempt, from_file, placement.own, script, outcome)
        refuse_crowds(placement.places, {host: int(facts[host]["cores"]) for host in placement.hosts})


def _attempt(
    agents: Agents,
    placement: Placement,
    script: str,
    context: JobContext,
    ssh: Path | None = None,
    keepers: Keepers | None = None,
    *,
    is_idle: bool = False,
) -> AttemptOnHosts:
    """Begin an attempt on every host. It lives as long as a `with` of the result. This host's agent removes `ssh`."""
    wish = {
        "python": sys.executable,
        "paths": _paths(script),
        "idle": is_idle,
        "script": str(Path(script).absolute()),
        "variables": {name: value for name, value in os.environ.items() if name.startswith(_FOR_PYTHON)},
        "token": context.job,
        "roll_call": context.roll_call,
    }
    addresses = placement.addresses
    wishes = {
        host: {**wish, "peers": {peer: address for peer, address in addresses.items() if peer != host}}
        for host in addresses
    }
    for place in placement.places if context.tf_config else ():
        wishes[place.host]["num_worker_ports"] = place.num_ranks
    if not is_idle:  # the ranks of the present attempt may have it
        wishes[placement.hosts[0]]["port"] = torchrun.wanted_port(os.environ)
    if ssh is not None:
        wishes[placement.own]["ssh"] = str(ssh)
    return AttemptOnHosts(agents, addresses, wishes, keepers)


def _paths(script: str) -> list[str]:
    return [str(Path.cwd()), sys.executable, str(Path(script).absolute())]


def _facts(attempt: AttemptOnHosts, from_file: Mapping[str, str]) -> Mapping[str, HostFacts]:
    """Return each host's facts. LaunchError names each host that is unreachable or lacks a device of `from_file`."""
    facts = attempt.facts()
    if refusals := shared_addresses(facts):
        refusal = refuse("the job was not started: two machines have one address", refusals, script="")
        refusal.different = faults_by_host(refusals)
        raise refusal
    refusals = [
        Refusal(Condition.DEVICES, host, f"{text}, which does not exist there")
        for host in facts
        for text in absent(from_file, facts[host]["devices"])
    ]
    if refusals:
        refusal = refuse(
            "the job was not started: the file of variables does not fit the hosts",
            refusals,
            script="",
            advice="Write the file anew: mpitrain check-cluster --write-env FILE. ",
        )
        refusal.different = faults_by_host(refusals)
        raise refusal
    return facts


def _equal_facts(
    attempt: AttemptOnHosts,
    from_file: Mapping[str, str],
    own: str,
    script: str,
    outcome: str = "the job was not started",
) -> Mapping[str, HostFacts]:
    """Return each host's facts as _facts does. LaunchError also names each host that differs from this one."""
    facts = _facts(attempt, from_file)
    refusals = differences(own, facts)
    begun, waited = time.monotonic(), 0.0
    seen: dict[str, str] = {}
    while (late := perhaps_late(refusals)) and waited < _LATE_SECONDS:
        seen |= late
        time.sleep(_AGAIN_SECONDS)
        attempt.ask_again({own, *late})
        facts = _facts(attempt, from_file)
        refusals = differences(own, facts)
        waited = time.monotonic() - begun
    if refusals:
        refusal = refuse(
            f"{outcome}: the hosts must have the same as {own}, but they differ",
            refusals,
            str(Path(script).absolute()),
            "One share for code and Python keeps hosts equal: `ansible-playbook cluster/setup.yml --tags nfs,runtime`. "
            f"Files that differ were compared again for {_LATE_SECONDS:g} s: the shared folder may show a change late. "
            "`mpitrain run --dry-run ...` prints the command that starts the job unchecked. ",
        )
        refusal.hosts = without_files(own, facts)
        refusal.different = faults_by_host(refusals)
        raise refusal
    if seen:
        hosts = "; ".join(f"on {host}, {fault}" for host, fault in seen.items())
        line = f"waited {waited:.1f} s for the shared folder, which showed a change late: {hosts}"
        _say([f"{line}; now all hosts have the same"])
    return facts


def _pinning(job: JobSpec, facts: Mapping[str, HostFacts]) -> Pinning:
    vendor = None if job.mpiexec is None else job.mpiexec.vendor
    return pin(facts, job.placement.hosts, vendor, os.environ)


def _fitted(
    job: JobSpec,
    facts: Mapping[str, HostFacts],
    pinning: Pinning,
    added: Mapping[str, str],
    holders: Holders | None = None,
) -> JobSpec:
    """Return the job as its hosts need it, with `added` variables. With a roll call, ranks report their start."""
    placement = job.placement
    cores = {host: int(facts[host]["cores"]) for host in placement.hosts}
    refuse_crowds(placement.places, cores)
    common, by_host = _threads(placement, cores)
    gpus = {host: gpus_of_step(host, facts[host]) for host in placement.hosts}
    groups = torchrun.of_host(placement)
    of_hosts = {
        host: {**groups[host], **pinning.by_host.get(host, {}), **by_host.get(host, {}), **gpus[host]}
        for host in placement.hosts
    }
    settings = {
        f"{place.first_rank}-{place.ranks[-1]}": of_hosts[place.host]
        for place in placement.places
        if of_hosts[place.host]
    }
    program = job.program
    if job.mpiexec is not None and (job.context.roll_call or settings):
        told = json.dumps(settings)
        program = command_of(told, program) if holders is None else holders.command(told)
    return replace(
        job,
        program=program,
        of_hosts=of_hosts,
        num_cores=min(cores.values()),
        variables={**job.variables, **torchrun.of_job(job, facts, os.environ), **pinning.common, **common, **added},
        has_rdma=any(facts[host]["rdma"] for host in placement.hosts),
    )


def _threads(placement: Placement, cores: Mapping[str, int]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return how many threads a rank may use, on all hosts or by host: the ranks of a host share its cores."""
    if _THREADS in os.environ:
        return {}, {}
    by_host = {place.host: {_THREADS: str(max(1, cores[place.host] // place.num_ranks))} for place in placement.places}
    first, *others = by_host.values()
    return (first, {}) if all(other == first for other in others) else ({}, by_host)


def _notes(facts: Mapping[str, HostFacts], pinning: Pinning) -> list[str]:
    """What a user should know of a job that can start."""
    return [note for note in (mixed_processors(facts), pinning.note) if note]


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"mpitrain: {line}", file=sys.stderr, flush=True)
