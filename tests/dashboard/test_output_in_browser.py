"""The output of ranks on the page of a run: by rank and by text, as text, and what is left of it after the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visiting import MARKUP, Visit, contrast

from faults.telling import Teller, script, train
from jobs import until
from mpitrain.dashboard.record_reader import run_id
from serving import dashboard

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
            assert page.evaluate("document.documentElement.scrollWidth") <= 400
            colors = "(one) => getComputedStyle(document.querySelector(one)).color"
            ground = page.evaluate("getComputedStyle(document.querySelector('#outputLines')).backgroundColor")
            for name in ("#outputLines div", "#outputLines span", "#outputNote"):
                assert contrast(page.evaluate(colors, name), ground) >= 4.5, name
            (tmp_path / "job/end").touch()

        visit: Any = None
        job = train(tmp_path / "job", during, source=script(PRINTS))
        assert (job.code, job.left) == (0, []), job.output
        until(lambda: "The launcher of the job had the output" in visit.page.inner_text("#outputNote"))
        assert visit.page.locator("#outputLines div").count() == 1, "what was shown stays"
        visit.close()
