"""The pages in a real browser: what they show, by mouse and by keyboard, and that no text becomes markup."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from records_made import lines, make_record, rows_made
from visiting import MARKUP, Visit, assert_fits

from jobs import until
from mpitrain.dashboard.record_reader import run_id
from serving import Dashboard, dashboard


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    event = {"after_step": 5, "text": MARKUP, "source": "ranks", "lost_ranks": [1], "num_ranks": 2, "seconds": 0.5}
    odd = [{"step": 1, "loss": 1.0, MARKUP: 2.0}, {"step": 9, "loss": 2.0, "events": [event]}]
    make_record(folder / "first", rows_made(1, 3000))
    make_record(folder / "second", rows_made(1, 100), arguments=["--lr", "0.2"], hosts={"lab7": [0]})
    make_record(
        folder / "odd", odd, script=MARKUP, end=f"DataError: {MARKUP}", hosts={MARKUP: [0]}, packages={MARKUP: MARKUP}
    )
    for seed in range(4):  # of one group; the best test losses are 0.02, 0.06, 0.08 and 0.08
        rows = [{**row, "test loss": (1 + min(3, seed + (seed > 0))) * 2 / row["step"]} for row in rows_made(1, 100)]
        make_record(folder / f"s{seed}", rows, script="seeds/train.py", arguments=["--lr", "0.3", "--seed", str(seed)])
    with (folder / "odd/metrics.jsonl").open("a") as file:
        file.write(MARKUP + "\n")
    return folder


@pytest.fixture
def visit(browser: Any, served: Dashboard) -> Iterator[Visit]:
    made = Visit(browser, served)
    yield made
    made.close()


def names(page: Any, *ours: str) -> list[str]:
    """The names of the runs that the list shows, without jobs of other tests."""
    shown = page.locator("#runs tbody tr a").all_inner_texts()
    return [name for name in shown if name in (ours or ("first", "second", "odd"))]


def test_the_list_is_filtered_and_sorted(visit: Visit) -> None:
    page = visit.page
    assert sorted(names(page)) == ["first", "odd", "second"]
    assert "?token" not in page.url
    assert page.get_by_role("row").filter(has_text="first").locator(".state").inner_text() == "✓ done"
    page.get_by_label("Filter").fill("LAB7 done")
    assert names(page) == ["second"]
    page.get_by_label("Filter").fill("")
    page.get_by_role("button", name="Step").click()
    assert names(page) == ["first", "second", "odd"]
    assert page.locator("th[aria-sort]").inner_text() == "Step"
    page.get_by_role("button", name="Step").press("Enter")
    assert names(page) == ["odd", "second", "first"]


def test_markup_is_shown_and_never_run(visit: Visit) -> None:
    page = visit.page
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="odd", exact=True))
    assert MARKUP in row.inner_text()
    visit.open_run("odd")
    text = page.inner_text("body")
    assert text.count(MARKUP) >= 4  # its error, an event, the script, a host
    page.get_by_text("Packages").click()
    assert page.locator("dt", has_text=MARKUP).count() == 1
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, main script").count() == 0


def test_a_script_inside_the_page_does_not_run(visit: Visit) -> None:
    """The policy of the page would stop what had become markup."""
    page = visit.page
    page.evaluate("markup => document.body.insertAdjacentHTML('beforeend', markup)", MARKUP)
    page.evaluate(
        "() => { const made = document.createElement('script'); made.textContent = 'window.hacked=1'; "
        "document.body.append(made); }"
    )
    page.wait_for_timeout(300)
    assert page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in problem for problem in visit.problems)
    visit.problems.clear()


def test_what_is_shown_is_in_the_address(visit: Visit, browser: Any, served: Dashboard, folder: Path) -> None:
    """A reload shows the same filter, order and zoom. A link to any page may have a token."""
    page = visit.page
    page.get_by_label("Filter").fill("done")
    page.get_by_role("button", name="Samples/s").click()
    assert names(page) == ["first", "second"]
    assert page.url.endswith("/?filter=done&sort=Samples%2Fs&order=falling")
    page.reload()
    until(lambda: names(page) == ["first", "second"])
    assert page.locator("th[aria-sort=descending]").inner_text() == "Samples/s"
    context = browser.new_context()
    other = context.new_page()
    other.goto(f"{served.base}/run/{run_id(folder / 'first')}?from=100&token={served.viewer}&to=110")
    other.wait_for_selector("#charts[data-drawn]")
    assert "token" not in other.url and other.inner_text("#name") == "first"
    assert other.evaluate("new URLSearchParams(location.search).get('from')") == "100"
    other.locator(".plot").first.focus()
    when = other.get_attribute("#charts", "data-drawn")
    other.keyboard.press("ArrowRight")
    until(lambda: other.get_attribute("#charts", "data-drawn") != when)
    assert "from=102.5&to=112.5" in other.url
    context.close()


def test_a_zoom_does_not_wait_for_new_rows(visit: Visit) -> None:
    """While the answer of a request for new rows takes a second, and its pause 5 s more, a zoom is drawn at once."""
    page = visit.page
    visit.open_run("first")

    def answer(route: Any) -> None:
        if "from=" not in route.request.url:
            time.sleep(1.0)
        route.continue_()

    page.route("**/series?*", answer)
    page.locator(".plot").first.focus()
    page.keyboard.press("0")  # as slow as one for new rows
    page.wait_for_timeout(1500)
    when = drawn(page)[0]
    page.evaluate("window.begun = performance.now()")
    page.keyboard.press("+")
    wait_for_drawing(page, when)
    took = float(drawn(page)[0]) - page.evaluate("window.begun")
    assert took < 4000, took


def drawn(page: Any) -> tuple[str, str]:
    """When the charts were drawn last, and the note of the first one."""
    return page.get_attribute("#charts", "data-drawn"), page.locator(".chart .note").first.inner_text()


def wait_for_drawing(page: Any, before: str) -> None:
    until(lambda: drawn(page)[0] != before, "the charts are not drawn anew")


def test_a_chart_is_zoomed_by_mouse_and_by_keyboard(visit: Visit) -> None:
    """The whole run has more points than the chart has pixels; a zoom has each."""
    page = visit.page
    visit.open_run("first")
    when, note = drawn(page)
    assert "loss: extremes of 3,000 points" in note
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 50, steps=5)
    page.mouse.up()
    wait_for_drawing(page, when)
    when, note = drawn(page)
    assert note == ""
    page.locator(".plot").first.focus()
    pixels = page.evaluate("document.querySelector('.chart').clientWidth") - 20
    for key, points in (
        ("0", 3000),
        ("+", 1500),
        ("+", 750),
        ("+", 375),
        ("ArrowRight", 375),
        ("-", 750),
        ("Escape", 3000),
    ):
        page.keyboard.press(key)
        wait_for_drawing(page, when)
        when, note = drawn(page)
        assert (f"extremes of {points:,} points" in note) == (points > 2 * pixels), (key, note)
        assert points > 2 * pixels or "extremes" not in note


def test_two_runs_are_compared(visit: Visit, served: Dashboard) -> None:
    page = visit.page
    assert page.get_by_role("button", name="Compare").is_disabled()
    for name in ("first", "second"):
        page.get_by_label(f"compare {name}", exact=True).focus()
        page.keyboard.press("Space")
    page.get_by_role("button", name="Compare 2").press("Enter")
    page.wait_for_selector(".u-over")
    heads = page.locator("#runs th").all_inner_texts()
    assert heads[3:] == ["best test loss", "Samples/s", "--lr", "ranks", "hosts", "Step", "best loss"]
    facts = [row.locator("td.fact").all_inner_texts() for row in page.locator("#runs tbody tr").all()]
    assert facts == [["0.1", "3", "a: 2, b: 1"], ["0.2", "1", "lab7"]]
    assert page.locator(".u-legend .u-label").all_inner_texts() == ["step", "first", "second"] * 3
    page.get_by_role("button", name="Baseline").first.click()
    steps = page.locator("#runs tbody tr").nth(1).locator("td.numeric").nth(2)
    until(lambda: steps.inner_text() == "100 -97 %")
    page.get_by_label("Metrics").fill("test")
    until(lambda: page.locator(".chart:visible h3").all_inner_texts() == ["test loss"])
    assert "baseline=first" in page.url and "metrics=test" in page.url
    assert page.locator("#problem").is_hidden()


def test_runs_are_grouped_by_an_argument(visit: Visit) -> None:
    """A group has the mean of its runs, with the lowest and the highest value; its runs are compared as one line."""
    page = visit.page
    page.goto(f"{visit.served.base}/?columns=Step,best test loss,--lr&group=1&filter=train.py&sort=--lr")
    group = page.get_by_role("row").filter(has_text="4 runs")
    until(lambda: group.locator("td").all_inner_texts()[2:] == ["100", "0.3", "0.06 0.02 to 0.08"])
    group.get_by_role("button").click()
    until(lambda: sorted(names(page, "s0", "s1", "s2", "s3")) == ["s0", "s1", "s2", "s3"])
    page.get_by_label("compare 4 runs").check()
    page.get_by_label("compare first", exact=True).check()
    page.get_by_role("button", name="Compare 5").click()
    page.wait_for_selector(".u-over")
    shown = page.locator("#runs tbody tr td:first-child").all_inner_texts()
    assert sorted(one.strip() for one in shown) == ["seeds/train.py, --lr 0.3 (4)", "train.py, --lr 0.1 (1)"]
    assert page.locator("#problem").is_hidden()


def test_a_chart_is_shown_over_time_smoothed_and_logarithmic(visit: Visit) -> None:
    """And the whole view is in the address. Less important metrics are folded, and found by a filter."""
    page = visit.page
    visit.open_run("first")
    assert page.locator(".chart:visible h3").all_inner_texts() == ["loss, test loss"]
    page.get_by_text("Other metrics").click()
    page.get_by_label("Filter").fill("second")
    until(lambda: page.locator(".chart:visible h3").all_inner_texts() == ["loss, test loss", "samples per second"])
    page.get_by_label("Log").check()
    page.get_by_label("Smoothing").select_option("1")
    labels = ["step", "loss", "test loss", "loss, mean of 1 %", "test loss, mean of 1 %"]
    until(lambda: page.locator("#charts .u-legend .u-label").all_inner_texts() == labels)
    assert page.url.endswith("?metrics=second&log=1&smooth=1")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save loss, test loss as PNG").click()
    assert Path(saved.value.path()).read_bytes()[:4] == b"\x89PNG"


def test_a_failed_run_says_why_first(visit: Visit) -> None:
    visit.open_run("odd")
    card = visit.page.get_by_label("How it ended")
    assert card.inner_text().startswith(f"Failed: DataError: {MARKUP}")
    assert card.bounding_box()["y"] < visit.page.locator("#figures").bounding_box()["y"]


def test_the_list_says_why_a_run_has_failed_and_draws_losses(visit: Visit) -> None:
    def row(name: str) -> Any:
        return visit.page.get_by_role("row").filter(has=visit.page.get_by_role("link", name=name, exact=True))

    assert f"DataError: {MARKUP}" in row("odd").inner_text() or "⚠" in row("odd").inner_text()
    points = row("first").locator("svg.spark polyline").get_attribute("points").split()
    assert 16 <= len(points) <= 32
    heights = [float(point.split(",")[1]) for point in points]
    assert heights == sorted(heights) and heights[0] == 2 and heights[-1] == 16, "a falling loss falls"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_no_page_is_wider_than_the_screen(browser: Any, served: Dashboard, scheme: str, width: int) -> None:
    visit = Visit(browser, served, viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert_fits(visit.page, width)
    visit.open_run("first")
    assert_fits(visit.page, width)
    visit.close()


def test_a_long_list_grows_as_it_is_read(browser: Any, tmp_path: Path) -> None:
    """It begins with what finds room on a screen, and has every run at its end; the filter looks through all."""
    for place in range(205):
        make_record(tmp_path / f"runs/r{place:03}", rows_made(1, 1), first_started=2e9 + place, ended=2e9 + place + 1)
    with dashboard(tmp_path / "cache", str(tmp_path / "runs")) as served:
        served.wait_for("/api/runs", lambda answer: len(served.records(answer)) == 205)
        visit = Visit(browser, served)
        page = visit.page

        def ours() -> list[str]:  # other tests may have jobs, which come first
            texts = page.locator("#runs tbody tr td:nth-child(2)").all_inner_texts()
            return [text for text in texts if len(text) == 4 and text[0] == "r"]

        until(lambda: int(page.inner_text("#count").partition(" ")[0]) >= 205)
        all_names = [f"r{place:03}" for place in reversed(range(205))]
        before = ours()
        assert before == all_names[: len(before)] and 20 <= len(before) < 205
        page.get_by_label("Filter").fill("r007")
        until(lambda: ours() == ["r007"])
        page.get_by_label("Filter").fill("")

        def scroll() -> bool:
            page.mouse.wheel(0, 3000)
            return ours() == all_names

        until(scroll)
        page.get_by_role("button", name="Run", exact=True).click()
        until(lambda: ours() == all_names[::-1])
        visit.close()


def test_numbers_and_times_are_written_as_intl_writes_them(visit: Visit) -> None:
    numbers = [0, -0.5, 999, 1000, -1234, 1234567, 12345.6, 1e15, 123456789012345680000]
    written, expected = visit.page.evaluate(
        """async (numbers) => {
        const {number, time} = await import("/pages/text.js");
        const format = new Intl.NumberFormat("en"), day = new Intl.DateTimeFormat("sv");
        const clock = new Intl.DateTimeFormat("en-GB", {hour: "2-digit", minute: "2-digit"});
        const rounded = (value) => Math.abs(value) > 1000 ? Math.round(value) : value;
        const old = new Date(2024, 1, 3, 4, 5), now = new Date();
        const times = [`${day.format(old)} ${clock.format(old)}`, clock.format(now)];
        return [[...numbers.map((one) => number(one)), time(old / 1000), time(now / 1000)],
          [...numbers.map((one) => format.format(rounded(one))), ...times]]; }""",
        numbers,
    )
    assert written == expected
    assert visit.page.evaluate('async () => (await import("/pages/text.js")).number(3e25)') == "3.00e+25"


def test_a_page_follows_a_run(browser: Any, tmp_path: Path) -> None:
    """Rows appear while the page is open; and the page says so if the dashboard ends."""
    folder = make_record(tmp_path / "runs/grows", rows_made(1, 5), end="", ended=None)
    with dashboard(tmp_path / "cache", str(tmp_path / "runs")) as served:
        visit = Visit(browser, served)
        visit.open_run("grows")
        page = visit.page
        assert page.inner_text("#figures li:first-child strong") == "5"
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(lines(rows_made(6, 77)))
        until(lambda: page.inner_text("#figures li:first-child strong") == "77")
        when, _ = drawn(page)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": 1.0}) + "\n")  # begun anew
        until(lambda: page.inner_text("#figures li:first-child strong") == "3")
        wait_for_drawing(page, when)
        until(lambda: page.inner_text("#connection") == "connected")
    until(lambda: page.inner_text("#connection").startswith("not connected"))
    visit.context.close()
