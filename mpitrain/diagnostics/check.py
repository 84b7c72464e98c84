"""What a check is, what it says, and what it judges.

A check is one entry in a module of `checks/`: what it looks at, a pure function from what was seen to findings, why
it matters and what repairs it. Where it finds nothing, it has passed; so a judge that cannot know must say so
(`NotSeenError`, `NotHereError`), and never return without a word.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mpitrain.diagnostics.ssh_settings import destination, login_words
from mpitrain.launch.hostfile import Host

Level = Literal["quick", "full", "bench"]
LEVELS: tuple[Level, ...] = ("quick", "full", "bench")
Verdict = Literal["pass", "warn", "fail", "skip", "blocked", "unknown"]
# On what one verdict is given: the whole cluster, a node, the head alone, a pair of nodes in one direction, the way
# from the head to a node.
Scope = Literal["cluster", "node", "head", "pair", "way"]
# What a check of a node's answers needs: the login works, and Python runs there.
BY_SSH = ("SSH01", "SSH03", "SSH02", "PRB01")


class NotSeenError(Exception):
    """What the judge needs was asked for, and there is no answer; the text says why. Its verdict is unknown."""


class NotHereError(Exception):
    """What the check is about is not there; the text says what. Its verdict is skip."""


@dataclass(frozen=True)
class Target:
    """What is checked, and what set-up was told to make of it.

    Attributes:
        hosts: the nodes to look at, the head first if it is one of them.
        user: the shared user, as whom jobs run.
        share: the shared folder; None where there is none, as far as is known.
        venv: the virtual environment of jobs.
        settings: the variables of cluster/group_vars/all.yml, with their defaults.
        set_up: how a line that repairs begins: `ansible-playbook cluster/setup.yml`, with the inventory if needed;
            empty where nothing was set up by it.
        script: the program of `--script`, if any; an absolute path.
        environ: the user's variables that choose interfaces and ports.
        inventory_head: the head where it is none of `hosts`; else None.
        inventory: the file that the nodes come from; None where they were named by hand.
        python_here: of `mpitrain doctor`, which looks at this machine alone: the Python of jobs. Else None.
    """

    hosts: tuple[Host, ...]
    user: str
    share: str | None
    venv: str | None
    settings: Mapping[str, Any]
    set_up: str
    script: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    inventory_head: Host | None = None
    inventory: Path | None = None
    python_here: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is this machine, looked at by itself: there is no login, no set-up and no other node."""
        return self.python_here is not None

    @property
    def python(self) -> str:
        """The Python of jobs."""
        return self.python_here or f"{self.venv}/bin/python"

    @property
    def head(self) -> str:
        """The head's name; it need not be one of `names`."""
        return (self.inventory_head or self.hosts[0]).name

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the nodes to look at, the head first if it is one of them."""
        return tuple(host.name for host in self.hosts)

    @property
    def addresses(self) -> dict[str, str]:
        """Name -> address, as the inventory has them; the head's too."""
        return {host.name: host.address for host in self._all()}

    def login(self, name: str) -> str:
        """What stands behind `ssh` in a line that reaches the node as it is printed; its place, on this machine."""
        if self.is_here:
            return "{login}"
        return next(shlex.join(login_words(host)) for host in self._all() if host.name == name)

    def known_as(self, name: str) -> str:
        """The node's name in known_hosts, quoted for a shell; other ports than ssh's own are part of it."""
        host = next(host for host in self._all() if host.name == name)
        port = host.variables.get("ansible_port", "22")
        place = destination(host)
        return shlex.quote(place if port == "22" else f"[{place}]:{port}")

    def destination(self, name: str) -> str:
        """Where ssh from here goes; not always by the address that the other nodes reach it by."""
        return destination(next(host for host in self._all() if host.name == name))

    def _all(self) -> tuple[Host, ...]:
        return (*self.hosts, self.inventory_head) if self.inventory_head else self.hosts


