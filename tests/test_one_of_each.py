"""An algorithm, codec, strategy, check, hook, subcommand or fact is one file and one line: it inherits all else.

In a copy of the package one of each is added, from tests/added: its file, and its line in the registry with the import
that this needs. The copy's own tests, which know no names, then have to find it; and they fail until the documents have
it too.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from jobs import REPOSITORY, Job, mpiexec, run_command

RANKS = 3
FUTURE = "from __future__ import annotations\n"


class Addition(NamedTuple):
    """A file of tests/added; where it goes, and what goes behind which lines of the registry there."""

    file: str
    registry: str
    begin: str
    line: str
    imported: str = ""
    imports: str = FUTURE


ADDITIONS = {
    "allreduce": Addition(
        "gather_and_add.py",
        "allreduce/__init__.py",
        "ALGORITHMS |= {\n",
        '    "gather_and_add": Entry(gather_and_add, gather_and_add_steps, seconds),\n',
        "from mpitrain.allreduce.gather_and_add import gather_and_add, gather_and_add_steps, seconds\n",
    ),
    "compression": Addition(
        "halves.py",
        "compression/__init__.py",
        "CODECS: dict[str, Callable[[bool], Codec]] = {\n",
        '    "halves": halves,\n',
        "from mpitrain.compression.halves import halves\n",
    ),
    "strategies": Addition(
        "together.py",
        "strategies/__init__.py",
        "STRATEGIES: dict[str, str] = {\n",
        '    "together": "together.Together",\n',
    ),
    "check/checks": Addition(
        "tea.py",
        "check/checks/__init__.py",
        "SUBJECTS: tuple[ModuleType, ...] = (\n",
        "    tea,\n",
        "from mpitrain.check.checks import tea\n",
    ),
    "training/hooks": Addition(
        "marked_steps.py",
        "__init__.py",
        "_HOME = {\n",
        '    "MarkedSteps": "training.hooks.marked_steps",\n',
        "    from mpitrain.training.hooks.marked_steps import MarkedSteps as MarkedSteps\n",
        "if TYPE_CHECKING:\n",
    ),
    "training": Addition(
        "seen_samples.py",  # publishes it; that may be a line of any file
        "watching/rank_facts.py",
        "FACTS = (\n",
        '    RankFact("seen_samples", int, "", 0, "Samples", KNOWN, True, "the samples that the rank has had"),\n',
    ),
    "cli": Addition(
        "greet.py",
        "cli/__init__.py",
        '    "begin, and run a training": {\n',
        '        "greet": "mpitrain.cli.greet",\n',
    ),
}

# What the documents need: file, behind which text, and what.
DOCUMENTED = [
    (
        "docs/reference/status.md",
        "",
        "\n| --- | --- |\n",
        "| `gather_and_add`, `halves`, `together`, `MarkedSteps`, `mpitrain greet` | done |\n",
    ),
    ("docs/dev/allreduce-algorithms.md", "", "\n- [ring](#ring)\n", "- [gather_and_add](#gather_and_add)\n"),
    ("docs/dev/allreduce-algorithms.md", "", "\n## ring\n", "\n## gather_and_add\n"),
    (
        "docs/explanation/allreduce.md",
        "\n## Codecs",
        "| --- | --- | --- | --- | --- | --- |\n",
        "| `halves` | 2 | | | | |\n",
    ),
    ("tests/faults/cluster/matrix.py", "", "UNPROVED = {\n", '    "TEA01": "there is no tea anywhere",\n'),
    (
        "docs/reference/formats-and-protocols.md",
        "\nAn entry of `ranks` has:",
        "| --- | --- |\n",
        "| `seen_samples` | the samples that the rank has had |\n",
    ),
    ("docs/reference/configuration.md", "", "are compressed on a network: ", "`halves`, "),
]


def insert(path: Path, begin: str, text: str, section: str = "") -> None:
    """Put `text` behind `begin`, at the first place in the section."""
    before, heading, rest = path.read_text().partition(section) if section else ("", "", path.read_text())
    assert rest.count(begin) >= 1, (path, begin)
    path.write_text(before + heading + rest.replace(begin, begin + text, 1))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the package with its tests and documents, and one of each in it; the documents know nothing of that."""
    folder = tmp_path_factory.mktemp("copy")
    for part in ("mpitrain", "tests", "docs", "cluster", "examples", "benchmarks/log"):
        # With what is compiled, which is as old as its source there too.
        shutil.copytree(REPOSITORY / part, folder / part, ignore=shutil.ignore_patterns("*.png"))
    for path in [*REPOSITORY.glob("*.md"), REPOSITORY / "pyproject.toml"]:
        shutil.copy(path, folder)
    for place, added in ADDITIONS.items():
        shutil.copy(REPOSITORY / "tests/added" / added.file, folder / "mpitrain" / place)
        registry = folder / "mpitrain" / added.registry
        insert(registry, added.begin, added.line)
        if added.imported:
            insert(registry, added.imports, added.imported)
    return folder


