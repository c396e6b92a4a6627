"""What the global options say, and the relay that commands work with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from sqlalchemy.exc import ArgumentError

from zzol_relay.app import Relay
from zzol_relay.cli import logs
from zzol_relay.core.errors import ConfigurationError
from zzol_relay.settings import Settings

__all__ = ["Options", "open_relay", "options_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The validated settings, and how to log."""

    settings: Settings
    log_level: str | None
    log_json: bool

    def start_logging(self, default_level: str) -> None:
        """Log to stderr, from ``--log-level`` or else ``default_level`` on."""
        logs.configure(self.log_level or default_level, json=self.log_json)


def options_of(context: typer.Context) -> Options:
    """The options that the program's callback has left."""
    options = context.obj
    assert isinstance(options, Options)
    return options


@contextmanager
def open_relay(options: Options) -> Iterator[Relay]:
    """A relay that is not started: it connects when asked something, and closes its connections at the end."""
    relay = make_relay(options.settings)
    options.start_logging("warning")
    try:
        yield relay
    finally:
        relay.stop()


def make_relay(settings: Settings) -> Relay:
    """A relay of no streams, as operators and bare workers need it. Raises ``ConfigurationError``."""
    if not settings.database_url:
        raise ConfigurationError(
            "no database is given: use --database-url, ZZOL_DATABASE_URL or ZZOL_DATABASE_URL_FILE"
        )
    try:
        return Relay(settings.database_url, settings=settings, worker=True)
    except (ArgumentError, ValueError):
        # Their messages quote the part that cannot be parsed, which may be of the password.
        raise ConfigurationError(
            "database_url or redis_url cannot be parsed; percent-encode what is special in names and passwords"
        ) from None
