"""The `mpitrain` command. One module here is one subcommand; it imports what it needs when it runs."""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import os
import signal
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

from mpitrain import __version__
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.reading import shown_text

_MOST_LETTERS = 1000  # of an error
_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


class Command(Protocol):
    """The interface of a subcommand's module."""

    HELP: str  # one line
    PAGE: str  # of docs/, which `--help` names

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the subcommand's options. Put a longer description and examples into the parser too."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the subcommand. Return the exit code."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print in two lines what is wrong, however long the argument is, and which command lists the options."""
        sys.stderr.write(f"{self.prog}: error: {shown_text(message, _MOST_LETTERS)}\n")
        sys.stderr.write(f"{self.prog} --help lists the {'options' if ' ' in self.prog else 'commands'}\n")
        sys.exit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print as `print` does. argparse's own method ignores a full disk."""
        (file or sys.stderr).write(message)


class _HelpFormat(argparse.RawDescriptionHelpFormatter):
    """One line for an option where possible."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=27)


# The commands by purpose: their names and modules.
_GROUPS = {
    "begin, and run a training": {
        "new": "mpitrain.cli.new",
        "run": "mpitrain.cli.run",
        "slurm": "mpitrain.cli.slurm",
        "serve": "mpitrain.cli.serve",
        "work": "mpitrain.cli.work",
    },
    "look at jobs, and change them": {
        "ps": "mpitrain.cli.ps",
        "top": "mpitrain.cli.top",
        "logs": "mpitrain.cli.logs",
        "runs": "mpitrain.cli.runs",
        "tell": "mpitrain.cli.tell",
        "scale": "mpitrain.cli.scale",
        "kill": "mpitrain.cli.kill",
        "resume": "mpitrain.cli.resume",
        "dashboard": "mpitrain.cli.dashboard",
    },
    "set up machines": {
        "cluster": "mpitrain.cli.cluster",
        "check-cluster": "mpitrain.cli.check_cluster",
        "doctor": "mpitrain.cli.doctor",
        "completion": "mpitrain.cli.completion",
    },
    "measure and compare": {
        "bench": "mpitrain.cli.bench",
        "plan": "mpitrain.cli.plan",
        "verify": "mpitrain.cli.verify",
        "plot": "mpitrain.cli.plot",
        "checkpoint": "mpitrain.cli.checkpoint",
    },
}
COMMANDS = {name: module for group in _GROUPS.values() for name, module in group.items()}
_EXAMPLES = """\
  mpitrain run -n 2 train.py                           # two ranks, here
  mpitrain run --hosts node1,node2 --ppn 1 train.py    # a rank on each host
  mpitrain check-cluster --hosts node1,node2           # what is wrong there
