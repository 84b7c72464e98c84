"""Several servers: the same bits as one server, whatever the model's shape; hooks; what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from counting import NUM_SAMPLES, counting, parts, playing, train_served
from hands import Served

import mpitrain as mt
from mpitrain.adapters.accumulate import Accumulate
from mpitrain.errors import ConfigError, NonFiniteError
from mpitrain.job.start import the_job
from mpitrain.server.shards import Shards

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "tensors": {"a": (3, 5), "b": (7,), "none": (0, 4), "c": (), "d": (2, 2, 2)},
    "one larger than all others": {"a": (2,), "large": (101, 3), "b": (1,)},
    "fewer elements than servers": {"a": (1,), "none": (0,), "b": (1,)},
}

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: mt.optim.SGD(lambda step: 0.1 / (1 + step), momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda: mt.optim.AdamW(lambda step: 0.01 * (1 + step), weight_decay=0.1),
    "clipped": lambda: mt.optim.AdamW(0.01, clip_norm=0.5),
}


def towards(parameters: Any, batch: Any, on_gradient: Any) -> float:
    """Each parameter goes towards other values with each sample."""
    for number, (name, value) in enumerate(parameters.items()):
        goal = numpy.sin(numpy.arange(value.size).reshape(value.shape) + batch.mean() + number)
        on_gradient(name, (value - goal).astype(value.dtype))
    return 1.0


def several(
    number: int,
    shapes: Any,
    optimizer: Any,
    hooks: Any = (),
    *,
    function: Any = towards,
    dtype: str = "float32",
    steps: int = 7,
    mode: str = "sync",
    make_scale: Any = None,
) -> tuple[mt.Trainer, Any]:
    """A run of so many servers and of three workers."""

    def build(world: mt.World) -> mt.Parts:
        rng = numpy.random.default_rng(7)
        values = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
        data = mt.data.ArrayData(world, numpy.arange(NUM_SAMPLES), global_batch=8, seed=5)
        model = mt.ArrayFunction(function, values, optimizer(), loss_scale=make_scale and make_scale())
        return mt.Parts(model, mt.ParameterServer(mode), data)  # type: ignore[arg-type]

    hooks = [mt.StopAtStep(steps), *hooks]
    trainer, others = train_served(build, [build] * 3, hooks, shard_builds=[build] * (number - 1))
    assert others.errors == {}
    return trainer, others


def bits(trainer: mt.Trainer) -> dict[str, Any]:
    """Parameters and optimizer."""
    state = trainer.adapter.state()
    found = {f"parameter {name}": value.tobytes() for name, value in state["parameters"].items()}
    for key, entry in state["optimizer"].items():
        found[key] = entry if isinstance(entry, int) else [value.tobytes() for value in entry.values()]
    return found


class Everything(mt.Hook):
    """Sees the whole model after each step, as a hook of a user does."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
        self.seen.append(str(bits(trainer)).encode())


@pytest.mark.parametrize(("optimizer", "dtype"), [("sgd", "float64"), ("adamw", "float32")])
@pytest.mark.parametrize("shapes", SHAPES)
def test_sync_has_the_bits_of_one_server(shapes: str, optimizer: str, dtype: str) -> None:
    expected = bits(several(1, SHAPES[shapes], OPTIMIZERS[optimizer], dtype=dtype)[0])
    assert expected["step"] == 7
    for number in (2, 3):
        assert bits(several(number, SHAPES[shapes], OPTIMIZERS[optimizer], dtype=dtype)[0]) == expected


