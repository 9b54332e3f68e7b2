"""Allowed requests: those of the page that this server sent.

A page of another site can send requests to 127.0.0.1, and read the answers through a name that it points there (DNS
rebinding). So `Host` must be one of our names, and requests that change something must come from our page.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from shlex import quote
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Nothing from other sites, and only the scripts and styles of the page.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def _name_of(host: str) -> str:
    """The name without its port, in lower case."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Guard:
    """An ASGI application around another one: refuses foreign hosts and origins, adds headers to all answers."""

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        """names: of this server, besides localhost and its addresses."""
        self._app = app
        self._names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        problem = self._problem(scope["method"], scope["path"], Headers(scope=scope))
        if problem:
            await JSONResponse({"error": problem}, 403)(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def _problem(self, method: str, path: str, headers: Headers) -> str:
        """Why this request is refused; "": it is allowed."""
        host = headers.get("host", "")
        name = _name_of(host)
        # An address is safe: no other site can point a name at it.
        if name not in self._names and not _is_address(name):
            return (
                f"This server is not called {name!r}. Start kafka-marshal ui with --allow-host {quote(name)} if it is."
            )
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return "This request comes from a page of another site."
        # Any site may link to the page itself.
        if path != "/" and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "This request comes from a page of another site."
        if method not in ("GET", "HEAD"):
            if origin is None:
                return "This request does not say which page it comes from."
            if headers.get("content-type", "").partition(";")[0] != "application/json":
                return "This request is not JSON."
        return ""