"""
# Commands that have been renamed, and what a user types now.
_RENAMED = {
    "join": "mpitrain scale JOB +HOST",
    "leave": "mpitrain scale JOB -HOST",
    "simulate": "mpitrain plan --machines FILE, without a script; --servers N,N asks for the table of servers, and "
    "--mtbf 2000h for that of saves",
    "testbed": "scripts/testbed of a checkout, because test beds are not in the wheel",
    "chaos": "scripts/testbed chaos of a checkout, because faults on purpose are not in the wheel",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mpitrain` with `argv` (default: this process's arguments). Return the exit code.

    2: wrong usage (an unknown option, a missing script); 1: any other error of mpitrain.
    """
    try:
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # flushed here, where an error leads to an exit code
    except KeyboardInterrupt:  # also while the modules of the commands are imported
        print("mpitrain: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of the output is gone (`| head`)
        _drop_stdout()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is not None or error.errno not in _OF_OUTPUT:
            raise
        _drop_stdout()
        print(f"mpitrain: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _drop_stdout() -> None:
    """Discard output that could not be written: Python would report the error again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str] | None) -> int:
    parser = _Parser(prog="mpitrain", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mpitrain {__version__}")
    choices = parser.add_subparsers(dest="command", metavar="COMMAND")
    words = sys.argv[1:] if argv is None else list(argv)
    words = words[1:] if words[:1] == ["--"] else words
    if "_ARGCOMPLETE" not in os.environ and (not words or words[0] in ("-h", "--help")):
        print(_overview())
        return 0
    typed = next((word for word in words if not word.startswith("-")), None)
    if typed in _RENAMED:
        parser.error(f"{typed} is now {_RENAMED[typed]}")
    commands: dict[str, Command] = {}
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name in _needed(words, typed):
        commands[name] = cast(Command, importlib.import_module(COMMANDS[name]))
        help_text = commands[name].HELP
        parsers[name] = choices.add_parser(
            name,
            help=help_text,
            description=f"{help_text[0].upper()}{help_text[1:]}.",
            formatter_class=_HelpFormat,
            allow_abbrev=False,
        )
        commands[name].add_arguments(parsers[name])
        parsers[name].epilog = _below_options(parsers[name].epilog or "", commands[name].PAGE)
    if "_ARGCOMPLETE" in os.environ:  # set by what `mpitrain completion` prints
        from mpitrain.cli.completion import complete

        complete(parser)
    if typed is not None and typed not in COMMANDS:
        parser.error(f"there is no command {typed!r}{_near(typed, COMMANDS)}; known: {', '.join(COMMANDS)}")
    arguments, unknown = parser.parse_known_args(words)
    if unknown[:1] == ["--"] and "ansible" in arguments:  # argparse does not fill nargs="*" behind `remove node2 --yes`
        arguments.ansible, unknown = unknown[1:], []
    if "words" in arguments and not any(word.startswith("-") for word in unknown):  # nor nargs="*" behind an option
        arguments.words, unknown = [*arguments.words, *unknown], []
    if unknown:
        _refuse(parsers.get(arguments.command, parser), unknown[0], getattr(arguments, "if_unknown", ""))
    try:
        return commands[arguments.command].run(arguments)
    except MpitrainError as error:
        print(f"mpitrain {arguments.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _overview() -> str:
    """All commands, by purpose, and three examples."""
    lines = ["Data-parallel training over MPI on a few ordinary Linux machines.", ""]
    lines += ["usage: mpitrain COMMAND ...     `mpitrain COMMAND --help` explains one"]
    for title, group in _GROUPS.items():
        lines += ["", f"{title}:"]
        lines += [_listed(name, module) for name, module in group.items()]
    if added := [name for name in COMMANDS if not any(name in group for group in _GROUPS.values())]:
        lines += ["", "more:", *(_listed(name, COMMANDS[name]) for name in added)]
    return "\n".join([*lines, "", "examples:", f"{_EXAMPLES}", f"More: {page('tutorials/get-started.md')}"])


def _listed(name: str, module: str) -> str:
    return f"  {name:<15}{cast(Command, importlib.import_module(module)).HELP}"


def _below_options(text: str, page_name: str) -> str:
    """The text of a command, wrapped for a terminal, and the page with more information."""
    parts = [part if part.startswith(" ") else textwrap.fill(part, 80) for part in text.strip().split("\n\n")]
    return "\n\n".join([*filter(None, parts), f"More: {page(page_name)}"])


def page(name: str) -> str:
    """Return where a page of docs/ is: in the checkout, or in this package as pip installed it."""
    package = Path(__file__).parents[1]
    pages = (package.parent / "docs" / name, package / "docs" / name)
    return str(next((path for path in pages if path.is_file()), f"docs/{name} in mpitrain's repository"))


def _needed(words: Sequence[str], typed: str | None) -> Iterable[str]:
    """The commands that have to be loaded: the one that was typed, or all of them for a list or a completion."""
    if "_ARGCOMPLETE" in os.environ:
        return COMMANDS
    if typed in COMMANDS and words[0] == typed:
        return [typed]
    return [] if words[:1] == ["--version"] else COMMANDS


def _refuse(parser: argparse.ArgumentParser, argument: str, advice: str) -> None:
    """Refuse unknown arguments. `advice` is the parser's default `if_unknown`, if an action has set one."""
    # argparse has no public list of a parser's options.
    known = [name for name, action in parser._option_string_actions.items() if action.help != argparse.SUPPRESS]
    hint = _near(argument.partition("=")[0], known) or (f"; {advice}" if advice else "")
    parser.error(f"unknown argument {argument}{hint}")


def _near(typed: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(typed, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