@pytest.fixture(scope="module")
def documented(copy: Path) -> Path:
    """The copy, with documents that name all of it."""
    for file, section, begin, text in DOCUMENTED:
        insert(copy / file, begin, text, section)
    run(copy, *PYTEST, f"{REGISTRY}::test_the_table_in_the_docs_is_made_from_the_checks", WRITE_DOCS="1")
    return copy


def run(copy: Path, *words: str, ranks: int | None = None, code: int = 0, **env: str) -> Job:
    """Python in the copy, on so many ranks; it must end with this code."""
    start = [sys.executable] if ranks is None else [*mpiexec(ranks), sys.executable]
    env = {"PYTHONPATH": str(copy), "COLUMNS": "100", "WRITE_DOCS": ""} | env
    job = run_command([*start, *words], cwd=copy, env=env, timeout=600)
    assert job.code == code, job.output
    return job


PYTEST = ("-m", "pytest", "-v", "-p", "no:cacheprovider")
REGISTRY = "tests/check/test_registry.py"
DOCUMENTS = ("tests/test_docs_quotes.py", REGISTRY)
MATRIX = "tests/check/test_proved.py::test_every_check_is_proved_or_named"


def outcomes(job: Job, outcome: str) -> set[str]:
    return set(re.findall(rf"::(.+) {outcome}\b", job.stdout))


# -- one process ------------------------------------------------------------------------------------------------------


def test_the_documents_must_have_it(copy: Path) -> None:
    """Nothing else is missing."""
    job = run(copy, *PYTEST, *DOCUMENTS, MATRIX, code=1)
    assert outcomes(job, "FAILED") == {
        "test_status_has_every_algorithm_codec_and_strategy",
        "test_each_algorithm_has_a_section[gather_and_add]",
        "test_the_table_of_codecs_has_each_of_them",
        "test_the_setting_for_compression_names_each_codec",
        "test_status_has_every_command_and_no_other",
        "test_the_table_in_the_docs_is_made_from_the_checks",
        "test_every_check_is_proved_or_named",
        "test_each_fact_of_a_rank_is_described",
    }, job.output


def test_it_inherits_the_tests_of_one_process(documented: Path) -> None:
    chosen = "(halves and not bits) or greet or TEA01 or MarkedSteps or gather_and_add or together or marked_steps "
    chosen += (
        "or type_checkers or status_has or codecs_has or compression_names or test_help or in_the_docs or proved_or"
        " or fact"
    )
    files = ("cli/test_main.py", "test_compression.py", "test_public.py", "test_layers.py")
    job = run(documented, *PYTEST, *DOCUMENTS, MATRIX, *(f"tests/{file}" for file in files), "-k", chosen)
    passed = outcomes(job, "PASSED")
    assert {
        "test_the_error_is_as_large_as_is_said[halves-numpy-1000]",
        "test_by_name[halves]",
        "test_every_command[greet-has_help]",
        "test_every_option_says_what_it_is[greet]",
        "test_a_check_is_whole[TEA01]",
        "test_every_name_is_what_its_module_has[MarkedSteps]",
        "test_type_checkers_see_the_names_that_there_are",
        "test_each_algorithm_has_a_section[gather_and_add]",
        "test_status_has_every_command_and_no_other",
        "test_the_table_in_the_docs_is_made_from_the_checks",
        "test_every_check_is_proved_or_named",
        "test_each_fact_of_a_rank_is_described",
        "test_imports_run_downwards[compression.halves]",
    } <= passed, job.output


