"""Balance: parts of a batch in proportion to the speed of each rank."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from models import mlp
from mpitrain import ArrayFunction, Balance, Hook, Parts, Step, StopAtStep, Sync, Trainer, World
from mpitrain.data import ArrayData, Prefetch
from mpitrain.data.shares import split
from mpitrain.errors import ConfigError
from mpitrain.optim import SGD

from .common import skip_alone
from .trainings import DECAY, MOMENTUM, RATE, Record, bare_numpy, builder, initial_parameters, samples_of


class Pretend(Hook):
    """Balance on machines that take `seconds` a sample: no clock, so that what comes out is exact."""

    def __init__(self, balance: Balance, seconds: float) -> None:
        self.balance, self.seconds = balance, seconds
        self.parts: list[int] = []
        self.shared_out_at: list[int] = []

    def before_run(self, trainer: Trainer) -> None:
        self.balance.before_run(trainer)

    def after_step(self, trainer: Trainer, step: Step) -> None:
        assert 0 < step.own_seconds <= step.seconds
        self.parts.append(step.own_samples)
        before = self.balance.samples_per_second
        self.balance.after_step(trainer, replace(step, own_seconds=step.own_samples * self.seconds))
        if self.balance.samples_per_second is not before:
            self.shared_out_at.append(step.number)

    def after_run(self, trainer: Trainer) -> None:
        self.balance.after_run(trainer)


@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetch"])
def test_parts_are_in_proportion_and_the_mean_is_that_of_the_whole_batch(world: World, prefetch: bool) -> None:
    """Speeds 1, 1/2, 1/4 and so on: after 3 steps rank 0 has about twice the samples of rank 1."""

    def build(world: World) -> Parts:
        data = ArrayData(world, samples_of(171), global_batch=64, seed=3)
        adapter = ArrayFunction(
            mlp.loss_and_gradients, initial_parameters(), SGD(RATE, momentum=MOMENTUM, weight_decay=DECAY)
        )
        return Parts(adapter, Sync(), Prefetch(data) if prefetch else data)

    record = Record()
    hook = Pretend(Balance(3), 0.01 * 2**world.rank)
    trainer = Trainer(build, [StopAtStep(8), record, hook])
    trainer.run()
    speeds = [100 / 2**rank for rank in range(world.size)]
    assert hook.balance.samples_per_second == pytest.approx(speeds)
    assert hook.shared_out_at == [3]
    equal = [1.0] * world.size
    sizes = [64, 64, 43, 64, 64, 43, 64, 64]
    expected = [split(size, equal if number < 3 else speeds)[world.rank] for number, size in enumerate(sizes)]
    assert hook.parts == expected
    assert not trainer.times_own_work

    parameters, losses, _ = bare_numpy(171, 64, 8)
    assert [step.samples for step in record.steps] == sizes
    numpy.testing.assert_allclose([step.loss for step in record.steps], losses, rtol=1e-12)
    for name, value in trainer.adapter.parameters().items():
        numpy.testing.assert_allclose(value, parameters[name], rtol=1e-12, atol=1e-14)
    assert trainer.data.state() == {"epoch": 2, "cursor": 128, "seed": 3, "shuffle": True, "num_samples": 171}


def test_speeds_are_measured_again_when_asked(world: World) -> None:
    def measured(every: int | None, ask_after: int | None) -> list[int]:
        balance = Balance(2, every=every)

        class Ask(Hook):
            def after_step(self, trainer: Trainer, step: Step) -> None:
                if step.number == ask_after:
                    balance.measure()

        hook = Pretend(balance, 0.1)
        Trainer(builder(14, 14), [StopAtStep(14), Ask(), hook]).run()
        assert balance.samples_per_second == pytest.approx([10.0] * world.size)
        return hook.shared_out_at

    assert measured(None, None) == [2]
    assert measured(4, None) == [2, 8, 14]  # asked for after 6 and 12, measured in the two steps after that
    assert measured(None, 9) == [2, 11]


def test_a_rank_without_samples_is_waited_for(world: World) -> None:
    """The measured step is an epoch's last one, with one sample: only rank 0 has one. The next step counts too."""
    skip_alone(world)
    hook = Pretend(Balance(1), 0.1)
    Trainer(builder(world.size * 2 + 1, world.size * 2), [StopAtStep(1)]).run()
    trainer = Trainer(builder(world.size * 2 + 1, world.size * 2), [StopAtStep(4), hook])
    trainer.step()
    trainer.run()
    assert hook.parts == [int(world.rank == 0), 2, int(world.rank == 0)]
    assert hook.shared_out_at == [3]


def test_balance_refuses(world: World) -> None:
    for make, text in ((lambda: Balance(0), "over 0 steps"), (lambda: Balance(every=0), "every 0 steps")):
        with pytest.raises(ConfigError, match=text):
            make()

    class Own:
        steps_per_epoch, epoch = 1, 0

    trainer = Trainer(lambda world: replace(builder(20, 10)(world), data=Own()), [StopAtStep(1), Balance()])
    with pytest.raises(ConfigError, match=r"Balance: Own has no method share_out") as caught:
        trainer.run()
    assert caught.value.known_everywhere
