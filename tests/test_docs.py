"""The documents are true: programs run, links lead somewhere, names exist.

An HTML comment just before a fenced block says what is done with it; it does not show on the page:

    <!-- test -->               console: run each line that begins with "$ ", in order; it must end with code 0.
                                python: run it in one process.
    <!-- test: exact -->        the same, and numbers count (below).
    <!-- test: fails -->        console: each command must end with another code than 0.
    <!-- test: file=fit.py -->  keep the block under that name, for the commands that follow.

The blocks of one document run one after the other in one directory, a copy of the repository's scripts and examples.
Each line shown under a command must come in its output, in this order; others may come in between ("..." says so on the
page). A line that ends with "..." stands for any end. Any number stands for any other, but in an exact block. Every
Python block, marked or not, must compile.

A command of REPEATED runs in `scripts/test --nightly` only, because another test of every run has what it shows.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import socket
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest

import mpitrain
from jobs import REPOSITORY, run_command
from mpitrain.cli import COMMANDS
from mpitrain.config import ENV_FILE, KEY, PREFIX, Config
from test_layers import FLOORS

DOCUMENTS = [*REPOSITORY.glob("*.md"), *sorted((REPOSITORY / "docs").rglob("*.md"))]
TEXTS = {path.relative_to(REPOSITORY).as_posix(): path.read_text() for path in DOCUMENTS}
# What the documents write for this machine's own.
HOST, DIRECTORY = "lab1", "/home/ada/mpitrain"
COMMAND_SECONDS = 300.0
# What the marked blocks of a document import, where an environment may lack it.
FRAMEWORKS = {
    "docs/how-to/horovod.md": "torch",
    "docs/how-to/jax.md": "jax",
    "docs/how-to/low-communication.md": "torch",
    "docs/how-to/pytorch.md": "torch",
    "docs/explanation/numerics.md": "torch",
}


# Dear commands, by the test of every run that starts the same programs.
REPEATED = {
    "tests/faults/test_chaos.py": ["bash chaos_demo.sh", "ls demo"],
    "tests/examples/torch_programs.py": [
        "mpiexec -n 2 python examples/torch_whole_loop.py --checkpoint state.pt --epochs 2",
        "mpiexec -n 3 python examples/torch_whole_loop.py --checkpoint state.pt",
        "mpiexec -n 2 python examples/torch_ddp.py --steps 20",
    ],
}
NIGHTLY = {command for listed in REPEATED.values() for command in listed}

# Blocks of commands without a comment before them, by document and first line: the test that runs the commands, or why
# none does.
NOT_RUN = {
    "README.md": {
        "$ mpitrain run -n 3 train.py": "tests/faults/test_restart.py, tests/faults/test_hangs.py",
        "scripts/quickstart": "it downloads packages and a data set",
        "mpitrain run -n 4 train.py": "the script is the reader's; tests/examples/test_torch_examples.py",
    },
    "CONTRIBUTING.md": {
        "scripts/test": "it runs this test",
        "export OMP_NUM_THREADS=1": "it runs this test",
    },
    "docs/tutorials/get-started.md": {"$ scripts/quickstart --epochs 1": "it downloads packages and a data set"},
    "docs/how-to/cluster-admin.md": {
        "scripts/quickstart": "it downloads packages, and needs machines",
        "mpitrain cluster init": "it needs machines; on a bed, tests/cli/test_cluster_bed.py",
        "cp cluster/hosts.example": "it needs machines; on a bed, tests/nodes/beds.py",
        "pip install './mpitrain-": "tests/test_wheel.py",
        "scripts/collection dist": "tests/test_release.py",
        "$ mpitrain cluster install": "it needs a cluster",
    },
    "docs/reference/cli.md": {'eval "$(mpitrain completion bash)"': "tests/cli/test_completion.py"},
    "docs/reference/formats-and-protocols.md": {'echo \'{"look": 1': "tests/launch/test_live.py"},
    "docs/explanation/allreduce.md": {"mpitrain bench --hosts": "it needs machines; tests/cli/test_bench.py"},
    "docs/dev/cuda-kernels.md": {
        "$ scripts/gpu-check": "it needs a GPU; tests/cuda/test_gpu_check.py",
        "$ mpitrain bench -n 2 --device cuda": "it needs a GPU",
        "$ mpiexec -n 2 python examples/train.py --device cuda": "it needs a GPU",
    },
    "docs/dev/testbed.md": {
        "$ scripts/testbed up 4": "tests/nodes/test_bed.py",
        "$ scripts/testbed break kill": "tests/nodes/test_faults.py",
        "$ scripts/testbed save": "tests/nodes/test_lifecycle.py",
        "$ scripts/testbed ssh": "tests/cluster/test_chaos_over_hosts.py",
    },
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: str
    line: int  # of its first line
    language: str
    text: str
    mark: str | None  # what the comment before it says behind "test": ""; None without a comment

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(document: str) -> Iterator[Block]:
    """The fenced blocks of a document."""
    pattern = re.compile(
        r"(?:^<!-- test(?:: (?P<mark>\S+))? -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
    )
    text = TEXTS[document]
    for found in pattern.finditer(text):
        mark = (found["mark"] or "") if found[0].startswith("<!--") else None
        yield Block(document, text.count("\n", 0, found.start("text")) + 1, found["language"], found["text"], mark)


ALL_BLOCKS = [block for document in TEXTS for block in blocks(document)]


def test_every_command_is_run_or_says_why_not() -> None:
    known = {(document, first) for document, listed in NOT_RUN.items() for first in listed}
    used = set()
    for document, text in TEXTS.items():
        for found in re.finditer(r"(?P<before>^.*)\n```(?:console|bash)\n(?P<first>.*)$", text, re.M):
            if not re.fullmatch(r"<!-- (?:test(?:: \S+)?|not run: .+) -->", found["before"]):
                fits = {one for one in known if one[0] == document and found["first"].startswith(one[1])}
                assert fits, f"{document}: {found['first']}\nmark the block, or say in NOT_RUN what runs it"
                used |= fits
    assert used == known
    tests = {
        name for listed in NOT_RUN.values() for why in listed.values() for name in re.findall(r"tests/\S+\.py", why)
    }
    assert not [name for name in tests if not (REPOSITORY / name).is_file()]


def test_every_mark_belongs_to_a_block() -> None:
    for document, text in TEXTS.items():
        marks = re.findall(r"^ *<!-- *test.*$", text, re.M)
        assert len(marks) == sum(block.mark is not None for block in blocks(document)), document


MARKED = sorted({block.document for block in ALL_BLOCKS if block.mark is not None})


@pytest.mark.parametrize(
    ("document", "leaves_out"),
    [
        *(pytest.param(document, NIGHTLY, id=document) for document in MARKED),
        *(
            pytest.param(document, set(), id=f"{document}, all of it", marks=pytest.mark.nightly)
            for document in MARKED
            if any(f"$ {command}\n" in TEXTS[document] for command in NIGHTLY)
        ),
    ],
)
def test_marked_blocks_run(document: str, leaves_out: set[str], tmp_path: Path) -> None:
    if framework := FRAMEWORKS.get(document):
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    for folder in ("examples", "scripts"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for block in blocks(document):
        if block.mark is None:
            continue
        if block.mark.startswith("file="):
            (tmp_path / block.mark.removeprefix("file=")).write_text(block.text)
        elif block.language == "python":
            (tmp_path / "block.py").write_text(block.text)
            run(block, "python block.py", tmp_path)
        else:
            assert block.language == "console", f"{block}: only console and python blocks can be run"
            for command, expected in commands(block):
                if command not in leaves_out:
                    check_shown(block, command, expected, run(block, command, tmp_path))


def commands(block: Block) -> list[tuple[str, list[str]]]:
    """Each command of a console block, and the lines shown under it."""
    found: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        elif found and found[-1][0].endswith("\\") and not found[-1][1]:
            found[-1] = (f"{found[-1][0]}\n{line}", [])
        else:
            found[-1][1].append(line)
    return found


def run(block: Block, command: str, directory: Path) -> str:
    """Run a command as a user with this Python's environment would; returns what it printed."""
    if re.fullmatch(r"source \S+/activate", command):
        return ""  # PATH does it here
    script = f'export PATH="{Path(sys.executable).parent}:$PATH"; unset OMP_NUM_THREADS; {command}'
    job = run_command(["bash", "-c", f"exec 2>&1; {script}"], timeout=COMMAND_SECONDS, cwd=directory)
    assert (job.code != 0) == (block.mark == "fails"), f"{block}: {command}\n{job.output}"
    assert not job.left, f"{block}: {command} left {job.left}"
    return (
        job.stdout.replace(sys.prefix, f"{DIRECTORY}/.venv")
        .replace(str(directory), DIRECTORY)
        .replace(f" on {socket.gethostname()}", f" on {HOST}")
    )


