"""What an event is, what is refused, and how it is laid out as a stream entry (G4–G6, S3, S7)."""

from __future__ import annotations

import dataclasses
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from zzol_relay.core.errors import InvalidEventError, PayloadTooLargeError

__all__ = [
    "MAX_AGGREGATE_ID",
    "MAX_NAME",
    "MAX_SEQUENCE",
    "MAX_TYPE",
    "Event",
    "encode_data",
    "entry_fields",
    "lexical_sequence",
    "validate",
]

MAX_NAME = 64
"""Characters of a stream or aggregate type."""
MAX_TYPE = 128
"""Characters of an event type, correlation id or causation id."""
MAX_AGGREGATE_ID = 128
"""Characters of an aggregate id."""
MAX_SEQUENCE = (1 << 53) - 1
"""The script compares sequences as Lua numbers, which are exact up to here."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")
_DATA_OPTIONS = orjson.OPT_PASSTHROUGH_DATETIME


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One fact that happened, immutable.

    ``type`` and ``schema_version`` name its contract; ``data`` is a JSON value and an immutable snapshot without
    secrets (G6). Events of one aggregate (``aggregate_type`` and ``aggregate_id``, both or none) keep their order;
    events without one have none. What is left out is filled by ``record()`` and ``publish()``, which return the
    completed event: ``event_id`` (a UUIDv7; give your own to make a resend recognisable), ``occurred_at`` (now, UTC;
    never the publish time) and ``sequence`` (the aggregate's next).
    """

    type: str
    stream: str
    data: Any = None
    aggregate_type: str | None = None
    aggregate_id: str | None = None
    sequence: int | None = None
    schema_version: int = 1
    event_id: uuid.UUID | None = None
    occurred_at: datetime | None = None
    correlation_id: str | None = None
    causation_id: str | None = None
    traceparent: str | None = None

    @property
    def aggregate(self) -> str | None:
        """``aggregate_type:aggregate_id``, as the script's keys and the logs name it."""
        return None if self.aggregate_id is None else f"{self.aggregate_type}:{self.aggregate_id}"


def _name(field: str, value: object, limit: int) -> None:
    if not isinstance(value, str) or not _NAME.match(value):
        raise InvalidEventError(field, f"{value!r} is not a name of ASCII letters, digits, '.', '_' and '-'")
    if len(value) > limit:
        raise InvalidEventError(field, f"{len(value)} characters are over the limit of {limit}")


def _text(field: str, value: object, limit: int) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidEventError(field, f"{value!r} is not a non-empty string")
    if len(value) > limit:
        raise InvalidEventError(field, f"{len(value)} characters are over the limit of {limit}")
    # Padding is invisible to PAD SPACE collations: 'a' and 'a ' would be one aggregate to MySQL and two to Redis.
    if value != value.strip() or not value.isprintable():
        raise InvalidEventError(field, f"{value!r} has leading, trailing or unprintable characters")


def validate(event: Event) -> None:
    """Refuse every field that cannot be carried; says nothing about ``data`` (see ``encode_data``).

    Raises ``InvalidEventError``.
    """
    _name("type", event.type, MAX_TYPE)
    _name("stream", event.stream, MAX_NAME)
    if (event.aggregate_type is None) != (event.aggregate_id is None):
        raise InvalidEventError("aggregate_id", "aggregate_type and aggregate_id go together; give both or none")
    if event.aggregate_id is not None:
        _name("aggregate_type", event.aggregate_type, MAX_NAME)
        _text("aggregate_id", event.aggregate_id, MAX_AGGREGATE_ID)
    if event.sequence is not None:
        if event.aggregate_id is None:
            raise InvalidEventError("sequence", "a sequence needs an aggregate")
        if type(event.sequence) is not int or not 1 <= event.sequence <= MAX_SEQUENCE:
            raise InvalidEventError("sequence", f"{event.sequence!r} is not an integer from 1 to {MAX_SEQUENCE}")
    if type(event.schema_version) is not int or not 1 <= event.schema_version <= 65535:
        raise InvalidEventError("schema_version", f"{event.schema_version!r} is not an integer from 1 to 65535")
    if event.event_id is not None and not isinstance(event.event_id, uuid.UUID):
        raise InvalidEventError("event_id", f"{event.event_id!r} is not a uuid.UUID")
    if event.occurred_at is not None:
        if not isinstance(event.occurred_at, datetime):
            raise InvalidEventError("occurred_at", f"{event.occurred_at!r} is not a datetime")
        if event.occurred_at.utcoffset() is None:
            raise InvalidEventError("occurred_at", "a datetime without time zone is ambiguous; use datetime.now(UTC)")
    if event.correlation_id is not None:
        _text("correlation_id", event.correlation_id, MAX_TYPE)
    if event.causation_id is not None:
        _text("causation_id", event.causation_id, MAX_TYPE)
    if event.traceparent is not None and not (
        isinstance(event.traceparent, str) and _TRACEPARENT.match(event.traceparent)
    ):
        raise InvalidEventError("traceparent", f"{event.traceparent!r} is not a W3C traceparent")


