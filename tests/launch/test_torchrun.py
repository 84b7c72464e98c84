"""torchrun's variables: which the ranks of a job share, and what becomes of those that the user has set."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from mpitrain.context import ADDED, TF_WORKERS, JobContext, tf_config
from mpitrain.errors import LaunchError
from mpitrain.launch.dialects import JobSpec
from mpitrain.launch.facts import hold_ports
from mpitrain.launch.libraries import Mpiexec
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.torchrun import MAX_RESTARTS, RESTART_COUNT, of_host, of_job

WHERE = Placement((Place("b", 0, 3), Place("c", 3, 2)), {"a": "10.0.0.1", "b": "10.0.0.2", "c": "fd00::3"}, "a")
JOB = JobSpec(
    mpiexec=Mpiexec(Path("/v/bin/mpiexec"), "mpich", "5.0.2"),
    program=["python", "train.py"],
    placement=WHERE,
    num_cores=2,
    as_root=False,
    variables={RESTART_COUNT: "0", MAX_RESTARTS: "3"},
)
FACTS = {host: {"ports": [1000 + number, 2000 + number]} for number, host in enumerate("abc")}


def test_what_the_ranks_share() -> None:
    told = of_job(JOB, FACTS, {})
    assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == ("10.0.0.2", "1001"), (
        "of the host of rank 0, not the launcher's"
    )
    assert told["JAX_COORDINATOR_ADDRESS"] == "10.0.0.2:2001"
    assert (told["WORLD_SIZE"], told["GROUP_WORLD_SIZE"], told[MAX_RESTARTS]) == ("5", "2", "3")
    assert of_host(WHERE) == {"b": {}, "c": {"GROUP_RANK": "1"}}
    assert {"RANK", "LOCAL_RANK", "MASTER_PORT"} <= set(told[ADDED].split(","))
    narrowed = of_job(replace(JOB, placement=WHERE.without({"b"})), FACTS, {})
    assert narrowed["JAX_COORDINATOR_ADDRESS"] == "[fd00::3]:2002"


def test_what_the_user_has_set() -> None:
    own = {"MASTER_ADDR": "ib-b", "MASTER_PORT": "29500"}
    told = of_job(JOB, FACTS, own)
    assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == ("ib-b", "29500")
    assert not set(own) & set(told[ADDED].split(",")), "a program that a rank starts has them too"
    in_use = {**FACTS, "b": {"ports": [1001, 2001, 29500]}}
    with pytest.raises(LaunchError, match=r"on b, the port 29500 \(MASTER_PORT\) is taken"):
        of_job(JOB, in_use, own)
    # The ranks of the attempt before may still have it.
    later = replace(JOB, variables={**JOB.variables, RESTART_COUNT: "1"})
    assert of_job(later, in_use, own)["MASTER_PORT"] == "29500"


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_the_flight_recorder_is_on(name: str) -> None:
    """Under one name: PyTorch warns of the old one where it knows both. What the user has set stays."""
    pytest.importorskip("torch")
    job = replace(JOB, context=JobContext(roll_call="/tmp/mpitrain-roll-call-1a2b3c4d"))
    told, sizes = of_job(job, FACTS, {}), {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}
    assert len(sizes & told.keys()) == 1
    assert told["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == "/tmp/mpitrain-roll-call-1a2b3c4d-recorder-"
    assert not sizes & of_job(job, FACTS, {name: "7"}).keys()


def test_addresses_of_workers() -> None:
    """TensorFlow's: one for each rank, on its own host."""
    facts = {host: {**FACTS[host], "worker_ports": [5000 + place for place in range(3)]} for host in "bc"}
    job = replace(JOB, context=JobContext(tf_config=1))
    facts["c"]["worker_ports"] = facts["c"]["worker_ports"][:2]
    workers = of_job(job, facts, {})[TF_WORKERS]
    assert workers == "10.0.0.2:5000,10.0.0.2:5001,10.0.0.2:5002,[fd00::3]:5000,[fd00::3]:5001"
    told = json.loads(tf_config(workers, 3))
    assert told["cluster"]["worker"][told["task"]["index"]] == "[fd00::3]:5000"


def taken(wanted: int) -> list[int]:
    """What is said of a port that the user has chosen."""
    held, ports = hold_ports(wanted)
    for one in held:
        one.close()
    return ports[2:]


def test_held_ports_are_free_for_ranks_alone() -> None:
    with ExitStack() as stack:
        held, ports = hold_ports(0)
        for one in held:
            stack.enter_context(closing(one))
        assert len({*ports}) == 2
        for port in ports:
            with socket.create_server(("", port)):  # sets SO_REUSEADDR, as a store does
                assert taken(port) == [port]
            assert taken(port) == [], "nobody listens"
