"""A small GPT: pre-norm blocks, learned positions, causal attention, GELU MLP, output tied to the embedding.

Sizes are only in the parameters' shapes: attention.qkv.weight is (width, 3, heads, head width).
Source: Radford et al., Language Models are Unsupervised Multitask Learners (2019), section 2.3.
"""

from collections.abc import Callable
from types import ModuleType

import numpy
from numpy.typing import DTypeLike

from mpitrain.arrays import Array, is_device_array, namespace

from .layers import (
    attention,
    attention_backward,
    dense,
    dense_backward,
    gelu,
    gelu_backward,
    layer_norm,
    layer_norm_backward,
    normal,
    product,
    softmax_cross_entropy,
    wide,
)

Parameters = dict[str, Array]
OnGradient = Callable[[str, Array], None]


def initial(
    rng: numpy.random.Generator,
    xp: ModuleType,
    *,
    vocabulary: int,
    context: int = 64,
    width: int = 128,
    heads: int = 4,
    layers: int = 2,
    dtype: DTypeLike = "float32",
) -> Parameters:
    """Random parameters: normal, deviation 0.02; smaller by the depth for those that write to the residual stream."""
    if width % heads:
        raise ValueError(f"width is {width} and heads {heads}; allowed: a width that is a multiple of heads")
    into_stream = 0.02 / (2 * layers) ** 0.5
    parameters = {
        "embedding.token": normal(rng, xp, (vocabulary, width), 0.02, dtype),
        "embedding.position": normal(rng, xp, (context, width), 0.02, dtype),
    }
    shapes = {
        "norm1.scale": (width,),
        "norm1.bias": (width,),
        "attention.qkv.weight": (width, 3, heads, width // heads),
        "attention.qkv.bias": (3 * width,),
        "attention.out.weight": (width, width),
        "attention.out.bias": (width,),
        "norm2.scale": (width,),
        "norm2.bias": (width,),
        "mlp.up.weight": (width, 4 * width),
        "mlp.up.bias": (4 * width,),
        "mlp.down.weight": (4 * width, width),
        "mlp.down.bias": (width,),
    }
    for layer in range(layers):
        for name, shape in shapes.items():
            if name.endswith("weight"):
                deviation = into_stream if name in ("attention.out.weight", "mlp.down.weight") else 0.02
                value = normal(rng, xp, shape, deviation, dtype)
            else:
                value = xp.full(shape, float(name.endswith("scale")), dtype)
            parameters[f"block{layer}.{name}"] = value
    parameters["norm.scale"] = xp.ones(width, dtype)
    parameters["norm.bias"] = xp.zeros(width, dtype)
    return parameters


def scores(parameters: Parameters, x: Array) -> Array:
    """The logits (n, time, vocabulary) of integer tokens x (n, time), time at most the context."""
    return _forward(parameters, x)[0]


def loss_and_gradients(
    parameters: Parameters, batch: tuple[Array, Array], on_gradient: OnGradient, loss_scale: float = 1.0
) -> float:
    """The mean loss over the tokens of batch = x, y: integers (n, time), y one token later. See `models`."""
    x, y = batch
    xp = namespace(x)
    logits, kept_blocks, (h, normalised, inverse) = _forward(parameters, x)
    embedding, positions = parameters["embedding.token"], parameters["embedding.position"]
    vocabulary, width = embedding.shape

    loss, d_logits = softmax_cross_entropy(logits.reshape(y.size, vocabulary), y.reshape(y.size), loss_scale)
    d_embedding = wide(product(d_logits.T, h.reshape(y.size, width)))
    d = product(d_logits, embedding).reshape(h.shape)
    d, d_scale, d_bias = layer_norm_backward(d, parameters["norm.scale"], normalised, inverse)
    on_gradient("norm.bias", d_bias)
    on_gradient("norm.scale", d_scale)
    for layer in reversed(range(len(kept_blocks))):
        d = _block_backward(parameters, f"block{layer}.", kept_blocks[layer], d, on_gradient)

    d_positions = xp.zeros_like(wide(positions))
    d_positions[: x.shape[1]] = wide(d).sum(axis=0)
    on_gradient("embedding.position", d_positions)
    # A product with one-hot rows instead of xp.add.at: the same bits every time on a GPU, and quick enough
    # for a vocabulary of characters.
    one_hot = (x.reshape(x.size, 1) == xp.arange(vocabulary)).astype(d.dtype)
    d_embedding += wide(product(one_hot.T, d.reshape(x.size, width)))
    on_gradient("embedding.token", d_embedding)
    return float(loss)


def generate(
    parameters: Parameters, prompt: Array, length: int, rng: numpy.random.Generator, temperature: float = 1.0
) -> Array:
    """Continue integer tokens `prompt` (time >= 1,) by `length` sampled ones; returns those (length,)."""
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; allowed: a number > 0")
    xp = namespace(prompt)
    context = len(parameters["embedding.position"])
    tokens = prompt
    for _ in range(length):
        logits = scores(parameters, tokens[None, -context:])[0, -1]
        host = (logits.get() if is_device_array(logits) else logits).astype("float64")
        # Adding Gumbel noise and taking the largest is drawing from the softmax (Gumbel, 1954).
        choice = (host / temperature + rng.gumbel(size=host.shape)).argmax()
        tokens = xp.concatenate([tokens, xp.asarray([choice], tokens.dtype)])
    return tokens[len(prompt) :]


def _forward(parameters: Parameters, x: Array) -> tuple[Array, list[list[Array]], tuple[Array, Array, Array]]:
    embedding = parameters["embedding.token"]
    stream = embedding[x] + parameters["embedding.position"][: x.shape[1]]
    kept_blocks: list[list[Array]] = []
    while f"block{len(kept_blocks)}.norm1.scale" in parameters:
        stream, kept = _block(parameters, f"block{len(kept_blocks)}.", stream)
        kept_blocks.append(kept)
    h, normalised, inverse = layer_norm(stream, parameters["norm.scale"], parameters["norm.bias"])
    return product(h, embedding.T), kept_blocks, (h, normalised, inverse)


def _block(parameters: Parameters, block: str, stream: Array) -> tuple[Array, list[Array]]:
    """Add attention and then the MLP to the residual stream. Returns the stream and the backward pass's values."""

    def p(name: str) -> Array:
        return parameters[block + name]

    n, time, width = stream.shape
    _, _, heads, head_width = p("attention.qkv.weight").shape
    h1, normalised1, inverse1 = layer_norm(stream, p("norm1.scale"), p("norm1.bias"))
    qkv = dense(h1, p("attention.qkv.weight").reshape(width, 3 * width), p("attention.qkv.bias"))
    qkv = qkv.reshape(n, time, 3, heads, head_width).transpose(2, 0, 3, 1, 4)
    q, k, v = qkv
    mixed, probabilities = attention(q, k, v)
    joined = mixed.swapaxes(1, 2).reshape(n, time, width)
    stream = stream + dense(joined, p("attention.out.weight"), p("attention.out.bias"))

    h2, normalised2, inverse2 = layer_norm(stream, p("norm2.scale"), p("norm2.bias"))
    up = dense(h2, p("mlp.up.weight"), p("mlp.up.bias"))
    active, tanh = gelu(up)
    stream = stream + dense(active, p("mlp.down.weight"), p("mlp.down.bias"))
    kept = [
        h1,
        normalised1,
        inverse1,
        qkv,
        probabilities,
        joined,
        h2,
        normalised2,
        inverse2,
        up,
        active,
        tanh,
    ]
    return stream, kept


def _block_backward(parameters: Parameters, block: str, kept: list[Array], d: Array, on_gradient: OnGradient) -> Array:
    """`d` is the gradient by the block's output, the returned one that by its input."""
    h1, normalised1, inverse1, qkv, probabilities, joined, h2, normalised2, inverse2, up, active, tanh = kept
    xp = namespace(d)
    _, n, heads, time, head_width = qkv.shape
    width = heads * head_width

    def dense_part(name: str, d_y: Array, x: Array) -> Array:
        weight = parameters[f"{block}{name}.weight"]
        d_x, d_weight, d_bias = dense_backward(d_y, x, weight.reshape(len(weight), -1))
        on_gradient(f"{block}{name}.bias", d_bias)
        on_gradient(f"{block}{name}.weight", d_weight.reshape(weight.shape))
        return d_x

    def norm_part(name: str, d_y: Array, normalised: Array, inverse: Array) -> Array:
        d_x, d_scale, d_bias = layer_norm_backward(d_y, parameters[f"{block}{name}.scale"], normalised, inverse)
        on_gradient(f"{block}{name}.bias", d_bias)
        on_gradient(f"{block}{name}.scale", d_scale)
        return d_x

    d_up = gelu_backward(dense_part("mlp.down", d, active), up, tanh)
    d = d + norm_part("norm2", dense_part("mlp.up", d_up, h2), normalised2, inverse2)

    d_joined = dense_part("attention.out", d, joined)
    d_mixed = d_joined.reshape(n, time, heads, head_width).swapaxes(1, 2)
    q, k, v = qkv
    d_qkv = xp.stack(attention_backward(d_mixed, q, k, v, probabilities))
    d_qkv = d_qkv.transpose(1, 3, 0, 2, 4).reshape(n, time, 3 * width)
    return d + norm_part("norm1", dense_part("attention.qkv", d_qkv, h1), normalised1, inverse1)
