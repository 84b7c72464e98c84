"""The pages, and the files that they load, as a browser gets them.

A page names in its head all that it needs. So the browser asks for everything at once, and not for each module only
when it has read the one that imports it.
"""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_FOLDER = Path(__file__).parent / "pages"
_IMPORT = re.compile(r'^import .* from "\./(.+)";', re.MULTILINE)
_CHARTS = "uplot/uPlot.esm.js"
_STYLES_OF_CHARTS = "uplot/uPlot.min.css"
ICON = '<link rel="icon" href="/pages/icon.svg" type="image/svg+xml">'


def files() -> Iterator[tuple[str, bytes, str]]:
    """Iterate over what pages load, to be kept in memory, because a disk may be busy: path, content and media type."""
    for file in sorted(_FOLDER.rglob("*.*")):
        if file.suffix != ".html":
            kind, _ = mimetypes.guess_type(file.name)
            yield f"/pages/{file.relative_to(_FOLDER)}", file.read_bytes(), kind or "text/plain"


def page(name: str, asks: str = "") -> bytes:
    """Return a page: the file `name`.html with what is between its head and its end, and `name`.js.

    `asks` is an answer of this server that the page asks for first.
    """
    modules = _modules(f"{name}.js", {})
    styles = [_STYLES_OF_CHARTS] * (_CHARTS in modules) + ["style.css"]
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{name.capitalize()} - mpitrain</title>",
        *([f'<link rel="preload" href="{asks}" as="fetch" crossorigin>'] if asks else []),
        *(f'<link rel="stylesheet" href="/pages/{style}">' for style in styles),
        *(f'<link rel="modulepreload" href="/pages/{module}">' for module in modules),
        f'<script type="module" src="/pages/{name}.js"></script>',
        ICON,
        "</head>",
        "<body>",
        (_FOLDER / f"{name}.html").read_text("utf-8") + "</body>",
        "</html>\n",
    ]
    return "\n".join(lines).encode()


def _modules(name: str, known: Mapping[str, None]) -> dict[str, None]:
    """Return the module and all that it imports, also through others."""
    modules = {**known, name: None}
    for other in _IMPORT.findall((_FOLDER / name).read_text("utf-8")):
        if other not in modules:
            modules = _modules(other, modules)
    return modules