def _encode_other(value: object) -> object:
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise InvalidEventError("data", f"the datetime {value.isoformat()} has no time zone")
        return value.isoformat()
    raise InvalidEventError("data", f"a value of type {type(value).__name__} is not JSON")


def _has_non_finite(value: object) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, Mapping):
        return any(map(_has_non_finite, value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return any(map(_has_non_finite, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(_has_non_finite(getattr(value, field.name)) for field in dataclasses.fields(value))
    return False


def encode_data(data: object, limit: int) -> bytes:
    """``data`` as UTF-8 JSON of at most ``limit`` bytes.

    Carries what orjson carries, and datetimes with a time zone. Raises ``InvalidEventError`` for the rest, for NaN
    and infinities (orjson would write ``null`` in silence), and ``PayloadTooLargeError``.
    """
    try:
        encoded = orjson.dumps(data, _encode_other, _DATA_OPTIONS)
    except orjson.JSONEncodeError as error:
        cause = error.__cause__
        if isinstance(cause, InvalidEventError):
            raise cause from None
        raise InvalidEventError("data", f"not JSON: {error}") from None
    # Only a null can be a NaN in disguise, so the walk is paid by the few payloads that hold one.
    if b"null" in encoded and _has_non_finite(data):
        raise InvalidEventError("data", "NaN and infinities are not JSON")
    if len(encoded) > limit:
        raise PayloadTooLargeError(len(encoded), limit)
    return encoded


def lexical_sequence(sequence: int) -> str:
    """A sequence as a string that sorts like the number (the CloudEvents ``sequence`` attribute)."""
    return f"{sequence:020d}"


def entry_fields(event: Event, data: bytes, source: str) -> list[str | bytes]:
    """The stream entry of a completed event, flat: field, value, field, value …

    CloudEvents 1.0 attributes in binary mode; ``data`` is JSON. ``event_id`` and ``occurred_at`` must be set.
    """
    if event.event_id is None or event.occurred_at is None:
        raise InvalidEventError("event_id", "the event is not completed; record() and publish() return it completed")
    # Of '2026-01-31T12:00:00.000000+00:00', the offset gives way to 'Z'.
    time = event.occurred_at.astimezone(UTC).isoformat("T", "microseconds")[:26] + "Z"
    fields: list[str | bytes] = [
        "specversion", "1.0",
        "id", str(event.event_id),
        "type", event.type,
        "source", source,
        "time", time,
        "datacontenttype", "application/json",
        "schemaversion", str(event.schema_version),
    ]  # fmt: skip
    if event.aggregate_id is not None:
        fields += ("subject", f"{event.aggregate_type}/{event.aggregate_id}", "partitionkey", event.aggregate_id)
    if event.sequence is not None:
        fields += ("sequence", lexical_sequence(event.sequence))
    if event.correlation_id is not None:
        fields += ("correlationid", event.correlation_id)
    if event.causation_id is not None:
        fields += ("causationid", event.causation_id)
    if event.traceparent is not None:
        fields += ("traceparent", event.traceparent)
    fields += ("data", data)
    return fields
