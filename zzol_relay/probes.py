"""Probes over HTTP: ``/live``, ``/ready``, ``/status``, ``/metrics``.

``serve_probes`` runs them on a port of their own, as ``zzol-relay worker --probe-port`` does; ``probes_app`` is the
WSGI application, to be mounted in an application's own server. No path takes input or shows event data, but all tell
about the system: by default only this machine can ask.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import orjson

from zzol_relay.app import Relay
from zzol_relay.core.errors import ConfigurationError
from zzol_relay.relay.health import InTime
from zzol_relay.version import __version__

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["ProbeServer", "probes_app", "serve_probes"]

_log = logging.getLogger("zzol_relay.probes")

_PATIENCE = 2.0


def probes_app(relay: Relay, registry: CollectorRegistry | None = None) -> WSGIApplication:
    """A WSGI application for ``relay``; other paths are 404, other methods than GET and HEAD 405.

    ``/live`` and ``/ready`` answer 200 or 503, at once, with the reasons. ``/status`` is always 200 and tells about
    MySQL, Redis and the backlog within two seconds, whatever hangs. ``/metrics`` exposes ``registry``
    (prometheus-client's own by default); 404 without prometheus-client.
    """
    status = InTime(relay.status, "zzol-relay-status")
    metrics = _metrics_app(registry)

    def verdict(name: str) -> Callable[[], tuple[str, bytes]]:
        def answer() -> tuple[str, bytes]:
            health = relay.health()
            good = getattr(health, name)
            reasons = () if good else health.reasons
            return "200 OK" if good else "503 Service Unavailable", _json({name: good, "reasons": reasons})

        return answer

    pages: dict[str, Callable[[], tuple[str, bytes]]] = {
        "/live": verdict("live"),
        "/ready": verdict("ready"),
        "/status": lambda: ("200 OK", _json(_status(relay, status))),
    }

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        headers = [("Content-Type", "application/json"), ("Cache-Control", "no-store")]
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            line, body = "405 Method Not Allowed", _json({"error": "only GET and HEAD"})
            headers.append(("Allow", "GET, HEAD"))
        elif path == "/metrics" and metrics is not None:
            return metrics(environ, start_response)
        elif path in pages:
            line, body = pages[path]()
        else:
            line, body = "404 Not Found", _json({"error": "there are /live, /ready, /status and /metrics"})
        start_response(line, [*headers, ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    return app


class ProbeServer:
    """Serves a WSGI application on threads of its own, for few and short requests; a context manager that stops it.

    A client that sends nothing is cut off after five seconds. Raises ``ConfigurationError`` where the address cannot
    be listened at. ``port`` 0 takes a free one, which ``port`` then names.
    """

    def __init__(self, app: WSGIApplication, host: str, port: int) -> None:
        family = _Server6 if ":" in host else _Server
        try:
            self._server = family((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(f"probes cannot be served at {host} port {port}: {error}") from None
        self._server.set_app(app)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="zzol-relay-probes", daemon=True
        )
        self._thread.start()
        _log.info("probes are served", extra={"host": host, "port": self.port})

    def stop(self) -> None:
        """Take no more requests; safe to call twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def serve_probes(
    relay: Relay, port: int, host: str = "127.0.0.1", registry: CollectorRegistry | None = None
) -> ProbeServer:
    """Serve ``probes_app`` at ``host`` and ``port``; start it before the relay, and stop it after."""
    return ProbeServer(probes_app(relay, registry), host, port)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    # A thread that waits for a client must not hold up the stop.
    block_on_close = False

    def server_bind(self) -> None:
        # HTTPServer's would ask the DNS for the host's name.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a probe's connection broke", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 5.0

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("probe", extra={"request": format % args})


def _status(relay: Relay, status: InTime[Any]) -> dict[str, Any]:
    try:
        found, error = status(_PATIENCE), None
    except Exception as failure:
        # Its text may hold more than a probe should tell; the loops log it.
        found, error = None, type(failure).__name__
    return {
        "relay": relay.name,
        "version": __version__,
        "health": dataclasses.asdict(relay.health()),
        "redis": {"circuit": relay.circuit},
        "database": {"answers": found is not None, "error": error},
        "backlog": None if found is None else dataclasses.asdict(found.backlog),
        "counters": relay.counters,
        "errors": relay.errors(),
    }


def _json(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_NAIVE_UTC | orjson.OPT_UTC_Z)


def _metrics_app(registry: CollectorRegistry | None) -> WSGIApplication | None:
    try:
        from prometheus_client import REGISTRY, make_wsgi_app
    except ImportError:
        return None
    app: WSGIApplication = make_wsgi_app(registry if registry is not None else REGISTRY)
    return app
