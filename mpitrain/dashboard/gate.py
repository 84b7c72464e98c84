"""Who may ask for what: the addresses, the tokens and the headers of every answer.

A link with a token gives the browser a cookie at its first visit. Programs send the token as `Authorization: Bearer`.
"""

from __future__ import annotations

import hmac
import html
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mpitrain.dashboard.html import ICON

Role = Literal["viewer", "operator"]

FOR_OPERATORS = "a viewer cannot do this; open the link for operators"
_COOKIE_SECONDS = 30 * 24 * 3600
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
_WELCOME = f'{_HEAD}<meta http-equiv="refresh" content="0;url=/">'


@dataclass(frozen=True)
class Tokens:
    """The secrets of the two roles. An operator may also send commands to jobs."""

    viewer: str
    operator: str

    @classmethod
    def new(cls) -> Tokens:
        """Make new ones."""
        return cls(secrets.token_urlsafe(24), secrets.token_urlsafe(24))

    def role(self, token: str) -> Role | None:
        """Return whose token this is; None: nobody's."""
        given = token.encode(errors="replace")
        if hmac.compare_digest(given, self.operator.encode()):
            return "operator"
        return "viewer" if hmac.compare_digest(given, self.viewer.encode()) else None


class Gate:
    """An ASGI application around another one: it lets in who has a token, and sets `state.role` of the request."""

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
        """Return the answer to who may not come in, or comes in for the first time; None: the application answers."""
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        if host not in self._hosts:
            allowed = ", ".join(sorted(self._hosts))
            return PlainTextResponse(f"this dashboard is not {host[:200]!r}; allowed are {allowed}\n", 421)
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if scope["path"] == "/" and scope["method"] == "GET" and "token" in query:
            return self._welcome(query["token"][0])
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

    def _welcome(self, token: str) -> Response:
        if self._tokens.role(token) is None:
            return _page("This token is not of this dashboard. Open the link that it has printed at its start.", 401)
        # Not a redirect: after a click on another site, a browser would not send a strict cookie along.
        answer = HTMLResponse(_WELCOME)
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
