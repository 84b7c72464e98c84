"""Modules of PyTorch on servers: whole tensors, with the bits of one server; statistics, and notes that are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from counting import train_served

import mpitrain as mt
from mpitrain.adapters.accumulate import Accumulate
from mpitrain.errors import ConfigError, GradientError
from mpitrain.reducer.division import counts_of, divide, members
from mpitrain.reducer.means import Remarks, remarks_of
from mpitrain.server.gradients import GradientBuffer
from mpitrain.server.parameters import ParameterShard, Replica

torch = pytest.importorskip("torch")
X = numpy.random.default_rng(3).standard_normal((40, 3)).astype("float32")

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.001, centered=True),
    "adam without foreach": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=False, amsgrad=True),
}


def a_module() -> Any:
    """With a large tensor, buffers of batch norm, a frozen tensor, and one that no loss depends on."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = torch.nn.Sequential(
            torch.nn.Linear(3, 50),
            torch.nn.BatchNorm1d(50),
            torch.nn.ReLU(),
            torch.nn.Linear(50, 20),
            torch.nn.Linear(20, 1),
        )
        module[4].bias.requires_grad_(False)
        module.unused = torch.nn.Parameter(torch.ones(7))
    return module


def loss(module: Any, batch: Any) -> Any:
    value = batch
    for layer in list(module)[:5]:
        value = layer(value)
    return (value - batch.sum(1, keepdim=True)).square().mean()


def build_with(make: Callable[[Any], Any], schedule: Any = None, **options: Any) -> Callable[[mt.World], mt.Parts]:
    def build(world: mt.World) -> mt.Parts:
        module = a_module()
        optimizer = make([one for one in module.parameters() if one.requires_grad])
        scheduled = {} if schedule is None else {"schedule": schedule(optimizer)}
        data = mt.data.ArrayData(world, X, global_batch=16, seed=5)
        return mt.Parts(
            mt.TorchModule(module, loss, optimizer, **scheduled, **options), mt.ParameterServer("sync"), data
        )

    return build


def train(number: int, build: Any, hooks: Any = (), steps: int = 6) -> mt.Trainer:
    hooks = [mt.StopAtStep(steps), *hooks]
    trainer, others = train_served(build, [build] * 2, hooks, shard_builds=[build] * (number - 1))
    assert others.errors == {}
    return trainer


def bits(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: bits(value) for name, value in state.items()}
    return (str(state.dtype), state.shape, state.tobytes()) if isinstance(state, numpy.ndarray) else state


pytestmark = pytest.mark.filterwarnings("ignore:no rank's loss depends")


@pytest.mark.parametrize(
    "optimizer", ["adamw", *(pytest.param(name, marks=pytest.mark.nightly) for name in OPTIMIZERS if name != "adamw")]
)
def test_sync_has_the_bits_of_one_server(optimizer: str) -> None:
    """Parameters, buffers, counters and the optimizer's state, also of tensors that no loss depends on."""
    build = build_with(OPTIMIZERS[optimizer])
    expected = bits(train(1, build).adapter.state())
    assert expected["optimizer"]["step"] == 6
    for number in (2, 3):
        assert bits(train(number, build).adapter.state()) == expected


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_factor_of_the_rate_is_that_of_all_servers(optimizer: str) -> None:
    """As `staleness_correction` has it: one update alone has the factor. Without servers, which would take turns."""
    build = build_with(OPTIMIZERS[optimizer])
    one, *several = (build(mt.init()).adapter for _ in range(3))
    for number, adapter in enumerate(several):
        adapter.update_only(number, 2, lambda norm: norm)  # type: ignore[attr-defined]
    stores = [ParameterShard(one), *(ParameterShard(adapter, number, 2) for number, adapter in enumerate(several))]
    random = numpy.random.default_rng(1)
    for factor in (1.0, 0.5, 1.0):
        gradients = {one.name: random.standard_normal(one.count) for one in stores[0].layout.parameters}
        rates = []
        plans = stores[0].plan(factor), *[stores[1].plan(factor)] * 2
        for store, plan in zip(stores, plans, strict=True):
            flats = {dtype: numpy.empty(count, dtype) for dtype, count in counts_of(store.part).items()}
            for index, own, place in members(store.layout, store.part):
                parameter = store.layout.parameters[index]
                flats[parameter.dtype][place] = gradients[parameter.name][own]
            rates.append(store.apply(flats, Remarks(notes=(None,)), plan, staleness=0))
        assert rates == [factor * OPTIMIZERS[optimizer]([torch.ones(1)]).param_groups[0]["lr"]] * 3
    for number, part in enumerate(several[0].divisions(2)[1].parts):  # type: ignore[attr-defined]
        layout = several[0].divisions(2)[1].layout  # type: ignore[attr-defined]
        names = [layout.parameters[index].name for index, _, _ in members(layout, part)]
        assert names
        for name in names:
            assert bits(several[number].parameters()[name]) == bits(one.parameters()[name])


