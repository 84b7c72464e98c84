"""Who may ask for what: the addresses, the tokens and the headers of every answer.

A link to a page with a token gives the browser a cookie at its first visit, and continues to the page without the
token. Programs send the token as `Authorization: Bearer`.
"""

from __future__ import annotations

import hmac
import html
import secrets
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Literal
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mpitrain.dashboard.html import ICON
from mpitrain.errors import DataError, MpitrainError
from mpitrain.state_files import keep_state, read_state, state_folder

Role = Literal["viewer", "operator"]

FOR_OPERATORS = "a viewer cannot do this; open the link for operators"
_COOKIE_SECONDS = 30 * 24 * 3600
_KEPT_VERSION, _MOST_KEPT_BYTES, _LEAST_LETTERS = 1, 4096, 32  # of the file with the tokens
_HEADERS = {
    # Nothing from elsewhere, no script or style inside a page: a text that became markup could still do nothing.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


_HEAD = f"<!doctype html><title>mpitrain</title>{ICON}"
# Which of these is asked for by a link: not the answers for programs, which take a token in a header alone.
_NO_PAGES = ("/api/", "/pages/", "/metrics")


@dataclass(frozen=True)
class Tokens:
    """The secrets of the two roles. An operator may also send commands to jobs."""

    viewer: str
    operator: str

    @classmethod
    def new(cls) -> Tokens:
        """Make new ones."""
        return cls(secrets.token_urlsafe(24), secrets.token_urlsafe(24))

    @classmethod
    def kept(cls, name: str, *, anew: bool = False) -> Tokens:
        """Return those of the dashboard with this name, which a later one of this user has too; `anew`: make new ones.

        So links, bookmarks and open pages hold after a restart. If they cannot be kept, a warning goes to stderr.
        """
        try:
            path = state_folder() / f"dashboard-{name}.json"
            kept = None if anew else read_state(path, _KEPT_VERSION, _MOST_KEPT_BYTES)
        except DataError as error:
            print(f"mpitrain dashboard: the links are new, and hold until it ends: {error}", file=sys.stderr)
            return cls.new()
        found = [] if kept is None else [kept.get(role) for role in ("viewer", "operator")]
        if found and all(isinstance(one, str) and len(one) >= _LEAST_LETTERS for one in found):
            return cls(*map(str, found))
        made = cls.new()
        try:
            keep_state(path, _KEPT_VERSION, asdict(made))
        except MpitrainError as error:
            print(f"mpitrain dashboard: the links hold until it ends: {error}", file=sys.stderr)
        return made

    def role(self, token: str) -> Role | None:
        """Return the role of this token; None: it is unknown."""
        given = token.encode(errors="replace")
        if hmac.compare_digest(given, self.operator.encode()):
            return "operator"
        return "viewer" if hmac.compare_digest(given, self.viewer.encode()) else None


class Gate:
    """An ASGI application around another one: it admits requests with a token, and sets their `state.role`."""

    def __init__(self, app: ASGIApp, tokens: Tokens, hosts: Collection[str], port: int, *, is_secure: bool) -> None:
        """
        Args:
            app: what is guarded.
            hosts: the names and addresses under which browsers may come. Any other name is that of a foreign page
                whose name was made to point here (DNS rebinding).
            port: of the server. Cookies do not know ports, so the name of the cookie has it.
            is_secure: all connections use TLS.
        """
        self._app = app
        self._tokens = tokens
        scheme = "https" if is_secure else "http"
        names = [f"[{host}]" if ":" in host else host.lower() for host in hosts]
        self._hosts = {f"{name}:{port}" for name in names}
        if port == (443 if is_secure else 80):
            self._hosts |= set(names)
        self._origins = {f"{scheme}://{host}" for host in self._hosts}
        self._cookie = f"mpitrain-{port}"
        self._is_secure = is_secure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        refusal = PlainTextResponse("mpitrain dashboard has no web sockets\n", 404)
        answer = self._answer(scope) if scope["type"] == "http" else refusal
        await (answer or self._app)(scope, receive, _with_headers(send))

    def _answer(self, scope: Scope) -> Response | None:
        """Return the answer to a request that is refused, or to a first visit; None: the application answers."""
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        if host not in self._hosts:
            allowed = ", ".join(sorted(self._hosts))
            return PlainTextResponse(f"this dashboard is not {host[:200]!r}; allowed are {allowed}\n", 421)
        query = parse_qsl(scope["query_string"].decode("latin-1"))
        tokens = [value for name, value in query if name == "token"]
        if tokens and scope["method"] == "GET" and not scope["path"].startswith(_NO_PAGES):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            path = "/" + quote(scope["path"].lstrip("/"))  # never //host, which would be a page elsewhere
            return self._welcome(tokens[0], path + (f"?{rest}" if rest else ""))
        role = self._tokens.role(self._given(scope, headers))
        if role is None:
            return _page("Open the link that `mpitrain dashboard` has printed: it has a token.", 401)
        if scope["method"] not in ("GET", "HEAD"):
            if role != "operator":
                return PlainTextResponse(f"{FOR_OPERATORS}\n", 403)
            if "authorization" not in headers and headers.get("origin", "") not in self._origins:
                return PlainTextResponse("this request comes from another page\n", 403)
        scope.setdefault("state", {})["role"] = role
        return None

    def _given(self, scope: Scope, headers: Headers) -> str:
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return token.strip()
        return HTTPConnection(scope).cookies.get(self._cookie, "")

    def _welcome(self, token: str, target: str) -> Response:
        if self._tokens.role(token) is None:
            return _page("This token is not of this dashboard. Open the link that it has printed at its start.", 401)
        # Not a redirect: after a click on another site, a browser would not send a strict cookie along.
        answer = HTMLResponse(f'{_HEAD}<meta http-equiv="refresh" content="0;url={html.escape(target)}">')
        answer.set_cookie(
            self._cookie, token, _COOKIE_SECONDS, httponly=True, samesite="strict", secure=self._is_secure
        )
        return answer


def _page(text: str, code: int) -> Response:
    return HTMLResponse(f"{_HEAD}<p>{html.escape(text)}</p>\n", code)


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return send_with_headers