def test_clipping_and_the_norm_are_of_all_parts() -> None:
    """Both to rounding: the squares are added up in another order."""

    class Norms(mt.Hook):
        def __init__(self) -> None:
            self.found: list[float] = []

        def before_step(self, trainer: mt.Trainer) -> None:
            trainer.adapter.measure_gradient_norm()

        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            norm = trainer.adapter.gradient_norm()
            assert norm is not None
            self.found.append(norm)

    for optimizer in ("sgd", "clipped"):
        runs = []
        for number in (1, 3):
            norms = Norms()
            trainer, _ = several(number, SHAPES["tensors"], OPTIMIZERS[optimizer], [norms], dtype="float64")
            runs.append((norms.found, trainer.adapter.parameters()))
        numpy.testing.assert_allclose(runs[1][0], runs[0][0], rtol=1e-14)
        assert min(runs[0][0]) > 0.5  # clipped in each step
        for name, value in runs[0][1].items():
            numpy.testing.assert_allclose(runs[1][1][name], value, rtol=1e-12)


def test_no_server_has_all_bytes() -> None:
    """Pushes and pulls: each server has its third, up to one element of each message."""
    trainer, _ = several(3, {"a": (1000,), "b": (2001,)}, OPTIMIZERS["sgd"], steps=20)
    servers = trainer.strategy.stats.servers  # type: ignore[attr-defined]
    expected = [60 * 4 * count for count in (1001, 1000, 1000)]  # of 3 workers in 20 steps
    assert [one.bytes_in for one in servers] == expected
    # A worker that is faster takes two of a step's three units, and pulls nothing for the second.
    workers = trainer.strategy.stats.workers  # type: ignore[attr-defined]
    pushes, pulls = (
        [getattr(worker, name) / (4 * 3001) for worker in workers] for name in ("pushed_bytes", "pulled_bytes")
    )
    assert sum(pushes) == 60
    assert all(pull <= min(push, 20) and pull.is_integer() for push, pull in zip(pushes, pulls, strict=True))
    assert [one.bytes_out for one in servers] == [4 * count * sum(pulls) for count in (1001, 1000, 1000)]
    assert sum(pulls) >= 20


def test_a_gradient_that_the_scale_made_infinite_is_skipped_by_all() -> None:
    """It is in the last server's part alone. The step before and after it count on all of them."""

    def scaled(parameters: Any, batch: Any, on_gradient: Any, *, loss_scale: float) -> float:
        def hand_in(name: str, gradient: Any) -> None:
            on_gradient(name, gradient * loss_scale if name != "d" or loss_scale < 4 else gradient * numpy.inf)

        return towards(parameters, batch, hand_in)

    found = []
    for number in (1, 3):
        trainer, _ = several(
            number,
            SHAPES["tensors"],
            OPTIMIZERS["sgd"],
            [Everything()],
            function=scaled,
            make_scale=lambda: mt.optim.LossScale(8.0, growth_interval=2),
        )
        assert trainer.adapter.loss_scale is not None
        assert trainer.adapter.loss_scale.skipped_steps == 3  # at 8, 4 and, after two good steps at 2, again 4
        found.append(bits(trainer))
    assert found[0] == found[1]
    assert found[0]["step"] == 4


def test_nan_that_one_server_sees_is_named_and_refused_by_all() -> None:
    def bad(parameters: Any, batch: Any, on_gradient: Any) -> float:
        def hand_in(name: str, gradient: Any) -> None:
            on_gradient(name, gradient * numpy.nan if name == "d" and 3 in batch else gradient)

        return towards(parameters, batch, hand_in)

    kept: list[Any] = []

    class Keep(mt.Hook):
        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            kept[:] = [trainer, bits(trainer)]

    with pytest.raises(
        NonFiniteError,
        match=r"worker \d on .*, work unit \d+ \(epoch \d+, places .*\): d holds NaN or infinity; 3 workers",
    ):
        several(3, SHAPES["tensors"], OPTIMIZERS["adamw"], [Keep()], function=bad, mode="async", steps=1000)
    trainer, last = kept
    assert bits(trainer) == last  # those of the last good update, also after the error


def test_what_ranks_had_left_out_is_in_the_first_update_of_all_servers() -> None:
    class Carry(mt.Hook):
        def before_run(self, trainer: mt.Trainer) -> None:
            trainer.strategy.restore_own({"carried": {"count": -numpy.arange(24, dtype="float64")}})

    builds = [parts(mt.ParameterServer("sync")) for _ in range(4)]
    hooks = [mt.StopAtStep(2), Carry()]
    trainer, others = train_served(builds[0], builds[1:2], hooks, shard_builds=builds[2:])
    assert others.errors == {}
    carried = trainer.adapter.parameters()["count"] - numpy.arange(24)
    assert carried.sum() == 2
    assert set(carried) == {0.0, 0.125}


