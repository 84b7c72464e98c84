"""Every gradient against central differences in float64, and what the models promise beside that."""

import ml_dtypes
import numpy
import pytest

from models import cnn, gpt, mlp

CLASSES, VOCABULARY = 5, 11


def model_mlp(rng, dtype="float64", samples=6):
    parameters = mlp.initial(rng, numpy, inputs=12, hidden=(9, 7), classes=CLASSES, dtype=dtype)
    return mlp, parameters, images(rng, samples, 12, dtype)


def model_cnn(rng, dtype="float64", samples=3):
    parameters = cnn.initial(rng, numpy, inputs=64, channels=(3, 4), classes=CLASSES, dtype=dtype)
    return cnn, parameters, images(rng, samples, 64, dtype)


def model_gpt(rng, dtype="float64", samples=3):
    sizes = {"vocabulary": VOCABULARY, "context": 8, "width": 12, "heads": 3, "layers": 2}
    parameters = gpt.initial(rng, numpy, dtype=dtype, **sizes)
    tokens = rng.integers(VOCABULARY, size=(samples, 7))  # shorter than the context
    return gpt, parameters, (tokens[:, :-1], tokens[:, 1:])


def images(rng, samples, inputs, dtype):
    return rng.random((samples, inputs)).astype(dtype), rng.integers(CLASSES, size=samples)


MODELS = [model_mlp, model_cnn, model_gpt]


@pytest.fixture(params=MODELS)
def build(request):
    return request.param


def gradients_of(model, parameters, batch):
    """The loss and the gradients by name, in the order in which they were handed in."""
    found = {}

    def on_gradient(name, array):
        assert name not in found
        found[name] = array

    return model.loss_and_gradients(parameters, batch, on_gradient), found


def test_gradients_match_central_differences(build):
    rng = numpy.random.default_rng(7)
    model, parameters, batch = build(rng)
    for name in parameters:  # away from the zeros and ones of the start, so that every term counts
        parameters[name] += 0.3 * rng.normal(size=parameters[name].shape)
    _, gradients = gradients_of(model, parameters, batch)

    def slope(value, direction, width=1e-5):
        losses = []
        for sign in (1, -1):
            value += sign * width * direction
            losses.append(gradients_of(model, parameters, batch)[0])
            value -= sign * width * direction
        return (losses[0] - losses[1]) / (2 * width)

    for name, value in parameters.items():
        gradient = gradients[name]
        largest = abs(gradient).max()
        assert largest > 1e-6, name
        for _ in range(3):
            direction = rng.normal(size=value.shape)
            direction /= numpy.linalg.norm(direction)
            expected = slope(value, direction)
            assert abs((gradient * direction).sum() - expected) < 1e-6 * largest, name
        for entry in rng.choice(value.size, size=min(6, value.size), replace=False):
            direction = numpy.zeros(value.shape)
            direction.flat[entry] = 1
            assert abs(gradient.flat[entry] - slope(value, direction)) < 1e-6 * largest, (name, entry)


def test_every_gradient_once_last_layer_first_final_in_arrays_of_its_own(build):
    model, parameters, batch = build(numpy.random.default_rng(1), "float32")
    _, gradients = gradients_of(model, parameters, batch)
    copies = []
    model.loss_and_gradients(parameters, batch, lambda _, array: copies.append(array.copy()))
    assert all((now == then).all() for now, then in zip(gradients.values(), copies, strict=True))
    assert gradients.keys() == parameters.keys()
    for name, gradient in gradients.items():
        assert (gradient.shape, gradient.dtype) == (parameters[name].shape, numpy.float32), name
        others = [*parameters.values(), *(other for key, other in gradients.items() if key != name)]
        assert not any(numpy.shares_memory(gradient, other) for other in others), name
    order, last_layer = list(gradients), {mlp: "dense3", cnn: "dense", gpt: "norm"}[model]
    assert all(name.startswith(f"{last_layer}.") for name in order[:2])
    assert order[-1] == {mlp: "dense1.weight", cnn: "conv1.weight", gpt: "embedding.token"}[model]


