"""Imports run downwards only. The table is the map of docs/architecture.md; a new module needs a line in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mpitrain"

# From the bottom up. A module may import those of lower layers and of its own, but never in a circle.
# A name ending in .* stands for a package with all its modules.
LAYERS: dict[str, list[str]] = {
    "bottom": ["errors", "extras", "job", "job.context", "job.early", "job.own_addresses"],
    "values": ["arrays", "config", "last_word", "profile", "shown", "state_files", "tree"],
    "compression": ["compression.*"],
    "serve": [
        "serve",
        "serve.doorkeeper",
        "serve.jobs",
        "serve.keys",
        "serve.ledger",
        "serve.link",
        "serve.pace",
        "serve.passes",
        "serve.plain",
        "serve.shard_roll",
        "serve.sockets",
        "serve.strangers",
        "serve.wire",
        "serve.worker_link",
    ],
    "watching": ["watching.*"],
    "launch": ["launch.*"],
    "waiting": ["waiting.*"],
    "world": ["layout", "shard", "world", "cuda.*"],
    "allreduce": ["allreduce.*"],
    "exchange": [
        "collectives",
        "exchange.bucket",
        "exchange.checks",
        "exchange.division",
        "exchange.driver",
        "exchange.exchange",
        "exchange.low_rank",
        "exchange.moves",
        "exchange.on_device",
        "exchange.on_host",
        "exchange.overlap",
        "exchange.shares",
        "exchange.slot",
        "exchange.summands",
        "exchange.sums",
        "exchange.totals",
        "exchange.trees",
    ],
    "reducer": [
        "exchange",
        "exchange.alone",
        "exchange.left_out",
        "exchange.means",
        "exchange.owned",
        "exchange.reducer",
        "exchange.remarks",
        "exchange.scattered",
        "exchange.vote",
    ],
    "remote": ["remote.*"],
    "job": [
        "job.cores",
        "job.elastic",
        "job.failure",
        "job.helpers",
        "job.job",
        "job.partings",
        "job.recovery",
        "job.role",
        "job.segments",
        "job.spare",
        "job.start",
        "job.step_times",
        "job.told",
        "job.trace",
        "job.worlds",
        "verify",
        "verify.compare",
        "verify.comparison",
        "verify.comparison_report",
        "verify.fingerprint",
        "verify.given_arrays",
        "verify.parameter_changes",
        "verify.record_file",
        "verify.run_record",
    ],
    "forecast": [
        "plan",
        "plan.forecast",
        "plan.host_times",
        "plan.ways",
        "simulate",
        "simulate.events",
        "simulate.machines",
        "simulate.network",
        "simulate.ring_times",
        "simulate.serving",
        "simulate.sums",
        "simulate.training",
        "simulate.transport",
    ],
    "parts": [
        "adapters.*",
        "serve.answers",
        "serve.attendance",
        "serve.connect",
        "serve.farewell",
        "serve.lines",
        "serve.messages",
        "serve.party",
        "serve.pieces",
        "serve.pushes",
        "serve.refusals",
        "serve.replica",
        "serve.server",
        "serve.shard",
        "serve.shard_peers",
        "serve.shards",
        "serve.source",
        "serve.status",
        "serve.store",
        "serve.update",
        "serve.worker",
        "strategies.*",
        "training",
        "training.built",
        "training.checkpoint.*",
        "training.data.*",
        "training.flat_optimizer",
        "training.loss_scale",
        "training.metrics",
        "training.non_finite",
        "training.optimizers",
        "training.outcomes",
        "training.parts",
        "training.run_document",
        "training.run_event",
        "training.schedules",
        "training.step",
        "training.tunable",
    ],
    "trainer": [
        "training.hooks.*",
        "training.meters.*",
        "training.plot",
        "training.probe",
        "training.course",
        "training.keep",
        "training.pause",
        "training.state_copies",
        "training.steering",
        "training.turn",
        "training.virtual_passes",
        "training.trainer",
        "training.writers.*",
        "verify.observe",
    ],
    "frameworks": ["horovod.*", "jax.*", "torch.*"],
    "bench": ["bench.*"],
    "simulate": [
        "simulate.machines_file",
        "simulate.picture",
        "simulate.report",
        "simulate.saves",
        "simulate.scaling",
        "simulate.servers_table",
    ],
    "plan": ["plan.measured_steps", "plan.plan_report"],
    "diagnostics": ["diagnostics.*"],
    "testbed": ["testbed.*"],
    "chaos": ["chaos.*"],
    "provision": ["provision.*"],
    "dashboard": ["dashboard.*"],
    "command line": ["cli.*", "__main__"],
}

# Where the table alone would allow more: the only modules of ours that these may import.
ONLY = {
    "watching.*": ["errors", "config", "watching.*"],
    "launch.*": ["errors", "config", "job.context", "watching.*", "launch.*"],
    "diagnostics.*": ["errors", "config", "launch.*", "diagnostics.*"],
    "testbed.*": ["errors", "config", "launch.*", "testbed.*"],
    "provision.*": ["errors", "config", "launch.*", "provision.*"],
    "chaos.*": ["errors", "extras", "config", "job.context", "watching.*", "launch.*", "testbed.*", "chaos.*"],
}

# Imported nowhere else in the package, not even inside a function.
HOMES = {
    "argcomplete": ["cli.completion"],
    "ansible": ["provision.callback_plugins.mpitrain_report"],
    "cupy": ["cuda.device"],  # others of the package get it from there
    "torch": [
        "adapters.torch_arrays",
        "adapters.torch_buffers",
        "adapters.torch_checks",
        "adapters.torch_layers",
        "adapters.torch_module",
        "adapters.torch_optimizer",
        "adapters.torch_parts",
        "adapters.torch_random",
        "adapters.torch_shard",
        "adapters.torch_state",
        "adapters.torch_trained",
        "horovod.elastic.sampler",
        "horovod.elastic.torch_state",
        "horovod.numpy",
        "horovod.sync_batch_norm",
        "horovod.torch.*",
        "torch.*",
    ],
    "jax": ["jax.*"],
    "fabric": ["diagnostics.connect"],
    "matplotlib": ["bench.plot", "chaos.picture", "simulate.picture", "training.plot"],
    "mlflow": ["training.writers.mlflow"],
    "numba": ["compression.kernels"],
    "pynvml": ["training.meters.gpu_utilisation"],
    "rich": ["cli.check_cluster", "cli.top_screen", "cli.top_view", "simulate.report", "training.hooks.log"],
    "starlette": ["dashboard.app", "dashboard.gate"],
    "tensorboardX": ["training.writers.tensorboard"],
    "uvicorn": ["dashboard.server"],
    "wandb": ["training.writers.wandb"],
    "zmq": ["serve.doorkeeper", "serve.keys", "serve.sockets"],
}

LEVELS = {entry: level for level, entries in enumerate(LAYERS.values()) for entry in entries}
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py"  # its lazy names point everywhere; tests/test_public.py has it
}


def covers(entry: str, module: str) -> bool:
    return entry == module or (entry.endswith(".*") and f"{module}.".startswith(entry.removesuffix("*")))


def level(module: str) -> int | None:
    return next((number for entry, number in LEVELS.items() if covers(entry, module)), None)


def layer(module: str) -> str:
    number = level(module)
    return "no layer" if number is None else list(LAYERS)[number]


def imports(source: str) -> Iterator[tuple[int, str, bool]]:
    """Line, full name and whether it is only for type checkers, of every import, wherever it stands."""

    def walk(node: ast.AST, typing_only: bool) -> Iterator[tuple[int, str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name, typing_only) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"line {child.lineno}: relative import"
                for alias in child.names:
                    yield child.lineno, f"{child.module}.{alias.name}", typing_only
            elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                for part in child.body:
                    yield from walk(ast.Module([part], []), True)
                for part in child.orelse:
                    yield from walk(ast.Module([part], []), typing_only)
            else:
                yield from walk(child, typing_only)

    yield from walk(ast.parse(source), False)


def our_module(name: str, files: dict[str, Path]) -> str | None:
    """The module of ours that `mpitrain.a.b.Name` is in; None for the package itself (its version)."""
    parts = name.split(".")
    if parts[0] != "mpitrain":
        return None
    for end in range(len(parts), 1, -1):
        if (module := ".".join(parts[1:end])) in files:
            return module
    return None


def violations(module: str, source: str, files: dict[str, Path]) -> list[str]:
    mine = level(module)
    if mine is None:
        return [f"mpitrain/{module}: not in the table of tests/test_layers.py"]
    only = next((allowed for entry, allowed in ONLY.items() if covers(entry, module)), None)
    found = []
    for line, name, _ in imports(source):
        where = f"mpitrain.{module}, line {line} (layer {layer(module)}), imports {name}"
        root = name.split(".")[0]
        if root in HOMES and not any(covers(entry, module) for entry in HOMES[root]):
            found.append(f"{where}; only {HOMES[root]} may")
        other = our_module(name, files)
        if other is None:
            continue
        theirs = level(other)
        if only is not None and not any(covers(entry, other) for entry in only):
            found.append(f"{where}; allowed are {', '.join(only)}")
        elif theirs is None or theirs > mine:
            found.append(f"{where}, which is above it (layer {layer(other)})")
    return found


@pytest.mark.parametrize("module", FILES)
def test_imports_run_downwards(module: str) -> None:
    assert violations(module, FILES[module].read_text(), FILES) == []


def test_the_table_has_no_module_that_is_not_there() -> None:
    for entry in LEVELS:
        assert any(covers(entry, module) for module in FILES), entry


def test_no_circles() -> None:
    """No circle exists by imports inside functions either. Imports for type checkers do not count."""
    graph = {
        module: {
            other
            for _, name, typing_only in imports(path.read_text())
            if not typing_only and (other := our_module(name, FILES)) is not None and other != module
        }
        for module, path in FILES.items()
    }
    while graph:
        free = [module for module, others in graph.items() if not others & graph.keys()]
        assert free, f"import each other in a circle: {sorted(graph)}"
        for module in free:
            del graph[module]


@pytest.mark.parametrize(
    ("module", "source", "text"),
    [
        ("errors", "import mpitrain.config", "imports mpitrain.config, which is above it (layer values)"),
        ("world", "def f():\n    from mpitrain.exchange import trees", "line 2 (layer world), imports mpitrain.exch"),
        ("world", "if TYPE_CHECKING:\n    from mpitrain.job.partings import farewell", "above it (layer job)"),
        ("launch.job", "from mpitrain.arrays import Array", "errors, config, job.context, watching.*, launch.*"),
        ("diagnostics.mpi", "from mpitrain.world import World", "allowed are errors, config, launch.*, diagnostics.*"),
        ("training.trainer", "import cupy.cuda", "only ['cuda.device'] may"),
        ("cli.run", "def f():\n    import torch", "(layer command line), imports torch; only ["),
        ("exchange.new", "", "mpitrain/exchange.new: not in the table"),
        ("training.hooks.log", "from mpitrain import cli", "above it (layer command line)"),
    ],
)
def test_what_is_not_allowed_is_found(module: str, source: str, text: str) -> None:
    found = violations(module, source, FILES)
    assert len(found) == 1
    assert text in found[0]


def test_what_is_allowed() -> None:
    source = (
        "import numpy\nfrom mpitrain import __version__, errors\nfrom mpitrain.tree import Tree\nimport mpitrain.config"
    )
    assert violations("world", source, FILES) == []


def test_only_errors_py_says_that_every_rank_raises_an_error() -> None:
    """A forgotten mark breaks the World: there is one way to set it, which cannot be half done."""
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == "known_everywhere":
                assert module == "errors", f"{path}, line {node.lineno}: raise everywhere(error) in its place"


def test_types_without_pytorch() -> None:
    """Where there is no PyTorch, scripts/check leaves out the modules that import it, and checks all others."""
    (pattern,) = re.findall(r"--exclude '([^']+)'", (PACKAGE.parent / "scripts/check").read_text())
    for module, path in FILES.items():
        uses = any(name.partition(".")[0] == "torch" for _, name, _ in imports(path.read_text()))
        left_out = bool(re.search(pattern, path.relative_to(PACKAGE.parent).as_posix()))
        assert left_out or not uses, f"{path}: mypy finds what PyTorch lacks"
        assert not left_out or module.startswith(("torch", "horovod", "adapters.torch_")), path
