"""The worker's probes over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from zzol_relay.app import Relay
from zzol_relay.core.errors import ConfigurationError
from zzol_relay.metrics import Metrics
from zzol_relay.probes import serve_probes

__all__ = ["ProbeHost", "ProbePort", "serving"]

_log = logging.getLogger("zzol_relay.cli")

ProbePort = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Serve /live, /ready, /status and /metrics over HTTP.")
]
ProbeHost = Annotated[str, typer.Option(help="Address to serve them at; whoever can reach it can read them.")]


@contextmanager
def serving(relay: Relay, host: str, port: int | None) -> Iterator[None]:
    """Serve the probes of a relay that is not started yet; nothing where ``port`` is None."""
    if port is None:
        yield
        return
    try:
        metrics = Metrics().attach(relay)
    except ConfigurationError as error:
        metrics = None
        _log.warning("/metrics is not served", extra={"reason": str(error)})
    try:
        with serve_probes(relay, port, host):
            yield
    finally:
        if metrics is not None:
            metrics.close()
