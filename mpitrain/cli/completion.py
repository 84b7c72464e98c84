"""`mpitrain completion SHELL`: print what makes a shell complete the command line of mpitrain."""

from __future__ import annotations

import argparse

from mpitrain.extras import missing

HELP = "print what lets a shell complete these commands"
PAGE = "reference/cli.md"

_EPILOG = """\
Put the line of your shell into its start-up file. It needs argcomplete:
pip install 'mpitrain[completion]'.

  eval "$(mpitrain completion bash)"        # ~/.bashrc
  eval "$(mpitrain completion zsh)"         # ~/.zshrc, after compinit
  mpitrain completion fish | source         # ~/.config/fish/config.fish
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def run(arguments: argparse.Namespace) -> int:
    """Print the lines of the shell. Return 0."""
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError as error:
        raise missing("completion", "argcomplete", "completion", error) from None
    print(shellcode(["mpitrain"], shell=arguments.shell))
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks what may come next, and end this process."""
    from argcomplete import autocomplete

    autocomplete(parser)
