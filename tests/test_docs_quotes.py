"""What the documents quote of the code is so: constants, commands with their options, the table of what is there."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from typing import cast

import pytest

from jobs import REPOSITORY
from mpitrain.allreduce import ALGORITHMS
from mpitrain.cli import COMMANDS, Command
from mpitrain.compression import CODECS, names
from mpitrain.config import Config
from mpitrain.strategies import STRATEGIES
from mpitrain.watching.rank_facts import FACTS
from test_docs import TEXTS

UNITS = {"KIB": 2**10, "MIB": 2**20, "MILLI": 1e-3}
# By document: a pattern of the sentence with its number as a group, and where the number comes from.
QUOTES: dict[str, list[tuple[str, str]]] = {
    "dev/allreduce-algorithms": [
        (r"A segment travels in pieces of at most (\d+) KiB", "allreduce.ring.PIECE_BYTES / KIB"),
        (r"k = pieces of a segment = N / p / (\d+) KiB", "allreduce.ring.PIECE_BYTES / KIB"),
        (r"It goes in blocks of (\d+) KiB", "allreduce.shared_memory._BLOCK_BYTES / KIB"),
        (r"it is copied in and out, (\d+) MiB at a time", "allreduce.shared_memory._SLAB_BYTES / MIB"),
        (r"one exchange in (\d+) is made without naps", "waiting.pieces._WITHOUT_NAPS"),
        (r"Exchanges of less than (\d+) KiB are over", "waiting.pieces._LEAST_BYTES / KIB"),
        (r"beside the backward pass sleeps ([\d.]+) ms", "reducer.driver._NAP_SECONDS / MILLI"),
        (r"The scratch memory is (\d+) MiB, made once", "allreduce.ring.PIECE_BYTES * allreduce.ring.AHEAD / MIB"),
    ],
    "dev/architecture": [
        (r"Between two looks it sleeps for ([\d.]+) ms", "reducer.driver._NAP_SECONDS / MILLI"),
        (r"drives it for up to ([\d.]+) s too", "torch.channel._HERE_SECONDS"),
        (r"The first (\d+) calls of a group are compared", "torch.channel.COMPARED_CALLS"),
        (r"waits up to ([\d.]+) s to hear whether", "job.failure._ARBITRATION_SECONDS"),
        (r"hears nothing from its agent there for (\d+) s", "launch.trouble.SILENCE_SECONDS"),
        (r"what has not ended after (\d+) s, or at a second signal", "launch.run.GRACE_SECONDS"),
    ],
    "how-to/pytorch": [
        (r"The first (\d+) calls of a group are compared", "torch.channel.COMPARED_CALLS"),
    ],
    "how-to/run-jobs": [
        (r"after (\d+) s without a heartbeat", "launch.trouble.SILENCE_SECONDS"),
        (r"exit (\d+) s after the last heartbeat", "launch.trouble.AGENT_SILENCE_SECONDS"),
    ],
    "how-to/troubleshooting": [
        (r"gives the ranks (\d+) s after a Ctrl-C", "launch.run.GRACE_SECONDS"),
        (r"When nothing has moved for (\d+) s", "Config().stall_seconds"),
    ],
    "how-to/fault-tolerance": [
        (r"at the earliest (\d+) s after it was set aside", "launch.where.ASIDE_SECONDS"),
        (r"a host was found bad (\d+) times", "launch.changes.MOST_TIMES_BAD"),
        (r"it is asked again after (\d+) s, 20 s", "launch.changes.FIRST_SECONDS"),
        (r"and so on, up to every (\d+) minutes, silently", "launch.changes.MOST_SECONDS / 60"),
        (r"The host is asked again after (\d+) minutes", "launch.changes.DIFFERENT_SECONDS / 60"),
    ],
    "how-to/parameter-server": [
        (r"lasts for more than (\d+) s, the STATE", "launch.jobs._SILENT_SECONDS"),
        (r"the table has the (\d+) that joined last", "server.status._MOST_GONE"),
        (r"in one process, for (\d+) s at most", "launch.served._MOST_SIZES_SECONDS"),
        (r"look up code, packages and MPI for at most (\d+) s", "launch.served._MOST_SECONDS"),
        (r"over the last (\d+) s, or over the last", "server.status._LOOKS - 1"),
    ],
    "reference/formats-and-protocols": [
        (r"(\d+) KiB for a rank", "launch.log.MOST_RANK_BYTES / KIB"),
        (r"(\d+) MiB for all ranks together", "launch.log.MOST_BYTES / MIB"),
        (r"A line is kept up to (\d+) bytes", "launch.log.MOST_LINE_BYTES"),
        (r"At most ([\d,]+) lines, and 1 MiB", "launch.log.MOST_LINES"),
    ],
    "how-to/monitor": [
        (r"the last lines of each rank \((\d+) KiB for each", "launch.log.MOST_RANK_BYTES / KIB"),
        (r"at most (\d+) MiB in all", "launch.log.MOST_BYTES / MIB"),
        (r"a folder does not answer for (\d+) s", "dashboard.folder_watch._SILENT_SECONDS"),
    ],
    "dev/cuda-kernels": [
        (r"arrays go through (\d+) MiB of its own", "cuda.peer.SLAB_BYTES / MIB"),
        (r"for buffers below (\d+) KiB", "cuda.transports.LIMIT_BYTES / KIB"),
    ],
}


def value_of(expression: str) -> float:
    """Of constants as `module.NAME`, settings and units. Skips the test where a module's framework is missing."""

    def constant(found: re.Match[str]) -> str:
        module, _, name = found[0].rpartition(".")
        if module.startswith("torch."):
            pytest.importorskip("torch", reason="PyTorch is not installed")
        return repr(getattr(import_module(f"mpitrain.{module}"), name))

    return float(eval(re.sub(r"\b[a-z_]+(?:\.\w+)+", constant, expression), {"Config": Config, **UNITS}))


