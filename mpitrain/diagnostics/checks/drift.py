"""Changes of the nodes since a baseline was saved."""

from __future__ import annotations

from mpitrain.diagnostics.baseline import STABLE, drift
from mpitrain.diagnostics.check import Ask, Check
from mpitrain.diagnostics.collect import ClusterStep, PairStep

ASKS = (Ask("system", "system", "login"),)
PAIRS: dict[str, PairStep] = {}
CLUSTER: dict[str, ClusterStep] = {}
CHECKS = (
    Check(
        "DRF01",
        "the nodes are as in the baseline",
        "quick",
        "cluster",
        drift,
        uses=tuple(STABLE),
        looks="What does not change by itself (kernel, packages, addresses, limits), against the file of --baseline.",
        why="A cluster that no longer works was changed somewhere; this says where.",
        remedy="if the change is intended: mpitrain check-cluster --save-baseline FILE",
        needs=("PRB01",),
        fault="an interface's MTU changed after the baseline",
    ),
)
