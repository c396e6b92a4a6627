"""Looking events up, for whoever asks what became of one."""

from __future__ import annotations

import dataclasses
import uuid

from zzol_relay.core.errors import BrokerUnavailableError, ConfigurationError
from zzol_relay.core.lifecycle import Status
from zzol_relay.settings import Settings
from zzol_relay.store.audit import AuditEntry, AuditStore
from zzol_relay.store.dead_letters import DeadLetterStore
from zzol_relay.store.outbox import OutboxRecord, OutboxStore
from zzol_relay.streams.presence import Presence
from zzol_relay.streams.publisher import ScriptPublisher

__all__ = ["Events", "Story"]


@dataclasses.dataclass(frozen=True, slots=True)
class Story:
    """What became of an event.

    ``entry`` says whether its entry stands in its stream: ``present``, ``absent``, ``trimmed`` (absent, and old enough
    to have been), ``unreachable`` (Redis does not answer), or None where it was not published, or its entry id never
    learned. ``waiting_behind`` counts the unpublished rows of its aggregate behind it. ``audit`` is what operators did
    to it by its id or in bulk, oldest first.
    """

    record: OutboxRecord
    entry: str | None
    waiting_behind: int
    audit: list[AuditEntry]


class Events:
    """``relay.events``: the outbox's rows, settled ones until the retention ends (24 h)."""

    def __init__(
        self,
        store: OutboxStore,
        rows: DeadLetterStore,
        audit: AuditStore,
        publisher: ScriptPublisher,
        settings: Settings,
    ) -> None:
        self._store = store
        self._rows = rows
        self._audit = audit
        self._publisher = publisher
        self._prefix = settings.key_prefix

    def find(self, event_id: uuid.UUID) -> OutboxRecord | None:
        """The row of an event; None where there is none, or none any more."""
        return self._store.find(event_id)

    def of_aggregate(self, aggregate: str, *, stream: str | None = None, limit: int = 100) -> list[OutboxRecord]:
        """The newest ``limit`` events of an aggregate (``type:id``) per stream, in sequence order.

        Raises ``ConfigurationError`` where ``aggregate`` is not of that form.
        """
        kind, _, id_ = aggregate.partition(":")
        if not kind or not id_:
            raise ConfigurationError(f"aggregate {aggregate!r} is not of the form type:id")
        return self._store.of_aggregate(kind, id_, stream=stream, prefix=self._prefix, limit=limit)

    def of_correlation(self, correlation_id: str, *, limit: int = 100) -> list[OutboxRecord]:
        """The newest ``limit`` events of a correlation id, oldest first; for want of an index this reads the
        whole table."""
        return self._store.of_correlation(correlation_id, limit=limit)

    def story(self, event_id: uuid.UUID) -> Story | None:
        """What became of an event; None where it is not in the outbox."""
        record = self._store.find(event_id)
        if record is None:
            return None
        settled = record.status in (Status.PUBLISHED, Status.DISCARDED)
        waiting = 0 if settled else self._rows.waiting_behind(record)
        return Story(record, self._entry(record), waiting, self._audit.about(event_id))

    def _entry(self, record: OutboxRecord) -> str | None:
        if not record.stream_entry_id:
            return None
        try:
            (place,) = self._publisher.look_for(record.stream_key, [(record.stream_entry_id, str(record.event_id))])
        except BrokerUnavailableError:
            return "unreachable"
        return {Presence.PRESENT: "present", Presence.ABSENT: "absent", Presence.TRIMMED: "trimmed"}[place]