def test_the_command_is_there(copy: Path) -> None:
    assert re.search(r"^  greet +greet somebody$", run(copy, "-m", "mpitrain", "--help").stdout, re.M)
    assert run(copy, "-m", "mpitrain", "greet", "you", "--loud", code=3).stdout == "HELLO you\n"


CHECK_CLUSTER = """
import sys
from mpitrain.cli import main
from mpitrain.check import connect, doctor
connect.log_in = doctor.log_in  # this machine is the node, and needs no ssh
sys.exit(main(["check-cluster", "--hosts", "localhost", *sys.argv[1:]]))
"""


def test_the_check_is_made(copy: Path) -> None:
    """check-cluster and doctor both make the check, and each gives its own remedy."""
    pytest.importorskip("fabric")
    findings = json.loads(run(copy, "-c", CHECK_CLUSTER, "--only", "TEA01", "--json").stdout)["findings"]
    assert [(one["id"], one["verdict"], one["remedy"]) for one in findings] == [
        ("TEA01", "warn", "ssh localhost make tea")
    ]
    assert findings[0]["found"].endswith(" has no tea")
    run(copy, "-c", CHECK_CLUSTER, "--only", "TEA01", "--strict", code=1)
    assert "TEA01  quick  there is tea" in run(copy, "-m", "mpitrain", "check-cluster", "--explain", "all").stdout
    done = run_command(
        [sys.executable, "-m", "mpitrain", "doctor", "--json"], cwd=copy, env={"PYTHONPATH": str(copy)}
    )  # its exit code is that of this machine
    (finding,) = (one for one in json.loads(done.stdout)["findings"] if one["id"] == "TEA01")
    assert (finding["verdict"], finding["remedy"]) == ("warn", "make tea")


# -- on all ranks of a job --------------------------------------------------------------------------------------------


def test_it_inherits_the_tests_on_ranks(documented: Path) -> None:
    """Those of algorithms also between pretended nodes and over parts of the ranks."""
    chosen = "(gather_and_add and test_allreduce and not many and not exact) or (halves and not a_profile) "
    chosen += "or (test_the_contract and together) or MarkedSteps"
    job = run(documented, "-m", "tests.ranks", "-vv", "-k", chosen, ranks=RANKS)
    names = "\n".join(outcomes(job, "PASSED"))
    for name in (
        "test_between_nodes[gather_and_add",
        "test_between_nodes_in_hierarchical[gather_and_add",
        "test_over_a_part_of_the_ranks[gather_and_add",
        "test_nans_have_the_same_bits_everywhere[",
        "test_refuses_what_it_cannot_sum_in_place[",
        "test_sums_are_as_close_as_the_codec_allows[alone on each node-halves-1000]",
        "test_a_mean_beyond_the_wire_is_an_error_on_every_rank[halves",
        "test_training_with_the_setting_for_compression[halves",
        "test_the_contract[together-means_are_by_samples",
        "test_every_hook[MarkedSteps-is_described",
    ):
        assert name in names, job.output


def test_the_bench_has_it(copy: Path) -> None:
    words = ("-m", "mpitrain", "bench", "-n", str(RANKS))
    out = run(copy, *words, "--algorithms=all", "--codecs=none,halves", "--sizes=4K", "--rounds=1").stdout
    rows = [line.split() for line in out.splitlines() if not line.startswith("#")]
    assert [row[4:6] for row in rows if "gather_and_add" in row] == [["gather_and_add", "none"]]
    assert [row[4:6] for row in rows if "halves" in row] == [["compressed", "halves"]]
    assert re.search("no codec 'x'; known: .*halves", run(copy, *words, "--codecs=x", code=2).stderr)
    assert re.search("no algorithm 'x'; known: .*gather_and_add", run(copy, *words, "--algorithms=x", code=2).stderr)


