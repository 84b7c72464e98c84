"""A check: whether there is tea. There is none, anywhere."""

from mpitrain.diagnostics.check import Ask, Check, Finding

ASKS, PAIRS, CLUSTER = (Ask("tea", "names", "login", lambda _target, _host: {"names": []}),), {}, {}


def _judge(seen, node):
    yield Finding("warn", (node,), f"{seen.node(node, 'tea')['hostname']} has no tea", "a pot of it")


CHECKS = (
    Check(
        "TEA01",
        "there is tea",
        "quick",
        "node",
        _judge,
        uses=("tea",),
        looks="Into the pot.",
        why="Nobody works without.",
        remedy="ssh {login} make tea",
        fault="an empty pot",
        alone=True,
    ),
)
