"""The answers of the server: pages, runs, curves, a stream of changes, and the answers of jobs to commands."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from mpitrain.dashboard.catalogue import Catalogue
from mpitrain.dashboard.cluster import ClusterView
from mpitrain.dashboard.commands import MOST_BYTES, Commands, Outputs, order_of
from mpitrain.dashboard.gate import FOR_OPERATORS
from mpitrain.dashboard.html import files, page
from mpitrain.dashboard.index import IndexedRun
from mpitrain.dashboard.prometheus import exposition
from mpitrain.dashboard.run_files import files_of
from mpitrain.dashboard.run_notes import notes_of
from mpitrain.dashboard.shared_answers import SharedAnswers
from mpitrain.dashboard.shown_jobs import ShownJob
from mpitrain.dashboard.summary import differences
from mpitrain.dashboard.waits import who_waits
from mpitrain.errors import ConfigError, DataError
from mpitrain.launch.live_picture import fact_columns

_FIRST_RUNS = 40  # find room on a screen
_MOST_PIXELS = 8192
_MOST_NAMES = 64  # of metrics in one answer
_MOST_COMPARED = 32
_MOST_LETTERS = 300  # of names of folders in a message
_KNOWN = "the inventory, the last check of the cluster, or the measured ways"
_NO_LAUNCHER = (
    "no launcher here has it: the job has ended, its launcher is on another machine (start a dashboard there, or use "
    "`mpitrain tell` on a node), or plain mpiexec has started it"
)
_PAUSE_SECONDS = 0.4  # between two messages to a viewer
_SILENCE_SECONDS = 10.0  # after that, a message says that the connection is alive


class Routes:
    """The routes of a dashboard."""

    def __init__(self, catalogue: Catalogue, cluster: ClusterView) -> None:
        self._catalogue = catalogue
        self._cluster = cluster
        self._commands = Commands()
        self._files, self._known = SharedAnswers(), SharedAnswers()
        self._outputs = Outputs()
        self._ending = asyncio.Event()

    def app(self) -> Starlette:
        """Return the application."""
        return Starlette(
            routes=[
                _kept("/", page("runs", asks=f"/api/runs?most={_FIRST_RUNS}"), "text/html"),
                _kept("/run/{id}", page("run"), "text/html"),
                _kept("/compare", page("compare"), "text/html"),
                _kept("/cluster", page("cluster"), "text/html"),
                Route("/api/cluster", self.cluster),
                Route("/metrics", self.metrics),
                Route("/api/runs", self.runs),
                Route("/api/runs/{id}", self.run),
                Route("/api/runs/{id}/series", self.series),
                Route("/api/runs/{id}/before", self.before),
                Route("/api/runs/{id}/notes", self.notes, methods=["POST"]),
                Route("/api/runs/{id}/rows.csv", self.rows),
                Route("/api/runs/{id}/files", self.files),
                Route("/api/runs/{id}/tell", self.tell, methods=["GET", "POST"]),
                Route("/api/runs/{id}/output", self.output),
                Route("/api/compare", self.compare),
                Route("/api/stream", self.stream),
                *(_kept(*file) for file in files()),
            ],
            lifespan=self._lifespan,
        )

    def end(self) -> None:
        """End all streams and waits, so that the server can end."""
        self._ending.set()
        self._commands.end()
        self._files.end()
        self._known.end()
        self._outputs.end()
        self._catalogue.bell.ring()

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._catalogue.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def runs(self, request: Request) -> Response:
        """Answer the list of runs: all, or the first `most`."""
        answer = await self._list(request.state.role)
        most = min(max(_number(request.query_params.get("most"), math.inf), 0), answer["num_runs"])
        return _json({**answer, "runs": answer["runs"][: int(most)]})

    async def _list(self, role: str) -> dict[str, Any]:
        runs = await asyncio.to_thread(self._catalogue.summaries)
        return {"runs": runs, "num_runs": len(runs), "problem": self._catalogue.problem, "role": role}

    async def run(self, request: Request) -> Response:
        """Answer with everything known of a run, apart from its curves."""
        run, job = await self._run(request.path_params["id"])
        answer = {
            "run": self._catalogue.summary(run, job),
            "document": dataclasses.asdict(run.document) if run and run.document else None,
            "names": run.names if run else [],
            "events": run.events if run else [],
            **_live(job),
            "history": list(job.history) if job else [],
            "role": request.state.role,
        }
        return _json(answer)

    async def _run(self, id_: str) -> tuple[IndexedRun | None, ShownJob | None]:
        run, job = await asyncio.to_thread(self._catalogue.find, id_)
        if run is None and job is None:
            raise HTTPException(404, f"there is no run {id_[:40]!r}; its record may have been moved")
        return run, job

    async def series(self, request: Request) -> Response:
        """Answer curves: `name` (one or more), `from` and `to` (steps), `pixels`; with `mean`, means of this many
        columns instead of the extremes of pixels.
        """
        query = request.query_params
        names = query.getlist("name")[:_MOST_NAMES]
        first, last = _number(query.get("from"), -math.inf), _number(query.get("to"), math.inf)
        pixels = int(min(max(_number(query.get("pixels"), 1000), 1), _MOST_PIXELS))
        columns = int(min(max(_number(query.get("mean"), 0), 0), _MOST_PIXELS))
        run, _ = await self._run(request.path_params["id"])
        curves = {}
        for name in names:
            if run is None:
                break
            wanted = (run.id, name, first, last, columns or pixels)
            points = await asyncio.to_thread(self._catalogue.curve, *wanted, is_mean=columns > 0)
            curves[name] = {
                "steps": points.steps.tolist(),
                "values": [value if math.isfinite(value) else None for value in points.values.tolist()],
                "exact": points.is_exact,
                "points": points.num_points,
                "notFinite": points.num_not_finite,
                "firstNotFinite": points.first_not_finite,
            }
        return _json({"curves": curves})

    async def rows(self, request: Request) -> Response:
        """Answer all rows as CSV: the step, and every metric, or those of `name`."""
        run, _ = await self._run(request.path_params["id"])
        names = request.query_params.getlist("name") or (run.names if run else [])
        lines = await asyncio.to_thread(self._catalogue.csv, run, names) if run else iter(())
        headers = {"Content-Disposition": f'attachment; filename="{run.id if run else "run"}.csv"'}
        return StreamingResponse(lines, media_type="text/csv", headers=headers)

    async def before(self, request: Request) -> Response:
        """Answer with a comparison with the previous run of its script; null: there is none."""
        run, _ = await self._run(request.path_params["id"])
        return _json(await asyncio.to_thread(self._catalogue.before, run) if run else None)

    async def notes(self, request: Request) -> Response:
        """Write the name, note, tags and hiding of a run beside its record."""
        _refuse_viewers(request)
        run, _ = await self._run(request.path_params["id"])
        if run is None:
            raise HTTPException(409, "it has no record, so there is no place for notes")
        try:
            notes = notes_of(await self._body(request), "the request")
            await asyncio.to_thread(self._catalogue.note, run, notes)
        except DataError as error:
            raise HTTPException(400, str(error)) from None
        except OSError as error:
            raise HTTPException(409, f"the notes in {run.folder} cannot be written: {error.strerror}") from None
        return _json({"accepted": "noted"})

    async def files(self, request: Request) -> Response:
        """Answer which checkpoints a run has, and what verify has said of its script."""
        id_ = request.path_params["id"]
        run, _ = await self._run(id_)
        document = run.document if run else None
        places = ", ".join([*document.checkpoints, document.folder])[:_MOST_LETTERS] if document else ""
        name = f"the files of {id_} ({places})"
        return _json(await _in_time(self._files.get(name, lambda: files_of(document))))

    async def cluster(self, _: Request) -> Response:
        """Answer the hosts, the last check, and what was measured between them."""
        known = await _in_time(self._known.get(_KNOWN, self._cluster.known))
        return _json({**known, "hosts": await asyncio.to_thread(self._cluster.hosts)})

    async def tell(self, request: Request) -> Response:
        """Send a command to a job (POST), or answer with the commands that it accepts (GET). The answer is that of its
        launcher."""
        _refuse_viewers(request)
        _, job = await self._run(request.path_params["id"])
        if request.method != "POST":  # not an error: a page asks again and again, and a job may end at any time
            return _json({"refused": _NO_LAUNCHER} if job is None else await self._commands.can(job))
        try:
            order = order_of(await self._body(request))
        except ConfigError as error:
            raise HTTPException(400, str(error)) from None
        if job is None:
            raise HTTPException(409, _NO_LAUNCHER)
        if why := self._commands.why_not():
            raise HTTPException(429, why, {"Retry-After": "1"})
        return _json(await self._commands.tell(job, order))

    async def _body(self, request: Request) -> bytes:
        """Return the body of a request. When the dashboard ends, the rest of one is not waited for."""
        body, end = asyncio.create_task(_read(request)), asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({body, end}, return_when=asyncio.FIRST_COMPLETED)
            if not body.done():
                raise HTTPException(503, "the dashboard ends, and the command was not passed on")
            return await body
        finally:
            body.cancel()
            end.cancel()

    async def output(self, request: Request) -> Response:
        """Answer the newest lines of the ranks: `ranks`, such as 0-2,5, and `text`, which the lines have."""
        _refuse_viewers(request)
        run, job = await self._run(request.path_params["id"])
        query, folder = request.query_params, run.folder if run else ""
        of_job = run.document.job if run and run.document else ""
        return _json(await self._outputs.lines(job, query.get("ranks", ""), query.get("text", ""), folder, of_job))

    async def compare(self, request: Request) -> Response:
        """Answer with the differences between the runs `runs` (ids, separated by commas)."""
        ids = [one for one in request.query_params.get("runs", "").split(",") if one]
        runs, documents = [], []
        names: dict[str, None] = {}
        for id_ in ids[:_MOST_COMPARED]:
            run, job = await self._run(id_)
            runs.append(self._catalogue.summary(run, job))
            documents.append(run.document if run else None)
            names |= dict.fromkeys(run.names if run else ())
        facts = differences(documents, [run["folder"] for run in runs])
        return _json({"runs": runs, "names": list(names), "differences": facts, "asked": len(ids)})

    async def stream(self, request: Request) -> Response:
        """Answer server-sent events, whenever something changes: the list of runs; with `run`, what is new of one; with
        `cluster`, the hosts.
        """
        id_ = request.query_params.get("run", "")
        if id_:
            await self._run(id_)
        if "cluster" in request.query_params:
            with suppress(DataError):  # the page names it, and the hosts of jobs are shown
                await self._known.get(_KNOWN, self._cluster.known)
            texts = self._changes_of_hosts()
        else:
            texts = self._changes_of(id_) if id_ else self._changes_of_list(request.state.role)
        lines = self._events(texts)
        return StreamingResponse(lines, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def _events(self, texts: AsyncIterator[str]) -> AsyncIterator[str]:
        """Iterate over a message for each ring of the bell: the next text, if it has changed."""
        bell, before, count = self._catalogue.bell, "", -1
        while True:
            count = await bell.wait(count, _SILENCE_SECONDS)
            if self._ending.is_set():
                return
            text = await anext(texts)
            yield f"data: {text}\n\n" if text != before else ": nothing new\n\n"
            before = text
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _changes_of(self, id_: str) -> AsyncIterator[str]:
        while True:
            try:
                run, job = await self._run(id_)
                rows = {"names": run.names if run else [], "numEvents": len(run.events) if run else 0}
                yield json.dumps({"run": self._catalogue.summary(run, job), **rows, **_live(job)})
            except HTTPException:
                yield json.dumps({"run": None})

    async def _changes_of_hosts(self) -> AsyncIterator[str]:
        while True:
            yield json.dumps({"hosts": await asyncio.to_thread(self._cluster.hosts)})

    async def _changes_of_list(self, role: str) -> AsyncIterator[str]:
        """Iterate over what is new in the list since the text before: 1,000 runs have half a megabyte."""
        told: dict[str, dict[str, Any]] = {}
        is_first = True
        while True:
            answer = await self._list(role)
            runs = {run["id"]: run for run in answer["runs"]}
            changed = [run for id_, run in runs.items() if told.get(id_) != run]
            gone = [id_ for id_ in told if id_ not in runs]
            yield json.dumps({**answer, "runs": changed, "gone": gone, "isWhole": is_first})
            told, is_first = runs, False

    async def metrics(self, _: Request) -> Response:
        """Answer the numbers of live jobs for Prometheus."""
        return PlainTextResponse(exposition(self._catalogue.live.jobs.values()), media_type=_PROMETHEUS)


_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def _live(job: ShownJob | None) -> dict[str, Any]:
    """Return what the page of a run shows of its job; `facts` are columns of its table of ranks."""
    if job is None:
        return {"live": None, "waits": None, "slow": "", "machines": [], "facts": []}
    facts = [fact._asdict() | {"kind": fact.kind.__name__} for fact in fact_columns(job.look["ranks"])]
    return {"live": job.look, "waits": who_waits(job.look), "slow": job.slow, "machines": job.machines, "facts": facts}


def _refuse_viewers(request: Request) -> None:
    if request.state.role != "operator":
        raise HTTPException(403, FOR_OPERATORS)


async def _in_time(answer: Awaitable[Any]) -> Any:
    try:
        return await answer
    except DataError as error:
        raise HTTPException(503, str(error)) from None


def _kept(path: str, content: bytes, kind: str) -> Route:
    async def answer(_: Request) -> Response:
        return Response(content, media_type=kind)

    return Route(path, answer)


def _json(answer: Any) -> Response:
    return Response(json.dumps(answer, allow_nan=False), media_type="application/json")


async def _read(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"a command has at most {MOST_BYTES} bytes")
    return body


def _number(text: str | None, default: float) -> float:
    try:
        value = float(text) if text else default
    except ValueError:
        raise HTTPException(400, f"{text!r:.80} is not a number") from None
    return default if math.isnan(value) else value