def test_empty_batch(build):
    for dtype in ("float32", "float64"):
        model, parameters, batch = build(numpy.random.default_rng(3), dtype, samples=0)
        loss, gradients = gradients_of(model, parameters, batch)
        assert loss == 0.0
        assert gradients.keys() == parameters.keys()
        for name, gradient in gradients.items():
            assert (gradient.shape, gradient.dtype) == (parameters[name].shape, dtype)
            assert not gradient.any(), name
        assert len(model.scores(parameters, batch[0])) == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-6)])
def test_loss_is_the_mean_cross_entropy_of_the_scores(build, dtype, tolerance):
    model, parameters, (x, y) = build(numpy.random.default_rng(4), dtype)
    loss, _ = gradients_of(model, parameters, (x, y))
    logits = model.scores(parameters, x)
    assert (logits.dtype, logits.shape[:-1]) == (dtype, y.shape)
    exponentials = numpy.exp(logits.astype("float64").reshape(y.size, -1))
    likelihoods = exponentials[range(y.size), y.ravel()] / exponentials.sum(axis=1)
    assert isinstance(loss, float)
    assert loss == pytest.approx(-numpy.log(likelihoods).mean(), rel=tolerance)


def test_weighted_halves_make_the_whole(build):
    model, parameters, (x, y) = build(numpy.random.default_rng(5), samples=7)
    whole_loss, whole = gradients_of(model, parameters, (x, y))
    halves = [gradients_of(model, parameters, (x[part], y[part])) for part in (slice(3), slice(3, 7))]
    assert (3 * halves[0][0] + 4 * halves[1][0]) / 7 == pytest.approx(whole_loss, rel=1e-13)
    for name, expected in whole.items():
        found = (3 * halves[0][1][name] + 4 * halves[1][1][name]) / 7
        numpy.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-14, err_msg=name)


def test_large_logits_do_not_overflow(build):
    model, parameters, batch = build(numpy.random.default_rng(6), "float32")
    for name in parameters:
        parameters[name] *= 30
    loss, gradients = gradients_of(model, parameters, batch)
    assert numpy.isfinite(loss)
    assert all(numpy.isfinite(gradient).all() for gradient in gradients.values())


def test_the_same_start_in_every_dtype(build):
    single, double = (build(numpy.random.default_rng(8), dtype)[1] for dtype in ("float32", "float64"))
    assert single.keys() == double.keys()
    for name, value in single.items():
        assert (value == double[name].astype("float32")).all()


