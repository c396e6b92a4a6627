"""The error tree.

::

    RelayError
    ├── ConfigurationError          a setting, stream or engine does not fit
    │   └── SchemaError             the tables are missing or of another revision
    ├── EventError                  the event is refused; nothing was written
    │   ├── InvalidEventError       a field or the data cannot be carried
    │   │   └── PayloadTooLargeError
    │   ├── UnknownStreamError
    │   └── SequenceError           the given sequence is not above the aggregate's last
    ├── RecordingError              the session or connection cannot take an outbox row
    ├── BrokerError
    │   ├── BrokerUnavailableError  Redis cannot be reached or refuses everybody
    │   └── PublishUncertainError   the reply was lost: the entry may or may not stand in the stream
    ├── DeadLetterError             the operation does not fit the row's state
    └── EmbeddedServiceError        a private server could not be found or started
"""

from __future__ import annotations

__all__ = [
    "BrokerError",
    "BrokerUnavailableError",
    "ConfigurationError",
    "DeadLetterError",
    "EmbeddedServiceError",
    "EventError",
    "InvalidEventError",
    "PayloadTooLargeError",
    "PublishUncertainError",
    "RecordingError",
    "RelayError",
    "SchemaError",
    "SequenceError",
    "UnknownStreamError",
]


class RelayError(Exception):
    """Every error this package raises on purpose."""


class ConfigurationError(RelayError):
    """A setting, a stream declaration or an engine does not fit; the message names it and what would."""


class SchemaError(ConfigurationError):
    """The relay's tables are missing or of another revision: run ``zzol-relay migrate``."""


class EventError(RelayError):
    """The event is refused; nothing was written and the session is still usable."""


class InvalidEventError(EventError):
    """A field or the data of an event cannot be carried; ``field`` names it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class PayloadTooLargeError(InvalidEventError):
    """The encoded data exceeds the limit; ``size`` and ``limit`` are bytes."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            "data",
            f"{size} bytes of JSON are over the limit of {limit}; store the bulk elsewhere and send a reference,"
            " or raise max_payload_bytes",
        )
        self.size = size
        self.limit = limit


class UnknownStreamError(EventError):
    """The event names a stream that the relay was not given."""

    def __init__(self, stream: str, known: tuple[str, ...]) -> None:
        super().__init__(f"stream {stream!r} is not declared; this relay has {', '.join(map(repr, known)) or 'none'}")
        self.stream = stream


class SequenceError(EventError):
    """A sequence given by the caller is not above the last one of its aggregate."""

    def __init__(self, aggregate: str, sequence: int, last: int) -> None:
        super().__init__(
            f"sequence {sequence} of aggregate {aggregate} is not above its last one, {last};"
            " reload the aggregate and try again, or leave sequence out to have it allocated"
        )
        self.aggregate = aggregate
        self.sequence = sequence
        self.last = last


class RecordingError(RelayError):
    """The session or connection cannot take an outbox row in its own transaction (G3); nothing was written."""


class BrokerError(RelayError):
    """Talking to Redis failed."""


class BrokerUnavailableError(BrokerError):
    """Redis cannot be reached, or refuses every write; nothing was written. Retry later."""


class PublishUncertainError(BrokerError):
    """The command was sent and its reply was lost: the entry may or may not stand in the stream.

    Resend only with ``once=True``, which deduplicates by event id.
    """


class DeadLetterError(RelayError):
    """The operation does not fit the row's present state; nothing was changed."""


class EmbeddedServiceError(RelayError):
    """A private server for demo or tests could not be found or started; the message says what to install."""
