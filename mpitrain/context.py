"""What the launcher tells a rank, in environment variables with a prefix of their own, which users do not set.

`mpitrain run` writes them for each rank that it starts, and removes those that it has received itself. A program that
another launcher started has none. Settings that all ranks share and users may set are in mpitrain.config.

Sent to the guards as text. So this module imports no other module of mpitrain, and must run with old Pythons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpitrain.reading import whole

PREFIX = "_MPITRAIN_"
# By these two variables a guard knows the processes of its job. The daemons of mpiexec have them too.
JOB, LAUNCHER = PREFIX + "JOB", PREFIX + "LAUNCHER"
EXPECTED_SIZE = PREFIX + "EXPECTED_SIZE"
LEAST_PLAN_STEPS = 4  # of each part of a batch; `mpitrain plan` takes no time from fewer
# How the names of variables begin in which an mpiexec tells a process that it is a rank, and of which job.
OF_MPIEXEC = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL", "I_MPI_")
# A spare (mpitrain.launch.spares) has its holder's mark, the folder in which it began, a line to the holder as
# "DESCRIPTOR HOLDER", and room for the marks of the job of which it becomes a rank: what /proc/PID/environ shows of a
# process cannot grow.
SPARE, SPARE_FOLDER = PREFIX + "SPARE", PREFIX + "SPARE_FOLDER"
SPARE_LINE, SPARE_ROOM = PREFIX + "SPARE_LINE", PREFIX + "SPARE_ROOM"
# The name of the memory in which the output of a spare waits until the spare is a rank.
SPARE_OUTPUT = "mpitrain-spare-output"
# "Clear the line". A line of a rank that begins with it and ends with a carriage return is the progress bar, which the
# launcher keeps below all other output.
BAR_START = b"\x1b[2K"


@dataclass(frozen=True)
class JobContext:
    """Each field is a variable: `roll_call` is _MPITRAIN_ROLL_CALL. A field without its variable has its default.

    Attributes:
        job: the id that `mpitrain ps` shows.
        launcher: which process that is; roster.launcher_name makes it.
        expected_size: ranks that the launcher started; 0: not known.
        roll_call: socket of the guard of its host, at which every rank calls; "": there is no guard.
        keeper: socket of the keeper of its host, which holds memory for the next try; "": there is no keeper.
        failed_ms: when the try before this one failed, by time.time(), in milliseconds; 0: this is the first try.
        failed_step: the step in which that try failed; 0: before its first.
        failure: why it failed, in a line, or how its hosts have changed.
        follows: the id of the try that trains until this one takes over; "": none does.
        saves: 1: this try makes no step; it only saves what the tries before have reached.
        orders: what earlier tries have been told, as JSON (launch/orders.py); "": nothing.
        devices: of the ranks in order, such as ("cuda:0", "cuda:1", "cpu"); none where --hosts names none.
        columns: width of the terminal that the launcher prints to; 0: it prints to none.
        recover: 1: the ranks that are left go on where one is lost; 0: the loss of a rank ends the job.
        verify_record: folder on rank 0 for a record of what the script computes; "": none is wanted.
        verify_steps: how many steps are recorded; then the script ends.
        plan_record: file on rank 0 for the times of steps, for `mpitrain plan`; each rank trains alone. "": none are
            measured.
        plan_steps: how many steps are measured of each part of a batch; then the script ends.
        plan_ranks: among how many ranks each part is one, such as ("1", "2", "4").
        servers: how many ranks of the job, or processes of `mpitrain serve`, are servers. 0: there is none, or one that
            `mpitrain serve` started.
        serves: "server", "shard" (a further server) or "worker" for a process that `mpitrain serve` or `mpitrain work`
            started; "": it is none.
        serve_number: of such a server; the first one is 0.
        serve_address: where such a server listens, or where its worker finds it: HOST:PORT, separated by commas. A
            further server has its own address, and then that of the first one.
        serve_key: the file with the servers' keys, or with the key of a worker.
        serve_environment: the file with the code and packages of this process, which a server compares, as JSON.
        serve_division: the file to which this process writes how servers divide its parameters, before it ends without
            a run; "": it trains.
        serve_plain: the network interface of a connection without encryption; "": all bytes are encrypted.
    """

    job: str = ""
    launcher: str = ""
    expected_size: int = 0
    roll_call: str = ""
    keeper: str = ""
    failed_ms: int = 0
    failed_step: int = 0
    failure: str = ""
    follows: str = ""
    saves: int = 0
    orders: str = ""
    devices: tuple[str, ...] = ()
    columns: int = 0
    recover: int = 0
    verify_record: str = ""
    verify_steps: int = 0
    plan_record: str = ""
    plan_steps: int = 0
    plan_ranks: tuple[str, ...] = ()
    servers: int = 0
    serves: str = ""
    serve_number: int = 0
    serve_address: str = ""
    serve_key: str = ""
    serve_environment: str = ""
    serve_division: str = ""
    serve_plain: str = ""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> JobContext:
        """Read the context from `environ` (such as os.environ). A malformed variable counts as missing."""
        told: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            text = environ.get(PREFIX + field.name.upper(), "")
            if isinstance(field.default, int):
                told[field.name] = field.default if (number := whole(text, 0, 2**63)) is None else number
            else:
                told[field.name] = tuple(text.split(",") if text else ()) if isinstance(field.default, tuple) else text
        return cls(**told)

    def variables(self) -> dict[str, str]:
        """Return what `read` reads: the variables of the fields that differ from their defaults."""
        told = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                told[PREFIX + field.name.upper()] = ",".join(value) if isinstance(value, tuple) else str(value)
        return told

    def device(self, rank: int) -> str:
        """Return the device that `mpitrain run --hosts` gave to a rank, such as "cuda:1" or "cpu"; "" if none."""
        return self.devices[rank] if self.devices else ""