JOB = """

import numpy
import rich.console

import mpitrain as mt
from mpitrain.allreduce import make_algorithm
from mpitrain.allreduce.select import choices
from mpitrain.cli.top_screen import TopHistory, picture
from mpitrain.dashboard.prometheus import exposition
from mpitrain.dashboard.shown_jobs import ShownJob
from mpitrain.launch.live_picture import of_ranks
from mpitrain.training.seen_samples import SeenSamples
from mpitrain.watching.activity import own_activity
from mpitrain.watching.rank_record import read_record
from mpitrain.watching.view import RankView

world = mt.init()

# Its cost is the lowest: of all ranks, and between nodes.
for line in choices(world):
    world.print(line)
apart = world.replaced(node_ranks=tuple(range(world.size)))
for name in ("auto", "hierarchical"):
    flat = numpy.arange(3.0) * (world.rank + 1)
    make_algorithm(apart, name).start(flat).wait()
    assert flat.tolist() == [0.0, 6.0, 12.0]


def build(world):
    def function(parameters, batch, on_gradient):
        (x,) = batch
        on_gradient("w", parameters["w"] - x.mean(axis=0))
        return float(((parameters["w"] - x) ** 2).sum() / 2 / len(x))

    data = mt.data.ArrayData(world, (numpy.arange(24.0).reshape(12, 2),), global_batch=12)
    adapter = mt.ArrayFunction(function, {"w": numpy.zeros(2)}, mt.optim.SGD(1.0))
    return mt.Parts(adapter, mt.strategies.make_strategy("together"), data)


hook = mt.MarkedSteps()
trainer = mt.Trainer(build, [mt.StopAtStep(4), hook, SeenSamples()])
trainer.run()
assert type(trainer.strategy).__name__ == "Together"
assert hook.numbers == [1, 2, 3, 4]
numpy.testing.assert_allclose(trainer.adapter.parameters()["w"], [11.0, 12.0], rtol=1e-14)  # the mean of all samples

# Each rank's fact, as others see it.
record = read_record(f"/proc/self/fd/{own_activity().descriptor}", world.rank)
look = of_ranks([RankView(record, 1, host="a")], {"a": [world.rank]}, {})
assert look["ranks"][0]["seen_samples"] == 16
look |= {"job": "j", "at": 1.0, "since": 0.0, "tries": 1, "script": "", "arguments": [], "state": "trains"}
told = exposition([ShownJob(look, 0.0)])
assert f'mpitrain_rank_seen_samples{{job_id="j",rank="{world.rank}",host="a"}} 16.0' in told
console = rich.console.Console(width=100)
with console.capture() as drawn:
    console.print(picture({**look, "events": [], "served": None}, TopHistory(), "rank", 100, None))
assert " SAMPLES STEP " in drawn.get(), drawn.get()
"""


def test_auto_chooses_it_and_a_trainer_runs_it(copy: Path) -> None:
    assert "from 0 KiB: gather_and_add\n" in run(copy, "-c", JOB, ranks=RANKS).stdout
    out = run(copy, "examples/train.py", "--help").stdout
    assert re.search(r"--strategy \{.*\btogether\b.*\}", out)


@pytest.mark.nightly  # tests/device_ranks has the same codec in every run
def test_the_codec_is_used_on_the_host_for_gpus(copy: Path) -> None:
    """Emulated ones; the tests count the line that says so."""
    words = ("-m", "tests.device_ranks", "--emulated=2", "-vv", "-k", "halves")
    job = run(copy, *words, ranks=2)
    assert outcomes(job, "PASSED") >= {
        "test_a_reducers_gradients[halves-True-alone on each node]",
        "test_a_transport_that_does_not_carry_it[halves-peer]",
    }, job.output
