"""What the server answers, and to whom: requests to a dashboard that really runs."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from records_made import lines, make_record, rows_made

from free_ports import free_port
from jobs import HANG_SECONDS
from mpitrain.cli import main
from mpitrain.dashboard.record_reader import run_id
from serving import Dashboard, dashboard, refused, require


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records: two that are whole, and one that is damaged."""
    folder = tmp_path_factory.mktemp("runs")
    make_record(folder / "first", rows_made(1, 3000))
    make_record(
        folder / "second", rows_made(1, 10), arguments=["--lr", "0.2"], end="DataError: no", first_started=2000.0
    )
    (folder / "odd").mkdir()
    (folder / "odd/metrics.jsonl").write_text('{"step": 1, "loss": "NaN"}\nhello\n')
    return folder


def test_the_list(served: Dashboard) -> None:
    runs = {run["name"]: run for run in served.records(served.get("/api/runs"))}
    states = {name: (run["state"], run["rows"]) for name, run in runs.items()}
    # On a busy machine, the record without a document may be more than a minute old by now.
    assert states.pop("odd") in [("trains", 1), ("unknown", 1)]
    assert states == {"first": ("done", 3000), "second": ("failed", 10)}
    first = runs["first"]
    assert (first["hosts"], first["ranks"], first["started"], first["ended"]) == (["a", "b"], 3, 1000.0, 1060.0)
    assert first["last"] == rows_made(3000, 3000)[0]
    assert (runs["second"]["why"], runs["second"]["script"]) == ("DataError: no", "train.py --lr 0.2")
    assert runs["odd"]["last"] == {"step": 1.0, "loss": "NaN"}
    assert runs["odd"]["problems"] == ["metrics.jsonl: " + runs["odd"]["problems"][0].partition(": ")[2]]
    assert "line 2 is not a row" in runs["odd"]["problems"][0]
    ids = [run["id"] for run in served.records(served.get("/api/runs"))]
    assert ids.index(runs["second"]["id"]) < ids.index(first["id"]), "the youngest first"


def test_a_run_and_its_curves(served: Dashboard, folder: Path) -> None:
    path = f"/api/runs/{run_id(folder / 'first')}"
    answer = served.get(path)
    assert answer["names"] == ["loss", "samples_per_second", "test loss"]
    assert (answer["document"]["strategy"], answer["live"], answer["history"]) == ("Sync", None, [])
    curves = served.get(f"{path}/series?name=loss&name=test%20loss&pixels=100")["curves"]
    assert (curves["loss"]["exact"], curves["loss"]["points"], curves["test loss"]["points"]) == (False, 3000, 1000)
    assert max(curves["loss"]["values"]) == 1.0 and min(curves["loss"]["values"]) == 1 / 3000
    zoomed = served.get(f"{path}/series?name=loss&from=100.5&to=110&pixels=100")["curves"]["loss"]
    assert zoomed["exact"] and zoomed["steps"] == list(range(100, 112))
    assert zoomed["values"] == [1 / step for step in range(100, 112)]
    odd = served.get(f"/api/runs/{run_id(folder / 'odd')}/series?name=loss")["curves"]["loss"]
    assert (odd["values"], odd["notFinite"], odd["firstNotFinite"]) == ([None], 1, 1.0)
    assert served.get(f"{path}/series?name=none")["curves"]["none"]["steps"] == []


def test_the_begin_of_the_list(served: Dashboard) -> None:
    """Which is what a page asks for first."""
    whole = served.get("/api/runs")
    begin = served.get("/api/runs?most=1")
    assert (len(begin["runs"]), begin["num_runs"] >= 3, whole["num_runs"]) == (1, True, len(whole["runs"]))
    for most, number in (("0", 0), ("-1", 0), ("nan", 3), ("inf", 3), ("1e300", 3)):
        runs = served.records(served.get(f"/api/runs?most={most}"))
        assert len(runs) == number, most


