"""Trees: walking, rebuilding and describing any nesting around arrays and numbers."""

from __future__ import annotations

import collections
import decimal
import enum
import fractions
from typing import Any, NamedTuple

import ml_dtypes
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.errors import DataError, TreeError
from mpitrain.tree import describe, leaves, num_samples, rebuild


class Pair(NamedTuple):
    left: Any
    right: Any


class Colour(enum.IntEnum):
    RED = 1


def keys() -> st.SearchStrategy[Any]:
    return st.one_of(st.text(max_size=5), st.integers(-3, 3), st.tuples(st.integers(0, 2), st.text(max_size=2)))


def trees() -> st.SearchStrategy[Any]:
    return st.recursive(
        st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans()),
        lambda child: st.one_of(
            st.lists(child, max_size=4),
            st.lists(child, max_size=4).map(tuple),
            st.builds(Pair, child, child),
            st.dictionaries(keys(), child, max_size=4),
        ),
        max_leaves=20,
    )


def count_leaves(tree: Any) -> int:
    if isinstance(tree, dict):
        return sum(map(count_leaves, tree.values()))
    if isinstance(tree, list | tuple):
        return sum(map(count_leaves, tree))
    return 0 if tree is None else 1


def follow(tree: Any, path: str) -> Any:
    """The path is Python: what stands there is the leaf."""
    return eval(f"tree{path}", {"tree": tree})


@given(trees())
def test_paths_lead_to_the_leaves(tree: Any) -> None:
    found = list(leaves(tree))
    assert len(found) == count_leaves(tree)
    assert len({path for path, _ in found}) == len(found)
    for path, leaf in found:
        assert follow(tree, path) is leaf


@given(trees())
def test_rebuilding(tree: Any) -> None:
    """With the same leaves it is the same tree: types and the order of keys too. Others come in the same places."""
    before = repr(tree)  # NaN is not equal to itself
    values = (leaf for _, leaf in leaves(tree))
    assert repr(rebuild(tree, values.__next__)) == before
    assert not list(values)
    result = rebuild(tree, iter(range(1000)).__next__)
    assert [leaf for _, leaf in leaves(result)] == list(range(count_leaves(tree)))
    assert [path for path, _ in leaves(result)] == [path for path, _ in leaves(tree)]
    assert repr(tree) == before


@given(st.dictionaries(keys(), st.integers(0, 9), max_size=6), st.randoms())
def test_the_order_in_which_a_dict_was_filled_does_not_matter(tree: dict[Any, int], random: Any) -> None:
    items = list(tree.items())
    random.shuffle(items)
    assert list(leaves(dict(items))) == list(leaves(tree))
    assert describe(dict(items)) == describe(tree)


def test_kinds_of_dicts_and_tuples_are_kept() -> None:
    default = collections.defaultdict(list, b=1, a=2)
    ordered = collections.OrderedDict(b=1, a=2)
    counter = collections.Counter(b=1, a=2)
    tree = [default, ordered, counter, Pair(1, (2, [3]))]
    ten = iter(range(10, 100))
    result = rebuild(tree, ten.__next__)
    assert [type(child) for child in result] == [type(child) for child in tree]
    assert result[0].default_factory is list
    assert list(result[1].items()) == [("b", 13), ("a", 12)]
    assert result[2] == {"a": 14, "b": 15}
    assert result[3] == Pair(16, (17, [18]))
    assert default == {"b": 1, "a": 2}


def test_describe() -> None:
    tree = {
        "w": numpy.zeros((784, 256), numpy.float32),
        "b": [numpy.zeros((), ml_dtypes.bfloat16), numpy.zeros((0, 2), ">i2")],
        1: (None, 2, True, 1.0, 1j),
        "numpy": [numpy.float32(1), numpy.datetime64(1, "s"), numpy.str_("abc"), numpy.bool_(True)],
    }
    assert describe(tree) == [
        "['b'][0] bfloat16 ()",
        "['b'][1] >i2 (0, 2)",
        "['numpy'][0] number float32",
        "['numpy'][1] number datetime64[s]",
        "['numpy'][2] number <U3",
        "['numpy'][3] number bool",
        "['w'] float32 (784, 256)",
        "[1][1] number int",
        "[1][2] number bool",
        "[1][3] number float",
        "[1][4] number complex",
    ]
    assert describe(numpy.zeros(3)) == ["the tree float64 (3,)"]
    assert describe(None) == describe({}) == describe([None, ()]) == ["an empty tree"]


@pytest.mark.parametrize(
    ("leaf", "name"),
    [
        ("text", "a str"),
        (b"bytes", "a bytes"),
        ({1}, "a set"),
        (object(), "a object"),
        (fractions.Fraction(1, 3), "a Fraction"),
        (decimal.Decimal(1), "a Decimal"),
        (numpy.array([None]), "an array of Python objects"),
        (numpy.zeros(2, [("a", object)]), "an array of Python objects"),
    ],
)
def test_leaves_that_cannot_be_exchanged(leaf: Any, name: str) -> None:
    with pytest.raises(TreeError, match=rf"^leaf \['a'\]\[1\] is {name}; "):
        list(leaves({"a": [1.0, leaf]}))
    with pytest.raises(TreeError, match=f"^leaf at the top is {name}; "):
        describe(leaf)


@pytest.mark.parametrize("leaf", [1, True, 1.5, 2j, Colour.RED, numpy.float16(1), numpy.zeros(3), numpy.zeros(3, "U2")])
def test_leaves_that_can(leaf: Any) -> None:
    assert [(path, value is leaf) for path, value in leaves([leaf])] == [("[0]", True)]


def test_num_samples() -> None:
    assert num_samples(numpy.zeros((3, 2))) == 3
    assert num_samples({"x": numpy.zeros((0, 5)), "y": [numpy.zeros(0), None]}) == 0
    with pytest.raises(DataError, match=r"found \['x'\] 3, \['y'\] 4$"):
        num_samples({"x": numpy.zeros(3), "y": numpy.zeros(4)})
    with pytest.raises(DataError, match=r"found \[0\] 3, \[1\] a number$"):
        num_samples([numpy.zeros(3), 7])
    with pytest.raises(DataError, match=r"found the array a number$"):
        num_samples(numpy.array(3.0))
    with pytest.raises(DataError, match=r"found no arrays$"):
        num_samples([])


def test_an_error_about_many_leaves_is_short() -> None:
    with pytest.raises(DataError, match=r"\['k0'\] 1, .*and 9990 more") as caught:
        num_samples({f"k{i}": numpy.ones(i + 1) for i in range(10_000)})
    assert len(str(caught.value)) < 1000
    with pytest.raises(TreeError) as refused:
        list(leaves({"x" * 5_000_000: "text"}))
    assert len(str(refused.value)) < 17_000
    assert str(refused.value).endswith("World.broadcast_object and World.allgather send any object")