def test_a_schedule_of_pytorch_and_what_a_hook_sets_are_those_of_all_servers() -> None:
    class Set(mt.Hook):
        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            if step.number == 3:
                trainer.adapter.optimizer.param_groups[0]["weight_decay"] = 0.5  # type: ignore[attr-defined]

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    found = []
    for number in (1, 3):
        build = build_with(OPTIMIZERS["sgd"], schedule)

        def visible(world: mt.World, build: Any = build) -> mt.Parts:
            parts = build(world)
            parts.adapter.optimizer = parts.adapter._torch_optimizer
            return parts

        found.append(bits(train(number, visible, [Set()]).adapter.state()))
    assert found[0] == found[1]
    assert found[0]["optimizer"]["groups"]["0"]["lr"] == 0.05 / 8


def test_clipping_is_by_the_norm_of_all_parts() -> None:
    build = build_with(OPTIMIZERS["adamw"], clip_norm=0.1)
    one, three = train(1, build).adapter, train(3, build).adapter
    assert one.gradient_norm() is not None
    assert three.gradient_norm() == pytest.approx(one.gradient_norm(), rel=1e-6)
    assert one.gradient_norm() > 0.1  # type: ignore[operator]
    for name, value in one.parameters().items():
        numpy.testing.assert_allclose(three.parameters()[name], value, rtol=2e-4, atol=1e-6)


def test_a_checkpoint_goes_on_with_other_numbers_of_servers_and_none(tmp_path: Path) -> None:
    """With the bits of a run that never stopped, and changed by a hook on the way."""

    class Change(mt.Hook):
        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            if step.number == 4:
                trainer.adapter.parameters()["0.weight"][...] *= 0.5
            if step.number == 5:
                trainer.adapter.restore(trainer.adapter.state())

    build = build_with(OPTIMIZERS["adamw"])
    expected = bits(train(1, build, [Change()], steps=12).adapter.state())
    for number, last in ((3, 3), (2, 6), (1, 9), (3, 12)):
        trainer = train(number, build, [Change(), mt.Checkpoint(tmp_path, steps=100)], steps=last)
        assert trainer.step_number == last
    assert bits(trainer.adapter.state()) == expected


def test_a_state_of_before_the_first_step_takes_the_optimizers_state_from_all_servers() -> None:
    class Again(mt.Hook):
        def before_run(self, trainer: mt.Trainer) -> None:
            state = trainer.adapter.state()
            self.kept = {**state, "parameters": {name: value.copy() for name, value in state["parameters"].items()}}
            assert self.kept["optimizer"]["state"] == {}

        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            if step.number == 3:
                trainer.adapter.restore(self.kept)

    build = build_with(OPTIMIZERS["adamw"])
    found = [bits(train(number, build, [Again()], steps=5).adapter.state()) for number in (1, 3)]
    assert found[0] == found[1]
    assert found[0]["optimizer"]["step"] == 2


def test_a_division_has_whole_tensors_and_no_server_has_most_bytes() -> None:
    adapter = build_with(OPTIMIZERS["adamw"])(mt.init()).adapter
    gradients, parameters = adapter.divisions(2)  # type: ignore[attr-defined]
    sizes = [sum((own.stop - own.start) * dtype.itemsize for dtype, own in part.items()) for part in gradients.parts]
    rest = 3 * 50 + 50 + 2 * 50 + 2 * 50 + 20 + 20 + 7  # the frozen bias is not pushed
    assert sizes == [4 * 50 * 20, 4 * rest]  # the largest tensor has more than half of all
    assert {name.name for name in parameters.layout.parameters} == set(adapter.parameters())