ROWS = [(document, *row) for document, rows in QUOTES.items() for row in rows]


@pytest.mark.parametrize(("document", "sentence", "value"), ROWS, ids=[f"{row[0]}: {row[1]}" for row in ROWS])
def test_constants(document: str, sentence: str, value: str) -> None:
    quoted = re.findall(sentence.replace(" ", r"\s+"), TEXTS[f"docs/{document}.md"])
    assert quoted, "the document does not say so any more: change this row with it"
    for number in quoted:
        assert float(number.replace(",", "")) == pytest.approx(value_of(value))


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(command)
    cast(Command, import_module(COMMANDS[command])).add_arguments(parser)
    return parser


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:  # argparse has no public list
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def lines_of_commands(document: str) -> Iterator[tuple[str, list[str]]]:
    """Each `mpitrain COMMAND ...` that a document shows, and the words behind the command."""
    text = re.sub(r"\\\n\s*", "", TEXTS[document])
    shown = re.findall(r"^(?:\$ )?mpitrain [a-z].*$", text, re.M) + re.findall(r"`(mpitrain [a-z][^`]*)`", text)
    for line in shown:
        words = shlex.split(line.removeprefix("$ ").replace("\n", " ").replace("'", ""), comments=True)
        if words[1] in COMMANDS:
            yield words[1], words[2:]


def unknown_options(command: str, words: list[str]) -> list[str]:
    """Those options among the words that the command does not have. What comes after a script is the script's."""
    parser, unknown = parser_of(command), []
    words = list(words)
    while words:
        word = words.pop(0)
        if word in ("--", "|", "&&", ";", ">", "&"):
            break
        if word in subcommands(parser):
            parser = subcommands(parser)[word]
        elif word.startswith("-") and len(word) > 1:
            action = parser._option_string_actions.get(word.partition("=")[0])
            if action is None and (command != "scale" or word.startswith("--")):  # scale JOB -node2
                unknown.append(word)
            if action is None:
                continue
            if "=" not in word and action.nargs is None and words:
                words.pop(0)
        elif word.endswith(".py"):
            break
    return unknown


@pytest.mark.parametrize("document", TEXTS)
def test_options_of_shown_commands_exist(document: str) -> None:
    wrong = {
        f"mpitrain {command} {' '.join(words)}": unknown
        for command, words in lines_of_commands(document)
        if (unknown := unknown_options(command, words))
    }
    assert not wrong


