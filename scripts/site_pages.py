"""The pages of the site that docs/ does not have, and links that lead to them: a hook of MkDocs, named in mkdocs.yml.

README.md is the first page. CONTRIBUTING.md and CHANGELOG.md are pages too, and so is each notebook. The public names
are in the pages of api/, made from the same tables that `import mpitrain` uses. A file of the repository to which a
page links is a page of source/.
"""

from __future__ import annotations

import ast
import posixpath
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel
from nbconvert import MarkdownExporter

REPOSITORY = Path(__file__).resolve().parents[1]
OTHERS = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
# Each page of api/ with its title, and the modules of mpitrain whose public names it has.
API = {
    "world": ("World", ("world", "job", "errors", "remote")),
    "trainer": ("Trainer", ("training", "optim", "state")),
    "strategies": ("Strategies", ("strategies", "reducer")),
    "adapters": ("Adapters", ("adapters",)),
    "data": ("Data", ("data",)),
    "hooks": ("Hooks", ("training.hooks",)),
    "meters": ("Meters and writers", ("training.meters", "training.writers")),
}
PACKAGES = {
    "collectives": ("Collectives", "mpitrain.collectives"),
    "torch": ("PyTorch", "mpitrain.torch"),
    "jax": ("JAX", "mpitrain.jax"),
    "horovod": ("Horovod", "mpitrain.horovod.torch"),
}
# Above the first block of the first page.
FIRST_LINKS = "\n".join(
    f"[{text}]({page}){{ .md-button {kind}}}"
    for text, page, kind in (
        ("Get started", "docs/tutorials/get-started.md", ".md-button--primary "),
        ("PyTorch", "docs/how-to/pytorch.md", ""),
        ("A cluster", "docs/tutorials/first-cluster.md", ""),
        ("Commands", "docs/reference/cli.md", ""),
        ("Python API", "api/index.md", ""),
    )
)
NOTEBOOK = ".ipynb"
# iframe-worker 1.0.4 of npm, MIT license: it lets search work in pages from the disk.
ASSETS = ("iframe-worker/index.js", "iframe-worker/LICENSE", "site.css")
LANGUAGES = {".py": "python", ".yml": "yaml", ".json": "json", ".toml": "toml", ".h": "cpp"}
LINK = re.compile(r'(?P<before>\]\(|\ssrc="|\shref=")(?P<target>[^)"\s#]+)(?P<anchor>#[^)"\s]*)?(?P<after>[)"])')


def on_config(config: Any) -> Any:
    """Name the version and the repository in the head of each page. Called by MkDocs, once in a build."""
    version = re.search(r'^__version__ = "(.+)"', (REPOSITORY / "mpitrain/__init__.py").read_text(), re.M)
    config.site_name = f"{config.site_name} {version[1] if version else ''}"
    if not config.repo_url:
        words = ["git", "-C", str(REPOSITORY), "config", "remote.origin.url"]
        config.repo_url = web_address(subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip())
    config.repo_name = "Repository"
    return config


def web_address(remote: str) -> str:
    """Return the page of a remote repository, or "" for one that has no page, such as a folder."""
    ssh = re.fullmatch(r"(?:ssh://)?(?:[\w.-]+@)([\w.-]+)[:/](.+?)(?:\.git)?/?", remote)
    if ssh:
        return f"https://{ssh[1]}/{ssh[2]}"
    return re.sub(r"(\.git)?/?$", "", remote) if re.match(r"https?://[^@]+$", remote) else ""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/. Called by MkDocs, once in a build."""
    for source, page in OTHERS.items():
        files.append(File.generated(config, page, abs_src_path=str(REPOSITORY / source)))
    for name in ASSETS:
        files.append(File.generated(config, f"assets/{name}", abs_src_path=str(REPOSITORY / "scripts" / name)))
    for notebook in [file for file in files if file.src_uri.endswith(NOTEBOOK)]:
        text, _ = MarkdownExporter().from_filename(notebook.abs_src_path)
        files.remove(notebook)
        files.append(File.generated(config, notebook.src_uri.replace(NOTEBOOK, ".md"), content=text))
    for page, text in api_pages():
        files.append(File.generated(config, page, content=text))
    linked = {target for file in files.documentation_pages() for target in targets(file)}
    for target in sorted(linked - {source_of(file) for file in files}):
        page = source_page(target)
        level = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, page, content=source_text(target), inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Return the text with links to pages of the site. Called by MkDocs for each page."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]
        markdown = markdown.replace("\n```", f"\n{FIRST_LINKS}\n\n```", 1)
    if page.file.src_uri.startswith("source/"):  # a search finds the pages that say how to use it
        page.meta["search"] = {"exclude": True}
    base = posixpath.dirname(source_of(page.file))
    pages = {source_of(file): file.src_uri for file in files}

    def of_the_site(link: re.Match[str]) -> str:
        target = target_of(base, link["target"])
        if target is None:
            return link[0]
        uri = pages.get(target, source_page(target))
        path = posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
        return f"{link['before']}{path}{link['anchor'] or ''}{link['after']}"

    return outside_of_blocks(markdown, lambda text: LINK.sub(of_the_site, text))


def source_of(file: File) -> str:
    """Return the path of a page's text in the repository; of a page of api/ or source/, where it would be in docs/."""
    if file.src_uri.startswith("notebooks/"):
        return f"docs/{file.src_uri.replace('.md', NOTEBOOK)}"
    others = {page: source for source, page in OTHERS.items()}
    return others.get(file.src_uri, f"docs/{file.src_uri}")


