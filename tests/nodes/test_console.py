"""What an error quotes from the console of a node that does not come up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testbed.node import not_up, panic

PANIC = "Kernel panic - not syncing: Attempted to kill init! exitcode=0x0000000b"


LATE = "node1 of test bed b was not up within 180 s. The end of its console"
REGISTERS = (
    f"the kernel of node1 of test bed b ended itself: {PANIC}. Debian's User-mode Linux has no room for all "
    "registers of this CPU (AMX, such as on Intel's Xeons since 2023); use a fast bed, without --full, or a machine "
    "with another CPU. The end of its console"
)
NO_INIT = "Kernel panic - not syncing: No working init found."


@pytest.mark.parametrize(
    ("console", "line", "said"),
    [
        (None, "", LATE),
        ("systemd[1]: hello\n", "", LATE),
        (f"ptrace set fp regs failed, errno = 14\n{PANIC}\nCPU: 0 PID: 1\n", PANIC, REGISTERS),
        (f"{NO_INIT}\n", NO_INIT, f"the kernel of node1 of test bed b ended itself: {NO_INIT} The end of its console"),
    ],
)
def test_what_is_said(tmp_path: Path, console: str | None, line: str, said: str) -> None:
    record: Any = SimpleNamespace(name="b", node_folder=lambda node: tmp_path)
    if console is not None:
        (tmp_path / "console.log").write_text(console)
    assert panic(record, "node1") == line
    message = str(not_up(record, "node1", 180.0))
    assert message.startswith(f"{said}, {tmp_path / 'console.log'}:\n    ")
    assert message.endswith((console or "(empty)").splitlines()[-1])
