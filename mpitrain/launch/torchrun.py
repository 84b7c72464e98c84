"""The variables by which processes find each other without MPI: torchrun's, and the address of JAX's coordinator.

`torch.distributed.init_process_group`, Lightning, accelerate and many scripts read torchrun's variables
(https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables"). `mpitrain run` sets them, so a script
that was written for torchrun runs unedited. `jax.distributed.initialize` reads JAX_COORDINATOR_ADDRESS; JAX 0.10 has no
variables for the number of processes and for that of a process. TensorFlow reads TF_CONFIG, with --tf-config
(https://www.tensorflow.org/guide/distributed_training, "Setting up the TF_CONFIG environment variable").

mpiexec gives all ranks the same environment. So each rank sets what differs between ranks (launch/rank.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from mpitrain.context import ADDED, TF_WORKERS
from mpitrain.error_file import ERROR_FILE
from mpitrain.errors import LaunchError
from mpitrain.launch.dialects import JobSpec
from mpitrain.launch.placement import Placement
from mpitrain.launch.rank import PLACE
from mpitrain.watching.flight_recorder import recorder_prefix

MASTER_ADDR, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
RESTART_COUNT, MAX_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"
# PyTorch's flight recorder keeps the last calls of NCCL, and writes them into files (watching/flight_recorder.py).
# Where both names of a setting are known, PyTorch warns of the old one.
_RECORDER = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE"}
_RECORDER |= {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE"}
_RECORDED_CALLS = "2000"
_RECORDER_HEADER = "include/torch/csrc/distributed/c10d/FlightRecorder.hpp"
# What torchrun alone sets. A user sets no such variable, so one that is there comes from another launcher.
_OF_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def of_host(placement: Placement) -> dict[str, dict[str, str]]:
    """Return by host the variables that it does not share with the first one."""
    return {place.host: {"GROUP_RANK": str(number)} if number else {} for number, place in enumerate(placement.places)}


def of_job(job: JobSpec, facts: Mapping[str, Mapping[str, Any]], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that all ranks share.

    Args:
        job: what is to be started; its context has the id.
        facts: of its hosts, with the `ports` that the agents hold (facts.hold_ports).
        environ: the user's environment. MASTER_ADDR and MASTER_PORT stay as they are there.

    Raises:
        LaunchError: MASTER_PORT is taken on the host of rank 0.
    """
    placement = job.placement
    first = placement.hosts[0]
    address = environ.get(MASTER_ADDR) or ("127.0.0.1" if placement.is_here else placement.addresses[first])
    port, of_jax, *taken = facts[first]["ports"]
    wanted = wanted_port(environ)
    # Later, the ranks of the attempt before may still have it.
    if wanted in taken and job.variables.get(RESTART_COUNT, "0") == "0":
        raise LaunchError(
            f"the job was not started: on {first}, the port {wanted} (MASTER_PORT) is taken. Choose another one, or "
            "leave MASTER_PORT out: mpitrain finds a free one."
        )
    size = str(placement.num_ranks)
    of_tensorflow = {TF_WORKERS: ",".join(_workers(placement, facts))} if job.context.tf_config else {}
    variables = {
        MASTER_ADDR: address,
        MASTER_PORT: str(wanted or port),
        "WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": str(len(placement.places)),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": size,
        "TORCHELASTIC_RUN_ID": job.context.job,
        RESTART_COUNT: job.variables.get(RESTART_COUNT, "0"),
        MAX_RESTARTS: job.variables.get(MAX_RESTARTS, "0"),
        "JAX_COORDINATOR_ADDRESS": f"{_bracketed(address)}:{of_jax}",
    }
    recorder = _of_recorder(job.context.roll_call)
    # A setting of the user stays, and so does its old name.
    ours = {
        name: value for name, value in recorder.items() if not {name, *_aliases(name)} & {*filter(environ.get, environ)}
    }
    variables |= ours
    chosen = {name for name in (MASTER_ADDR, MASTER_PORT) if environ.get(name)}
    added = (*variables, *PLACE, ERROR_FILE, *(["TF_CONFIG"] if of_tensorflow else []))
    return {**variables, **of_tensorflow, ADDED: ",".join(name for name in added if name not in chosen)}


def _of_recorder(roll_call: str) -> dict[str, str]:
    """Return the variables of the flight recorder, under the names that PyTorch here knows; none without PyTorch."""
    spec = PathFinder.find_spec("torch")
    if spec is None or not spec.submodule_search_locations or not roll_call:
        return {}
    prefix = recorder_prefix(roll_call)
    size, file = _RECORDER
    try:
        if _RECORDER[size] in Path(spec.submodule_search_locations[0], _RECORDER_HEADER).read_text(errors="replace"):
            size, file = _RECORDER.values()
    except OSError:  # it knows the old names at any rate
        pass
    return {
        size: _RECORDED_CALLS,
        file: prefix,
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": prefix,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


def _aliases(name: str) -> list[str]:
    """The other names of a setting of the flight recorder."""
    return [other for pair in _RECORDER.items() if name in pair for other in pair]


def _workers(placement: Placement, facts: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The addresses of all ranks for TensorFlow, HOST:PORT. The agents hold the ports."""
    for place in placement.places:
        address = "127.0.0.1" if placement.is_here else placement.addresses[place.host]
        for port in facts[place.host]["worker_ports"]:
            yield f"{_bracketed(address)}:{port}"


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def wanted_port(environ: Mapping[str, str]) -> int:
    """Return the port that the user has chosen for the first rank; 0: any.

    Raises:
        LaunchError: MASTER_PORT is no port.
    """
    text = environ.get(MASTER_PORT) or "0"
    if not text.isdecimal() or int(text) > 65535:
        raise LaunchError(f"MASTER_PORT is {text!r:.40}; it must be a port, from 1 to 65535, or unset")
    return int(text)


def foreign(environ: Mapping[str, str]) -> list[str]:
    """Return the names of variables that another launcher has set, and that each rank gets anew."""
    return [name for name in _OF_RANK if name in environ]