def check_shown(block: Block, command: str, expected: list[str], output: str) -> None:
    simple = str.strip if block.mark == "exact" else without_numbers
    lines = iter([simple(line) for line in output.splitlines()])
    for line in expected:
        begin, has_any_end = simple(line.removesuffix("...")), line.endswith("...")
        assert line == "..." or any(one == begin or (has_any_end and one.startswith(begin)) for one in lines), (
            f"{block}: {command}\nnot (there) in the output: {line}\n{output}"
        )


def without_numbers(line: str) -> str:
    """Numbers depend on the machine, and their widths with them."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,:]*(?:e[-+]\d+)?", "#", line)).strip()


def test_what_is_left_out_is_in_a_document_and_in_another_test() -> None:
    marked = [block for block in ALL_BLOCKS if block.mark is not None and block.language == "console"]
    assert {command for block in marked for command, _ in commands(block)} >= NIGHTLY
    for path, listed in REPEATED.items():
        programs = set(re.findall(r"examples/(\w+)\.py", " ".join(listed)))
        assert all(f'"{program}"' in (REPOSITORY / path).read_text() for program in programs)


def test_what_is_shown_is_compared() -> None:
    block = Block("a document", 1, "console", "$ a\nloss 0.5\n", "")
    assert commands(block) == [("a", ["loss 0.5"])]
    check_shown(block, "a", ["loss 0.5", "...", "end"], "other\nloss  1,024\nmore\nend\n")
    check_shown(block, "a", ["los...", "end..."], "other\nloss  1,024\nend\n")
    for wrong in (["Loss 0.5"], ["end", "loss 0.5"], ["lost..."], ["end...", "loss 0.5"], ["los"]):
        with pytest.raises(AssertionError, match="in the output"):
            check_shown(block, "a", wrong, "loss 0.5\nend\n")
    exact = dataclasses.replace(block, mark="exact")
    check_shown(exact, "a", ["loss 0.5"], "loss 0.5\n")
    with pytest.raises(AssertionError, match="in the output"):
        check_shown(exact, "a", ["loss 0.5"], "loss 0.6\n")


@pytest.mark.parametrize("block", [block for block in ALL_BLOCKS if block.language == "python"], ids=str)
def test_python_blocks_compile_and_use_public_names(block: Block) -> None:
    compile(block.text, str(block), "exec")
    assert set(re.findall(r"\bmt\.(\w+)", block.text)) <= {
        *mpitrain.__all__,
        *mpitrain._OF_FRAMEWORKS,
        *mpitrain._MODULES,
    }
    for module, name in re.findall(rf"\b(?:mt|mpitrain)\.({'|'.join(mpitrain._MODULES)})\.(\w+)", block.text):
        assert name in import_module(f"mpitrain.{module}").__all__


@pytest.mark.parametrize("document", TEXTS)
def test_links_lead_somewhere(document: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(TEXTS[document])):
        parts = urlsplit(target)
        if parts.scheme:
            assert parts.scheme == "https", target
            continue
        path = (REPOSITORY / document).parent / parts.path if parts.path else REPOSITORY / document
        assert path.exists(), target
        if parts.fragment:
            assert parts.fragment in anchors(path.read_text()), target


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to the headings."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


@pytest.mark.parametrize("document", TEXTS)
def test_named_files_exist(document: str) -> None:
    folders = "mpitrain|docs|scripts|tests|examples|benchmarks"
    named = re.findall(rf"(?<![\w/.~-])(?:{folders})/[\w./-]*\w", TEXTS[document])
    missing = [name for name in named if not (REPOSITORY / name).exists()]
    assert not missing


def test_settings() -> None:
    """Each variable that is named exists, and each that exists is named."""
    named = {name for text in TEXTS.values() for name in re.findall(rf"(?<!_){PREFIX}[A-Z]+(?:_[A-Z]+)*", text)}
    assert named == {PREFIX + field.name.upper() for field in dataclasses.fields(Config)} | {ENV_FILE, KEY}
    text = TEXTS["docs/reference/configuration.md"].partition("\n## Settings\n")[2].partition("\n## ")[0]
    ours, _, of_launcher = text.partition("Only the commands read")
    assert re.findall(rf"^\| `{PREFIX}(\w+)` \|", ours, re.M) == [f.name.upper() for f in dataclasses.fields(Config)]
    assert re.findall(r"^\| `(\w+)` \|", of_launcher, re.M) == [ENV_FILE, KEY]


def test_extras() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"'\.\[(\w+)\]'", TEXTS["docs/reference/configuration.md"])) == set(extras)


def test_subcommands() -> None:
    """Every command of a block exists; the text may speak of planned ones."""
    used = {name for block in ALL_BLOCKS for name in re.findall(r"(?:^|[$|&;] *)mpitrain ([a-z]\S*)", block.text, re.M)}
    assert used == set(COMMANDS)


def test_layers() -> None:
    """The table of the architecture is the one that is enforced."""
    text = TEXTS["docs/dev/architecture.md"].partition("## Layers")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \d+ \| (.*) \|$", text, re.M)
    assert [sorted(re.findall(r"`(\w+)`:", row)) for row in rows][::-1] == [sorted(floor) for floor in FLOORS]


def test_files_on_the_nodes() -> None:
    """docs/how-to/cluster-admin.md lists every path that a role writes, and none that no role writes."""
    table = (
        TEXTS["docs/how-to/cluster-admin.md"].partition("## What is changed on each machine")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| `(/[^`]+)` \|(.*)$", table, re.M)
    alike = {
        f"{Path(path).parent}/{name}"
        for path, text in rows
        for name in re.findall(r"`(\w+)`", text.partition("likewise")[2])
    }
    listed = {path for path, _ in rows} | alike
    roles = REPOSITORY / "cluster/playbooks/roles"
    # Undone is what the others did; the environment on the shared folder is in its folder.
    tasks = [path for path in roles.glob("*/tasks/*.yml") if path.parts[-3] not in ("mpitrain_undo", "mpitrain_verify")]
    assert tasks
    written = {
        found.strip()
        for path in tasks
        for found in re.findall(
            r"^ +(?:- )?(?:{kind: link, )?(?:dest|path|creates): (/[^,\n]+)", path.read_text(), re.M
        )
    }
    # By ssh-keygen, beside the private key, and by a shell.
    written |= {"/etc/ssh/mpitrain/id_ed25519.pub", "/etc/mpitrain/gate.loaded"}
    # What a template fills in may be anything within one name.
    patterns = {path: re.sub(r"(?:\\{){2}.*?(?:\\}){2}", "[^/]+", re.escape(path)) for path in written}
    undocumented = [path for path, pattern in patterns.items() if not any(re.fullmatch(pattern, one) for one in listed)]
    assert not undocumented, "written by a role, but not in the table"
    unwritten = [one for one in sorted(listed) if not any(re.fullmatch(pattern, one) for pattern in patterns.values())]
    assert not unwritten, "in the table, but written by no role"


def test_pictures_are_well_formed() -> None:
    pictures = list((REPOSITORY / "docs").rglob("*.svg"))
    assert pictures
    for picture in pictures:
        assert ElementTree.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"
