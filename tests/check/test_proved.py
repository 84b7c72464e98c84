"""Each check is proved by a real fault, or named with the reason why not; the page says the same."""

from __future__ import annotations

import os

from faults.cluster.every_fault import FAULTS
from faults.cluster.matrix import PAGE, UNPROVED, table
from mpitrain.check.checks import CHECKS


def test_every_check_is_proved_or_named() -> None:
    assert len(FAULTS) >= 40
    proved = {name for fault in FAULTS.values() for name in fault.fires}
    assert proved | UNPROVED.keys() == CHECKS.keys()
    assert not proved & UNPROVED.keys()


def test_the_page_has_these_faults() -> None:
    if os.environ.get("WRITE_DOCS"):
        PAGE.write_text(table(FAULTS))
    assert PAGE.read_text() == table(FAULTS), "WRITE_DOCS=1 writes it anew; scripts/test --nightly makes the faults"
