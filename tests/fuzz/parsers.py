"""Every parser of what a person or another program may write: valid examples, and how to have them read.

A parser is called with bytes, and with an empty folder. It may return anything, or raise an error of mpitrain.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import dataclasses
import hashlib
import json
import os
import pickle
import socket
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
from safetensors.numpy import save

from mpitrain import config
from mpitrain.check.checks.baseline import read_baseline
from mpitrain.check.target import _read as read_yaml
from mpitrain.cli import COMMANDS
from mpitrain.cli.run import aware_of
from mpitrain.cli.tell import _order
from mpitrain.context import JobContext
from mpitrain.cuda.device import local_rank_of
from mpitrain.dashboard.app import _json
from mpitrain.dashboard.cluster_reports import _of_check, _of_profile, last_check
from mpitrain.dashboard.commands import order_of
from mpitrain.dashboard.index import RunIndex
from mpitrain.dashboard.run_files import files_of
from mpitrain.dashboard.run_notes import notes_of
from mpitrain.dashboard.summary import differences, summary_of_run
from mpitrain.error_file import parse_error
from mpitrain.errors import ConfigError, LaunchError
from mpitrain.forecast.machines import from_profile, read_machines
from mpitrain.launch.batch import _counts, _of_file, _of_pairs
from mpitrain.launch.hostfile import group_variables, read_inventory
from mpitrain.launch.hosts import read_hostfile
from mpitrain.launch.kept import Kept
from mpitrain.launch.launched import launched_by
from mpitrain.launch.live_watcher import LiveWatcher
from mpitrain.launch.placement import parse_hosts
from mpitrain.launch.processes import launcher_pid
from mpitrain.launch.variables import port_ranges, read_env_file
from mpitrain.profile import from_json
from mpitrain.provision.inventory import parse_nodes
from mpitrain.provision.nodes import _listed
from mpitrain.provision.trust import read_fingerprints
from mpitrain.reading import MessageLines
from mpitrain.server.security import make_keys, parse_key, read_keys
from mpitrain.server.wire import MessageAssembly, frames
from mpitrain.state import store
from mpitrain.state.memory_slot import MemorySlot, read_copy
from mpitrain.state_files import read_state, state_folder
from mpitrain.training.run_document import RunDocument
from mpitrain.training.steering import Steering
from mpitrain.training.tunable import Tunables
from mpitrain.training.writers.csv_table import Csv
from mpitrain.training.writers.json_lines import JsonLines, read_events, read_rows
from mpitrain.training.writers.service import RunFile
from mpitrain.verify.record_file import read_record as read_verify_record
from mpitrain.watching import rank_record, roll_call, served_record
from mpitrain.watching.flight_recorder import last_calls
from mpitrain.watching.order import TrainingOrder
from mpitrain.watching.recorded_calls import report_of_calls
from testbed.bed_record import read_record as read_bed
from testbed.snapshots import read_snapshot

RATES = {f"{operation}_bytes_per_second": 3e9 for operation in ("encode", "add", "decode")}
LINKS = {"link_bytes_per_second": [[0.0, 117e6], [116e6, 0.0]], "link_latency_us": [[0.0, 40.0], [40.0, 0.0]]}
MEASURED = {"latency_between_nodes_us": 40.0, "copy_bytes_per_second": 6e9, "add_bytes_per_second": 4e9, **LINKS}
FINGERPRINT = {"hosts": ["a", "b"], "ranks_per_node": [2, 2], "mpi": "MPICH Version: 5.0.2"}
PROFILE: dict[str, Any] = {"schema": 2, "versions": {"mpitrain": "0.2.0"}, "nodes": ["a", "b"]}
PROFILE |= {
    "fingerprint": FINGERPRINT,
    "measured": {**MEASURED, "codecs": {"bf16": RATES}, "native_below_bytes": 32768},
}
DOCUMENT = RunDocument(
    "1a2b", "train.py", ["--lr", "0.1"], "/home/a", {"a": [0, 1]}, "Sync", {"bucket_mib": 1.0}, "3.11.7",
    {"numpy": "2.0.0"}, "0123abcd", False, "nowhere 1 2", 0, 1000.0, 1000.0, 1060.0, "done", ["runs/x"],
)  # fmt: skip
EVENT = {
    "after_step": 1, "text": "rank 2 was lost", "source": "memory", "lost_ranks": [2], "num_ranks": 2, "seconds": 1.5,
    "repeated_steps": 1, "teller": "ada", "at": 1e9,
}  # fmt: skip
ROWS = [{"step": 1, "loss": 1.5}, {"step": 2, "loss": "NaN", "events": [EVENT]}, {"step": 3, "resumed_after": 2.0}]
FINDING = dict.fromkeys(("id", "title", "verdict", "found", "allowed", "why", "remedy"), "x")
FINDING |= {"places": "node1", "blocks": ["NET01"]}
FOUND = {
    "schema": 1,
    "started": "2026-01-01T00:00:00+00:00",
    "seconds": 3.5,
    "counts": {"ok": 3},
    "findings": [FINDING],
}
REPORT = {
    "version": 1,
    "level": "full",
    "only": [],
    "skip": ["GPU01"],
    "report": {**FOUND, "nodes": {"node1": "10.0.0.1"}},
}
REPORT["machines"] = {"node1": {"cores": 8, "memory_bytes": 1 << 34}}
WAYS = {"version": 1, "measured": 1e9, "nodes": ["a", "b"], "latency_us": [[None, 40.0], [41.0, None]]}
WAYS["bytes_per_second"] = [[None, 1e8], [1e8, None]]
SKETCH = {"dtype": "float32", "count": 3, "norm": 1.0, "projections": [0.5] * 8}
INVENTORY = b"""[head]
node1 ansible_host=10.0.0.1 note="a b"   # first
[workers]
node2 ansible_host=10.0.0.2 ansible_port=22
[cluster:children]
head
workers
[all:vars]
ansible_user=admin
"""
YAML = b"mpitrain_user: train\nmpitrain_share: /srv\nlist: [1, 2.5, {a: b}]\nbase: &x {k: 1}\nmore: *x\ntext: |\n  a\n"
TOML = b"[nodes]\ncount = 16\ngbit = 1.0\nlatency_us = 50\nranks = 2\n[racks]\nnodes = 4\nuplink_gbit = 4\n"
TOML += b"[[unequal]]\nnodes = [3, 4]\ngbit = 0.1\nspeed = 0.5\n"
TENSORS = {"a.weight": numpy.ones((2, 3), "f4"), "b": numpy.zeros(0)}
MANIFEST = {"format": 1, "step": 5, "run": "x", "score": 1.5, "parts": 0, "files": {}}
MANIFEST["values"] = {"step": 5, "random": {"state": 2**127}}
MANIFEST["information"] = {"ranks": 2, "loss": 0.5, "hosts": ["a"], "settings": {}, "command": ["x"], "time": "now"}
STEP = {"number": 1, "kind": "step", "precision": "f4", "samples": [["a"], ["b"]], "weights": [1.0, 2.0], "loss": 0.5}
STEP |= {"tensors": {"a": SKETCH}, "metrics": {"x": 1.0}}
ORDER = TrainingOrder("ab", 1, "rate", "ada", 1e9, "", "0.5").plain()


@dataclass(frozen=True)
class Parser:
    """What is fuzzed: valid examples, and a function that reads an input; the folder is empty."""

    examples: tuple[bytes, ...]
    read: Callable[[bytes, Path], Any]


def of_file(read: Callable[[Path], Any], name: str = "file") -> Callable[[bytes, Path], Any]:
    """A parser of a file of that name in the folder."""

    def parse(data: bytes, folder: Path) -> Any:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o600)
        return read(path)

    return parse


def of_text(read: Callable[[str], Any], *refused: type[Exception]) -> Callable[[bytes, Path], Any]:
    """A parser of a text, as an argument or a variable of the environment has it, which may raise `refused` too."""

    def parse(data: bytes, _: Path) -> Any:
        with contextlib.suppress(*refused):
            return read(os.fsdecode(data.replace(b"\0", b"")))

    return parse


def as_json(*values: Any) -> tuple[bytes, ...]:
    return tuple(json.dumps(value).encode() for value in values)


OF_ROWS = (b"".join(row + b"\n" for row in as_json(*ROWS)),)


def profile(path: Path) -> None:
    with contextlib.suppress(ConfigError):
        from_profile(path)
    from_json(path.read_bytes().decode(errors="replace"), "x", PROFILE["fingerprint"])  # type: ignore[arg-type]


def resume(kind: type[JsonLines | Csv], path: Path) -> None:
    writer = kind(path.parent)
    try:
        writer.open(2)
        writer.write({"step": 3, "loss": 1.0})
    finally:
        writer.close()


def of_run(path: Path) -> None:
    """What the dashboard shows of a record."""
    folder = path.parent
    if path.name == "metrics.jsonl":
        (folder / "run.json").write_text(DOCUMENT.text())
    index = RunIndex(folder / "index")
    try:
        index.update(folder)
        for run in index.runs():
            differences([run.document, DOCUMENT])
            document = dataclasses.asdict(run.document) if run.document else None
            _json([summary_of_run(run, None), document, run.names, run.events, files_of(run.document)])
            for name in run.names:
                points = index.curve(run.id, name, 0.0, 1e300, 1)
                _json([points.steps.tolist(), points.first_not_finite])
    finally:
        index.close()


def of_checkpoint(data: bytes, folder: Path, *, of_tensors: bool = False) -> None:
    """A manifest, or a file of tensors, with the right checksums."""
    tensors = data if of_tensors else save(TENSORS)
    path = folder / "step-00000005"
    path.mkdir()
    (path / store.TENSORS).write_bytes(tensors)
    text = data
    with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
        content = json.loads(json.dumps(MANIFEST) if of_tensors else data)
        if isinstance(content["files"], dict):
            file = {"bytes": len(tensors), "sha256": hashlib.sha256(tensors).hexdigest()}
            content["files"].setdefault(store.TENSORS, file)
        checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        text = json.dumps({"manifest": content, "sha256": checksum}).encode()
    (path / "manifest.json").write_bytes(text)
    store.entries(folder)
    _json(files_of(dataclasses.replace(DOCUMENT, checkpoints=[str(folder)])))
    store.load(path)


def of_memory(name: str, read: Callable[[str], Any]) -> Callable[[bytes, Path], Any]:
    """A parser of memory that a process shares under a name."""

    def parse(data: bytes, _: Path) -> Any:
        descriptor = os.memfd_create(name)
        try:
            os.write(descriptor, data)
            return read(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)

    return parse


def page() -> bytes:
    memory = rank_record.Page(3)
    memory.set_metrics({"loss": 0.5})
    memory.write(rank_record.RankRecord(3, lost=(1, 2), error="x"), 1, "barrier", 5.0)
    memory.set_steering('{"run": 1}')
    data = os.pread(memory.descriptor, 1 << 16, 0)
    os.close(memory.descriptor)
    return data


def order_of_page(data: bytes, _: Path) -> None:
    """The order that the agent has written into the page of a rank, and a training that is paused by it."""
    memory = rank_record.Page(3)
    try:
        written = len(data[: rank_record.MOST_ORDER_BYTES])
        os.pwrite(memory.descriptor, rank_record._LENGTH.pack(written) + data[:written], rank_record._ORDER_AT)
        with contextlib.suppress(ValueError):  # what it raises for a damaged text, or another one
            order = TrainingOrder.of_plain(memory.order())
            steering = Steering()
            steering.pause = {"teller": order.teller, "at": order.at, "after_step": order.number}
            assert steering.words
    finally:
        os.close(memory.descriptor)


def copy_in_memory() -> bytes:
    slot = MemorySlot()
    slot.write(5, 0, 2, {"w": numpy.ones(3, "f4")}, {"step": 5, "random": {"state": 2**127}})
    data = slot.content().tobytes()
    slot.close()
    return data


def served(path: str) -> Any:
    with contextlib.suppress(ValueError):  # what it raises for a damaged text
        return served_record.read_served(path)


def as_served(data: bytes) -> bytes:
    return struct.pack("=II", len(data), zlib.crc32(data)) + data


def of_socket(hear: Callable[[socket.socket], Any]) -> Callable[[bytes, Path], Any]:
    """A parser of a message on a socket."""

    def parse(data: bytes, _: Path) -> Any:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = os.memfd_create("text")
        try:
            os.write(memory, data)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory]))]
            there.sendmsg([data[: 1 << 15]], rights)
            here.settimeout(5.0)
            return hear(here)
        finally:
            os.close(memory)
            here.close()
            there.close()

    return parse


def hear_rank(line: socket.socket) -> None:
    appearance = roll_call.receive(line)
    opened = ("process", "record", "witness", "errors")
    for descriptor in (getattr(appearance, name) for name in opened) if appearance else ():
        if descriptor is not None:
            os.close(descriptor)


def hear_keeper(line: socket.socket) -> None:
    kept = Kept(f"mpitrain-fuzz-{os.getpid()}")
    try:
        kept.estate = "{}"
        kept._answer(line)
    finally:
        kept.close()


def watch(data: bytes, _: Path) -> None:
    here, there = socket.socketpair()
    with here, there:
        watcher = LiveWatcher(here, 0.0)
        there.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            there.send(data)
        watcher.receive(0.0)
        watcher.judge(100.0)


def lines(data: bytes, _: Path) -> None:
    way = MessageLines(1 << 16)
    for begin in range(0, len(data), 1000):
        assert all(isinstance(message, dict) for message in way.take(data[begin : begin + 1000]))


def message(data: bytes, _: Path) -> None:
    assembly = MessageAssembly(1 << 20)
    for frame in data.split(b"||"):
        assembly.take(memoryview(frame), "peer")  # type: ignore[arg-type]


def kept_state(read: Callable[[], Any], name: str) -> Callable[[bytes, Path], Any]:
    def parse(data: bytes, _: Path) -> Any:
        path = state_folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return read()

    return parse


def settings(text: str) -> None:
    for name in ("BUCKET_MIB", "STALL_SECONDS", "MEMORY_STEPS", "HANG_SECONDS", "ALGORITHM", "NO_SUCH"):
        with contextlib.suppress(ConfigError):
            config.read_config({config.PREFIX + name: text}, {})
    JobContext.read(dict.fromkeys(("MPITRAIN_SERVERS", "MPITRAIN_COLUMNS", "MPITRAIN_DEVICES"), text))
    port_ranges({"UCX_TCP_PORT_RANGE": text, "FI_TCP_PORT_LOW_RANGE": text, "FI_TCP_PORT_HIGH_RANGE": text})


def argument_kinds() -> set[Callable[[str], Any]]:
    """The functions that read the arguments of all commands, but for those that look at the machine."""
    import importlib

    kinds: set[Callable[[str], Any]] = set()
    for module in COMMANDS.values():
        parser = argparse.ArgumentParser()
        importlib.import_module(module).add_arguments(parser)
        waiting = [parser]
        for one in waiting:
            kinds |= {action.type for action in one._actions if callable(action.type)}
            choices = [action.choices for action in one._actions if isinstance(action, argparse._SubParsersAction)]
            waiting += [below for of_action in choices for below in of_action.values()]
    return {kind for kind in kinds if kind is not Path}


KINDS = sorted(argument_kinds(), key=lambda kind: f"{kind.__module__}.{kind.__qualname__}")


def arguments(text: str) -> None:
    for kind in KINDS:
        with contextlib.suppress(argparse.ArgumentTypeError, ValueError, TypeError):  # argparse says it in a line
            kind(text)


def launchers(text: str) -> None:
    """The variables in which launchers and batch systems count ranks."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "_MPITRAIN_EXPECTED_SIZE"):
        with contextlib.suppress(LaunchError, ConfigError):
            launched_by({name: text, "PMI_RANK": text, "OMPI_COMM_WORLD_RANK": text, "SLURM_STEP_ID": "0"})
    with contextlib.suppress(LaunchError):
        launched_by({"SLURM_STEP_ID": text, "SLURM_NTASKS": "1"})
    with contextlib.suppress(ConfigError):
        _counts("Slurm job 1", "SLURM_TASKS_PER_NODE", text, 4)
    local_rank_of({"MPI_LOCALRANKID": text, "OMPI_COMM_WORLD_LOCAL_RANK": text})


