"""The pieces of the models: each layer is a function, and its backward pass the function below it.

A backward function takes `d_y`, the gradient of the loss with respect to the layer's output, and the values that the
forward pass kept. It returns the gradients with respect to the layer's inputs, in new arrays. All functions work on
float32 and float64, with NumPy and CuPy, and for mixed precision on float16 and bfloat16. With 16 bits, layers take and
return 16 bits. Sums are made in float32 and rounded once. Gradients that are such sums (of biases and scales) stay
float32.
"""

import math
from types import ModuleType

import numpy
from numpy.typing import DTypeLike

from mpitrain.arrays import Array, is_device_array, namespace

EPSILON = 1e-5  # of layer norm; keeps a constant row finite


def normal(
    rng: numpy.random.Generator, xp: ModuleType, shape: tuple[int, ...], deviation: float, dtype: DTypeLike
) -> Array:
    """Random initial weights. Drawn on the host in float64: the same numbers on every device and dtype."""
    return xp.asarray((rng.standard_normal(shape) * deviation).astype(dtype))


def wide(x: Array) -> Array:
    """x in float32 if x has 16 bits, else x itself."""
    return x.astype("float32") if x.itemsize == 2 else x


def product(a: Array, b: Array) -> Array:
    """a @ b in the dtype of both, 16-bit products added up in float32."""
    if a.itemsize > 2:
        return a @ b
    if is_device_array(a) and b.ndim == 2:  # by tensor cores; CuPy uses these for matrices only, not for stacks
        rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1]) @ b
        return rows.reshape(*a.shape[:-1], b.shape[1]).astype(a.dtype, copy=False)
    return (wide(a) @ wide(b)).astype(a.dtype)


def dense(x: Array, weight: Array, bias: Array) -> Array:
    """x (..., inputs) @ weight (inputs, outputs) + bias (outputs,)."""
    y = product(x, weight)
    y += bias
    return y


def dense_backward(d_y: Array, x: Array, weight: Array) -> tuple[Array, Array, Array]:
    rows, d_rows = x.reshape(-1, weight.shape[0]), d_y.reshape(-1, weight.shape[1])
    return product(d_y, weight.T), product(rows.T, d_rows), wide(d_rows).sum(axis=0)


def relu(x: Array) -> Array:
    return namespace(x).maximum(x, 0)


def relu_backward(d_y: Array, y: Array) -> Array:
    return d_y * (y > 0)


def gelu(x: Array) -> tuple[Array, Array]:
    """The tanh form of Hendrycks and Gimpel (2016). Returns y and the tanh, kept for the backward pass."""
    dtype, x = x.dtype, wide(x)
    tanh = namespace(x).tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
    return (0.5 * x * (1 + tanh)).astype(dtype, copy=False), tanh


def gelu_backward(d_y: Array, x: Array, tanh: Array) -> Array:
    dtype, x = x.dtype, wide(x)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return (wide(d_y) * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope)).astype(dtype, copy=False)


def layer_norm(x: Array, scale: Array, bias: Array) -> tuple[Array, Array, Array]:
    """Over the last axis. Returns y, the normalised x and 1 / deviation, kept for the backward pass."""
    dtype, x, scale, bias = x.dtype, wide(x), wide(scale), wide(bias)
    centred = x - x.mean(axis=-1, keepdims=True)
    inverse = 1 / namespace(x).sqrt((centred * centred).mean(axis=-1, keepdims=True) + EPSILON)
    centred *= inverse
    return (centred * scale + bias).astype(dtype, copy=False), centred, inverse


def layer_norm_backward(d_y: Array, scale: Array, normalised: Array, inverse: Array) -> tuple[Array, Array, Array]:
    leading = tuple(range(d_y.ndim - 1))
    dtype, d_y = d_y.dtype, wide(d_y)
    d = d_y * wide(scale)
    d_x = d - d.mean(axis=-1, keepdims=True) - normalised * (d * normalised).mean(axis=-1, keepdims=True)
    d_x = (d_x * inverse).astype(dtype, copy=False)
    return d_x, (d_y * normalised).sum(axis=leading), d_y.sum(axis=leading)


def softmax(x: Array) -> Array:
    """Over the last axis."""
    y = x - x.max(axis=-1, keepdims=True)
    namespace(x).exp(y, out=y)
    y /= y.sum(axis=-1, keepdims=True)
    return y