def test_a_codec_codes_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Error feedback by part: what the parameters have become is right up to what is left out at the end."""
    world, job = mt.init(), the_job()
    monkeypatch.setattr(job, "world", world.replaced(config=replace(world.config, compression="int8")))

    def steady(parameters: Any, batch: Any, on_gradient: Any) -> float:
        on_gradient("a", -numpy.linspace(-1, 1, 999, dtype="float32"))
        return 1.0

    trainer, _ = several(3, {"a": (999,)}, lambda: mt.optim.SGD(1.0), function=steady, steps=20)
    servers = trainer.strategy.stats.servers  # type: ignore[attr-defined]
    assert max(one.bytes_in for one in servers) < 3 * 20 * 500  # of 1332 bytes for each push
    start_values = numpy.random.default_rng(7).standard_normal(999).astype("float32")
    change = trainer.adapter.parameters()["a"] - start_values
    numpy.testing.assert_allclose(change, 20 * numpy.linspace(-1, 1, 999), atol=0.02)


def test_a_run_that_has_ended_before_its_first_step_ends_all_servers() -> None:
    class Ended(mt.Hook):
        ends_run = True

        def before_run(self, trainer: mt.Trainer) -> None:
            trainer.last_step = 0

    builds = [parts(mt.ParameterServer("sync")) for _ in range(5)]
    trainer, others = train_served(builds[0], builds[1:3], [Ended()], shard_builds=builds[3:])
    assert trainer.step_number == 0
    assert others.errors == {}


def test_hooks_see_the_whole_model_and_cost_nothing_if_they_do_not_read_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: Counter[str] = Counter()
    tell = Shards._tell

    def counted(self: Any, kind: str, fields: Any) -> None:
        told[kind] += 1
        tell(self, kind, fields)

    monkeypatch.setattr(Shards, "_tell", counted)
    seen = []
    for number in (1, 3):
        hook = Everything()
        several(number, SHAPES["tensors"], OPTIMIZERS["adamw"], [hook])
        seen.append(hook.seen)
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 7
    assert told["fetch"] == 7  # once for each step

    told.clear()
    hooks = [mt.Log(), mt.Record([mt.writers.JsonLines(tmp_path)], steps=1), mt.Checkpoint(tmp_path, steps=3)]
    several(3, SHAPES["tensors"], OPTIMIZERS["adamw"], hooks)
    assert told["fetch"] == 3  # steps 3 and 6, and the last one, 7


def test_what_hooks_change_reaches_all_servers() -> None:
    """Parameters before and after steps, and the optimizer: by restoring an earlier state of the model."""

    class Meddle(mt.Hook):
        def before_step(self, trainer: mt.Trainer) -> None:
            for value in trainer.adapter.parameters().values():
                value[...] = 1.5 * value
            if trainer.step_number == 2:
                state = trainer.adapter.state()
                self.kept = {
                    "parameters": {name: value.copy() for name, value in state["parameters"].items()},
                    "optimizer": {
                        key: value if isinstance(value, int) else {name: one.copy() for name, one in value.items()}
                        for key, value in state["optimizer"].items()
                    },
                }

        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            trainer.adapter.parameters()["d"][...] += 1.0
            if step.number == 5:
                trainer.adapter.restore(self.kept)

    found = [bits(several(number, SHAPES["tensors"], OPTIMIZERS["adamw"], [Meddle()])[0]) for number in (1, 2, 3)]
    assert found[0] == found[1] == found[2]
    assert found[0]["step"] == 4


def test_a_rate_that_a_hook_changes_is_the_rate_of_all_servers() -> None:
    """The schedule of the first server alone counts."""
    rate = [0.1]

    class Lower(mt.Hook):
        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            rate[0] /= 2

    def optimizer() -> mt.optim.SGD:
        first, rates = not made, rate
        made.append(True)
        return mt.optim.SGD(lambda step: rates[0] if first else 1e6)

    found = []
    for number in (1, 3):
        rate[0], made = 0.1, []
        found.append(bits(several(number, SHAPES["tensors"], optimizer, [Lower()])[0]))
    assert found[0] == found[1]


class Own:
    """An optimizer of a user, which cannot update a part."""

    def start(self, parameters: Any, decayed: Any) -> None:
        self._parameters = parameters

    def state(self) -> dict[str, Any]:
        return {"step": 0}


def test_what_cannot_be_divided_is_refused() -> None:
    """In every process with several servers, before anything else is done."""
    own: Any = Own()

    def build(wraps: Any) -> Any:
        def make(world: mt.World) -> mt.Parts:
            data = mt.data.ArrayData(world, numpy.arange(3), global_batch=3)
            model = wraps(mt.ArrayFunction(counting, {"count": numpy.zeros(3)}, own))
            return mt.Parts(model, mt.ParameterServer(), data)

        return make

    whole: Any = object()
    for kind in ("server", "shard", "worker"):
        for wraps in (lambda model: model, lambda model: Accumulate(model, per_rank_batch=4)):
            with playing(kind, "127.0.0.1:9", num_servers=2):
                with pytest.raises(ConfigError, match=r"Own has no method update_only.*Start one server"):
                    mt.Trainer(build(wraps))
                text = r"object has not all methods of DividedAdapter.*Start one server"
                with pytest.raises(ConfigError, match=text):
                    mt.Trainer(build(lambda _: whole))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: mt.optim.Adam(1.0), r"its optimizer is Adam \{.*\}, and that of server 0 SGD \{.*\}; give all"),
        (lambda: mt.optim.SGD(1.0, momentum=0.5), r"'_momentum': 0.5.*, and that of server 0 SGD \{.*'_momentum': 0.0"),
        (
            lambda: mt.optim.SGD(1.0, clip_norm=0.5),
            r"'_clip_norm': 0.5.*, and that of server 0 SGD \{.*'_clip_norm': None",
        ),
    ],
)
def test_another_optimizer_on_one_server(make: Any, text: str) -> None:
    def build(strategy: Any) -> Any:
        def make_parts(world: mt.World) -> mt.Parts:
            data = mt.data.ArrayData(world, numpy.arange(NUM_SAMPLES), global_batch=8)
            optimizer = make() if the_job().role.number == 2 else mt.optim.SGD(1.0)
            return mt.Parts(mt.ArrayFunction(counting, {"count": numpy.zeros(NUM_SAMPLES)}, optimizer), strategy, data)

        return make_parts

    served = Served(1, mt.ParameterServer("sync"), build, num_servers=3)
    with pytest.raises(ConfigError, match=rf"server 2 on \S+ cannot work with server 0 on \S+: .*{text}"):
        served.end()
    assert served._others.errors == {}


@pytest.mark.parametrize("kind", ["server", "shard"])
def test_a_script_without_a_parameter_server(kind: str) -> None:
    """Each server would train all of it by itself."""
    text = f"is a {kind} of a job with servers, and `build` has made the strategy Sync"
    with playing(kind, "127.0.0.1:9", num_servers=2), pytest.raises(ConfigError, match=text):
        mt.Trainer(parts(mt.Sync())).run()


def test_another_number_of_servers_than_the_strategy_was_given() -> None:
    text = r"ParameterServer\(servers=3\), and 2 were started; start them with `--servers 3` of `mpitrain run` or"
    for kind in ("server", "shard", "worker"):
        with playing(kind, "127.0.0.1:9", num_servers=2), pytest.raises(mt.errors.MpitrainError, match=text):
            mt.Trainer(parts(mt.ParameterServer("sync", servers=3)))
    mt.Trainer(parts(mt.ParameterServer("sync", servers=3)), [mt.StopAtStep(1)]).run()  # no servers at all
