"""One connection to each host of a job, by ssh or by a step of Slurm: how it is opened, and what its failure means."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from mpitrain.errors import LaunchError
from mpitrain.launch.batch import step_on
from mpitrain.launch.processes import start_child
from mpitrain.reading import MessageLines

# ssh asks no questions and shares no other connection. The user's own settings say which host keys are valid. No
# connection stays open for others (ControlPersist), because it would look like a process that the job has left.
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ControlMaster=no")
AGENT_OPTIONS = ("-T", "-x", "-a", "-o", "ControlPath=none", "-o", "ClearAllForwardings=yes", "-o", "LogLevel=ERROR")

# Not the Python of a virtual environment: the agent must work even if the shared folder with that environment is
# missing.
PYTHON = "/usr/bin/python3"

# A host that says nothing for longer is late. A healthy one says something every second.
LATE_SECONDS = 2.5

# The packages with modules that can be sent.
_SENT = (".", "watching", "launch")

# Modules of which every program that is sent is made, each after those that it imports.
COMMON = (
    "facts",
    "reading",
    "context",
    "watching.proc",
    "watching.sockets",
    "watching.rank_facts",
    "watching.rank_record",
    "error_file",
    "watching.view",
    "launch.processes",
    "launch.shared_files",
    "launch.hearing",
    "launch.kept",
)
# The modules of the agent.
AGENT = (
    *COMMON,
    "watching.roll_call",
    "watching.census",
    "watching.flight_recorder",
    "launch.memory_kills",
    "launch.facts",
    "launch.load",
    "launch.host_ranks",
    "launch.host_attempt",
    "launch.keeper",
    "launch.holder",
    "launch.agent",
)

# Sent first: a `read` in a startup file of the login's shell takes this line, instead of the agent's first one.
_BAIT = b"# mpitrain\n"
_SWALLOWED = "takes a line of what is sent to a command"
# A network that breaks meanwhile may leave the far side without the rest: it then ends after this time.
_BOOT_SECONDS = 60
# The next line has the modules and the wish. It is read byte by byte, so that the rest stays for the agent.
_BOOT = f"""
import json, signal, sys, types
signal.alarm({_BOOT_SECONDS})
stream = open(0, "rb", buffering=0, closefd=False)
if stream.readline().startswith(b"{{"):
    sys.exit("the shell {_SWALLOWED}")
line = stream.readline()
signal.alarm(0)
if line:
    bundle = json.loads(line)
    for name, text in bundle["modules"]:
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(text, name, "exec"), module.__dict__)
    module.main(bundle["wish"], bundle["probe"])
