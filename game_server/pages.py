"""The few files a browser needs, held in memory, and who may connect from where."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from http import HTTPStatus
from importlib.resources import files
from urllib.parse import urlsplit

from websockets.datastructures import Headers
from websockets.http11 import Response

__all__ = ["SOCKET_PATH", "origin_allowed", "plain", "static"]

SOCKET_PATH = "/ws"

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
}
_BODIES = {path: files(__package__).joinpath("static", name).read_bytes() for path, (name, _) in _FILES.items()}
_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def static(path: str) -> Response | None:
    """The page or one of its files; None where there is no such file."""
    path = path.partition("?")[0]
    if path not in _FILES:
        return None
    return _response(HTTPStatus.OK, _FILES[path][1], _BODIES[path])


def plain(status: HTTPStatus, text: str) -> Response:
    """A short answer in plain text."""
    return _response(status, "text/plain; charset=utf-8", text.encode() + b"\n")


def origin_allowed(origin: str | None, host: str, allowed: Collection[str]) -> bool:
    """Whether a page of ``origin`` may open a socket to ``host`` (CORS does not cover WebSockets).

    Clients that are no browsers send no origin. A page may connect back to the host it came from, where that is an
    address or localhost (a name could be a stranger's, bound to our address), or when its origin is listed.
    """
    if origin is None or origin in allowed:
        return True
    parts = urlsplit(origin)
    if parts.scheme not in ("http", "https") or parts.netloc.lower() != host.lower():
        return False
    name = parts.hostname or ""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return True


def _response(status: HTTPStatus, kind: str, body: bytes) -> Response:
    headers = Headers({
        "Content-Type": kind,
        "Content-Length": str(len(body)),
        "Content-Security-Policy": _CSP,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "Connection": "close",
    })  # fmt: skip
    return Response(status.value, status.phrase, headers, body)
