"""Commands and the output of ranks on the page of a run: a job that really runs, by mouse and by keyboard."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from visiting import MARKUP, Visit, assert_fits, contrast

from faults.telling import Teller, events_of, script, train
from jobs import until
from mpitrain.dashboard.record_reader import run_id
from serving import Dashboard, dashboard

# The record has the number of steps that are asked for: a run that was stopped has not made them all.
HOOKS = '[mt.StopAtStep(1_000_000), mt.Checkpoint(folder / "checkpoints", steps=1000)]'


def visited(tmp_path: Path, browser: Any, during: Callable[[Any, Dashboard], None]) -> Any:
    """Run a job; call `during` with the page of its run, opened by an operator. Returns how the job has ended."""
    (tmp_path / "runs").mkdir()
    with dashboard(tmp_path / "cache", str(tmp_path / "runs")) as served:

        def with_page(_: Teller) -> None:
            served.wait_for("/api/runs", lambda answer: any(is_ours(run, tmp_path) for run in answer["runs"]))
            options = {"viewport": {"width": 400, "height": 900}, "color_scheme": "dark"}
            visit = Visit(browser, served, served.operators_link, **options)
            visit.page.goto(f"{served.base}/run/{id_of(served, tmp_path)}")
            visit.page.get_by_text("Commands", exact=True).click()
            until(lambda: visit.page.inner_text("#nowFactor") == "multiplied by 1 now")
            during(visit.page, served)
            visit.close()

        return train(tmp_path / "job", with_page, source=script(hooks=HOOKS))


def is_ours(run: dict[str, Any], tmp_path: Path) -> bool:
    return run["is_live"] and run["folder"] == str(tmp_path / "job/record")


def id_of(served: Dashboard, tmp_path: Path) -> str:
    return next(str(run["id"]) for run in served.get("/api/runs")["runs"] if is_ours(run, tmp_path))


def answered(page: Any, title: str, text: str) -> None:
    """Wait for this answer to the last command."""
    shown = re.compile(rf"\d\d:\d\d:\d\d {re.escape(title)}: .*{re.escape(text)}", re.S)
    until(lambda: shown.fullmatch(page.locator("#answers li").first.inner_text().partition(", applied after step ")[0]))


def test_a_job_is_told_on_its_page(tmp_path: Path, browser: Any) -> None:
    def during(page: Any, served: Dashboard) -> None:
        _a_viewer_sees_no_command(browser, served, page.url)
        page.get_by_role("button", name="Pause").focus()
        page.keyboard.press("Enter")
        answered(page, "Pause", "the training is paused")
        until(lambda: page.locator("#state .paused").inner_text().endswith("paused"))
        assert f"on the dashboard of {socket.gethostname()}" in page.inner_text("#state")
        until(lambda: "left" not in page.inner_text("#figures"))  # in a pause no time runs down, and nothing is wrong
        until(lambda: re.search(r"paused, step [\d,]+", page.inner_text("#hosts")))
        assert page.locator("#hosts .red").count() == 0
        page.get_by_role("button", name="Resume").click()
        answered(page, "Resume", "the training is resumed")
        until(lambda: page.locator("#state .trains").count())
        until(lambda: page.inner_text("#pause") == "Pause")

        loud = page.get_by_role("textbox", name="loud")
        loud.fill("tr")  # and the rest later: what others tell must not overwrite it
        page.get_by_role("textbox", name="Learning rate times").fill("0.5")
        page.keyboard.press("Enter")
        answered(page, "Learning rate times 0.5", "the learning rate is multiplied by 0.5, so by 0.5 in all")
        until(lambda: page.inner_text("#nowFactor") == "multiplied by 0.5 now")
        page.get_by_role("textbox", name="decay").fill("0.125")
        page.get_by_role("button", name="Set decay").click()
        answered(page, "decay=0.125", "decay is 0.125")
        row = page.locator("#tunables form").filter(has_text="decay")
        until(lambda: row.locator(".now").inner_text() == "is 0.125 now")
        page.get_by_role("button", name="Undo Learning rate times 0.5").click()
        answered(page, "Undo: Learning rate times 1/0.5", "the learning rate is multiplied by 2, so by 1 in all")
        page.get_by_role("textbox", name="Learning rate times").fill("1e6")
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog")
        assert re.match(
            r"Multiply the learning rate of job [0-9a-f]{8} \(.*\), .* by 1e6\? ", dialog.inner_text(), re.S
        )
        page.keyboard.press("Escape")
        until(dialog.is_hidden)
        assert page.locator("#answers li").first.inner_text().count("Undo") == 2, "the factor was not told"
        assert (loud.input_value(), page.get_by_role("textbox", name="decay").input_value()) == ("tr", "0.125")
        page.get_by_role("textbox", name="label").fill(MARKUP)
        page.keyboard.press("Enter")
        answered(page, f"label={MARKUP}", f"label is {MARKUP!r}")
        until(lambda: MARKUP in page.locator("#tunables").inner_text())
        until(lambda: MARKUP in page.locator("#eventList").inner_text())
        page.get_by_role("textbox", name="Learning rate times").fill(MARKUP[:20])
        page.get_by_role("button", name="Multiply the learning rate").click()
        answered(page, f"Learning rate times {MARKUP[:20]}", "by which the learning rate is multiplied")
        assert page.locator("#answers li .problem").count() == 1

        page.get_by_role("button", name="Stacks").click()
        until(lambda: "rank 1 on" in page.locator("#stackText").inner_text())
        page.get_by_role("button", name="Save now").click()
        answered(page, "Save now", "the save of a checkpoint has begun")
        _the_page_fits(page)
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img, main script").count() == 0
        page.get_by_role("button", name="Stop…").press("Space")
        assert re.match(r"End job [0-9a-f]{8} \(.*\), which is at step [\d,]+, after", dialog.inner_text(), re.S)
        page.get_by_role("button", name="Stop the run").click()
        answered(page, "Stop", "the run ends, and is saved")
        until(lambda: "done" in page.inner_text("#state"))
        card = page.get_by_label("How it ended")
        until(lambda: re.search(r"it was stopped by .* after step [\d,]+ of [\d,]+", card.inner_text()))
        until(lambda: page.locator("#controls").is_hidden())
        assert page.locator("#answers").is_visible(), "the last answer stays"

    job = visited(tmp_path, browser, during)
    assert (job.code, job.left) == (0, []), job.output
    told = events_of(tmp_path / "job")
    assert [event["text"] for event in told] == [
        "the training is paused",
        "the training is resumed",
        "the learning rate is multiplied by 0.5, so by 0.5 in all",
        "decay is 0.125",
        "the learning rate is multiplied by 2, so by 1 in all",
        f"label is {MARKUP!r}",
        "the save of a checkpoint has begun",
        "the run ends, and is saved",
    ]
    assert all(event["teller"].endswith(f" on the dashboard of {socket.gethostname()}") for event in told)
    assert [event["at"] for event in told] == sorted(event["at"] for event in told)


def _a_viewer_sees_no_command(browser: Any, served: Dashboard, url: str) -> None:
    visit = Visit(browser, served)
    asked: list[str] = []
    visit.page.on("request", lambda request: asked.append(request.url))
    visit.page.goto(url)
    until(lambda: visit.page.locator("#ranks tbody tr").count() == 2)
    visit.page.wait_for_selector("#charts[data-drawn]")
    assert visit.page.locator("#commands").is_hidden()
    assert set(visit.page.get_by_role("button").all_inner_texts()) == {"PNG"}
    assert asked and not [one for one in asked if one.endswith("/tell")]
    visit.close()


def _the_page_fits(page: Any) -> None:
    """At 400 pixels, light and dark; each control is to be reached and seen by keyboard."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert_fits(page, 400, "#commands *", "#pause")
    page.get_by_role("button", name="Pause").focus()
    page.keyboard.press("Shift+Tab")  # a focus after a click is not shown, and one by a key is
    page.keyboard.press("Tab")
    reached = []
    for _ in range(13):
        reached.append(page.evaluate("document.activeElement.ariaLabel || document.activeElement.id"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        page.keyboard.press("Tab")
    values = ["", "Set decay", "", "Set loud", "", "Set label"]
    assert reached[:7] == ["pause", "save", "stop", "stacks", "kill", "factor", "Multiply the learning rate"]
    assert reached[7:] == values


def test_a_job_is_killed_on_its_page(tmp_path: Path, browser: Any) -> None:
    def during(page: Any, served: Dashboard) -> None:
        dialog = page.get_by_role("dialog")
        page.get_by_role("button", name="Kill…").press("Enter")
        text = dialog.inner_text()
        assert re.match(r"End job [0-9a-f]{8} \(.*\), which is at step [\d,]+, now, without a save\? ", text, re.S)
        assert "since its last checkpoint is lost" in text
        assert page.evaluate("document.activeElement.textContent") == "Cancel"
        assert contrast(*page.evaluate(COLORS_OF_DIALOG)) >= 4.5
        page.keyboard.press("Enter")
        until(dialog.is_hidden)
        page.get_by_role("button", name="Kill…").click()
        page.keyboard.press("Escape")
        until(dialog.is_hidden)
        assert page.locator("#answers li").count() == 0, "nothing was told"
        page.get_by_role("button", name="Kill…").click()
        page.get_by_role("button", name="Kill the job").click()
        answered(page, "Kill", "the job has ended, without a save")
        until(lambda: page.locator("#controls").is_hidden())

    job = visited(tmp_path, browser, during)
    assert job.code != 0 and job.left == [], job.output
    assert events_of(tmp_path / "job") == []


COLORS_OF_DIALOG = (
    "() => [getComputedStyle(document.querySelector('dialog button.danger')).color, "
    "getComputedStyle(document.querySelector('dialog')).backgroundColor]"
)

# In its first step, each rank prints markup, and a colour. Rank 1 also prints a long line.
PRINTS = f"""if len(steps) == 1:
                print({MARKUP!r}, "\\x1b[31mloss of", world.rank, "\\x1b[0m" + 5000 * world.rank * "x", flush=True)"""


def test_the_output_of_a_job(tmp_path: Path, browser: Any) -> None:
    (tmp_path / "runs").mkdir()
    with dashboard(tmp_path / "cache", str(tmp_path / "runs")) as served:
        id_ = run_id(tmp_path / "job/record")

        def during(_: Teller) -> None:
            nonlocal visit
            served.wait_for("/api/runs", lambda answer: any(run["id"] == id_ and run["last"] for run in answer["runs"]))
            viewer = Visit(browser, served)
            viewer.page.goto(f"{served.base}/run/{id_}")
            viewer.page.wait_for_selector("#charts[data-drawn]")
            assert viewer.page.locator("#output").is_hidden()
            viewer.close()
            options = {"viewport": {"width": 400, "height": 900}, "color_scheme": "dark"}
            visit = Visit(browser, served, served.operators_link, **options)
            page = visit.page
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            page.goto(f"{served.base}/run/{id_}")
            page.wait_for_selector("#charts[data-drawn]")
            assert not [url for url in asked if "/output?" in url], "nobody has asked for it"
            page.get_by_text("The last lines of each rank").press("Enter")
            lines = page.locator("#outputLines div")
            until(lambda: lines.filter(has_text="loss of").count() == 2)
            assert lines.filter(has_text=MARKUP).count() == 2
            assert "more were not kept" in lines.filter(has_text="[1] ").filter(has_text="loss").inner_text()
            page.get_by_role("textbox", name="Ranks").fill("0")
            page.get_by_role("searchbox", name="Text").fill("LOSS of")
            until(lambda: lines.count() == 1)
            assert lines.inner_text() == f"[0] {MARKUP} loss of 0 "
            assert page.inner_text("#outputNote") == "1 line"
            page.get_by_role("textbox", name="Ranks").fill("first")
            until(lambda: "'first' names no ranks" in page.inner_text("#outputNote"))
            page.get_by_role("textbox", name="Ranks").fill("0")
            until(lambda: page.inner_text("#outputNote") == "1 line")
            assert page.evaluate("window.hacked") is None
            assert page.locator("main img, main script").count() == 0
            assert_fits(page, 400, "#outputLines div, #outputLines span, #outputNote", "#outputLines")
            (tmp_path / "job/end").touch()

        visit: Any = None
        job = train(tmp_path / "job", during, source=script(PRINTS))
        assert (job.code, job.left) == (0, []), job.output
        until(lambda: "The launcher of the job had the output" in visit.page.inner_text("#outputNote"))
        assert visit.page.locator("#outputLines div").count() == 1, "what was shown stays"
        visit.close()
