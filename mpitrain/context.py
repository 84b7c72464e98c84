"""What the launcher tells a rank, in environment variables with a prefix of their own, which users do not set.

`mpitrain run` writes them for each rank that it starts, and removes those that it has received itself. A program that
another launcher started has none of them. For the settings that users may set, see mpitrain.config.

The text of this module is sent to the hosts' agents. So it imports no other module of mpitrain, and must run with old
Pythons.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mpitrain.reading import whole

PREFIX = "_MPITRAIN_"
# An agent recognises the processes of its job by these two variables. The daemons of mpiexec have them too.
JOB, LAUNCHER = PREFIX + "JOB", PREFIX + "LAUNCHER"
EXPECTED_SIZE = PREFIX + "EXPECTED_SIZE"
# The names of the variables that mpitrain has set for other libraries, separated by commas. A program that a rank
# starts is not a rank, so mpitrain.early removes them there.
ADDED = PREFIX + "ADDED"
LEAST_PLAN_STEPS = 4  # of each part of a batch; `mpitrain plan` needs at least this many for a step time
# Prefixes of the variables in which mpiexec tells a process that it is a rank, and of which job.
OF_MPIEXEC = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL", "I_MPI_")
# A warm interpreter (mpitrain.job.warm) has its holder's mark, the descriptors of a line to the holder and of a list of
# imports, and room for the marks of a rank's job: what /proc/PID/environ shows of a process cannot grow.
WARM, WARM_LINE, WARM_ROOM = PREFIX + "WARM", PREFIX + "WARM_LINE", PREFIX + "WARM_ROOM"
# The name of the memory in which a rank lists its imports, and the name of a warm interpreter in the process table.
IMPORTS, WARM_NAME = "mpitrain-imports", "mpitrain-warm"
# The variable in which an agent gives a process its rank, where it starts the ranks in place of mpiexec.
RANK = PREFIX + "RANK"
# HOST:PORT of each rank, separated by commas, where ranks get TensorFlow's variable TF_CONFIG.
TF_WORKERS = PREFIX + "TF_WORKERS"
# The variables that give a process its rank.
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", RANK)
# "Clear the line". A line of a rank that begins with it and ends with a carriage return is the progress bar, which the
# launcher keeps below all other output.
BAR_START = b"\x1b[2K"


@dataclass(frozen=True)
class VerifyTask:
    """What `mpitrain verify` asks of a rank.

    Attributes:
        record: folder on rank 0 for a record of what the script computes; "": no record.
        steps: number of steps to record; then the script ends.
    """

    record: str = ""
    steps: int = 0


@dataclass(frozen=True)
class PlanTask:
    """What `mpitrain plan` asks of a rank.

    Attributes:
        record: file on rank 0 for the step times; each rank trains alone. "": nothing is measured.
        steps: number of steps to measure with each fraction of a batch; then the script ends.
        ranks: the numbers of ranks among which a batch is divided, such as ("1", "2", "4"). Each gives a fraction of a
            batch.
    """

    record: str = ""
    steps: int = 0
    ranks: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServeTask:
    """The role of a process that `mpitrain serve` or `mpitrain work` started.

    Attributes:
        kind: "server", "shard" (a further server) or "worker"; "": none of them.
        number: of a server; the first one is 0.
        address: where a server listens, or where its worker finds it: HOST:PORT, separated by commas. A further server
            has its own address, followed by that of the first server.
        key: the file with the servers' keys, or with the key of a worker.
        environment: the file with the code and packages of this process, as JSON; a server compares them.
        division: the file to which this process writes how servers divide its parameters, before it ends without a
            run; "": it trains.
        plain: the network interface of a connection without encryption; "": all bytes are encrypted.
    """

    kind: str = ""
    number: int = 0
    address: str = ""
    key: str = ""
    environment: str = ""
    division: str = ""
    plain: str = ""


@dataclass(frozen=True)
class JobContext:
    """Each field is a variable: `roll_call` is _MPITRAIN_ROLL_CALL, and `serve.key` is _MPITRAIN_SERVE_KEY. A field
    without its variable has its default.

    Attributes:
        job: the id that `mpitrain ps` shows.
        launcher: identifies the launcher's process; see roster.launcher_name.
        expected_size: number of ranks that the launcher started; 0: not known.
        roll_call: socket of the host's agent, at which every rank registers; "": there is no agent.
        keeper: socket of the host's snapshot agent, which keeps memory for the next attempt; "": there is none.
        must_copy: 1: the user has asked for restarts, so whatever prevents in-memory checkpoints is reported; 0: by
            default.
        failed_ms: when the previous attempt failed, by time.time(), in milliseconds; 0: this is the first attempt.
        failed_step: the step in which that attempt failed; 0: before its first.
        failure: why it failed, in one line, or how its hosts have changed.
        follows: the id of the attempt that trains until this one takes over; "": there is none.
        saves: 1: this attempt runs no step; it only saves what earlier attempts have reached.
        orders: the commands that earlier attempts received, as JSON (launch/orders.py); "": none.
        devices: of the ranks in order, such as ("cuda:0", "cuda:1", "cpu"); none where --hosts names none.
        columns: width of the terminal that the launcher prints to; 0: it prints to none.
        recover: 1: if a rank is lost, the remaining ranks continue; 0: the loss of a rank ends the job.
        exchange: "mpitrain": process groups of gloo use mpitrain's backend; "": they are gloo's.
        tf_config: 1: each rank gets TensorFlow's TF_CONFIG.
        verify: what `mpitrain verify` wants of the ranks.
        plan: what `mpitrain plan` wants of them.
        servers: how many ranks of the job, or processes of `mpitrain serve`, are servers. 0: there is none, or one that
            `mpitrain serve` started.
        serve: what `mpitrain serve` or `mpitrain work` passes to the process that it started.
    """

    job: str = ""
    launcher: str = ""
    expected_size: int = 0
    roll_call: str = ""
    keeper: str = ""
    must_copy: int = 0
    failed_ms: int = 0
    failed_step: int = 0
    failure: str = ""
    follows: str = ""
    saves: int = 0
    orders: str = ""
    devices: tuple[str, ...] = ()
    columns: int = 0
    recover: int = 0
    exchange: str = ""
    tf_config: int = 0
    verify: VerifyTask = field(default_factory=VerifyTask)
    plan: PlanTask = field(default_factory=PlanTask)
    servers: int = 0
    serve: ServeTask = field(default_factory=ServeTask)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> JobContext:
        """Read the context from `environ` (such as os.environ). A malformed variable counts as missing."""
        context: JobContext = _read(cls(), PREFIX, environ)
        return context

    def variables(self) -> dict[str, str]:
        """Return the environment variables that `read` reads: those of the fields that differ from their defaults."""
        return dict(_variables(self, PREFIX))

    def device(self, rank: int) -> str:
        """Return the device that `mpitrain run --hosts` gave to a rank, such as "cuda:1" or "cpu"; "" if none."""
        return self.devices[rank] if self.devices else ""


def tf_config(workers: str, rank: int) -> str:
    """Return TF_CONFIG of a rank, a worker among others (tf.distribute.MultiWorkerMirroredStrategy).

    `workers` is as in TF_WORKERS.
    """
    return json.dumps({"cluster": {"worker": workers.split(",")}, "task": {"type": "worker", "index": rank}})


def _read(default: Any, prefix: str, environ: Mapping[str, str]) -> Any:
    told: dict[str, Any] = {}
    for one in dataclasses.fields(default):
        name, usual = prefix + one.name.upper(), getattr(default, one.name)
        text = environ.get(name, "")
        if dataclasses.is_dataclass(usual):
            told[one.name] = _read(usual, f"{name}_", environ)
        elif isinstance(usual, int):
            told[one.name] = usual if (number := whole(text, 0, 2**63)) is None else number
        else:
            told[one.name] = tuple(text.split(",") if text else ()) if isinstance(usual, tuple) else text
    return dataclasses.replace(default, **told)


def _variables(told: Any, prefix: str) -> Iterator[tuple[str, str]]:
    for one in dataclasses.fields(told):
        name, value = prefix + one.name.upper(), getattr(told, one.name)
        if dataclasses.is_dataclass(value):
            yield from _variables(value, f"{name}_")
        elif value != one.default:
            yield name, ",".join(value) if isinstance(value, tuple) else str(value)
