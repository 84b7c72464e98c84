"""The pages use the field's standard terms: a phrase of our own, or of translated English, is named with its term."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs import REPOSITORY

# What a page must not say (a regular expression, in any case), and what it says instead.
BANNED = {
    r"go(?:es|ing)? on": "continues; after a failure: resumes",
    r"went on": "continued; after a failure: resumed",
    r"(?:says|say|said) so": "prints a warning; say what it prints",
    r"stands? still|standing still|stood still": "hangs, stalls; of a training: pauses",
    r"tells of": "describes",
    r"cop(?:y|ies) in memory|copied to memory": "in-memory checkpoint",
    r"divided optimizer": "optimizer-state sharding (ZeRO stage 1)",
    r"cut over (?:several )?ranks": "pipeline parallelism",
    r"(?<!test )(?<!test\n)(?<!test\n  )\bbeds?\b": "test bed, simulated nodes",
    r"in rounds|of rounds": "local updates",
    r"has left out": "error-feedback residual; has not sent",
    r"the share\b(?! of)": "the shared folder, the NFS export",
    r"without a word": "without a heartbeat; without a message",
    r"what is left (?:of|on)": "processes that remain",
    r"whole checkpoint": "valid checkpoint, complete checkpoint",
    r"(?:next|last|first|each|every|this|that|a) try": "attempt",
    r"whoever": "the user who",
    r"this holds for|the same holds": "this also applies to",
    r"does not hold for": "does not apply to",
}
# The history and the log keep their words, as do the pages that are made from code.
PAGES = [
    REPOSITORY / "README.md",
    *(
        path
        for path in sorted((REPOSITORY / "docs").rglob("*.md"))
        if path.name not in ("checks.md", "fault-coverage.md")
    ),
]


def prose(text: str) -> str:
    """A page without its blocks, code, comments and the targets of its links, with the same lines."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found[0])

    for pattern in (r"^```.*?^```$", r"<!--.*?-->", r"`[^`]*`", r"\]\([^)]*\)"):
        text = re.sub(pattern, blank, text, flags=re.M | re.S)
    return text


def banned(text: str) -> list[str]:
    """What the text must not say: line, phrase and the standard term."""
    found = []
    for pattern, term in BANNED.items():
        whole = re.compile(rf"(?<!\w)(?:{pattern})(?!\w)", re.I)
        found += [
            f"{text[: one.start()].count(chr(10)) + 1}: {one[0]!r}; write: {term}" for one in whole.finditer(text)
        ]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_a_page_uses_the_standard_terms(page: Path) -> None:
    assert banned(prose(page.read_text())) == []


def test_the_pages_are_short() -> None:
    folders = ("tutorials", "how-to", "reference", "explanation")
    pages = [page for folder in folders for page in (REPOSITORY / "docs" / folder).glob("*.md")]
    assert len(pages) <= 26
    written = [page for page in pages if page.name != "checks.md"]  # made from the checks
    assert sum(len(page.read_text().splitlines()) for page in written) <= 6500
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 120


def test_what_is_banned_is_found() -> None:
    text = "The job\ngoes on. `goes on`\n```\nit goes on\n```\n[x](goes-on.md) A line says so.\n"
    assert [line.partition(";")[0] for line in banned(prose(text))] == ["2: 'goes on'", "6: 'says so'"]


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """The lines and texts of a module's strings, which may be a part of a message; not its docstrings."""
    tree = ast.parse(path.read_text())
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, owners) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def faults(texts: Callable[[Path], Iterator[tuple[int, str]]]) -> list[str]:
    """What must not be said in the texts of each module of the package."""
    return [
        f"{path.relative_to(REPOSITORY)}:{line}: {fault}"
        for path in sorted((REPOSITORY / "mpitrain").rglob("*.py"))
        for line, text in texts(path)
        for fault in banned(text)
    ]


def test_messages_use_the_standard_terms() -> None:
    assert faults(messages) == []


# What is right in code, where a share is also a part, and a round also one of a tournament or of a benchmark.
RIGHT_IN_CODE = ("in rounds", "of rounds", "the share")


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """A module's docstrings and comments, as one text with the lines of the module."""
    lines = [""] * (path.read_text().count("\n") + 2)
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            is_docstring = token.type == tokenize.STRING and token.line.lstrip().startswith(('"""', 'r"""'))
            if token.type == tokenize.COMMENT or is_docstring:
                for number, line in enumerate(token.string.splitlines(), token.start[0]):
                    lines[number] += line
    yield 0, prose("\n".join(lines[1:]))


def test_docstrings_and_comments_use_the_standard_terms() -> None:
    assert [fault for fault in faults(comments) if not any(f"'{right}'" in fault for right in RIGHT_IN_CODE)] == []
