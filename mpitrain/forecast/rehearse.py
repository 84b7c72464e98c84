"""What a rank of `mpitrain plan` runs: the script, as Python would run it, under a Rehearsal.

python -P -m mpitrain.forecast.rehearse SECONDS MAY_WRITE FILE SCRIPT|-m MODULE ARGUMENT...
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from mpitrain.job.rehearsal import Rehearsal


def main(seconds: str, may_write: str, file: str, *program: str) -> None:
    """Run the program to its end. FILE is the one that it begins in."""
    rehearsal = Rehearsal(file, float(seconds), may_write=may_write == "1")
    rehearsal.begin()
    with rehearsal.running():
        _run(program)


def _run(program: Sequence[str]) -> None:
    if program[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv[:] = list(program[1:])
        runpy._run_module_as_main(program[1])  # type: ignore[attr-defined] # what `python -m` calls
        return
    sys.path.insert(0, str(Path(program[0]).resolve().parent))
    sys.argv[:] = list(program)
    # It stays __main__ until the end, unlike that of runpy.run_path: functions of atexit and pickle need it.
    module = ModuleType("__main__")
    module.__file__ = os.fspath(program[0])
    sys.modules["__main__"] = module
    try:
        code = compile(Path(program[0]).read_bytes(), program[0], "exec", dont_inherit=True)
    except SyntaxError:
        sys.tracebacklimit = 0  # as Python reports it, without a frame of mpitrain
        raise
    exec(code, vars(module))


if __name__ == "__main__":
    main(*sys.argv[1:])
