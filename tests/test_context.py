"""What the launcher tells a rank: each value that is written is read, and no other."""

from __future__ import annotations

import dataclasses

import pytest

from mpitrain.context import JobContext, PlanTask, ServeTask, VerifyTask

FULL = JobContext(
    job="1a2b3c4d",
    launcher="node1 4711 815",
    expected_size=3,
    roll_call="/tmp/mpitrain-roll-call-1a2b3c4d",
    keeper="mpitrain-keeper-1a2b3c4d5e6f7081",
    failed_ms=1795449600123,
    failed_step=7,
    failure="rank 2 on node1 was killed by signal 9",
    follows="0f9e8d7c",
    orders='[{"number": 1}]',
    saves=1,
    devices=("cuda:0", "cuda:0", "cpu"),
    columns=132,
    recover=1,
    exchange="mpitrain",
    tf_config=1,
    must_copy=1,
    verify=VerifyTask("/tmp/a record", 7),
    plan=PlanTask("/tmp/times.json", 9, ("1", "2")),
    servers=1,
    serve=ServeTask(
        "worker", 2, "node1:5000,node2:5000", "/proc/self/fd/5", "/proc/self/fd/6", "/proc/self/fd/8", "wg0"
    ),
)


def test_what_is_written_is_read() -> None:
    variables = FULL.variables()
    for name, text in {
        "SERVE_KIND": "worker",
        "EXPECTED_SIZE": "3",
        "DEVICES": "cuda:0,cuda:0,cpu",
        "PLAN_RANKS": "1,2",
        "JOB": "1a2b3c4d",
    }.items():
        assert variables[f"_MPITRAIN_{name}"] == text
    assert all(getattr(FULL, field.name) != field.default for field in dataclasses.fields(JobContext))
    assert JobContext.read({"PATH": "/bin", "MPITRAIN_JOB": "x", **variables}) == FULL
    for field in dataclasses.fields(JobContext):
        context = JobContext(**{field.name: getattr(FULL, field.name)})
        assert JobContext.read(context.variables()) == context
    assert JobContext().variables() == {}
    assert JobContext.read({}) == JobContext()


@pytest.mark.parametrize("text", ["", "two", "-1", "2.5"])
def test_a_number_that_is_none_counts_as_not_told(text: str) -> None:
    assert JobContext.read({"_MPITRAIN_EXPECTED_SIZE": text, "_MPITRAIN_JOB": "a"}) == JobContext(job="a")


def test_the_device_of_a_rank() -> None:
    assert [FULL.device(rank) for rank in range(3)] == ["cuda:0", "cuda:0", "cpu"]
    assert JobContext().device(2) == ""