def hooked(hook: str) -> Callable[[Any], Any]:
    def make(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        getattr(optimizer, hook)(lambda *_: None)
        return optimizer

    return make


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (type("Own", (torch.optim.SGD,), {"__module__": "test_several_torch"}), "test_several_torch.Own is no optimi"),
        (type("Own", (torch.optim.SGD,), {"__module__": "torch.optimal"}), "torch.optimal.Own is no optimizer of tor"),
        (hooked("register_step_pre_hook"), r"SGD has hooks around its step \(register_"),
        (hooked("register_step_post_hook"), r"SGD has hooks around its step \(register_"),
    ],
)
def test_optimizers_that_are_refused(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{text}.*Start one server"):
        build_with(make)(mt.init()).adapter.dividable_optimizer()  # type: ignore[attr-defined]


NUM_WORKERS = 24
MEAN = 5.0


def a_small_module() -> Any:
    from mpitrain.adapters.torch_module import TorchModule

    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    return TorchModule(module, lambda module, batch: module(batch).square().mean(), optimizer)


class Stale:
    """A worker that answers with gradients of the parameters that it has pulled last."""

    def __init__(self, store: ParameterShard) -> None:
        self._store, self._adapter = store, Accumulate(a_small_module(), per_rank_batch=64)
        self._replica = Replica(self._adapter)
        self._buffer = GradientBuffer(divide(store.layout, 1), None, "a worker")

    def pull(self) -> None:
        self._replica.take(*self._store.since(self._replica.versions[0]))
        self._replica.load()

    def push(self, batch: numpy.ndarray) -> None:
        self._buffer.begin()
        self._adapter.loss_and_gradients(batch, self._buffer.take)
        unused, (flats,) = self._buffer.finish(1.0)
        gradients = dict(zip(self._store.layout.counts, [flat.copy() for flat in flats], strict=True))
        told = (tuple(unused), self._adapter.note())
        self._store.check_note(told[1])
        self._store.apply(gradients, remarks_of([told]), {}, self._store.version - self._replica.versions[0])
        self._store.note_changes()


def test_running_statistics_follow_the_batches_of_many_workers() -> None:
    """All of them answer in turn. With changes in full, the mean would swing more and more: the delay is too long."""
    server = Accumulate(a_small_module(), per_rank_batch=64)
    store = ParameterShard(server)
    workers = [Stale(store) for _ in range(NUM_WORKERS)]
    batch = numpy.random.default_rng(3).normal(MEAN, 1.0, (16, 2)).astype("float32")
    means, counts = [], []
    for worker in workers:
        worker.pull()
    for number in range(40 * NUM_WORKERS):
        worker = workers[number % NUM_WORKERS]
        worker.push(batch)
        worker.pull()
        means.append(numpy.array(server.parameters()["0.running_mean"]))
        counts.append(int(server.parameters()["0.num_batches_tracked"]))
    assert numpy.max(means) < 1.1 * MEAN + 1
    numpy.testing.assert_allclose(means[-1], batch.mean(0), rtol=0.05)
    assert counts == sorted(counts)
    assert counts[-1] >= 40


def test_an_older_note_does_not_replace_a_newer_one() -> None:
    server = a_small_module()
    store = ParameterShard(server)
    fast, slow = Stale(store), Stale(store)
    batch = numpy.ones((4, 2), "float32") * numpy.arange(4, dtype="float32")[:, None]
    slow.pull()
    for _ in range(3):
        fast.pull()
        fast.push(batch)
    slow.push(batch)
    assert int(server.parameters()["0.num_batches_tracked"]) == 3


@pytest.mark.parametrize(
    "note",
    [
        7,
        "text",
        ["0.num_batches_tracked"],
        (("0.num_batches_tracked", bytes(7)),),
        (("0.num_batches_tracked", "12345678"),),
        (("0.running_mean", bytes(8)),),
        (("nothing", bytes(8)),),
        (("0.num_batches_tracked", bytes(8), 1),),
    ],
)
def test_a_note_that_is_none(note: Any) -> None:
    """The server looks before anything is changed: half an update would be worse than none."""
    for adapter in (a_small_module(), Accumulate(a_small_module(), per_rank_batch=4)):
        store = ParameterShard(adapter)
        store.check_note(None)
        store.check_note((("0.num_batches_tracked", bytes(8)),))
        with pytest.raises(GradientError, match="does not hold values of this module's buffers"):
            store.check_note(note)
