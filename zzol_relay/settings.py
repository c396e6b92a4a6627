"""Every number and name that can be set, validated once.

Sources, later ones win: the defaults below, the environment (``ZZOL_<NAME>``, or ``ZZOL_<NAME>_FILE`` naming a file
that holds the value, for secrets), arguments. An unknown name is refused with a suggestion.
"""

from __future__ import annotations

import difflib
import os
import re
import zoneinfo
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from zzol_relay.core.errors import ConfigurationError

__all__ = ["ENV_PREFIX", "Settings", "Stream", "mask_url"]

ENV_PREFIX = "ZZOL_"

_PASSWORD = re.compile(r"(://[^:/?#@\s]*:)[^\s'\"]*@")
_QUERY_PASSWORD = re.compile(r"([?&]\w*pass(?:word|wd)=)[^&\s'\"]*", re.IGNORECASE)

Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(gt=0)]
KeyPrefix = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")]
TablePrefix = Annotated[str, Meta(pattern=r"^([a-z][a-z0-9_]{0,23})?$")]
SchemaName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_$-]{0,63}$")]
TimeOfDay = Annotated[str, Meta(pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$")]


def mask_url(text: str) -> str:
    """``text`` with the passwords of all URLs in it replaced by ``***``.

    Works on text rather than a parsed URL: one with an unescaped ``/``, ``#`` or ``@`` in its password parses wrongly,
    and must not show it.
    """
    return _QUERY_PASSWORD.sub(r"\1***", _PASSWORD.sub(r"\1***@", text))


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """A logical stream: ``shards`` Redis keys ``<prefix>:{<name>:<n>}``, chosen by a stable hash of the aggregate id.

    Order is not promised across a change of ``shards``. ``retention`` (seconds) trims by time, approximately, so that
    a hot room does not erase a quiet one's history; 0 never trims.
    """

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    shards: Annotated[int, Meta(ge=1, le=1024)] = 1
    retention: Annotated[float, Meta(ge=0)] = 600.0

    def __post_init__(self) -> None:
        # msgspec checks what it converts, not what is constructed.
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            try:
                msgspec.convert(getattr(self, name), kind)
            except msgspec.ValidationError as error:
                raise ConfigurationError(f"stream {self.name!r}: {name}: {error}") from None


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a relay. Times are seconds. ZZOL's own values stand behind each that it states."""

    database_url: str = ""
    """SQLAlchemy URL of the outbox's database; needed where no engine is given (the CLI)."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    """``redis://``, ``rediss://``, ``unix://``, ``sentinel://host:port,host:port/service/db`` or
    ``cluster://host:port,host:port``."""

    table_prefix: TablePrefix = "zzol_"
    """In front of every table's name."""
    schema: SchemaName | None = None
    """The database (MySQL) that holds the tables; None: the connection's own."""
    key_prefix: KeyPrefix = "zzol"
    """In front of every Redis key."""
    source: str = "zzol-relay"
    """CloudEvents ``source`` of every entry."""

    mode: Literal["hybrid", "polling"] = "hybrid"
    """``hybrid``: publish right after commit, poll as the fallback (Z15). ``polling``: the poller alone (Z14)."""
    on_dead_letter: Literal["skip", "block"] = "skip"
    """Whether an aggregate goes on past a dead letter (consumers see the gap) or waits for the operator."""

    max_payload_bytes: Count = 256 * 1024
    """Largest JSON encoding of an event's data."""

    tracing: bool = False
    """Give events that carry no ``traceparent`` that of the current OpenTelemetry span (the extra ``otel``)."""

    commit_wait: Annotated[float, Meta(ge=0)] = 0.25
    """Longest that ``commit()`` waits for the after-commit publish."""
    born_lease: Seconds = 2.0
    """How long a fresh row belongs to the process that recorded it, before the poller may take it."""
    dispatch_queue: Count = 10_000
    """Rows that may wait for the after-commit dispatcher; what overflows is left to the poller."""
    dispatch_batch: Count = 500
    """Most rows the dispatcher sends as one pipeline."""
    settle_queue: Count = 20_000
    """Published rows that may wait to be marked; what overflows is settled by the poller as duplicates."""
    settle_linger: Annotated[float, Meta(ge=0)] = 0.02
    """How long the settler lets marks gather into one UPDATE."""

    poll_interval: Seconds = 0.5
    """Pause of the poller after it found nothing (ZZOL: 0.5)."""
    batch_rows: Annotated[int, Meta(ge=1, le=5000)] = 500
    """Most rows of one claim (ZZOL: 50)."""
    batch_bytes: Count = 4 * 1024 * 1024
    """Most payload bytes of one claim; a single larger row goes alone."""
    claim_lease: Seconds = 30.0
    """How long a claim lasts unless renewed (ZZOL: 300)."""
    max_attempts: Count = 10
    """A row is a dead letter when this many counted attempts have failed (ZZOL: 10)."""
    backoff_base: Seconds = 0.5
    """First wait of a row after a failure of its own (ZZOL: none; the next poll)."""
    backoff_cap: Seconds = 60.0
    """Longest such wait."""
    blocked_delay: Seconds = 0.2
    """How long a row whose predecessor is not ready keeps out of the poller's window."""
    shard_retry: Seconds = 5.0
    """How long rows of a shard that cannot be written wait, while Redis itself is up."""

    recovery_interval: Seconds = 10.0
    """Between two looks for expired claims (ZZOL: 60)."""
    retention: Seconds = 24 * 3600.0
    """How long settled rows are kept (ZZOL: 24 h)."""
    cleanup_at: TimeOfDay = "04:00"
    """When the daily cleanup runs (ZZOL: 04:00)."""
    cleanup_timezone: str = "UTC"
    """Time zone of ``cleanup_at``, by its IANA name."""
    cleanup_batch: Annotated[int, Meta(ge=1, le=10_000)] = 1000
    """Rows deleted per transaction."""

    dedup_window: Seconds = 600.0
    """How long the script remembers an event id."""
    tail_ttl: Seconds = 24 * 3600.0
    """How long the script remembers an aggregate's last sequence."""

    redis_timeout: Seconds = 1.0
    """Socket and connect timeout of every Redis call but blocking reads."""
    probe_base: Seconds = 0.1
    """First pause between two probes of an unreachable Redis."""
    probe_cap: Seconds = 2.0
    """Longest such pause."""

    database_pool: Count = 4
    """Connections of the relay's own small pool."""
    database_timeout: Seconds = 30.0
    """Read and write timeout of the relay's own MySQL connections."""
    heartbeat_interval: Seconds = 5.0
    """Between two heartbeats in ``relay_instance``."""
    liveness_grace: Seconds = 120.0
    """How much longer than its interval a loop's round may take before the process counts as hung. Longer than
    ``database_timeout`` and a backoff together: a database that hangs fails rounds, and must not end the process."""
    shutdown_timeout: Seconds = 8.0
    """Longest that ``stop()`` waits for what is under way."""

    def __post_init__(self) -> None:
        if self.dedup_window <= self.born_lease + self.claim_lease:
            raise ConfigurationError(
                f"dedup_window ({self.dedup_window:g} s) must exceed born_lease + claim_lease"
                f" ({self.born_lease + self.claim_lease:g} s): a recovered row is resent within it"
            )
        if self.tail_ttl < self.dedup_window:
            raise ConfigurationError("tail_ttl must not be below dedup_window")
        if self.retention < self.dedup_window:
            raise ConfigurationError("retention must not be below dedup_window")
        if self.commit_wait >= self.born_lease:
            raise ConfigurationError("commit_wait must be below born_lease")
        try:
            zoneinfo.ZoneInfo(self.cleanup_timezone)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            raise ConfigurationError(f"cleanup_timezone {self.cleanup_timezone!r} is not an IANA time zone") from None

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown["database_url"] = mask_url(self.database_url)
        shown["redis_url"] = mask_url(self.redis_url)
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, /, **arguments: Any) -> Settings:
        """Build settings from defaults, the environment (default ``os.environ``) and ``arguments``.

        Raises ``ConfigurationError`` for an unknown name, a value out of range, or an unreadable ``*_FILE``.
        """
        known = frozenset(cls.__struct_fields__)
        values: dict[str, Any] = {}
        for variable, value in (os.environ if environ is None else environ).items():
            if not variable.startswith(ENV_PREFIX):
                continue
            name = variable[len(ENV_PREFIX) :].lower()
            if name not in known and name.endswith("_file"):
                name = name.removesuffix("_file")
                value = _read_secret(variable, value)
            _check_name(name, known, variable)
            values[name] = value
        for name, argument in arguments.items():
            _check_name(name, known, name)
            values[name] = argument
        try:
            return msgspec.convert(values, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"settings: {error}") from None


def _read_secret(variable: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{variable}: cannot read {path}: {error}") from None


def _check_name(name: str, known: frozenset[str], shown: str) -> None:
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigurationError(f"{shown!r} is not a setting{hint}")