def targets(file: File) -> Iterator[str]:
    """The paths in the repository to which a page links, but pages of docs/ and other files there."""
    base = posixpath.dirname(source_of(file))
    for part in re.split(BLOCK, file.content_string):
        for link in LINK.finditer(part):
            target = target_of(base, link["target"])
            if target is not None:
                yield target


def target_of(base: str, target: str) -> str | None:
    """Return the path in the repository of a link in a page of the folder `base`. None: the link leads elsewhere."""
    if ":" in target or target.startswith("/"):
        return None
    path = posixpath.normpath(posixpath.join(base, target.rstrip("/")))
    return path if (REPOSITORY / path).exists() else None


def source_page(target: str) -> str:
    return f"source/{target}.md"


def source_text(target: str) -> str:
    """Return the page of a file of the repository, or of a folder: what is in it."""
    path = REPOSITORY / target
    if path.is_dir():
        names = sorted(
            f"{one.name}/" if one.is_dir() else one.name for one in path.iterdir() if one.name[0] not in "._"
        )
        return (
            "\n".join([f"# {target}/", "", "The repository has here:", "", *(f"- `{name}`" for name in names)]) + "\n"
        )
    language = LANGUAGES.get(path.suffix, "text")
    return f"# {target}\n\n````{language}\n{path.read_text()}\n````\n"


BLOCK = re.compile(r"^(```.*?^```)$", re.M | re.S)


def outside_of_blocks(markdown: str, change: Any) -> str:
    """Return the text with all that is in no fenced block changed."""
    return "".join(part if part.startswith("```") else change(part) for part in BLOCK.split(markdown))


def api_pages() -> Iterator[tuple[str, str]]:
    """Each page of api/ with its text: the directives of mkdocstrings for each public name."""
    homes = tables(REPOSITORY / "mpitrain/__init__.py", ("_HOME", "_OF_FRAMEWORKS"))
    groups: dict[str, list[str]] = {page: [] for page in API}
    for name, module in homes.items():
        fits = [
            (len(prefix), page) for page, (_, prefixes) in API.items() for prefix in prefixes if in_(module, prefix)
        ]
        groups[max(fits)[1]].append(f"mpitrain.{module}.{name}")
    lines = ["# API", "", "All public names, with the docstrings of the code.", ""]
    for page, (title, _) in API.items():
        paths = sorted(groups[page], key=lambda path: path.rsplit(".", 1)[1].lower())
        yield f"api/{page}.md", entries(title, paths)
        lines.append(f"- [{title}]({page}.md): {in_a_line(paths)}")
    for page, (title, module) in PACKAGES.items():
        paths = [f"{module}.{name}" for name in public_names(module)]
        yield f"api/{page}.md", entries(f"{title}: `{module}`", paths)
        lines.append(f"- [{title}]({page}.md), `{module}`: {in_a_line(paths)}")
    yield "api/index.md", "\n".join(lines) + "\n"


def entries(title: str, paths: list[str]) -> str:
    return f"# {title}\n\n" + "".join(f"::: {path}\n\n" for path in paths)


def in_a_line(paths: list[str]) -> str:
    return ", ".join(f"`{path.rsplit('.', 1)[1]}`" for path in paths)


def in_(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


def tables(path: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Return the literal dictionaries of these names in a module, as one. Nothing is imported."""
    merged: dict[str, str] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names:
            merged |= ast.literal_eval(node.value)
    return merged


def public_names(module: str) -> list[str]:
    """Return the names in a module's __all__, or else its functions and classes without a leading underscore."""
    path = REPOSITORY / module.replace(".", "/")
    body = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return [
        one.name for one in body if isinstance(one, ast.FunctionDef | ast.ClassDef) and not one.name.startswith("_")
    ]
