"""What publishes a fact of a rank."""

from mpitrain.training.hooks.hook import Hook
from mpitrain.watching.activity import own_activity


class SeenSamples(Hook):
    """Publishes how many samples the rank has had."""

    def __init__(self):
        self.seen = 0

    def after_step(self, trainer, step):
        self.seen += step.own_samples
        own_activity().publish("seen_samples", self.seen)
