"""The site of the documentation: it is built without a network, and each page has what its text says."""

from __future__ import annotations

import ast
import os
import runpy
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

import mpitrain
from jobs import REPOSITORY

pytest.importorskip("mkdocs", reason="the extra site is not installed")
BUILD_SECONDS = 600.0
ADDRESS = "https://example.org/ada/mpitrain"
# Read by the browser from another machine, as soon as the page is shown.
LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """What a page has: its anchors, its links, what it loads, and how many of each element its text has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.counts = {"li": 0, "pre": 0, "tr": 0}
        self._in_text = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := values.get(key))}
        if tag == "a" and (href := values.get("href")):
            self.links.append(href)
        if tag in LOADED and (source := values.get(LOADED[tag])) and values.get("rel") != "canonical":
            self.loads.append(source)
        if tag == "article":
            self._in_text += 1
        if self._in_text and tag in self.counts:
            self.counts[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        if tag == "article":
            self._in_text -= 1


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Each page of a new site. It is built without a network where this user may make one without."""
    site = tmp_path_factory.mktemp("site")
    alone = ["unshare", "--net"]
    # Root in a container mostly may not.
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        alone = []
    command = [*alone, sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "REPOSITORY_URL": ADDRESS},
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def page_of(pages: dict[Path, Page], name: str) -> Page:
    (page,) = (page for path, page in pages.items() if path.as_posix().endswith(f"site0/{name}"))
    return page


def html_of(path: Path) -> str:
    """The page of a document, below the site's folder."""
    return path.relative_to(REPOSITORY / "docs").with_suffix(".html").as_posix()


@pytest.mark.parametrize(
    ("remote", "page"),
    [
        ("git@example.org:ada/mpitrain.git", "https://example.org/ada/mpitrain"),
        ("ssh://git@example.org/ada/mpitrain", "https://example.org/ada/mpitrain"),
        ("https://example.org/ada/mpitrain.git", "https://example.org/ada/mpitrain"),
        ("https://ada:secret@example.org/ada/mpitrain", ""),
        ("/srv/git/mpitrain.git", ""),
        ("", ""),
    ],
)
def test_the_page_of_a_repository(remote: str, page: str) -> None:
    assert runpy.run_path(str(REPOSITORY / "scripts/site_pages.py"))["web_address"](remote) == page


def test_each_page_leads_to_the_repository_and_to_its_neighbours(pages: dict[Path, Page]) -> None:
    page = page_of(pages, "how-to/monitor.html")
    assert ADDRESS in page.links
    assert {"fault-tolerance.html", "performance.html"} <= set(page.links)
    first = page_of(pages, "index.html")
    assert {"tutorials/get-started.html", "how-to/pytorch.html", "reference/cli.html", "api/index.html"} <= set(
        first.links
    )


def test_every_document_is_a_page(pages: dict[Path, Page]) -> None:
    for path in (REPOSITORY / "docs").rglob("*.md"):
        assert page_of(pages, html_of(path)).anchors
    for path in (REPOSITORY / "docs/notebooks").glob("*.ipynb"):
        assert page_of(pages, f"notebooks/{path.stem}.html").counts["pre"] > 2  # also what the cells print
    assert "is-it-for-you" in page_of(pages, "index.html").anchors


def test_every_link_leads_somewhere(pages: dict[Path, Page]) -> None:
    lost = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are those of a site at the root of a server
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].anchors):
                lost.append(f"{path.name}: {link}")
    assert not lost


def test_a_page_loads_nothing_from_elsewhere(pages: dict[Path, Page]) -> None:
    far = {f"{path.name}: {source}" for path, page in pages.items() for source in page.loads if "//" in source}
    assert not far


@pytest.mark.parametrize("path", sorted((REPOSITORY / "docs").rglob("*.md")), ids=lambda path: path.stem)
def test_a_page_has_the_lists_and_tables_that_its_text_has(path: Path, pages: dict[Path, Page]) -> None:
    """MkDocs reads another Markdown than GitHub and editors: a list that it does not see becomes a paragraph."""
    tokens = MarkdownIt("commonmark").enable("table").parse(path.read_text())
    kinds = {"li": ("list_item_open",), "pre": ("fence", "code_block"), "tr": ("tr_open",)}
    expected = {tag: sum(token.type in kind for token in tokens) for tag, kind in kinds.items()}
    assert page_of(pages, html_of(path)).counts == expected


def test_every_public_name_is_in_the_reference(pages: dict[Path, Page]) -> None:
    anchors = {anchor for path, page in pages.items() if path.parent.name == "api" for anchor in page.anchors}
    homes = mpitrain._HOME | mpitrain._OF_FRAMEWORKS
    assert {f"mpitrain.{home}.{name}" for name, home in homes.items()} <= anchors
    tree = ast.parse((REPOSITORY / "mpitrain/horovod/torch/__init__.py").read_text())  # its import needs PyTorch
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert {f"mpitrain.horovod.torch.{name}" for name in names} <= anchors
