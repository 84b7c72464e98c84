"""Warm interpreters as the launcher sees them, and one alone. tests/faults/test_warm.py has both in jobs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs import HANG_SECONDS, clean_environment
from mpitrain.context import WARM_LINE, WARM_NAME
from mpitrain.job.warm import may_differ
from mpitrain.launch.agents import Agents
from mpitrain.launch.holders import Holders
from mpitrain.launch.libraries import Vendor
from mpitrain.launch.placement import Place
from mpitrain.launch.rank import HOOK, command_of
from mpitrain.launch.tuning import Conditions, settings
from mpitrain.launch.variables import pin
from mpitrain.watching.rank_record import RankRecord

HERE = [Place("here", 0, 1)]
TRAINS = {0: RankRecord(0, first_step=1, facts={"step": 2})}


def test_ranks_are_forked_after_the_first_step() -> None:
    """An agent says why it has no interpreter."""
    with Agents("here") as agents:
        holders = Holders(agents, ["program"])
        agents.have(["here"])
        holders.begin()
        assert holders.news(HERE, {0: RankRecord(0, first_step=1, facts={"step": 1})}) == []
        assert holders.command() == command_of("{}", ["program"])
        assert holders.news(HERE, TRAINS) == []
        assert holders.command()[-2:] == ["{}", "program"]
        assert holders.command()[3].endswith("stub.py")
        agents.heard["warm"]("here", {"said": "here: ranks start cold"})
        assert holders.news(HERE, TRAINS) == ["here: ranks start cold"]
        assert holders.news(HERE, TRAINS) == []


@pytest.mark.parametrize("vendor", ["mpich", "impi", "openmpi"])
def test_an_interpreter_of_several_hosts_fits_an_attempt_on_one(vendor: Vendor) -> None:
    """The launcher gives the two other variables for the network. Cold ranks because of them would be of no use."""
    route = {"interface": "eno1", "network": "10.0.0.0/24"}
    facts = {"a": {"rdma": False, "routes": {"b": route}}, "b": {"rdma": False, "routes": {"a": route}}}
    pinned = pin(facts, ["a", "b"], vendor, {}).common
    several = Conditions(vendor, num_hosts=2, has_rdma=False, is_oversubscribed=False, glibc=(2, 36))
    tuned = settings(several, {}).items() ^ settings(replace(several, num_hosts=1), {}).items()
    changed = {*pinned, *(name for name, _ in tuned)}
    if vendor == "mpich":  # its mpiexec sets this one because of HYDRA_IFACE
        changed.add("MPIR_CVAR_NEMESIS_TCP_NETWORK_IFACE")
    assert "FI_TCP_IFACE" in changed
    assert [name for name in sorted(changed) if not may_differ(name)] == []
    assert not may_differ("OMP_NUM_THREADS")


@contextmanager
def interpreter(folder: Path, modules: Mapping[str, str], **imports: Any) -> Iterator[tuple[dict[str, Any], int]]:
    """A warm interpreter that imports modules, of which ranks have these files."""
    line, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listed = os.memfd_create("imports")
    listing = {"modules": list(modules.items()), "own": [], "set": {}, **imports}
    os.write(listed, json.dumps(listing).encode())
    path = os.pathsep.join([HOOK, str(folder), clean_environment()["PYTHONPATH"]])
    name = f"mpitrain-test-{folder.name}-{os.getpid()}"
    environment = clean_environment({"PYTHONPATH": path, WARM_LINE: f"{far_end.fileno()} {listed} {name}"})
    (folder / "program.py").write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n")
    command = [sys.executable, str(folder / "program.py")]
    with subprocess.Popen(command, env=environment, pass_fds=[far_end.fileno(), listed]) as process:
        far_end.close()
        os.close(listed)
        line.settimeout(HANG_SECONDS)
        try:
            yield json.loads(line.recv(4096)), process.pid
        finally:
            line.close()  # it ends
    assert process.returncode == 0
    assert not (folder / "ran").exists(), "only ranks run the program"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import _thread, time\n_thread.start_new_thread(time.sleep, (99,))", "an import has started 1 thread(s) ("),
        ("import os\nends = os.pipe()", "an import has opened pipe:["),
        ("import mmap\nmemory = mmap.mmap(-1, 4096)", "an import has mapped /dev/zero"),
        ("import subprocess\nprocess = subprocess.Popen(['sleep', '9'])", "an import has started a process"),
        ("import json", "thing is {}/thing.py before the program runs, and /other/thing.py in the program"),
        ("import own", "the program has a module own of its own"),
        ("import os", "the program sets OMP_NUM_THREADS in its environment"),
    ],
)
def test_what_makes_ranks_start_cold(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "thing.py").write_text(text)
    (tmp_path / "own.py").touch()
    imports: dict[str, Any] = {}
    if text == "import own":
        imports["own"] = ["own"]
    elif text == "import os":
        imports["set"] = {"OMP_NUM_THREADS": "7"}
    with interpreter(tmp_path, {"thing": "/other/thing.py" if text == "import json" else ""}, **imports) as (said, _):
        assert why.format(tmp_path) in said["unfit"]


def test_a_warm_interpreter(tmp_path: Path) -> None:
    """What fails in its import, wants MPI or sets what the program sets is no obstacle, nor are NumPy's threads."""
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    (tmp_path / "uses_mpi.py").write_text("try:\n    from mpi4py import MPI\nexcept ImportError:\n    MPI = None")
    (tmp_path / "sets.py").write_text("import os\nos.environ['SET_BY_AN_IMPORT'] = 'yes'")
    names = ["no_such_module", "fails", "uses_mpi", "sets", "numpy"]
    with interpreter(tmp_path, dict.fromkeys(names, ""), set={"SET_BY_AN_IMPORT": "yes"}) as (said, pid):
        assert said == {"ready": 1}
        assert Path(f"/proc/{pid}/comm").read_text().strip() == WARM_NAME