def test_a_page_names_all_that_it_loads(served: Dashboard) -> None:
    """So a browser asks for it at once; and what it names is there."""
    for path, name, num_modules in (("/", "runs", 7), ("/run/x", "run", 18), ("/compare", "compare", 10)):
        _, headers, text = served.ask(path)
        assert headers["content-type"] == "text/html; charset=utf-8"
        modules = re.findall(r'<link rel="modulepreload" href="(/pages/[^"]+)">', text)
        assert (modules[0], len(modules)) == (f"/pages/{name}.js", num_modules)
        styles = re.findall(r'<link rel="stylesheet" href="([^"]+)">', text)
        assert ("/pages/uplot/uPlot.min.css" in styles) == ("/pages/uplot/uPlot.esm.js" in modules)
        for file, kind in [(file, "javascript") for file in modules] + [(file, "text/css") for file in styles]:
            status, headers, code = served.ask(file)
            assert (status, kind in headers["content-type"]) == (200, True), file
            for other in re.findall(r'from "\./([^"]+)"', code) if kind == "javascript" else ():
                assert f"/pages/{other}" in modules, file
        assert text.count("<title>") == text.count("<body>") == text.count("</html>") == 1


def test_what_differs(served: Dashboard, folder: Path) -> None:
    ids = [run_id(folder / name) for name in ("first", "second")]
    answer = served.get(f"/api/compare?runs={ids[0]},{ids[1]}")
    assert answer["differences"] == [{"name": "--lr", "values": ["0.1", "0.2"]}]
    assert [run["name"] for run in answer["runs"]] == ["first", "second"]
    many = served.get(f"/api/compare?runs={','.join(ids * 20)}")
    assert (many["asked"], len(many["runs"])) == (40, 32), "the page says that eight are left out"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/runs/0000", 404),
        ("/api/runs/job-x", 404),
        ("/api/runs/..%2f..%2fetc", 404),
        ("/api/runs/0000/series?name=loss", 404),
        ("/api/compare?runs=0000", 404),
        ("/api/stream?run=0000", 404),
        ("/pages/../../app.py", 404),
        ("/pages/%2e%2e/app.py", 404),
        ("/nothing", 404),
    ],
)
def test_what_is_not_there(served: Dashboard, path: str, status: int) -> None:
    found, _, text = served.ask(path)
    assert found == status, text


def test_numbers_that_are_none(served: Dashboard, folder: Path) -> None:
    path = f"/api/runs/{run_id(folder / 'first')}/series?name=loss"
    assert served.ask(f"{path}&from=x")[0] == 400
    for query in ("from=nan", "to=inf", "pixels=-5", "pixels=1e300", "from=1e300", "from=5&to=1", "name="):
        assert served.ask(f"{path}&{query}")[0] == 200, query


def test_only_with_a_token(served: Dashboard) -> None:
    for path in ("/", "/api/runs", "/api/stream", "/metrics", "/pages/style.css", "/run/x", "/nothing"):
        for token in ("", "wrong", served.viewer[:-1], "\u00e9"):
            status, _, text = served.ask(path, headers={"Authorization": f"Bearer {token}"}, token="")
            assert (status, "Open the link" in text) == (401, True), path
        assert served.ask(path, token="", headers={"Cookie": f"mpitrain-{served.port}=wrong"})[0] == 401
    assert served.ask("/?token=wrong", token="")[0] == 401
    assert served.ask("/api/runs?token=" + served.viewer, token="")[0] == 401, "only pages take it"


def test_a_link_to_any_page_may_have_the_token(served: Dashboard) -> None:
    status, headers, text = served.ask(f"/run/0a?x=1&token={served.viewer}&y=%22%3E", token="")
    assert (status, f"mpitrain-{served.port}=" in headers["set-cookie"]) == (200, True)
    assert 'content="0;url=/run/0a?x=1&amp;y=%22%3E"' in text
    assert 'content="0;url=/evil.example/"' in served.ask(f"//evil.example/?token={served.viewer}", token="")[2]
    assert served.ask("/run/0a?token=wrong", token="")[0] == 401


def test_the_links_hold_after_a_restart(folder: Path, tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path / "state")}
    port, links = str(free_port()), []
    for words in ((), (), ("--new-links",)):
        with dashboard(tmp_path / "cache", str(folder), "--port", port, *words, env=environment) as made:
            links.append((made.viewer, made.operator))
            made.ask("/")  # it serves, so Ctrl-C ends it well
            (kept,) = (tmp_path / "state/mpitrain").glob("dashboard-*.json")
            assert kept.stat().st_mode & 0o777 == 0o600
    assert links[0] == links[1] and not set(links[0]) & set(links[2])
    kept.write_text("[")
    with dashboard(tmp_path / "cache", str(folder), "--port", port, env=environment) as made:
        made.ask("/")
        assert made.viewer not in links[2]


