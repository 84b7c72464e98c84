"""What a job finds on this node (the programs of its shell, NumPy), and what it leaves afterwards."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from mpitrain import facts
from mpitrain.check.node import children
from mpitrain.check.node.shell import MARK, SSH_SECONDS, ending, in_job

# mpitrain's own commands on a node after set-up. Each starts the command of its name in the virtual environment.
_COMMANDS = "/usr/local/lib/mpitrain/bin"
_PYTHON_SECONDS = 30  # 10 were too few on four nodes of one machine with a load of 30
_MPIEXEC_SECONDS = 10
_MOST_OUTPUT = 1 << 20
_MOST_ERROR = 2000

# `python` and `mpiexec` in that shell if they lead to the environment, otherwise those in the environment. If a Python
# is named ($5), the mpiexec beside it comes first, as for `mpitrain run`; a different one in the shell is reported.
_PROGRAMS = f"""
cd /
python=$5
on_path=$(command -v mpiexec)
if [ "$python" ]; then
    mpiexec=${{python%/*}}/mpiexec
    [ -x "$mpiexec" ] || mpiexec=$on_path
    [ "$mpiexec" != "$on_path" ] || on_path=
else
    python=$(command -v python)
    case $python in "$1"/bin/* | {_COMMANDS}/*) ;; *) python=$1/bin/python ;; esac
    mpiexec=${{on_path:-$1/bin/mpiexec}}
    on_path=
fi
echo {MARK}
echo "$python"
timeout -k 1 "$6" "$python" -c "$2" "$3" "$4" 2>&1
echo "{MARK}$?"
echo "$mpiexec"
timeout -k 1 "$7" "$mpiexec" --version 2>&1
echo "{MARK}$?"
echo "$on_path"
[ -z "$on_path" ] || timeout -k 1 "$7" "$on_path" --version 2>&1
echo "{MARK}"
"""
# The script prints three lines, because a broken MPI may kill the process, and another Python takes time. The first
# argument is the text of facts.py.
_FACTS = """
import sys
at_start = set(sys.modules)
import json, os, platform, subprocess, types
from importlib.machinery import PathFinder
from pathlib import Path
text, script = sys.argv[1:]
probe = types.ModuleType("probe")
exec(text, probe.__dict__)
facts = {**probe.interpreter(), "libc": " ".join(platform.libc_ver()), "prefix": sys.prefix, "files": None}
facts["mpitrain"] = facts["mpitrain"] or ""
def inventory():
    try:
        from mpitrain.launch.hostfile import find_inventory, read_inventory
        path = find_inventory()
        if path is None:
            return None
        read_inventory(path)
        return ""
    except ImportError:
        return None
    except Exception as error:
        return str(error)
needed = '''
import sys
at_start = set(sys.modules)
import mpi4py
mpi4py.rc(initialize=False, finalize=False)
import numpy, mpitrain
mpitrain.init, mpitrain.Trainer
print(*{name.partition(".")[0] for name in set(sys.modules) - at_start})
'''
def shadows():
    beside = {path.stem: path for path in Path(script).parent.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()}
    others = {}
    for name in beside.keys() - at_start:
        spec = PathFinder.find_spec(name, [folder for folder in sys.path if folder])
        library = Path(spec.origin).resolve() if spec and spec.origin else None
        if library and beside[name].resolve() not in (library, *library.parents):
            others[name] = str(beside[name])
    if not others:
        return {}
    done = subprocess.run([sys.executable, "-P", "-c", needed], stdout=subprocess.PIPE, text=True)
    names = {*done.stdout.split(), "torch", "jax", "cupy"}
    return {name: path for name, path in others.items() if name in names}
facts["inventory"] = inventory()
if script:
    try:
        facts["files"] = probe.files_of(Path(script))
    except FileNotFoundError:
        pass
    except OSError as error:
        facts["unreadable"] = error.strerror
print(json.dumps(facts), flush=True)
try:
    library = probe.mpi_library()
    import mpi4py
    from mpi4py import MPI
    maps = [line.split()[-1] for line in open("/proc/self/maps")]
    paths = [p for p in maps if "/libmpi" in p and ".so" in p and "/libmpi_" not in p]
    print(json.dumps({"library": library, "path": paths[0] if paths else "",
        "mpi4py": mpi4py.__version__, "module": os.path.basename(MPI.__file__)}))
except Exception as error:
    print(json.dumps({"why": (type(error).__name__ + ": " + str(error)).splitlines()[0][:300]}))
sys.stdout.flush()
if facts["files"] is not None:
    print(json.dumps({"shadows": shadows()}))
"""


def programs(wish: dict[str, Any]) -> dict[str, Any]:
    """Return the python and mpiexec of a job, in the job's shell.

    `wish` has this node's "address", the "venv", "probe" (the text of facts.py), "script" and "python" ("" for
    none). The answer has "python", with "why" if it does not run; "mpi", the library that mpi4py loads, likewise;
    "mpiexec"; and "on_path", the mpiexec that a shell would find, if it is a different one.
    """
    patience = children.patience()
    python_seconds, mpiexec_seconds = _PYTHON_SECONDS * patience, _MPIEXEC_SECONDS * patience
    arguments = [wish["venv"], _FACTS, wish["probe"], wish["script"], wish["python"]]
    arguments += [f"{python_seconds:.0f}", f"{mpiexec_seconds:.0f}"]
    command = ["sh", "-c", _PROGRAMS, "sh", *arguments]
    code, out, error = in_job(wish["address"], command, SSH_SECONDS + _PYTHON_SECONDS + 2 * _MPIEXEC_SECONDS)
    parts = out.split(MARK)
    if len(parts) != 5:
        return {"refused": ending(code, error, out)}
    python_code, _, rest = parts[2].partition("\n")
    path, _, version = rest.partition("\n")
    mpiexec_code, _, rest = parts[3].partition("\n")
    on_path, _, other_version = rest.partition("\n")
    lines = [line for line in parts[1].splitlines() if line.startswith("{")]
    others = [line for line in parts[1].splitlines() if line and not line.startswith("{")]
    why = _why(python_code, "\n".join(others[1:]), python_seconds)
    shadows = json.loads(lines[2]) if len(lines) > 2 else {"shadows": None, "why_no_shadows": why}
    return {
        "python": {"path": others[0], **({**json.loads(lines[0]), **shadows} if lines else {"why": why})},
        "mpi": json.loads(lines[1]) if len(lines) > 1 else {"why": why},
        "mpiexec": {
            "path": path,
            "text": version[:4000],
            "why": _why(mpiexec_code, version.strip(), mpiexec_seconds),
        },
        "on_path": {"path": on_path, "text": other_version[:4000]} if on_path else None,
    }


def _why(code: str, said: str, seconds: float) -> str:
    """Return why a program failed; empty if it succeeded."""
    if code == "0":
        return ""
    if code in ("124", "137"):
        return f"it does not end within {seconds:.0f} s"
    return (said.splitlines()[-1][:300] if said else "") or f"it ended with code {code}"


# Ask NumPy's BLAS for its number of threads: as many ranks as cores, each with as many threads, are slow.
_NUMPY = """
import json, sys
import numpy
blas = []
try:
    from threadpoolctl import threadpool_info
    blas = [[p["internal_api"], p["version"], p["num_threads"]] for p in threadpool_info() if p["user_api"] == "blas"]
except ImportError:
    pass
assert numpy.arange(3.0).sum() == 3.0
print(json.dumps({"version": numpy.__version__, "blas": blas}))
"""
_NUMPY_SECONDS = 30.0


def numpy(wish: dict[str, Any]) -> dict[str, Any]:
    """Return NumPy's version and BLAS in wish["python"], or "why" it cannot be used."""
    code, out, error = children.run([wish["python"], "-c", _NUMPY], _NUMPY_SECONDS)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if code == 0 and lines:
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer
    return {"why": _why(str(code), error.strip(), _NUMPY_SECONDS)}


def job(wish: dict[str, Any]) -> dict[str, Any]:
    """Run wish["command"], an mpiexec, for at most wish["seconds"] on an idle machine, and keep its output.

    It is a child of this agent, not of an ssh, so it ends with the agent.
    """
    seconds = wish["seconds"] * children.patience()
    started = time.monotonic()
    command = ["timeout", "-k", "1", f"{seconds:.0f}", *wish["command"]]
    code, out, error = children.run(command, seconds + 3.0, env=wish["environment"])
    took = time.monotonic() - started
    return {"code": code, "seconds": took, "out": out[-_MOST_OUTPUT:], "error": error[-_MOST_ERROR:]}


def memory(_wish: dict[str, Any]) -> list[str]:
    """Return this user's shared-memory files. A killed rank leaves its own."""
    return [str(path) for path in Path("/dev/shm").iterdir() if path.is_file() and path.stat().st_uid == os.getuid()]


def left(wish: dict[str, Any]) -> list[str]:
    """Return this user's processes with wish["token"] on their command line that have not ended after wish["seconds"].

    If there is none, remove unused shared memory that is not in wish["memory"], because it was theirs.
    """
    until = time.monotonic() + wish["seconds"]
    while True:
        processes = [folder for folder in Path("/proc").glob("[0-9]*") if int(folder.name) != os.getpid()]
        words = {folder.name: facts.text(f"{folder}/cmdline").split("\0") for folder in processes}
        alive = [f"{number} {line[0]}" for number, line in words.items() if wish["token"] in line]
        if not alive:
            maps = "".join(facts.text(f"{folder}/maps") for folder in processes)
            for path in set(memory({})) - set(wish["memory"]):
                if path not in maps:
                    Path(path).unlink()
        if not alive or time.monotonic() > until:
            return alive
        time.sleep(0.2)


CALLS = {
    "numpy": numpy,
    "job_programs": programs,
    "job_run": job,
    "job_left": left,
    "job_memory": memory,
}
