"""The cluster's page, and the checkpoints of a run, in a real browser: by mouse, by keyboard, with hostile texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cluster_made import INVENTORY, keep_check, keep_profile, keep_ways
from records_made import make_record, rows_made
from visiting import MARKUP, Visit, assert_fits

from jobs import until
from mpitrain.last_word import keep_word
from mpitrain.state.store import name_of, save
from serving import Dashboard, dashboard

CELL = 36  # pixels of a cell where there is room enough (pages/matrix.js)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    folder = tmp_path_factory.mktemp("cluster")
    state = folder / "state"
    (folder / "hosts").write_text(INVENTORY)
    keep_check(state, observed=MARKUP)
    keep_ways(state)
    keep_profile(folder / "profile")
    for step in (10, 20):
        save(folder / "kept", step, {})
    (folder / "kept" / name_of(20) / "manifest.json").write_text(MARKUP)
    (folder / "train.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(state))
        keep_word("verify", folder / "train.py", [MARKUP], [MARKUP], is_equal=False)
    checkpoints = [str(folder / "kept"), f"{folder}/{MARKUP}"]
    make_record(folder / "runs/first", rows_made(1, 30), script=str(folder / "train.py"), checkpoints=checkpoints)
    variables = {"XDG_STATE_HOME": str(state), "MPITRAIN_PROFILE": str(folder / "profile")}
    words = (str(folder / "runs"), "-i", str(folder / "hosts"))
    with dashboard(folder / "cache", *words, env=variables) as made:
        made.wait_for("/api/runs", lambda answer: len(made.records(answer)) == 1)
        yield made


def open_cluster(visit: Visit) -> Any:
    visit.page.get_by_role("link", name="Cluster", exact=True).click()
    visit.page.wait_for_selector("#findings li")
    return visit.page


def test_hosts_and_findings(browser: Any, served: Dashboard) -> None:
    visit = Visit(browser, served)
    page = open_cluster(visit)
    row = page.get_by_role("row").filter(has_text="node1").first
    assert "no job runs there, so nobody measures its load" in row.inner_text()
    assert "16.8 GB of memory" in row.inner_text()
    (finding,) = page.locator("#findings li").all()
    assert MARKUP in finding.inner_text() and "node[2-3]" in finding.inner_text()
    assert finding.locator("pre").inner_text() == "mount it"
    assert "level full, without NFS01, 4 hosts: 1 fail" in page.inner_text("#checkWhen")
    assert page.locator("#problems").is_hidden()
    assert page.evaluate("window.hacked") is None
    visit.close()


def test_a_matrix_by_keyboard_and_by_mouse(browser: Any, served: Dashboard) -> None:
    """The note has what the table has."""
    visit = Visit(browser, served)
    page = open_cluster(visit)
    canvas, note = page.locator("canvas.matrix").first, page.locator(".matrices .now").first
    canvas.focus()
    assert note.inner_text() == "node1 to node2: 21 MB/s"
    steps = [("ArrowRight", "node1 to node3: 31 MB/s"), ("ArrowDown", "node2 to node3: 32 MB/s")]
    steps += [("ArrowLeft", "node2 to node2: the same host"), ("ArrowLeft", "node2 to node1: not measured")]
    steps += [("ArrowLeft", "node2 to node1: not measured"), ("ArrowUp", "node1 to node1: the same host")]
    for key, text in steps:
        page.keyboard.press(key)
        assert note.inner_text() == text, key
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 5, box["y"] + box["height"] - 1.5 * CELL)
    assert note.inner_text() == "node3 to node4: 43 MB/s"
    page.get_by_text("Bandwidth as a table").first.click()
    rows = [row.split("\t") for row in page.locator("table").nth(1).locator("tbody tr").all_inner_texts()]
    assert rows[1] == ["node2", "", "", "32 MB/s", "42 MB/s"]
    shown = page.evaluate(
        """(cell) => { const canvas = document.querySelector("canvas.matrix"), context = canvas.getContext("2d");
        const size = cell * devicePixelRatio, left = canvas.width - 4 * size, top = canvas.height - 4 * size;
        const pixel = (x, y) => [...context.getImageData(x, y, 1, 1).data].join();
        const at = (from, to) => pixel(left + (to + .5) * size, top + (from + .5) * size);
        const hasInk = (...box) => context.getImageData(...box).data.some((one) => one > 0);
        const names = [0, 1, 2, 3].map((place) =>
          hasInk(left + place * size, 0, size, top) && hasInk(0, top + place * size, left, size));
        return {colors: [at(2, 3), at(2, 0), at(1, 0), at(0, 0)], names}; }""",
        CELL,
    )
    assert shown["names"] == [True] * 4, "each row and each column has a name"
    colors = shown["colors"]
    assert len(set(colors)) == 4, "the best, the worst, not measured, and nothing"
    visit.close()


def test_a_matrix_of_400_hosts_and_a_zero(browser: Any, served: Dashboard) -> None:
    """Without its table, which takes a browser long."""
    visit = Visit(browser, served)
    qualities = visit.page.evaluate(
        """async () => { const {Matrix} = await import("/pages/matrix.js");
        class Bare extends Matrix { table() { return document.createElement("p"); } }
        const nodes = Array.from({length: 400}, (_, place) => `n${place}`);
        const rows = nodes.map((_, from) => nodes.map((_, to) => from === to ? null : from));
        return [true, false].map((isMoreBetter) => {
          const made = new Bare(document.body, "M", nodes, rows, String, {isMoreBetter});
          return [made.quality(0), made.quality(399)];
        }); }"""
    )
    assert qualities == [[0, 1], [1, 0]]
    visit.close()


def test_checkpoints_and_verify_of_a_run(browser: Any, served: Dashboard) -> None:
    visit = Visit(browser, served)
    visit.open_run("first")
    page = visit.page
    page.wait_for_selector("#checkpoints tbody tr")
    rows = [row.split("\t") for row in page.locator("#checkpoints tbody tr").all_inner_texts()]
    assert [row[0] for row in rows] == ["20", "10"]
    assert "is damaged" in rows[0][-1] and rows[1][-1] == "" and rows[1][1].endswith(("just now", " min ago"))
    assert any(
        f"{MARKUP} is not on this machine" in text for text in page.locator("#checkpoints .problem").all_inner_texts()
    )
    assert page.inner_text("#verifyWords") == "not equal on one rank and on several"
    assert MARKUP in page.inner_text("#verifyWords + span")
    page.get_by_text("What was compared").click()
    assert page.inner_text("#verifyLines") == MARKUP
    assert page.evaluate("window.hacked") is None
    visit.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_no_page_is_wider_than_the_screen(browser: Any, served: Dashboard, scheme: str, width: int) -> None:
    visit = Visit(browser, served, viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = open_cluster(visit)
    until(lambda: page.locator("canvas.matrix").count() == 4)
    assert_fits(page, width, "h1, h2, h3, td, th, p, a, dt, dd, li, small, summary, pre, strong")
    visit.close()
