"""What several servers refuse: optimizers that cannot be divided, and another number of servers."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from counting import NUM_SAMPLES, counting, parts, playing
from hands import Served

import mpitrain as mt
from mpitrain.adapters.accumulate import Accumulate
from mpitrain.errors import ConfigError
from mpitrain.job.start import the_job


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


def test_another_number_of_servers_than_the_strategy_was_given() -> None:
    text = r"ParameterServer\(servers=3\), and 2 were started; start them with `--servers 3` of `mpitrain run` or"
    for kind in ("server", "shard", "worker"):
        with playing(kind, "127.0.0.1:9", num_servers=2), pytest.raises(mt.errors.MpitrainError, match=text):
            mt.Trainer(parts(mt.ParameterServer("sync", servers=3)))
    mt.Trainer(parts(mt.ParameterServer("sync", servers=3)), [mt.StopAtStep(1)]).run()  # no servers at all