def told(text: str) -> None:
    """What comes behind `mpitrain tell JOB`, and what the values of a script make of it."""
    values = Tunables()
    for name, default in (("lr", 0.5), ("steps", 3), ("is_on", True), ("text", "x")):
        values.declare(name, default)
        with contextlib.suppress(ConfigError):
            _order(["set", f"{name}={text}"])
            values.set(name, text)
    with contextlib.suppress(ConfigError):
        _order(text.split(" "))
    json.dumps(values.values()).encode()


def fingerprints(path: Path) -> None:
    read_fingerprints([str(path)])


# As PyTorch writes it: tests/watching/test_flight_recorder.py.
RECORDED = {
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "entries": [
        {
            "process_group": ("0", "default_pg"),
            "collective_seq_id": 7,
            "is_p2p": False,
            "profiling_name": "nccl:all_reduce",
            "state": "started",
            "input_dtypes": ["Float"],
            "input_sizes": [[4]],
            "frames": [{"filename": "/a/train.py", "line": 3, "name": "train"}],
        }
    ],
}


def recorded(data: bytes, _: Path) -> object:
    """Report on the calls of a rank, or refuse them."""
    try:
        return report_of_calls({0: last_calls(data)})
    except ValueError as error:
        raise LaunchError(str(error)) from None