"""
# Behind the name of a Python: it waits for modules, and runs the main() of the last.
BOOT = ("-I", "-u", "-c", _BOOT)


def command_on(host: str, line: str) -> list[str]:
    """Return the words that run a line of shell on `host`: by a step of this Slurm job if it has the host, else by ssh.

    Raises:
        ConfigError: Slurm cannot expand its own list of hosts.
    """
    if words := step_on(host):
        return [*words, "sh", "-c", line]
    return ["ssh", *SSH_OPTIONS, *AGENT_OPTIONS, host, line]


def typed_on(host: str, line: str) -> str:
    """Return what a user types to run a line on `host`."""
    return f"srun --overlap -N1 -n1 -w {host} {line}" if step_on(host) else f"ssh {host} {line}"


@dataclass
class Connection:
    """The connection to an agent. Bytes flow both ways without blocking.

    Attributes:
        heard_seconds: when the agent was last heard, by the caller's clock.
        answered_seconds: when it has last answered a beat.
        has_spoken: it was heard at all.
        back_seconds: when it was last heard again after it had been late, by the same clock.
        is_closed: nothing more will come.
    """

    host: str
    process: subprocess.Popen[bytes]
    errors: IO[bytes]  # a file with what ssh and the far side wrote to stderr
    heard_seconds: float
    is_closed: bool = False
    answered_seconds: float = 0.0
    has_spoken: bool = False
    back_seconds: float = -math.inf
    _received: MessageLines = field(default_factory=MessageLines, repr=False)
    _unsent: bytes = field(default=b"", repr=False)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a line now, or else at the next `flush`: a broken network accepts nothing."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    @property
    def output(self) -> int:
        """The descriptor that can be read when messages have come."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    @property
    def input(self) -> int:
        """The descriptor that can be written to when more can be sent."""
        assert self.process.stdin is not None
        return self.process.stdin.fileno()

    def flush(self) -> None:
        """Send what has not been accepted yet."""
        assert self.process.stdin is not None
        try:
            while self._unsent:
                written = os.write(self.process.stdin.fileno(), self._unsent[: 1 << 16])
                self._unsent = self._unsent[written:]
        except BlockingIOError:
            pass
        except OSError:  # the far side has gone; the next read shows it
            self._unsent = b""

    @property
    def has_unsent(self) -> bool:
        """True while data waits to be sent."""
        return bool(self._unsent)

    def receive(self, now: float) -> list[dict[str, Any]]:
        """Return the messages that have come. Leave out other lines, such as a greeting of a login script."""
        assert self.process.stdout is not None
        try:
            data = os.read(self.process.stdout.fileno(), 1 << 20)
        except BlockingIOError:
            return []
        if not data:
            self.is_closed = True
            return []
        if self.has_spoken and now - self.heard_seconds > LATE_SECONDS:
            self.back_seconds = now
        self.heard_seconds, self.has_spoken = now, True
        return list(self._received.take(data))

    def why_closed(self) -> str:
        """Describe in one line what went wrong, and what to do."""
        self.errors.seek(0)
        words = self.errors.read().decode(errors="replace").strip()
        try:
            code: int | None = self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            code = None
        return explain(self.host, words, code)

    def how_killed(self) -> str:
        """Return how the agent was killed, if it was: ssh itself only returns 255."""
        self.errors.seek(0)
        if self.errors.read().strip():
            return ""
        try:
            code = self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            return ""
        return f"was killed by signal {-code}" if code < 0 else "was killed" if code == 255 else ""

    def hang_up(self) -> None:
        """Send no more. The agent then ends the rest of the job on its host, and itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def close(self, timeout_seconds: float) -> None:
        """After `hang_up`: kill the ssh process if it does not end in time."""
        try:
            self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.leave()

    def leave(self) -> None:
        """After `hang_up`: let the process live on."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.errors.close()


def connect(
    host: str,
    is_this_machine: bool,
    wish: Mapping[str, Any],
    now: float,
    modules: Sequence[str] = AGENT,
    descriptors: Sequence[int] = (),
) -> Connection:
    """Start an agent on `host`, or the main() of the last of `modules`. Return at once; its messages come later.

    `descriptors` of this process stay open in one that runs on this machine.

    Raises:
        LaunchError: there is no ssh on this machine.
    """
    command = boot_on(host, is_this_machine)
    # Clean-up must outlive the launcher: this machine's agent. Its ssh processes need not. But at SIGTERM srun kills
    # what it has started, and the agent there could not clean up. It ends with its stdin.
    may_end = not is_this_machine and not step_on(host)
    return boot(host, command, sources(modules), wish, now, ends_with_us=may_end, descriptors=descriptors)


def boot_on(host: str, is_this_machine: bool) -> list[str]:
    """Return the words that start a Python on `host` which waits for modules (`boot`)."""
    if is_this_machine:
        return [sys.executable, *BOOT]
    return command_on(host, f"exec {shlex.join([PYTHON, *BOOT])}")


def boot(
    host: str,
    command: Sequence[str],
    modules: Sequence[tuple[str, str]],
    wish: Mapping[str, Any],
    now: float,
    *,
    ends_with_us: bool,
    descriptors: Sequence[int] = (),
) -> Connection:
    """Start `command`, a Python with BOOT, and send it modules (name and text); it runs the main() of the last.

    Raises:
        LaunchError: there is no such program on this machine.
    """
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the connection
    # The kernel would watch over the thread that forks, so it must be the main one.
    is_watched = ends_with_us and threading.current_thread() is threading.main_thread()
    how: dict[str, Any] = {} if is_watched else {"preexec_fn": None}
    try:
        process = start_child(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, pass_fds=descriptors, **how
        )
    except FileNotFoundError:
        raise LaunchError(
            f"there is no {command[0]} on this machine, to start the job on {host}: apt-get install openssh-client"
        ) from None
    assert process.stdin is not None
    assert process.stdout is not None
    os.set_blocking(process.stdin.fileno(), False)
    os.set_blocking(process.stdout.fileno(), False)
    connection = Connection(host, process, errors, now, _unsent=_BAIT)
    connection.send({"modules": modules, "wish": wish, "probe": _texts()["facts"]})
    return connection


