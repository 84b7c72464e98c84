"""A check: whether there is tea. There is none, anywhere."""

from mpitrain.check.check import Ask, Check, Finding

ASKS = (Ask("tea", "names", "login", lambda _target, _host: {"names": []}),)


def _judge(seen, node):
    yield Finding("warn", f"{seen.node(node, 'tea')['hostname']} has no tea", "a pot of it")


CHECKS = (
    Check(
        "TEA01",
        "there is tea",
        _judge,
        uses=("tea",),
        looks="Into the pot.",
        why="Nobody works without.",
        remedy="ssh {login} make tea",
        fault="an empty pot",
        alone=True,
    ),
)
