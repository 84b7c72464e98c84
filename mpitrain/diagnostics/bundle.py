"""The text that is sent to a node: the modules of node/, and the few lines that start them there."""

from __future__ import annotations

import base64
from importlib.resources import files
from typing import Any

# The agent ends itself after this time without questions, as after a pulled cable, and in any case after the second.
_IDLE_SECONDS = 300
LIFE_SECONDS = 7200
_NODE = "mpitrain.diagnostics.node"
# Each module comes after those that it imports.
_MODULES = (
    "children",
    "interfaces",
    "machine",
    "system",
    "account",
    "share",
    "sshd",
    "tunnel",
    "ways",
    "shell",
    "jobs",
    "start",
    "gpu",
    "rates",
)


# A program of several lines, as a word that every shell takes: csh knows no line breaks in quotes.
def in_a_word(program: str) -> str:
    return f"import base64;exec(base64.b64decode({base64.b64encode(program.encode()).decode()!r}))"


# Sent first: a startup file of the login's shell may read a line that is not meant for it.
BAIT = b"# mpitrain-check\n"
# The next line has the modules. Python reads it byte by byte, to leave the questions to the agent.
BOOT = """
import json, sys, types
if sys.version_info < (3, 8):
    print(json.dumps({"old": sys.version.split()[0]})); sys.exit()
stream = open(0, "rb", buffering=0, closefd=False)
first = stream.readline()
bundle = json.loads((first if first.startswith(b"{") else stream.readline()) or "null")
if bundle:
    bundle["swallowed"] = first.startswith(b"{")
    sys.modules[bundle["package"]] = types.ModuleType(bundle["package"])
    for name, text in bundle["modules"] + [bundle["agent"]]:
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(text, name, "exec"), module.__dict__)
    module.main(bundle)
"""


def bundle() -> dict[str, Any]:
    """The text that is sent to a node: the modules, and the time after which the agent ends itself."""
    source = files(_NODE)
    texts = {name: (source / f"{name}.py").read_text() for name in (*_MODULES, "agent")}
    named = [(f"{_NODE}.{name}", text) for name, text in texts.items()]
    return {
        "boot": in_a_word(BOOT),
        "package": _NODE,
        "seconds": _IDLE_SECONDS,
        "life_seconds": LIFE_SECONDS,
        "modules": named[:-1],
        "agent": named[-1],
    }
