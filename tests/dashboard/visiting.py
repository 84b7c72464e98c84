"""A visit of the pages in a real browser."""

from __future__ import annotations

import math
from typing import Any

from serving import Dashboard

MARKUP = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
WAIT_MS = 240_000  # a busy machine


class Visit:
    """A page that has come in by the link of viewers, or by another one, and all that went wrong on it."""

    def __init__(self, browser: Any, served: Dashboard, link: str = "", **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.served = served
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda line: self.problems.append(line.text) if line.type == "error" else None)
        self.page.on("request", self._look_at)
        self.page.goto(link or served.link)
        self.page.wait_for_selector("#runs tbody tr")

    def _look_at(self, request: Any) -> None:
        if not request.url.startswith(self.served.base):
            self.problems.append(f"a request leaves the machine: {request.url}")

    def open_run(self, name: str) -> None:
        self.page.get_by_role("link", name=name, exact=True).click()
        self.page.wait_for_selector("#charts[data-drawn]")

    def close(self) -> None:
        assert self.problems == []
        self.context.close()


def contrast(one: str, other: str) -> float:
    """Of two colours as the browser gives them: rgb(1, 2, 3)."""

    def luminance(color: str) -> float:
        parts = [int(part) / 255 for part in color[color.index("(") + 1 : -1].split(",")[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return math.fsum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted(luminance(color) for color in (one, other))
    return (high + 0.05) / (low + 0.05)


def assert_fits(page: Any, width: int, selector: str = "h1, td, th, p, a, dt, dd, li", ground: str = "body") -> None:
    """The page is no wider than the screen, and texts stand out from their ground, by the rule of WCAG 2: 4.5 to 1."""
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    colors = page.evaluate(
        f"() => [...document.querySelectorAll('{selector}')].map((one) => getComputedStyle(one).color)"
    )
    behind = page.evaluate(f"getComputedStyle(document.querySelector('{ground}')).backgroundColor")
    assert colors and min(contrast(color, behind) for color in set(colors)) >= 4.5