def softmax_cross_entropy(logits: Array, labels: Array, loss_scale: float = 1.0) -> tuple[Array, Array]:
    """Mean over the rows of -log softmax(logits (rows, classes))[label]. Returns the loss, 0-d, and scaled d_logits.

    No rows give loss 0. The loss stays on its device: its conversion to a float waits for the device, so the caller
    converts it after the backward pass.
    """
    xp = namespace(logits)
    dtype, logits = logits.dtype, wide(logits)
    rows = xp.arange(len(labels))
    shifted = logits - logits.max(axis=-1, keepdims=True)
    d_logits = xp.exp(shifted)
    total = d_logits.sum(axis=-1, keepdims=True)
    share = 1 / max(len(labels), 1)
    loss = (xp.log(total[:, 0]) - shifted[rows, labels]).sum(dtype=xp.float64) * share
    d_logits /= total
    d_logits[rows, labels] -= 1
    d_logits *= share * loss_scale
    return loss, d_logits.astype(dtype, copy=False)


def patches(x: Array, size: int) -> Array:
    """Every size x size neighbourhood of x (n, height, width, channels), zeros outside, as a row ("im2col").

    Returns (n * height * width, size * size * channels), a copy. `size` is odd.
    """
    xp = namespace(x)
    n, height, width, channels = x.shape
    margin = size // 2
    padded = xp.zeros((n, height + 2 * margin, width + 2 * margin, channels), x.dtype)
    padded[:, margin : margin + height, margin : margin + width] = x
    image, row, column, channel = padded.strides
    windows = xp.lib.stride_tricks.as_strided(
        padded, (n, height, width, size, size, channels), (image, row, column, row, column, channel)
    )
    return windows.reshape(n * height * width, size * size * channels)


def convolution(x: Array, weight: Array) -> tuple[Array, Array]:
    """Cross-correlate x (n, height, width, inputs) with weight (size, size, inputs, outputs), zeros outside.

    Returns y (n, height, width, outputs) and the patches of x, kept for the backward pass.
    """
    rows = patches(x, weight.shape[0])
    y = product(rows, weight.reshape(rows.shape[1], weight.shape[3]))
    return y.reshape(*x.shape[:3], weight.shape[3]), rows


def convolution_backward_weight(d_y: Array, rows: Array, weight: Array) -> Array:
    return product(rows.T, d_y.reshape(len(rows), weight.shape[3])).reshape(weight.shape)


def convolution_backward_input(d_y: Array, weight: Array) -> Array:
    """By x: d_y convolved with the weight turned by 180 degrees, its inputs and outputs exchanged."""
    return convolution(d_y, weight[::-1, ::-1].transpose(0, 1, 3, 2))[0]


def _quarters(x: Array) -> list[Array]:
    """Four views of x (n, height, width, channels), each one corner of all 2 x 2 squares."""
    return [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]


def max_pool(x: Array) -> Array:
    """The largest of each 2 x 2 square; height and width must be even."""
    xp = namespace(x)
    a, b, c, d = _quarters(x)
    return xp.maximum(xp.maximum(a, b), xp.maximum(c, d))


def max_pool_backward(d_y: Array, x: Array, y: Array) -> Array:
    """If several values of a square are the largest (plain background), the first gets the gradient."""
    xp = namespace(x)
    d_x = xp.empty_like(x)
    left = d_y
    for corner, d_corner in zip(_quarters(x), _quarters(d_x), strict=True):
        here = corner == y
        xp.multiply(left, here, out=d_corner)
        left = left * ~here
    return d_x


def attention(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Causal attention of q, k, v (n, heads, time, width): no position sees a later one.

    Returns y, shaped like q, and the attention probabilities, kept for the backward pass.
    Source: Vaswani et al., Attention Is All You Need (2017), section 3.2.1.
    """
    xp = namespace(q)
    logits = wide(q) @ wide(k).swapaxes(-1, -2)
    logits *= 1 / math.sqrt(q.shape[-1])
    logits += xp.triu(xp.full(logits.shape[-2:], -xp.inf, logits.dtype), 1)
    probabilities = softmax(logits).astype(q.dtype, copy=False)
    return product(probabilities, v), probabilities


def attention_backward(d_y: Array, q: Array, k: Array, v: Array, probabilities: Array) -> tuple[Array, Array, Array]:
    d_probabilities = wide(d_y) @ wide(v).swapaxes(-1, -2)
    weights = wide(probabilities)
    inner = (d_probabilities * weights).sum(axis=-1, keepdims=True)
    d_logits = weights * (d_probabilities - inner)
    d_logits *= 1 / math.sqrt(q.shape[-1])
    d_logits = d_logits.astype(q.dtype, copy=False)
    return product(d_logits, k), product(d_logits.swapaxes(-1, -2), q), product(probabilities.swapaxes(-1, -2), d_y)
