"""SyncBatchNorm: batch normalisation over the samples of all ranks, as if one process had the whole batch.

Each rank gathers the counts, means and sums of squares of all ranks, 16 bytes for each channel of each rank. The
backward pass sums two numbers for each channel over ranks. Both are in float64, and have the same bits on every rank.

Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy
import torch
from torch.autograd.function import once_differentiable

from mpitrain import collectives
from mpitrain.errors import DataError, everywhere
from mpitrain.job.start import init
from mpitrain.world.world import World


class Moments(NamedTuple):
    """The number of all ranks' values, their mean, and the sum of squares around it: by channel, in float64."""

    number: int
    mean: numpy.ndarray
    squares: numpy.ndarray


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """Normalise each channel over the samples of all ranks. Channels are the second dimension.

    Every rank makes the same number of calls, even with batches without samples, and the backward pass of each. In
    evaluation, with running statistics, a rank may call it alone. Gradients of weight and bias are those of this rank's
    own samples.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        """See torch.nn.BatchNorm2d."""
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalised values, with the shape, dtype and device of `input`.

        Args:
            input: at least two dimensions, on the CPU or a GPU. Only the first one may differ from rank to rank.

        Raises:
            ValueError: `input` has another number of channels, or too few dimensions. Raised on this rank.
            DataError: all ranks together have fewer than two values for each channel. Raised on every rank.
            MismatchError: the ranks' layers have different numbers of channels. Raised on every rank.
        """
        world = init()
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"{world.name()}: SyncBatchNorm of {self.num_features} channels was given a batch of shape "
                f"{tuple(input.shape)}; the second dimension must be the channels"
            )
        if world.size == 1 or (self.track_running_stats and not self.training):
            return super().forward(input)
        moments = _moments(world, input.detach())
        if self.training and self.track_running_stats:
            self._track(moments)
        apply: Any = _Normalised.apply
        result: torch.Tensor = apply(input, self.weight, self.bias, world, moments, self.eps)
        return result

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Do nothing: `forward` checks the input."""

    def _track(self, moments: Moments) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(_like(self.running_mean, moments.mean), share)
        self.running_var.lerp_(_like(self.running_var, moments.squares / (moments.number - 1)), share)


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        world: World,
        moments: Moments,
        eps: float,
    ) -> torch.Tensor:
        wide = _wide(values)
        mean = _like(wide, moments.mean)
        scale = _like(wide, 1 / numpy.sqrt(moments.squares / moments.number + eps))
        ctx.save_for_backward(values, weight, mean, scale)
        ctx.world, ctx.count = world, moments.number
        result = (wide - _along(mean, wide)) * _along(scale, wide)
        if weight is not None:
            result = result * _along(weight.to(wide.dtype), wide)
        if bias is not None:
            result = result + _along(bias.to(wide.dtype), wide)
        return result.to(values.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        values, weight, mean, scale = ctx.saved_tensors
        wide, slope = _wide(values), _wide(gradient)
        normal = (wide - _along(mean, wide)) * _along(scale, wide)
        others = _others(wide)
        sums = torch.stack([slope.sum(others), (slope * normal).sum(others)])
        of_values = None
        if ctx.needs_input_grad[0]:
            totals = collectives.allreduce(ctx.world, sums.double().cpu().numpy()).wait() / ctx.count
            level, tilt = (_along(_like(wide, total), wide) for total in totals)
            factor = scale if weight is None else scale * weight.to(wide.dtype)
            of_values = ((slope - level - normal * tilt) * _along(factor, wide)).to(values.dtype)
        of_bias, of_weight = (None if weight is None else one.to(weight.dtype) for one in sums)
        return of_values, of_weight, of_bias, None, None, None


def _moments(world: World, values: torch.Tensor) -> Moments:
    """Collective."""
    wide = _wide(values)
    count = wide.numel() // wide.shape[1]
    own = numpy.zeros((1, 2 * wide.shape[1] + 1))
    if count:
        variance, mean = torch.var_mean(wide, _others(wide), correction=0)
        own[0] = [count, *mean.tolist(), *(count * variance).tolist()]
    of_ranks = collectives.allgather(world, own).wait()
    counts, (means, squares) = of_ranks[:, :1], numpy.split(of_ranks[:, 1:], 2, axis=1)
    total = int(counts.sum())
    if total < 2:
        raise everywhere(
            DataError(
                f"{world.name()}: SyncBatchNorm in training has {total} values for each channel on all {world.size} "
                "ranks together; it needs at least 2"
            )
        )
    mean = (counts * means).sum(axis=0) / total
    return Moments(total, mean, (squares + counts * (means - mean) ** 2).sum(axis=0))


def _wide(values: torch.Tensor) -> torch.Tensor:
    """The tensor in float32 at least: sums of 16-bit numbers lose too much precision."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _others(values: torch.Tensor) -> list[int]:
    """The dimensions other than that of the channels."""
    return [0, *range(2, values.dim())]


def _along(channels: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A number for each channel, in a shape that fits the values."""
    return channels.reshape(1, -1, *[1] * (values.dim() - 2))


def _like(tensor: torch.Tensor, array: numpy.ndarray) -> torch.Tensor:
    """The array with the dtype and device of the tensor."""
    return torch.from_numpy(array).to(tensor)
