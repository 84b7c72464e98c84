"""Run a command at a terminal of its own, and type answers to what it asks.

    python tests/typed.py '[["What it asks", "the answer"], ...]' COMMAND...

Prints what the terminal showed; ends with the command's exit code, or 99 if a question did not come in time.
"""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import sys
import time
from pathlib import Path

QUESTION_SECONDS = 400.0


def main(answers: list[tuple[str, str]], command: list[str]) -> int:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(command[0], command)
    shown, behind = "", 0
    waiting = list(answers)
    deadline = time.monotonic() + QUESTION_SECONDS
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                new = os.read(terminal, 65536)
            except OSError:  # the command has closed the terminal
                new = b""
            if not new:
                print(shown)
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if not waiting else unasked(waiting)
            shown += new.decode(errors="replace").replace("\r\n", "\n")
        if waiting and (found := shown.find(waiting[0][0], behind)) >= 0:
            behind = found + len(waiting[0][0])
            time.sleep(0.3)  # as a person
            while is_on_its_way(pid) and time.monotonic() < deadline:
                time.sleep(0.05)
            os.write(terminal, waiting.pop(0)[1].encode())
            deadline = time.monotonic() + QUESTION_SECONDS
    os.kill(pid, signal.SIGKILL)
    print(shown)
    return unasked(waiting)


def is_on_its_way(pid: int) -> bool:
    """True if the process still works, and does not read yet: a Ctrl-C just before it reads would not wake it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("R", "D")


def unasked(waiting: list[tuple[str, str]]) -> int:
    print(f"typed.py: it did not ask or did not end; still to be asked: {waiting}", file=sys.stderr)
    return 99


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
