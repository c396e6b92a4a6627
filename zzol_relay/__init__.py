"""zzol_relay: a transactional outbox that publishes right after commit, and a direct path, into Redis Streams."""

from zzol_relay.app import Relay, RelayStatus, migrate
from zzol_relay.core.errors import (
    BrokerError,
    BrokerUnavailableError,
    ConfigurationError,
    DeadLetterError,
    EmbeddedServiceError,
    EventError,
    InvalidEventError,
    PayloadTooLargeError,
    PublishUncertainError,
    RecordingError,
    RelayError,
    SchemaError,
    SequenceError,
    UnknownStreamError,
)
from zzol_relay.core.events import Event
from zzol_relay.core.lifecycle import Status
from zzol_relay.core.observer import Fact, Observer
from zzol_relay.relay.events import Story
from zzol_relay.relay.health import Health
from zzol_relay.relay.republish import Republished
from zzol_relay.settings import Settings, Stream
from zzol_relay.store.audit import AuditEntry
from zzol_relay.store.dead_letters import DeadLetterFilter
from zzol_relay.store.gauges import Backlog
from zzol_relay.store.outbox import OutboxRecord
from zzol_relay.streams.tail import Entry, Listener, Tail
from zzol_relay.version import __version__

__all__ = [
    "AuditEntry",
    "Backlog",
    "BrokerError",
    "BrokerUnavailableError",
    "ConfigurationError",
    "DeadLetterError",
    "DeadLetterFilter",
    "EmbeddedServiceError",
    "Entry",
    "Event",
    "EventError",
    "Fact",
    "Health",
    "InvalidEventError",
    "Listener",
    "Observer",
    "OutboxRecord",
    "PayloadTooLargeError",
    "PublishUncertainError",
    "RecordingError",
    "Relay",
    "RelayError",
    "RelayStatus",
    "Republished",
    "SchemaError",
    "SequenceError",
    "Settings",
    "Status",
    "Story",
    "Stream",
    "Tail",
    "UnknownStreamError",
    "__version__",
    "migrate",
]