def sources(modules: Sequence[str]) -> list[tuple[str, str]]:
    """Return the full name and the text of these modules of mpitrain, such as "launch.agent"."""
    texts = _texts()
    return [(f"mpitrain.{name}", texts[name]) for name in modules]


@functools.cache
def _texts() -> dict[str, str]:
    """Return the modules that can be sent, all as they are at the first call.

    A job may outlive an update of the package. A module of the new version then fits neither the lists of modules here
    nor the messages of this process.
    """
    package = Path(__file__).parents[1]
    paths = [path for folder in _SENT for path in (package / folder).glob("*.py")]
    return {".".join(path.relative_to(package).with_suffix("").parts): path.read_text() for path in paths}


def explain(host: str, words: str, code: int | None) -> str:
    """Explain why the connection to `host` ended, from the output of ssh, and what to do."""
    last = words.splitlines()[-1] if words else f"ended with code {code} and wrote nothing"
    shown = f"{host}: {last}"
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in words and (other := _owner_of_key(words, host)):
        return (
            f"{shown}: {other} answers at its address, so two machines have one address, or have changed theirs. See "
            f"`getent hosts {host}` here, and `ip -brief address` on the consoles of {host} and {other}"
        )
    for sign, remedy in _REMEDIES:
        if sign in words:
            return f"{shown}: {remedy.format(host=host)}"
    return shown


def _owner_of_key(words: str, host: str) -> str:
    """Return the other host whose key ssh was shown, by the file that has the key of `host`; "": none is known."""
    shown, file = re.search(r"SHA256:([\w+/]+)", words), re.search(r"^Offending \w+ key in (.+):\d+\s*$", words, re.M)
    with suppress(OSError):
        for line in Path(file[1]).read_text(errors="replace").splitlines() if shown and file else ():
            names, _, key, *_ = [*line.split(), "", "", ""]
            with suppress(ValueError):  # a comment, which is no key
                fingerprint = base64.b64encode(hashlib.sha256(base64.b64decode(key)).digest()).decode().rstrip("=")
                is_other = host not in names.split(",") and names[0] not in "|@"  # the names may be hashed
                if shown and fingerprint == shown[1] and is_other:
                    return names.split(",")[0]
    return ""


# Messages of ssh, the most telling first.
_REMEDIES = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        (
            "its host key has changed. Was the host installed anew? Compare the key on its console, then run "
            "`mpitrain cluster trust {host}` and `ansible-playbook cluster/setup.yml --tags ssh`"
        ),
    ),
    (
        "Host key verification failed",
        "its host key is unknown here. For a node of this cluster, run `ansible-playbook cluster/setup.yml --tags ssh`",
    ),
    (
        "Permission denied",
        (
            "it does not let this user in with a key. Is this the cluster's user (`id -un`)? If so, run "
            "`ansible-playbook cluster/setup.yml --tags ssh`"
        ),
    ),
    (
        "Could not resolve hostname",
        "the name is unknown. See `getent hosts {host}`; to repair: `ansible-playbook cluster/setup.yml --tags hosts`",
    ),
    ("Connection refused", "it is up, but no ssh server listens. Run on its console: `systemctl start ssh`"),
    ("timed out", "it does not answer. Is it switched on and its cable plugged in? Try `ping {host}`"),
    ("No route to host", "it does not answer. Is it switched on and its cable plugged in? Try `ping {host}`"),
    ("not allowed at this time", "it is not ready for logins yet; try again in a moment"),
    ("booting up", "it is not ready for logins yet; try again in a moment"),
    (
        _SWALLOWED,
        (
            "a startup file there does so, such as a `read` in ~/.bashrc. `mpitrain check-cluster --only SSH05` "
            "names it, with the line that repairs it"
        ),
    ),
    (PYTHON, f"there is no Python at {PYTHON}. Install python3 there"),
)
