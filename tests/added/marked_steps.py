"""A hook with a state."""

from mpitrain.training.hooks.hook import Hook


class MarkedSteps(Hook):
    """Keeps the numbers of the steps, which checkpoints hold too."""

    def __init__(self):
        self.numbers = []

    def after_step(self, trainer, step):
        self.numbers.append(step.number)

    def state(self):
        return {"numbers": list(self.numbers)}

    def restore(self, state):
        self.numbers = list(state["numbers"])