def test_wrong_options_are_found() -> None:
    assert unknown_options("run", ["-n", "2", "--hots", "a", "train.py", "--lr", "1"]) == ["--hots"]
    assert unknown_options("cluster", ["init", "--user", "admin", "--nodse", "a"]) == ["--nodse"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_what_it_is(command: str) -> None:
    for parser in [parser_of(command), *subcommands(parser_of(command)).values()]:
        for action in parser._actions:
            assert action.help or not action.option_strings, f"mpitrain {command} {action.option_strings} has no help"


def test_benchmark_results_are_those_of_the_log() -> None:
    log = "\n".join(path.read_text() for path in (REPOSITORY / "benchmarks/log").glob("*.md")).replace("**", "")
    rows = re.findall(r"^\|.*\|$", TEXTS["docs/reference/benchmarks.md"], re.M)
    assert len(rows) > 30
    assert [row for row in rows if f"\n{row}\n" not in log] == []


def status() -> dict[str, str]:
    """The rows of the table of what is there: part and state."""
    table = TEXTS["docs/reference/status.md"]
    return dict(re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.M)[1:])


def test_status_counts_the_checks_that_a_fault_has_proved() -> None:
    checks = len(re.findall(r"^\| [A-Z]{3}\d\d", TEXTS["docs/reference/checks.md"], re.M))
    unproved = len(re.findall(r"^- [A-Z]{3}\d\d: ", TEXTS["docs/dev/fault-coverage.md"], re.M))
    assert f"{checks - unproved} of {checks} checks" in status()["`mpitrain doctor`, `mpitrain check-cluster`"]


def test_status_has_every_algorithm_codec_and_strategy() -> None:
    there = " ".join(part for part, state in status().items() if "not there" not in state)
    for name in [*ALGORITHMS.keys() - {"auto"}, *names(), *STRATEGIES]:
        assert re.search(rf"\b{name}\b", there), f"docs/reference/status.md lacks {name}"


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"auto"}))
def test_each_algorithm_has_a_section(name: str) -> None:
    text = TEXTS["docs/dev/allreduce-algorithms.md"]
    assert f"\n## {name}\n" in text
    assert f"\n- [{name}](#{name})\n" in text


def test_the_table_of_codecs_has_each_of_them() -> None:
    section = TEXTS["docs/explanation/allreduce.md"].partition("\n## Codecs\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.M)) == sorted(CODECS)


def test_the_setting_for_compression_names_each_codec() -> None:
    (meaning,) = re.findall(
        r"^\| `MPITRAIN_COMPRESSION` \| `none` \| (.*) \|$", TEXTS["docs/reference/configuration.md"], re.M
    )
    assert set(re.findall(r"`(\w+)`", meaning)) == {*names(), "none", "auto"}


def test_status_has_every_command_and_no_other() -> None:
    for part, state in status().items():
        for name in re.findall(r"`(?:mpitrain )?([a-z][a-z-]+)`", part):
            if name in COMMANDS:
                assert not state.startswith("not there"), f"mpitrain {name} exists: {part}"
        if state.startswith("not there"):
            planned = set(re.findall(r"`mpitrain ([a-z-]+)`", part))
            assert not planned & set(COMMANDS)
    named = {name for part in status() for name in re.findall(r"`mpitrain ([a-z-]+)`", part)}
    assert named >= COMMANDS.keys(), f"docs/reference/status.md lacks {COMMANDS.keys() - named}"


def test_each_fact_of_a_rank_is_described() -> None:
    section = TEXTS["docs/reference/formats-and-protocols.md"].partition("\nAn entry of `ranks` has:\n")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", section.partition("| phase |")[0], re.M))
    assert {fact.name: rows.get(fact.name) for fact in FACTS} == {fact.name: fact.help for fact in FACTS}


def test_nothing_that_exists_is_called_planned() -> None:
    for document, text in TEXTS.items():
        if document in ("CHANGELOG.md", "benchmarks/log/2026-11.md"):
            continue
        for sentence in re.findall(r"[^.|]*\bplanned\b[^.|]*", text):
            for name in [*COMMANDS, *ALGORITHMS, *names(), *STRATEGIES]:
                assert f"`{name}`" not in sentence, f"{document}: {sentence.strip()}"


def test_the_tests_that_a_document_names_are_there() -> None:
    """By file or by function, as in the table of faults of faults-and-tests.md."""
    there = set()
    for path in (REPOSITORY / "tests").rglob("test_*.py"):
        there |= {path.stem, *re.findall(r"^def (test_\w+)\(", path.read_text(), re.M)}
    named = {word for text in TEXTS.values() for word in re.findall(r"`(test_\w+)`", text)}
    assert len(named) > 20
    assert named <= there, sorted(named - there)
