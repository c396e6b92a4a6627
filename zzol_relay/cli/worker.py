"""The fallback worker as a process of its own."""

from __future__ import annotations

import logging
import os
import signal
import threading

import typer
from sqlalchemy.exc import SQLAlchemyError

from zzol_relay.cli.context import make_relay, options_of
from zzol_relay.cli.failures import Exit, explain
from zzol_relay.cli.probes import ProbeHost, ProbePort, serving
from zzol_relay.core.errors import SchemaError
from zzol_relay.settings import Settings
from zzol_relay.store.migrate import schema_fits

__all__ = ["worker"]

_log = logging.getLogger("zzol_relay.cli")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STOP_WITHIN = 9.5


def worker(context: typer.Context, probe_port: ProbePort = None, probe_host: ProbeHost = "127.0.0.1") -> None:
    """Publish what the outbox holds, recover expired claims, and clean up daily, until SIGTERM or SIGINT.

    On the first signal it claims no more, finishes or gives back what it holds, and ends with exit code 0; where that
    takes 10 s, because the database hangs, say, it ends with 1. A second signal ends it at once. Any number of
    workers may run. It starts and goes on without the database or Redis, and works as soon as they are back; only
    missing or outdated tables end it (exit code 4).
    """
    options = options_of(context)
    options.start_logging("info")
    relay = make_relay(options.settings)
    # Waited for below instead of handled: a handler could interrupt this thread anywhere. Threads inherit the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    with serving(relay, probe_host, probe_port):
        try:
            _check_schema(options.settings)
            relay.start()
            received = signal.sigwait(_SIGNALS)
            _log.info("stopping", extra={"signal": signal.Signals(received).name})
            _die_of_the_next_signal()
            _die_when_late()
        finally:
            relay.stop()


def _check_schema(settings: Settings) -> None:
    try:
        fits = schema_fits(settings.database_url, settings)
    except SQLAlchemyError as error:
        _log.warning("the database cannot be reached yet", extra={"error": explain(error)[1]})
        return
    if not fits:
        raise SchemaError("the relay's tables are missing or too old; run 'zzol-relay migrate'")


def _die_of_the_next_signal() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _die_when_late() -> None:
    def die() -> None:
        _log.error("could not stop in time; what is held is recovered when its claims run out")
        os._exit(Exit.FAILED)

    timer = threading.Timer(_STOP_WITHIN, die)
    timer.daemon = True
    timer.start()