def test_the_first_visit_gives_a_cookie(served: Dashboard) -> None:
    status, headers, _ = served.ask(f"/?token={served.viewer}", token="")
    cookie = headers["set-cookie"]
    assert status == 200
    assert cookie.startswith(f"mpitrain-{served.port}={served.viewer};")
    assert {"httponly", "samesite=strict", "path=/"} <= set(cookie.lower().replace("; ", ";").split(";"))
    assert served.ask("/api/runs", token="", headers={"Cookie": cookie.partition(";")[0]})[0] == 200


def test_viewers_and_operators(served: Dashboard) -> None:
    assert json.loads(served.ask("/api/runs")[2])["role"] == "viewer"
    assert json.loads(served.ask("/api/runs", token=served.operator)[2])["role"] == "operator"
    assert served.viewer != served.operator and len(served.viewer) >= 32
    status, _, text = served.ask("/api/runs", method="POST")
    assert (status, "a viewer cannot do this" in text) == (403, True)
    assert served.ask("/api/runs", token=served.operator, method="POST")[0] == 405
    cookie = {"Cookie": f"mpitrain-{served.port}={served.operator}"}
    foreign = ("http://evil.example", "null", "http://127.0.0.1:1")
    for origin in ({}, *({"Origin": name} for name in foreign)):
        assert served.ask("/api/runs", token="", method="POST", headers={**cookie, **origin})[0] == 403, origin
    own = {**cookie, "Origin": served.base}
    assert served.ask("/api/runs", token="", method="POST", headers=own)[0] == 405


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}", "", "[::2]:{port}"]
)
def test_a_foreign_host_is_refused(served: Dashboard, host: str) -> None:
    """DNS rebinding: a name of an attacker that points to this machine. The token does not help."""
    status, _, text = served.ask("/api/runs", headers={"Host": host.format(port=served.port)})
    assert (status, "allowed are" in text) == (421, True)
    assert served.ask("/api/runs", headers={"Host": f"LOCALHOST:{served.port}"})[0] == 200


def test_the_headers_of_every_answer(served: Dashboard) -> None:
    for path in ("/", "/pages/chart.js", "/api/runs", "/nothing", "/metrics"):
        for token in (None, ""):
            _, headers, _ = served.ask(path, token=token)
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "no-store"


def test_no_page_has_a_script_or_style_inside(served: Dashboard) -> None:
    for path in ("/", "/run/x", "/compare", "/cluster"):
        status, _, text = served.ask(path)
        assert status == 200
        assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|style=|https?://", text), path


def test_a_stream_tells_what_is_new(tmp_path: Path) -> None:
    """A row that is written appears within a second or two, on a quiet machine."""
    folder = make_record(tmp_path / "runs/a", rows_made(1, 2), end="", ended=None)
    with dashboard(tmp_path / "cache", "runs", cwd=tmp_path) as served:
        served.wait_for("/api/runs", lambda answer: len(served.records(answer)) == 1)
        line = http.client.HTTPConnection("127.0.0.1", served.port, timeout=HANG_SECONDS)
        line.request("GET", f"/api/stream?run={run_id(folder)}", headers={"Authorization": f"Bearer {served.viewer}"})
        answer = line.getresponse()
        assert answer.getheader("content-type") == "text/event-stream; charset=utf-8"
        rows = []
        for count in (2, 3):
            while not rows or rows[-1] != count:
                text = answer.readline().decode()
                if text.startswith("data: "):
                    rows.append(json.loads(text[6:])["run"]["rows"])
            if count == 2:
                with (folder / "metrics.jsonl").open("a") as file:
                    file.write(lines(rows_made(3, 3)))
        assert rows[-1] == 3
        shutil.rmtree(folder)
        while not (text := answer.readline().decode()).startswith('data: {"run": null'):
            assert text, "the stream has ended"
        served.process.send_signal(signal.SIGINT)
        assert answer.read() is not None  # the stream ends with the dashboard
        line.close()


