"""The optimizers, also over a part, against a reference: one array per parameter, float64, formulas of the papers."""

from __future__ import annotations

import math
import tracemalloc
from itertools import pairwise

import numpy
import pytest

from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.optim.flat_optimizer import clip_by_global_norm
from mpitrain.optim.optimizers import SGD, Adam, AdamW
from mpitrain.optim.schedules import warmup_cosine

SHAPES = {"weight": (7, 5), "bias": (5,), "scale": (3,), "head": (5, 4)}
DECAYED = {"weight", "head"}
STEPS = 60


def ranges() -> dict[str, slice]:
    result, start = {}, 0
    for name, shape in SHAPES.items():
        result[name] = slice(start, start + math.prod(shape))
        start = result[name].stop
    return result


SIZE = max(part.stop for part in ranges().values())
DECAYED_RANGES = [part for name, part in ranges().items() if name in DECAYED]


def flat(values: dict, dtype) -> numpy.ndarray:
    return numpy.concatenate([values[name].ravel() for name in SHAPES]).astype(dtype)


def draws(seed: int) -> list[dict]:
    """The parameters, then the gradients of each step."""
    rng = numpy.random.default_rng(seed)
    return [{name: rng.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(STEPS + 1)]


def reference_sgd(p, gradients, rates, momentum, nesterov, weight_decay):
    velocity = dict.fromkeys(p, 0.0)
    for all_g, rate in zip(gradients, rates, strict=True):
        for name in p:
            g = all_g[name] + (weight_decay * p[name] if name in DECAYED else 0)
            velocity[name] = momentum * velocity[name] + g
            p[name] = p[name] - rate * (g + momentum * velocity[name] if nesterov else velocity[name])
    return p


def reference_adamw(p, gradients, rates, betas, epsilon, weight_decay):
    m, v = dict.fromkeys(p, 0.0), dict.fromkeys(p, 0.0)
    for t, (all_g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        for name, g in all_g.items():
            if name in DECAYED:
                p[name] = p[name] - rate * weight_decay * p[name]
            m[name] = betas[0] * m[name] + (1 - betas[0]) * g
            v[name] = betas[1] * v[name] + (1 - betas[1]) * g**2
            m_hat, v_hat = m[name] / (1 - betas[0] ** t), v[name] / (1 - betas[1] ** t)
            p[name] = p[name] - rate * m_hat / (numpy.sqrt(v_hat) + epsilon)
    return p


def clipped(gradients, max_norm):
    if max_norm is None:
        return gradients
    result = []
    for g in gradients:
        norm = math.sqrt(sum(float((value**2).sum()) for value in g.values()))
        result.append({name: value * min(1, max_norm / norm) for name, value in g.items()})
    return result


def run(optimizer, parameters, gradients, dtype=numpy.float64):
    values = flat(parameters, dtype)
    optimizer.start(values, DECAYED_RANGES)
    rates = [optimizer.update(flat(g, dtype)) for g in gradients]
    return values, rates


SCHEDULE = warmup_cosine(0.05, warmup_steps=5, total_steps=STEPS)
RATES = [SCHEDULE(step) for step in range(STEPS)]
TOLERANCE = {numpy.float64: 1e-12, numpy.float32: 2e-5}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("clip_norm", [None, 8.0])  # the gradients' norm is about 7.9, so 8.0 clips some steps
@pytest.mark.parametrize(
    "options",
    [{"momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
     {"momentum": 0.0, "nesterov": False, "weight_decay": 0.1},
     {"momentum": 0.9, "nesterov": False, "weight_decay": 0.1},
     {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
)  # fmt: skip
def test_sgd(options, clip_norm, dtype):
    parameters, *gradients = draws(1)
    found, rates = run(SGD(SCHEDULE, clip_norm=clip_norm, **options), parameters, gradients, dtype)
    expected = flat(reference_sgd(parameters, clipped(gradients, clip_norm), RATES, **options), float)
    assert rates == RATES
    assert found.dtype == dtype
    numpy.testing.assert_allclose(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("clip_norm", [None, 8.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_adam_and_adamw(weight_decay, clip_norm, dtype):
    parameters, *gradients = draws(2)
    options = {"betas": (0.8, 0.95), "epsilon": 1e-3}
    adamw = AdamW(SCHEDULE, weight_decay=weight_decay, clip_norm=clip_norm, **options)
    found, rates = run(adamw, parameters, gradients, dtype)
    if weight_decay == 0:
        same, _ = run(Adam(SCHEDULE, clip_norm=clip_norm, **options), parameters, gradients, dtype)
        assert (found == same).all()
    expected = reference_adamw(parameters, clipped(gradients, clip_norm), RATES, weight_decay=weight_decay, **options)
    assert rates == RATES
    assert found.dtype == dtype
    numpy.testing.assert_allclose(found, flat(expected, float), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_norm_is_measured_when_asked_or_clipped(dtype):
    parameters, *gradients = draws(3)
    norms = [math.sqrt(sum(float((value**2).sum()) for value in g.values())) for g in gradients]
    for make in (SGD, Adam, AdamW):
        optimizer = make(0.1)
        optimizer.start(flat(parameters, dtype), [])
        assert optimizer.gradient_norm() is None
        for number in range(4):
            if number % 2:
                optimizer.measure_gradient_norm()
            optimizer.update(flat(gradients[number], dtype))
            expected = pytest.approx(norms[number], rel=TOLERANCE[dtype]) if number % 2 else None
            assert optimizer.gradient_norm() == expected
        optimizer = make(0.1, clip_norm=0.01)  # measured anyway, before it is clipped
        optimizer.start(flat(parameters, dtype), [])
        optimizer.update(flat(gradients[0], dtype))
        assert optimizer.gradient_norm() == pytest.approx(norms[0], rel=TOLERANCE[dtype])


@pytest.mark.parametrize("decayed", [[slice(2, 4), slice(0, 2), slice(4, 4), slice(4, 7)], [slice(0, 7)]])
def test_decay_ranges_may_be_adjacent_empty_and_in_any_order(decayed):
    parameters = numpy.ones(9)
    optimizer = SGD(1.0, weight_decay=0.5)
    optimizer.start(parameters, decayed)
    optimizer.update(numpy.zeros(9))
    assert parameters.tolist() == [0.5] * 7 + [1.0] * 2


def test_no_parameters_at_all():
    for optimizer in (SGD(0.1, momentum=0.9, clip_norm=1.0), AdamW(0.1, clip_norm=1.0)):
        optimizer.start(numpy.empty(0), [])
        assert optimizer.update(numpy.empty(0)) == 0.1


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_step_allocates_nothing(dtype):
    count = 100_000
    for optimizer in (
        SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1, clip_norm=1.0),
        AdamW(0.1, clip_norm=1.0),
    ):
        optimizer.start(numpy.ones(count, dtype), [slice(0, count // 2)])
        gradients = numpy.ones(count, dtype)
        optimizer.update(gradients)
        tracemalloc.start()
        optimizer.update(gradients)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < gradients.nbytes / 2  # einsum converts float32 in pieces of fixed length


@pytest.mark.parametrize(
    "make",
    [lambda: SGD(SCHEDULE), lambda: SGD(SCHEDULE, momentum=0.9, nesterov=True, weight_decay=0.1),
     lambda: Adam(SCHEDULE), lambda: AdamW(SCHEDULE, clip_norm=3.0)],
)  # fmt: skip
def test_a_restored_optimizer_goes_on_bit_for_bit(make):
    parameters, *gradients = draws(3)
    expected, _ = run(make(), parameters, gradients, numpy.float32)

    first = make()
    halfway, _ = run(first, parameters, gradients[: STEPS // 2], numpy.float32)
    saved = {name: value.copy() if name != "step" else value for name, value in first.state().items()}
    second = make()
    second.start(halfway, DECAYED_RANGES)
    second.restore(saved)
    for g in gradients[STEPS // 2 :]:
        second.update(flat(g, numpy.float32))
    assert (halfway == expected).all()
    assert second.state()["step"] == STEPS


def test_state_is_the_buffers_and_restore_a_copy():
    optimizer = Adam(0.1)
    optimizer.start(numpy.zeros(3), [])
    state = optimizer.state()
    assert state.keys() == {"first", "second", "step"}
    optimizer.update(numpy.ones(3))
    assert state["first"].tolist() == pytest.approx([0.1] * 3)
    given = {"first": numpy.ones(3), "second": numpy.ones(3), "step": 7}
    optimizer.restore(given)
    assert optimizer.state()["first"] is not given["first"]
    assert optimizer.state() | {"first": 0, "second": 0} == {"first": 0, "second": 0, "step": 7}


GOOD = {"first": numpy.ones(3), "second": numpy.ones(3), "step": 7}


@pytest.mark.parametrize(
    ("state", "text"),
    [({"first": numpy.ones(3), "step": 7}, r"state for Adam: the saved one lacks second, so another"),
     (GOOD | {"velocity": 0}, r"the saved one has besides velocity, so another optimizer"),
     (GOOD | {"second": numpy.ones(4)}, r"second is float64\(4,\); the parameters are float64\(3,\)"),
     (GOOD | {"second": numpy.ones(3, "f4")}, r"second is float32\(3,\); the parameters are float64\(3,\)"),
     (GOOD | {"step": -1}, "step is -1; allowed"),
     (GOOD | {"step": numpy.ones(3)}, "step is array")],
)  # fmt: skip
def test_restore_refuses_before_it_overwrites(state, text):
    optimizer = Adam(0.1)
    optimizer.start(numpy.zeros(3), [])
    with pytest.raises(CheckpointError, match=text):
        optimizer.restore(state)
    assert not optimizer.state()["first"].any()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_clip_below_at_and_above(dtype):
    gradients = numpy.array([3.0, 0.0, -4.0], dtype)
    for max_norm in (5.5, 5.0):
        assert clip_by_global_norm(gradients, max_norm) == 5.0
        assert gradients.tolist() == [3.0, 0.0, -4.0]
    assert clip_by_global_norm(gradients, 2.5) == 5.0
    assert gradients.tolist() == [1.5, 0.0, -2.0]


@pytest.mark.parametrize(("dtype", "large"), [(numpy.float32, 1e25), (numpy.float32, 1e36), (numpy.float64, 1e300)])
def test_clip_does_not_overflow(dtype, large):
    gradients = numpy.full(10_000, large, dtype)
    assert clip_by_global_norm(gradients, 1.0) == pytest.approx(100 * float(dtype(large)), rel=1e-12)
    assert gradients == pytest.approx(0.01, rel=1e-6)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_clip_leaves_gradients_that_are_not_finite(value):
    gradients = numpy.array([1e200, value, -1.0])
    norm = clip_by_global_norm(gradients, 1.0)
    assert math.isnan(norm) if math.isnan(value) else norm == math.inf
    assert gradients[0] == 1e200


@pytest.mark.parametrize("bounds", [[0, 31, SIZE], [0, 0, 1, SIZE], [0, SIZE]])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(lambda step: 0.1 / (1 + step), momentum=0.9, weight_decay=0.1),
        lambda: AdamW(lambda step: 0.1 / (1 + step), weight_decay=0.1),
    ],
)
def test_parts_have_the_bits_of_the_whole(make, dtype, bounds):
    """Each part has an optimizer of its own, and only the first one's schedule counts. The rest of it stays."""
    start, *gradients = draws(5)
    whole, values = make(), flat(start, dtype)
    whole.start(values, DECAYED_RANGES)
    parts = [slice(begin, end) for begin, end in pairwise(bounds)]
    optimizers, copies = [make() for _ in parts], [flat(start, dtype) for _ in parts]
    for optimizer, part, copy in zip(optimizers, parts, copies, strict=True):
        optimizer.start(copy, DECAYED_RANGES)
        optimizer.update_only(part, float)
    for step in gradients:
        expected = whole.update(flat(step, dtype))
        plan = optimizers[0].plan_update()
        for optimizer, part in zip(optimizers, parts, strict=True):
            optimizer.follow_plan(plan)
            assert optimizer.update(flat(step, dtype)[part]) == expected
    for optimizer, part, copy in zip(optimizers, parts, copies, strict=True):
        assert copy[part].tobytes() == values[part].tobytes()
        others = [name for name in whole.state() if name != "step"]
        for name in others:
            assert optimizer.state()[name][part].tobytes() == whole.state()[name][part].tobytes()
        untouched = flat(start, dtype)
        untouched[part] = copy[part]
        assert copy.tobytes() == untouched.tobytes()
        assert optimizer.state()["step"] == STEPS


def test_a_part_is_clipped_by_the_norm_of_all():
    """The norm of the part is 5, that of all 10, and the limit 2: the gradients are divided by 5."""
    optimizer, values = SGD(1.0, clip_norm=2.0), numpy.zeros(4)
    asked = []

    def norm_of_all(norm):
        asked.append(norm)
        return 10.0

    optimizer.start(values, [])
    optimizer.update_only(slice(1, 3), norm_of_all)
    optimizer.update(numpy.array([3.0, 4.0]))
    assert asked == [5.0]
    assert optimizer.gradient_norm() == 10.0
    numpy.testing.assert_allclose(values, [0, -0.6, -0.8, 0], rtol=1e-15)


def test_the_norm_of_all_parts_is_asked_where_it_is_measured():
    optimizer = SGD(1.0)
    optimizer.start(numpy.zeros(4), [])
    optimizer.update_only(slice(2, 4), lambda norm: norm + 1)
    optimizer.update(numpy.array([3.0, 4.0]))
    assert optimizer.gradient_norm() is None
    optimizer.measure_gradient_norm()
    plan = optimizer.plan_update()
    assert plan["measures_norm"]
    optimizer.follow_plan(plan)
    optimizer.update(numpy.array([3.0, 4.0]))
    assert optimizer.gradient_norm() == 6.0


def test_a_part_takes_gradients_of_its_own_size():
    optimizer = SGD(1.0)
    optimizer.start(numpy.zeros(4), [])
    optimizer.update_only(slice(0, 3), float)
    with pytest.raises(ConfigError, match=r"gradients are float64\(4,\); allowed, as the parameters: float64\(3,\)"):
        optimizer.update(numpy.zeros(4))
