"""Every gradient waits for the end of the step, and all go together, without a reducer."""

import numpy

from mpitrain.errors import MissingGradientError, NonFiniteError, everywhere
from mpitrain.reducer.bucket import plan_layout
from mpitrain.reducer.means import Means, Overlap, Remarks
from mpitrain.strategies.strategy import Strategy


class Together(Strategy):
    def begin(self, world, adapter):
        self.world, self.plan = world, plan_layout(adapter.layout)
        adapter.load_parameters(world.broadcast(adapter.parameters()))

    def begin_step(self, weight):
        self.weight, self.gradients = weight, {}

    def on_gradient(self, index, gradient):
        self.gradients[index] = gradient.copy()

    def finish_step(self, adapter, loss):
        said = self.world.allgather((self.problem(), self.weight))
        for problem, _ in said:
            if problem:
                kind, text = problem
                raise everywhere({"missing": MissingGradientError, "NaN": NonFiniteError}[kind](text))
        total = sum(weight for _, weight in said)
        tree = {str(index): self.gradients[index] for index in sorted(self.gradients)}
        tree, loss = self.world.mean((tree, loss), weight=self.weight)
        flats = {dtype: numpy.empty(count, dtype) for dtype, count in self.plan.counts.items()}
        for index, view in enumerate(self.plan.views(flats)):
            view[...] = tree[str(index)]
        return Means(loss, total, Overlap(0.0, 0.0, 0.0)), adapter.apply_gradients(flats, Remarks())

    def problem(self):
        for index, parameter in enumerate(self.plan.parameters):
            if index not in self.gradients:
                return "missing", f"{self.world.name()}: no gradient of {parameter.name}"
            if not numpy.isfinite(self.gradients[index]).all():
                return "NaN", f"{self.world.name()}: the gradient of {parameter.name} is not finite"
        return None
