"""The facts that each rank publishes about itself, for users and their tools: one table, which all readers use.

A new fact is a line here and a call of `activity.publish(name, value)`. The rank's record (rank_record.py), the ranks
of a look (launch/live_picture.py), `mpitrain top`, `ps --json`, the Run page and Prometheus then have it. Values that
only the launcher uses, such as the step after which a rank has left, are fields of RankRecord instead.

This module is sent to other hosts as text. It imports only the standard library, and runs with old Pythons.
"""

from __future__ import annotations

from typing import NamedTuple

# When a table of ranks has a column for the fact. KNOWN: a rank has another value than the one for "absent". In a
# terminal of less than 76 columns, `mpitrain top` leaves it out.
ALWAYS, KNOWN, NEVER = "always", "known", "never"


class RankFact(NamedTuple):
    """A number that a rank publishes.

    Attributes:
        name: for `publish`, and in JSON.
        kind: int, from 0, or float.
        unit: "seconds"; "": it counts something.
        absent: the value as long as a rank has published none, or 0. None: not known, so 0 is no value of the fact.
        heading: of its column, for people.
        column: ALWAYS, KNOWN or NEVER.
        has_family: Prometheus has it, as mpitrain_rank_NAME.
        help: its description, which the documents and Prometheus also show.
    """

    name: str
    kind: type
    unit: str
    absent: float | None
    heading: str
    column: str
    has_family: bool
    help: str


FACTS = (
    RankFact(
        "step", int, "", 0, "Step", ALWAYS, True, "the last step that the rank has begun, recorded or printed; 0: none"
    ),
    RankFact(
        "epoch",
        int,
        "",
        None,
        "Epoch",
        NEVER,
        False,
        "the epoch of the last step that the rank has made, from 1; null: not known",
    ),
    RankFact(
        "waited",
        float,
        "seconds",
        0.0,
        "Waited",
        NEVER,
        False,
        "for how many seconds the rank has waited for others in all waits that have ended, also in those below 0.1 s. "
        "The share of a second by which it grows tells a slow rank: it waits least",
    ),
    RankFact(
        "last_step",
        int,
        "",
        None,
        "Last step",
        NEVER,
        False,
        "the step after which the run ends; null: not known",
    ),
    RankFact(
        "left",
        float,
        "seconds",
        None,
        "Left",
        NEVER,
        False,
        "for how many seconds the steps up to `last_step` take, by the mean over the last half of the run, or more; "
        "null: not known, or none is left",
    ),
)
