"""The shell of a job: does it give the same programs and variables on every node?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import ip_address, ip_interface, ip_network

from mpitrain.diagnostics.check import Ask, Check, Finding, NotHereError, NotSeenError, Seen
from mpitrain.diagnostics.collect import ClusterStep, PairStep
from mpitrain.diagnostics.compare import known, usual
from mpitrain.launch.hostfile import Host
from mpitrain.launch.variables import absent, network_variables, only_loopback

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
# ENV03 checks PATH, and ENV05 the proxies, so these are not compared here.
_NOT_STRAY = ("PATH", "NO_PROXY")


def _programs(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    shells, unknown = known(seen, names, "shell")
    yield from unknown
    for program in ("mpiexec", "python") if shells else ():
        paths = {name: shell["programs"][program] for name, shell in shells.items()}
        common = usual(paths, seen.target.head)
        if common is None:
            text = f"a shell that is not a login shell finds no {program}"
            yield Finding("warn", (), text, "one in PATH; `mpitrain run` needs none", "{set_up} --tags ssh,runtime")
        for name, path in paths.items():
            if path == common:
                continue
            wrong = f"{program} is {path}" if path else f"there is no {program} in PATH"
            yield Finding("fail", (name,), wrong, f"{common or 'none'}, as on the others", _find("PATH"))


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
        yield Finding("warn", (name,), f"{', '.join(proxies)} set, but no_proxy does not have {nodes}", "", remedy)


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
            yield Finding("fail", (name,), f"{origin}: {text}", f"one of {has}", line)


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
                yield Finding("warn", (name,), text, others, _find(variable))


def _is_proxy(variable: str) -> bool:
    return variable.lower().endswith("_proxy")


def _find(variable: str) -> str:
    """Return a line that shows where a shell gets the variable. mpitrain does not set it, so a person must look."""
    places = (
        "/etc/environment /etc/ssh/sshd_config /etc/ssh/sshd_config.d /etc/bash.bashrc ~{user}/.bashrc ~{user}/.ssh"
    )
    return f"ssh {{login}} sudo grep -rnsw {variable} {places}"


# The environment of a command over ssh is read through such a login, so the login must work.
_SHELL = ("PRB01", "PRB02", "USR01", "USR02", "SSH09")

ASKS = (
    Ask(
        "shell", "shell", "job", lambda target, host: {"address": "" if target.is_here else host.address}, seconds=26.0
    ),
    Ask("variables", "variables", "job"),
)
PAIRS: dict[str, PairStep] = {}
CLUSTER: dict[str, ClusterStep] = {}
CHECKS = (
    Check(
        "ENV03",
        "a job's shell finds the same mpiexec and python everywhere",
        "quick",
        "cluster",
        _programs,
        uses=("shell",),
        looks="As the shared user: ssh to its own node, without a login shell; which mpiexec and python are in PATH.",
        why="mpiexec starts ranks through such a shell, which lacks what a profile adds to PATH.",
        needs=_SHELL,
        fault="another mpiexec first in PATH on one node",
    ),
    Check(
        "ENV05",
        "no proxy is used between the nodes",
        "quick",
        "node",
        _proxies,
        uses=("shell",),
        looks="In a job's shell: http_proxy, https_proxy, all_proxy, grpc_proxy, and whether no_proxy has every node.",
        why="Otherwise programs that use HTTP or gRPC between nodes ask the proxy, which does not know the nodes.",
        needs=_SHELL,
        fault="proxy variables without the nodes in no_proxy",
    ),
    Check(
        "NET07",
        "the devices that variables name exist",
        "quick",
        "node",
        _devices,
        uses=("network", "variables", "shell"),
        looks="UCX_NET_DEVICES, FI_TCP_IFACE, NCCL_SOCKET_IFNAME and similar variables, of this shell (and its "
        "MPITRAIN_ENV_FILE) and of the shared user's shells, against the interfaces of each node.",
        why="A wrong name is worse than none: with FI_TCP_IFACE, the job waits forever without a message.",
        remedy="ssh {login} ip -brief link",
        needs=_SHELL,
        fault="UCX_NET_DEVICES that no node has; UCX_NET_DEVICES=lo in /etc/environment of one node",
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
        needs=(*_SHELL, "NET07"),
        fault="UCX_TLS, OMPI_MCA_btl in the shell of one node",
    ),
)