_KEYS = make_keys()
_FRAMES = b"||".join(frames(1, "job", {"a": [1, "x"], "b": None}, [numpy.arange(5), numpy.ones((2, 2), "f4")]))

PARSERS: dict[str, Parser] = {
    "inventory": Parser((INVENTORY,), of_file(lambda path: (read_inventory(path), group_variables(path)))),
    "host file": Parser(
        (b"node1 slots=4\nnode2:2 # x\nnode3\n", b"a\nb\n"), of_file(lambda path: parse_hosts(read_hostfile(path)))
    ),
    "--hosts": Parser((b"a:4,b:2", b"b/cpux2,c/cuda:0", b"localhost", b"a/cuda:0,a/cuda:1"), of_text(parse_hosts)),
    "env file": Parser((b"A=1\nB='x y' # z\n\n#c\nUCX_NET_DEVICES=eth0\n",), of_file(read_env_file)),
    "PBS file": Parser(
        (b"a\na\nb\n",),
        of_file(lambda path: _of_file("PBS job 1", "PBS_NODEFILE", {"PBS_NODEFILE": str(path)}, "qsub")),
    ),
    "LSF hosts": Parser((b"a 4 b 4",), of_text(partial(_of_pairs, "LSF job 1"))),
    "launchers": Parser((b"4", b"0", b"2(x3),1", b"9" * 5000), of_text(launchers)),
    "nodes": Parser((b"a=10.0.0.1,b=10.0.0.2", b"a=fe80::1"), of_text(lambda text: parse_nodes(text, {}))),
    "fingerprints": Parser((b"a SHA256:" + b"x" * 43 + b"  # c\n",), of_file(fingerprints)),
    "--fingerprints": Parser((b"a=SHA256:" + b"x" * 43,), of_text(lambda text: read_fingerprints([text]))),
    "script": Parser((b"import os\nfrom a import b\nprint(1)\n",), of_file(aware_of, "train.py")),
    "told": Parser((b"0.25", b"7", b"off", b"set lr=0.5", b"rate 0.5"), of_text(told)),
    "settings": Parser((b"4", b"0.5", b"ring"), of_text(settings)),
    "arguments": Parser(
        (b"4", b"0.5", b"1,2,4", b"2:4", b"30s", b"12:00:00", b"25e6", b"0-9", b"NET01,GPU01"), of_text(arguments)
    ),
    "machines": Parser((TOML,), of_file(read_machines)),
    "profile": Parser(as_json(PROFILE), of_file(profile)),
    "profile shown": Parser(as_json(PROFILE), of_file(_of_profile)),
    "state": Parser(as_json({"version": 1, "a": 2}), of_file(partial(read_state, version=1, most_bytes=1 << 20))),
    "last check": Parser(as_json(REPORT), kept_state(last_check, "check-cluster.json")),
    "last ways": Parser(as_json(WAYS), kept_state(_of_check, "check-cluster-ways.json")),
    "run.json": Parser((DOCUMENT.text().encode(),), of_file(of_run, "run.json")),
    "rows": Parser(OF_ROWS, of_file(lambda path: (read_rows(path), read_events(path)), "metrics.jsonl")),
    "rows shown": Parser(OF_ROWS, of_file(of_run, "metrics.jsonl")),
    "rows resumed": Parser(OF_ROWS, of_file(partial(resume, JsonLines), "metrics.jsonl")),
    "csv": Parser((b"step,loss\n1,2.5\n2,nan\n",), of_file(partial(resume, Csv), "metrics.csv")),
    "run of a service": Parser(as_json({"run": "abc", "x": 1}), of_file(lambda path: RunFile(path).read(1))),
    "manifest": Parser(as_json(MANIFEST), of_checkpoint),
    "tensors": Parser((save(TENSORS),), partial(of_checkpoint, of_tensors=True)),
    "baseline": Parser(as_json({"mpitrain_baseline": 1, "nodes": {"a": {"x": 1}}}), of_file(read_baseline)),
    "group_vars": Parser((YAML,), of_file(read_yaml)),
    "verify": Parser(
        (b"\n".join(as_json({"num_ranks": 2}, STEP)) + b"\n",),
        of_file(lambda path: read_verify_record(path.parent), "record.jsonl"),
    ),
    "keys": Parser((f"{_KEYS.server_secret.hex()}\n{_KEYS.worker.text}\n".encode(),), of_file(read_keys)),
    "key": Parser((_KEYS.worker.text.encode(),), of_text(lambda text: parse_key(text, "MPITRAIN_KEY"))),
    "wire": Parser((_FRAMES,), message),
    "bed": Parser(
        as_json(
            {"name": "b", "full": True, "num_nodes": 2, "subnet": "10.1.2", "image": "x", "faults": {"n": {"a": ""}}}
        ),
        of_file(
            lambda path: read_bed(path.parents[2], "b").names if path.stat().st_size < 1000 else None,
            "beds/b/record.json",
        ),
    ),
    "snapshot": Parser(
        as_json({"full": True, "num_nodes": 2, "subnet": "10.1.2", "image": "x", "base": None}),
        of_file(lambda path: read_snapshot(path.parents[2], "s"), "snapshots/s/snapshot.json"),
    ),
    "command": Parser(as_json({"kind": "set", "name": "lr", "value": "0.5"}), lambda data, _: order_of(data)),
    "notes of a run": Parser(
        as_json({"name": "a", "note": "b", "tags": ["c"], "is_hidden": True}), lambda data, _: notes_of(data, "notes")
    ),
    "steering": Parser(as_json({"run": 1, "paused": "ada", "outcomes": []}), of_text(rank_record.read_steering)),
    "page of a rank": Parser((page(),), of_memory("mpitrain-rank-3", lambda path: rank_record.read_record(path, 3))),
    "error file of a rank": Parser(
        as_json({"message": {"message": "E: no", "extraInfo": {"py_callstack": "T", "timestamp": "1"}}}),
        lambda data, _: parse_error(data),
    ),
    "file of the flight recorder": Parser((pickle.dumps(RECORDED, protocol=2),), recorded),
    "order of a rank": Parser((json.dumps(ORDER).encode(),), order_of_page),
    "in-memory checkpoint": Parser(
        (copy_in_memory(),), lambda data, _: read_copy(numpy.frombuffer(bytearray(data), numpy.uint8))
    ),
    "packages": Parser(
        (b'a: 1\nmpitrain_python_packages: ["torch", "tqdm"]\n',), of_text(lambda text: _listed(Path("all.yml"), text))
    ),
    "page of a server": Parser(
        tuple(map(as_served, as_json({"at": 5.0, "workers": []}))), of_memory(served_record.NAME, served)
    ),
    "text of a server": Parser(
        as_json({"at": 5.0, "workers": []}),
        lambda data, folder: of_memory(served_record.NAME, served)(as_served(data), folder),
    ),
    "name of a launcher": Parser((f"{socket.gethostname()} {os.getpid()} 12345".encode(),), of_text(launcher_pid)),
    "roll call": Parser(as_json({"rank": 3, "descriptors": ["record"], "starter": 5}), of_socket(hear_rank)),
    "keeper": Parser(
        as_json(
            *({"keep": "1/a"}, {"give": "a"}, {"only": ["1/a"], "run": 3}, {"wish": "x"}, {"enter": "x"}, {"names": 1}),
            *(
                {"leave": "x", "step": 1, "ms": 5},
                {"follow": "x"},
                {"estate": 1},
                {"lead": "x"},
                {"tell": {"wish": 1, "of": "x", "step": 3}},
                {"pids": 1},
                {"stay": 1},
                {"drop": 1},
            ),
        ),
        of_socket(hear_keeper),
    ),
    "live": Parser(
        tuple(
            line + b"\n"
            for line in as_json(
                {"watch": 1, "version": 1},
                {"look": 1, "version": 1},
                {"output": {"ranks": "0-2"}, "version": 1},
                {"wish": {"leave": ["a"]}, "version": 1},
                {"wish": {"tell": ORDER, "from": "x"}, "version": 1},
            )
        ),
        watch,
    ),
    "lines": Parser((b'{"beat": 1}\nhello\n{"ranks": []}\n',), lines),
}
