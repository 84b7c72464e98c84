"""What optimizers refuse: hyper-parameters, parameters, decayed ranges, gradients and rates that do not fit."""

import math

import ml_dtypes
import numpy
import pytest

from mpitrain.errors import ConfigError
from mpitrain.optim.flat_optimizer import clip_by_global_norm
from mpitrain.optim.optimizers import SGD, Adam, AdamW


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.inf, math.nan])
def test_clip_refuses(max_norm):
    with pytest.raises(ConfigError, match=r"max_norm is .*; allowed: a finite number > 0"):
        clip_by_global_norm(numpy.ones(3), max_norm)


@pytest.mark.parametrize(
    ("make", "text"),
    [(lambda: SGD(-0.1), "learning_rate is -0.1; allowed: a finite number >= 0"),
     (lambda: SGD(math.nan), "learning_rate is nan"),
     (lambda: SGD(0.1, momentum=1.0), "momentum is 1.0; allowed: 0 <= momentum < 1"),
     (lambda: SGD(0.1, nesterov=True), "nesterov is True and momentum 0"),
     (lambda: SGD(0.1, weight_decay=-1), "weight_decay is -1; allowed"),
     (lambda: SGD(0.1, clip_norm=0), "clip_norm is 0; allowed: None or a finite number > 0"),
     (lambda: Adam(0.1, betas=(0.9, 1.0)), r"betas are \(0.9, 1.0\); allowed"),
     (lambda: Adam(0.1, betas=(0.9,)), r"betas are \(0.9,\); allowed"),
     (lambda: Adam(0.1, epsilon=0), "epsilon is 0; allowed: a finite number > 0"),
     (lambda: AdamW(0.1, weight_decay=math.inf), "weight_decay is inf; allowed")],
)  # fmt: skip
def test_hyper_parameters_that_are_not_allowed(make, text):
    with pytest.raises(ConfigError, match=text):
        make()


@pytest.mark.parametrize("dtype", [numpy.float16, ml_dtypes.bfloat16, numpy.int64])
def test_start_refuses_other_dtypes(dtype):
    with pytest.raises(ConfigError, match=rf"parameters are {numpy.dtype(dtype)}; allowed: float32 or float64"):
        SGD(0.1).start(numpy.ones(3, dtype), [])


@pytest.mark.parametrize("parameters", [numpy.ones((2, 3)), numpy.ones(6)[::2]])
def test_start_refuses_what_is_not_flat(parameters):
    with pytest.raises(ConfigError, match="allowed: one dimension, contiguous"):
        SGD(0.1).start(parameters, [])


@pytest.mark.parametrize(
    "decayed", [[slice(0, 7)], [slice(-1, 3)], [slice(0, 6, 2)], [slice(4, 2)], [slice(0, 3), slice(2, 4)]]
)
def test_start_refuses_bad_decay_ranges(decayed):
    with pytest.raises(ConfigError, match="decayed range"):
        SGD(0.1).start(numpy.ones(6), decayed)


def test_update_refuses_gradients_that_do_not_fit_and_bad_rates():
    optimizer = SGD(lambda step: 0.1 - step)
    with pytest.raises(ConfigError, match="SGD has no parameters yet"):
        optimizer.update(numpy.ones(3))
    optimizer.start(numpy.ones(3), [])
    for gradients in (numpy.ones(4), numpy.ones(3, "f4")):
        with pytest.raises(ConfigError, match=r"gradients are .*; allowed, as the parameters: float64\(3,\)"):
            optimizer.update(gradients)
    optimizer.update(numpy.ones(3))
    with pytest.raises(ConfigError, match=r"learning_rate at step 1 is -0.9; allowed"):
        optimizer.update(numpy.ones(3))
