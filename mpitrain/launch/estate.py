"""What a launcher leaves to another one that goes on with its job: the estate, which keepers hold as JSON.

    request      the fields of start.Request                python       of the launcher and the ranks
    folder       in which the launcher was started          since        when, by time.time()
    environment  of the ranks, without what is of a login   code         hashes of the script and the code beside it
    from_file    the variables that --env-file gave         launcher     as roster.launcher_name names it
    tries        the ids of the job's tries so far
    places       hosts, each with its number of ranks and its devices, also those that are set aside
    own          the host of the launcher                   is_here      the job runs on that host alone
    ended        why the launcher has ended the job, and left its state to another one; "": it has not

A secret in the environment is as safe with a keeper as in a rank: only processes of the same user can read it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.launch.placement import Placement
from mpitrain.launch.probe import python_files
from mpitrain.launch.roster import launcher_name
from mpitrain.launch.variables import is_of_login


def new_estate(request: Mapping[str, Any], script: str, from_file: Mapping[str, str]) -> dict[str, Any]:
    """Return the estate of a job that begins, without its hosts, from the environment of its ranks."""
    fields = {name: str(value) if isinstance(value, Path) else value for name, value in request.items()}
    return {
        "request": fields,
        "folder": str(Path.cwd()),
        "python": sys.executable,
        "since": time.time(),
        "environment": {name: value for name, value in os.environ.items() if not is_of_login(name)},
        "from_file": dict(from_file),
        "code": code_of(script),
        "launcher": launcher_name(os.getpid()),
        "tries": [],
        "ended": "",
    }


def hosts_of(placement: Placement) -> dict[str, Any]:
    """Return the part of an estate that says where a job runs."""
    places = [[place.host, place.num_ranks, list(place.devices)] for place in placement.places]
    return {"places": places, "own": placement.own, "is_here": placement.is_here}


def code_of(script: str) -> dict[str, str]:
    """Return a hash of the script, and of each file of Python beside and below it, by name."""
    path = Path(script).absolute()
    files = python_files(path.parent)
    files[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return {name: digest[:16] for name, digest in files.items()}
