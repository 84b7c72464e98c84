"""Optimizers over flat buffers, schedules, loss scales, and a rank's part of the optimizer.

`SGD`, `Adam` and `AdamW` take a rate or a schedule (`constant`, `warmup_cosine`). `LossScale` is for mixed precision.
PyTorch's own optimizers are for `mpitrain.TorchModule`.
"""

from mpitrain.optim.flat_optimizer import clip_by_global_norm
from mpitrain.optim.loss_scale import LossScale
from mpitrain.optim.optimizers import SGD, Adam, AdamW
from mpitrain.optim.schedules import constant, warmup_cosine

__all__ = ["SGD", "Adam", "AdamW", "LossScale", "clip_by_global_norm", "constant", "warmup_cosine"]