def test_the_stream_of_the_list_tells_only_what_is_new(tmp_path: Path) -> None:
    for name in "ab":
        make_record(tmp_path / "runs" / name, rows_made(1, 2))
    with dashboard(tmp_path / "cache", str(tmp_path / "runs")) as served:
        served.wait_for("/api/runs", lambda answer: len(served.records(answer)) == 2)
        line = http.client.HTTPConnection("127.0.0.1", served.port, timeout=HANG_SECONDS)
        line.request("GET", "/api/stream", headers={"Authorization": f"Bearer {served.viewer}"})
        answer = line.getresponse()

        ids = [run_id(tmp_path / "runs" / name) for name in "abc"]

        def next_one() -> tuple[bool, list[str], list[str]]:
            while True:
                text = answer.readline().decode()
                assert text, "the stream has ended"
                message = json.loads(text[6:]) if text.startswith("data: ") else {"runs": [], "gone": []}
                names = sorted(run["name"] for run in served.records(message))
                gone = [id_ for id_ in message["gone"] if id_ in ids]
                if names or gone:
                    return message["isWhole"], names, gone

        assert next_one() == (True, ["a", "b"], [])
        make_record(tmp_path / "made", rows_made(1, 2)).rename(tmp_path / "runs/c")
        assert next_one() == (False, ["c"], [])
        with (tmp_path / "runs/a/metrics.jsonl").open("a") as file:
            file.write(lines(rows_made(3, 3)))
        assert next_one() == (False, ["a"], [])
        shutil.rmtree(tmp_path / "runs/b")
        whole, names, gone = next_one()
        while not gone:  # its record may be seen half removed
            whole, names, gone = next_one()
        assert (whole, names, gone) == (False, [], [run_id(tmp_path / "runs/b")])
        line.close()


def test_two_dashboards_and_a_port_in_use(served: Dashboard, folder: Path, tmp_path: Path) -> None:
    """The second one is killed, and the next one finds its index whole."""
    code, errors = refused(tmp_path, str(folder), "--port", str(served.port))
    assert code == 1
    assert f"port {served.port} of 127.0.0.1 is in use, perhaps by another dashboard" in errors
    with dashboard(tmp_path, str(folder), code=-signal.SIGKILL) as second:
        assert second.viewer != served.viewer
        assert second.ask("/api/runs", token=served.viewer)[0] == 401
        second.wait_for("/api/runs", lambda answer: len(second.records(answer)) == 3)
        second.process.kill()
        second.process.wait(HANG_SECONDS)
    with dashboard(tmp_path, str(folder)) as third:
        runs = third.wait_for("/api/runs", lambda answer: len(third.records(answer)) == 3)
        assert {run["rows"] for run in third.records(runs)} == {3000, 10, 1}


def test_over_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, to make a certificate")
    make_record(tmp_path / "runs/a", rows_made(1, 2))
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    line = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    line += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost", "-days", "2"]
    subprocess.run(line, check=True, capture_output=True, timeout=HANG_SECONDS)
    words = ["--host", "0.0.0.0", "--tls-certificate", str(certificate), "--tls-key", str(key)]
    with dashboard(tmp_path / "cache", str(tmp_path / "runs"), *words) as served:
        assert served.base == f"https://{socket.gethostname()}:{served.port}"
        assert "secure" in served.ask(f"/?token={served.viewer}", token="")[1]["set-cookie"].lower()
        assert served.ask("/api/runs", headers={"Host": f"{socket.gethostname()}:{served.port}"})[0] == 200
        assert served.ask("/api/runs", headers={"Host": f"evil.example:{served.port}"})[0] == 421
        with socket.create_connection(("127.0.0.1", served.port), timeout=HANG_SECONDS) as plain:
            plain.sendall(b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"HTTP" not in plain.recv(100)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--host", "0.0.0.0"], 2, "0.0.0.0 can be reached from other machines"),
        (["--host", "192.0.2.1", "--tls-certificate", "x", "--tls-key", "y"], 2, "cannot listen on port"),
        (["--host", "no.such.name.invalid", "--tls-certificate", "x", "--tls-key", "y"], 2, "neither an address nor a"),
        (["--tls-certificate", "x"], 2, "--tls-certificate and --tls-key belong together"),
        (["--tls-certificate", "x", "--tls-key", "y"], 1, "TLS with x and y is not possible"),
        (["missing"], 2, "there is no folder missing"),
        (["--port", "70000"], 2, "--port 70000; allowed are 0 to 65535"),
        (["-i", "hosts"], 2, "stands before the first section"),
        (["-i", "missing"], 2, "there is no such file"),
        (["x" * 300], 2, "cannot be read: File name too long"),
        (["-i", "pipe"], 2, "has not answered for 3 s: is it a pipe"),
    ],
)
def test_what_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    text: str,
) -> None:
    require()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "hosts").write_text("node1\n")
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:  # this thread has the event loop of Playwright
        assert pool.submit(main, ["dashboard", "--port", "0", *words]).result() == code
    assert text in capsys.readouterr().err
