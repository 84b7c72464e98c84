"""What the first screen of each page says, at the widths of a desk and of a telephone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from records_made import make_record, rows_made
from visiting import Visit, assert_fits

from jobs import until
from mpitrain.dashboard.record_reader import run_id
from serving import Dashboard

TOLD = "the learning rate is multiplied by 0.5, so by 0.5 in all"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glance")
    event = {"after_step": 500, "text": TOLD, "source": "told", "teller": "ada on lab1", "at": 1030.0, "seconds": 0.0}
    event |= {"lost_ranks": [], "num_ranks": 2, "repeated_steps": 0}
    make_record(folder / "before", rows_made(1, 40), arguments=["--lr", "0.1", "--fast"], first_started=900.0)
    told = [*rows_made(1, 3000), {"step": 3001, "loss": "NaN", "events": [event]}]
    make_record(folder / "told", told, steps=1_000_000, checkpoints=[str(folder / "none")])
    return folder


@pytest.fixture(params=[1400, 400])
def visit(browser: Any, served: Dashboard, request: pytest.FixtureRequest) -> Iterator[Visit]:
    made = Visit(browser, served, viewport={"width": request.param, "height": 900 if request.param > 400 else 800})
    yield made
    made.close()


def is_on_screen(page: Any, place: Any) -> bool:
    """All of the element is on the first screen, and no box around it cuts it off."""
    box, size = place.bounding_box(), page.viewport_size
    is_inside = box["x"] >= 0 and box["x"] + box["width"] <= size["width"]
    seen = place.evaluate("""(one) => {
        const box = one.getBoundingClientRect();
        return [[box.left + 1, box.top + 1], [box.right - 1, box.bottom - 1]].every(([x, y]) => {
            const there = document.elementFromPoint(x, y);
            return there && (one.contains(there) || there.contains(one));
        });
    }""")
    return bool(is_inside and box["y"] + box["height"] <= size["height"] and seen)


def test_the_list_has_the_best_value_on_the_screen(visit: Visit) -> None:
    """Also beside a long number of steps."""
    page = visit.page
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="told", exact=True))
    assert is_on_screen(page, row.locator("td.numeric", has_text="test loss").last)
    assert re.search(r"(?<!\d)(1 run|(?!1 )\d+ runs)$", page.inner_text("#count"))


def test_the_first_screen_of_a_run(visit: Visit) -> None:
    """What was changed by a command, what differs from the last run, where the checkpoint is; a loss of NaN is red."""
    page = visit.page
    page.goto(f"{visit.served.base}/run/{run_id(visit.served.root / 'told')}")
    page.wait_for_selector("#charts[data-drawn]")
    assert is_on_screen(page, page.locator("#orders"))
    assert page.inner_text("#orders") == f"Last commands: after step 500 {TOLD}"
    until(lambda: page.locator("#against").count() and page.locator("#figures", has_text="checkpoint").count())
    assert "Changed: --fast on → not given" in page.inner_text("#against")
    assert is_on_screen(page, page.locator("#against").get_by_role("link", name="Compare"))
    checkpoint = page.locator("#figures li", has=page.get_by_text("checkpoint", exact=True))
    assert checkpoint.inner_text().split() == ["checkpoint", "none"]
    loss = page.locator("#figures li.problem strong")
    assert (loss.inner_text(), is_on_screen(page, loss)) == ("NaN", True)
    assert_fits(page, page.viewport_size["width"])


def test_a_comparison_has_the_best_values_on_the_screen(visit: Visit) -> None:
    page, root = visit.page, visit.served.root
    page.goto(f"{visit.served.base}/compare?runs={run_id(root / 'before')},{run_id(root / 'told')}")
    page.wait_for_selector(".u-over")
    for row in page.locator("#runs tbody tr").all():
        assert is_on_screen(page, row.locator("td.numeric").first)
    with page.expect_download():
        page.get_by_role("button", name="CSV").click()


@pytest.mark.parametrize(
    ("text", "flag"), [(TOLD, "rate x 0.5"), ("the training is paused", "paused"), ("rank 2 on a was lost",) * 2]
)
def test_a_flag_begins_with_what_was_done(visit: Visit, text: str, flag: str) -> None:
    assert visit.page.evaluate("async (text) => (await import('/pages/chart.js')).brief(text)", text) == flag


STROKES = """window.widths = [];
const stroke = CanvasRenderingContext2D.prototype.stroke;
CanvasRenderingContext2D.prototype.stroke = function (...path) {
    if (path.length) window.widths.push(this.lineWidth);
    return stroke.apply(this, path);
};"""


def test_a_dense_curve_is_drawn_thin(browser: Any, served: Dashboard) -> None:
    """A line of 1.5 pixels that goes up and down in each column took a browser without a GPU 0.3 s."""
    visit = Visit(browser, served, viewport={"width": 1400, "height": 900})
    page = visit.page
    page.add_init_script(STROKES)
    page.goto(f"{served.base}/run/{run_id(served.root / 'told')}")
    page.wait_for_selector("#charts[data-drawn]")
    until(lambda: page.evaluate("Math.max(...window.widths)") == 1)
    page.locator("#charts .plot").first.focus()
    for _ in range(3):
        page.keyboard.press("+")
    until(lambda: page.evaluate("window.widths.at(-1)") == 1.5)
    visit.close()