@dataclass
class Seen:
    """All that was seen, in plain values that JSON can hold. An answer that failed is {"error": why}.

    Attributes:
        target: what was looked at.
        control: of the machine that checks.
        nodes: node -> section -> what node/*.py gave for it.
        pairs: (from, to) -> section -> what was seen there.
        cluster: section -> what concerns all: the MPI job, the measurements.
    """

    target: Target
    control: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    pairs: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    cluster: dict[str, Any] = field(default_factory=dict)

    def node(self, name: str, section: str) -> Any:
        """A section of a node.

        Raises:
            NotSeenError: it has no answer.
        """
        sections = self.nodes.get(name, {})
        login = sections.get("login", {})
        if section not in sections and login.get("failed"):
            raise NotSeenError(login["found"])
        return _answer(sections, section, "the shell" if self.target.is_here else _OWN_SSH)

    def pair(self, pair: tuple[str, str], section: str) -> Any:
        """A section of a pair. Raises as `node` does."""
        return _answer(self.pairs.get(pair, {}), section)

    def whole(self, section: str) -> Any:
        """A section of the cluster. Raises as `node` does."""
        return _answer(self.cluster, section)


_OWN_SSH = "`ssh` of the shared user to its own node"


def _answer(sections: Mapping[str, Any], section: str, shell: str = _OWN_SSH) -> Any:
    if section not in sections:
        raise NotSeenError("was not looked at")
    answer = sections[section]
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        raise NotSeenError(answer["error"])
    # An ssh of the shared user to its own node that came to nothing: SSH09's to judge, and no answer for the others.
    if isinstance(answer, dict) and isinstance(answer.get("refused"), str):
        raise NotSeenError(f"{shell} {answer['refused']}")
    return answer


@dataclass(frozen=True)
class Finding:
    """Something that a judge says of one place.

    Attributes:
        verdict: warn, fail; or unknown and skip where that is said of a part only.
        where: () for the cluster, (node,), or (from, to).
        observed: what was seen, without the node's name in it, so that the same of many nodes is one line.
        allowed: what would be right.
        remedy: a line to run in place of the check's own; may use its fields.
        mend: the nodes whose set-up must be run again; the places themselves where it is empty.
    """

    verdict: Verdict
    where: tuple[str, ...]
    observed: str
    allowed: str = ""
    remedy: str = ""
    mend: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        id: short and stable, as SSH01: what --only, --skip, --explain and the JSON name it by.
        title: what holds where it passes.
        level: the lowest level that includes it.
        scope: on what a verdict is given; it says what `judge` gets: (seen, name), (seen, (from, to)) for a pair and a
            way, or (seen, names) with those nodes that are not blocked.
        judge: findings; none is a pass.
        uses: the sections that the judge reads; only those are asked for.
        looks: how it is found out, with the command, for --explain.
        why: one sentence.
        tag: the tag of cluster/setup.yml that repairs it, if one does.
        remedy: the line that repairs it otherwise; may use {node}, {user}, {share}, {address}, {python}, {known_as},
            and {login}, which is what `ssh` needs to reach the node. `mpitrain doctor` prints what stands behind
            `ssh {login}`.
        alone: whether it says something of a machine by itself: `mpitrain doctor` makes it too.
        remedy_alone: the line that repairs it there, where `remedy` is not the one.
        needs: checks without which it cannot be judged there; they come earlier in the registry.
        needs_head: the same, of the head, for a check of any node.
        needs_all: of needs, when a failure on any node blocks the check as a whole.
        fault: what was done in tests/faults to prove it.
    """

    id: str
    title: str
    level: Level
    scope: Scope
    judge: Callable[[Seen, Any], Iterable[Finding]]
    looks: str
    why: str
    uses: Sequence[str] = ()
    tag: str = ""
    remedy: str = ""
    needs: Sequence[str] = ()
    needs_head: Sequence[str] = ()
    needs_all: bool = False
    fault: str = ""
    alone: bool = False
    remedy_alone: str = ""


@dataclass(frozen=True)
class Ask:
    """A section of a node, or of the head alone: which call of node/*.py gives it, and what that is told.

    `user` is whom it runs as: "login", whoever logged in, or "job", the shared user. `seconds` is above the
    call's own deadlines.
    """

    section: str
    call: str
    user: Literal["login", "job"]
    wish: Callable[[Target, Host], Mapping[str, Any]] = lambda _target, _host: {}
    seconds: float = 8.0
    head_only: bool = False


@dataclass(frozen=True)
class Result:
    """A verdict in one place. `blocked_by`: the check whose failure is the cause, for the verdict blocked."""

    check: Check
    verdict: Verdict
    where: tuple[str, ...] = ()
    observed: str = ""
    allowed: str = ""
    remedy: str = ""
    mend: tuple[str, ...] = ()
    blocked_by: str = ""