def test_cnn_against_convolution_and_pool_by_loops():
    rng = numpy.random.default_rng(9)
    _, p, (x, _) = model_cnn(rng)
    p["conv1.bias"] += rng.normal(size=3)
    p["conv2.bias"] += rng.normal(size=4)

    def stage(image, weight, bias):
        side, outputs = image.shape[0], weight.shape[3]
        padded = numpy.pad(image, ((1, 1), (1, 1), (0, 0)))
        y = numpy.empty((side, side, outputs))
        for i in range(side):
            for j in range(side):
                y[i, j] = numpy.tensordot(padded[i : i + 3, j : j + 3], weight, axes=3) + bias
        y = numpy.maximum(y, 0)
        return y.reshape(side // 2, 2, side // 2, 2, outputs).max(axis=(1, 3))

    for image, found in zip(x, cnn.scores(p, x), strict=True):
        hidden = stage(image.reshape(8, 8, 1), p["conv1.weight"], p["conv1.bias"])
        hidden = stage(hidden, p["conv2.weight"], p["conv2.bias"])
        numpy.testing.assert_allclose(found, hidden.ravel() @ p["dense.weight"] + p["dense.bias"], rtol=1e-12)


def test_gpt_sees_no_later_token():
    rng = numpy.random.default_rng(11)
    _, parameters, (x, _) = model_gpt(rng)
    expected = gpt.scores(parameters, x)
    for position in range(1, x.shape[1]):
        changed = x.copy()
        changed[:, position:] = (changed[:, position:] + 1 + rng.integers(VOCABULARY - 1)) % VOCABULARY
        found = gpt.scores(parameters, changed)
        assert (found[:, :position] == expected[:, :position]).all()
        assert (found[:, position] != expected[:, position]).all()


def test_gpt_generates():
    rng = numpy.random.default_rng(12)
    _, parameters, _ = model_gpt(rng)
    prompt = numpy.array([1, 2, 3])
    tokens = gpt.generate(parameters, prompt, 20, numpy.random.default_rng(0))  # longer than the context
    again = gpt.generate(parameters, prompt, 20, numpy.random.default_rng(0))
    assert tokens.shape == (20,)
    assert (tokens == again).all()
    assert tokens.dtype == prompt.dtype
    assert ((tokens >= 0) & (tokens < VOCABULARY)).all()
    # At a temperature near zero the most likely token always wins.
    first = gpt.generate(parameters, prompt, 1, rng, temperature=1e-9)
    assert first == gpt.scores(parameters, prompt[None])[0, -1].argmax()
    assert gpt.generate(parameters, prompt, 0, rng).shape == (0,)


def test_sizes_that_are_not_allowed():
    rng = numpy.random.default_rng(0)
    with pytest.raises(ValueError, match="inputs is 36; allowed: the square of a multiple of 4"):
        cnn.initial(rng, numpy, inputs=36)
    with pytest.raises(ValueError, match="width is 10 and heads 3; allowed"):
        gpt.initial(rng, numpy, vocabulary=5, width=10, heads=3)
    _, parameters, _ = model_gpt(rng)
    with pytest.raises(ValueError, match="temperature is 0; allowed"):
        gpt.generate(parameters, numpy.array([1]), 1, rng, temperature=0)


@pytest.mark.parametrize(("precision", "unit"), [("bfloat16", 2.0**-9), ("float16", 2.0**-12)])
@pytest.mark.parametrize("scale", [1.0, 256.0])
def test_gradients_in_16_bits_are_those_in_64_but_for_roundings(build, precision, unit, scale):
    """Every value on the way is rounded once, so a gradient is off by a few units of its largest value.

    Parameters and batch are rounded beforehand, so that both computations begin with the same ones. Some 20 layers one
    behind the other (in the GPT) allow 20 units; and without any difference it would not be 16 bits.
    """
    dtype = numpy.dtype(getattr(ml_dtypes, precision, precision))
    rng = numpy.random.default_rng(11)
    model, parameters, batch = build(rng, "float32")
    for name in parameters:
        parameters[name] += 0.1 * rng.normal(size=parameters[name].shape).astype("float32")
    narrow = {name: value.astype(dtype) for name, value in parameters.items()}
    x = batch[0].astype(dtype) if batch[0].dtype == "float32" else batch[0]
    exact = {name: value.astype("float64") for name, value in narrow.items()}
    expected_loss, expected = gradients_of(model, exact, (x.astype("float64") if x.dtype == dtype else x, batch[1]))
    gradients = {}
    loss = model.loss_and_gradients(narrow, (x, batch[1]), gradients.__setitem__, loss_scale=scale)
    assert abs(loss - expected_loss) < 20 * unit * expected_loss
    assert gradients.keys() == expected.keys()
    for name, found in gradients.items():
        assert found.dtype in (dtype, numpy.float32)
        assert found.shape == narrow[name].shape
        off = abs(found.astype("float64") / scale - expected[name]).max() / abs(expected[name]).max()
        assert 0 < off < 20 * unit, (name, off / unit)


def test_cnn_gradient_where_a_whole_square_is_equal():
    """A plain image: all four values of a square are the largest, and one of them takes the gradient."""
    _, parameters, _ = model_cnn(numpy.random.default_rng(10))
    batch = numpy.zeros((2, 64)), numpy.array([0, 1])
    gradient = gradients_of(cnn, parameters | {"conv1.bias": parameters["conv1.bias"] + 0.1}, batch)[1]["conv1.bias"]
    above, below = (
        gradients_of(cnn, parameters | {"conv1.bias": parameters["conv1.bias"] + 0.1 + width}, batch)[0]
        for width in (1e-5, -1e-5)
    )
    assert gradient.sum() == pytest.approx((above - below) / 2e-5, rel=1e-6)


def test_default_sizes():
    rng = numpy.random.default_rng(0)
    shapes = [[value.shape for value in model.initial(rng, numpy).values()] for model in (mlp, cnn)]
    assert shapes[0] == [(784, 256), (256,), (256, 10), (10,)]
    assert shapes[1] == [(3, 3, 1, 16), (16,), (3, 3, 16, 32), (32,), (1568, 10), (10,)]
    assert {value.dtype.name for value in mlp.initial(rng, numpy).values()} == {"float32"}
