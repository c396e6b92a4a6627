"""Reading published rows again, for the day Redis loses what it acknowledged, and noting where they stand now."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, func, select, update

from zzol_relay.core.events import Event
from zzol_relay.core.lifecycle import Status
from zzol_relay.settings import Settings
from zzol_relay.store.database import Database
from zzol_relay.store.dialect import utc_now
from zzol_relay.store.outbox import in_stream

__all__ = ["PAGE", "PublishedRow", "RepublishStore", "RestorableRow"]

PAGE = 1000
"""Rows read per query."""


@dataclasses.dataclass(frozen=True, slots=True)
class PublishedRow:
    """A row and the entry it was acknowledged as; ``entry_id`` is '' where Redis had forgotten it by then."""

    id: int
    event_id: uuid.UUID
    stream_key: str
    entry_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class RestorableRow:
    """What it takes to send a published row again."""

    id: int
    event: Event
    data: bytes
    stream_key: str
    entry_id: str
    replays: int


class RepublishStore:
    """Rows that are PUBLISHED; none of them changes but for its entry id."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._db = database
        self._t = database.tables.outbox
        self._prefix = settings.key_prefix

    def now(self) -> datetime:
        """The database's present time, UTC, without time zone."""
        now: datetime = self._db.run("republish", lambda connection: connection.execute(select(utc_now())).scalar_one())
        return now

    def published(self, since: datetime, until: datetime, stream: str | None) -> Iterator[list[PublishedRow]]:
        """The rows settled from ``since`` until before ``until`` (UTC, without time zone), in pages, in the order of
        their settling."""
        t = self._t
        conditions = [t.c.status == Status.PUBLISHED.value, t.c.due_at < until]
        if stream is not None:
            conditions.append(in_stream(t.c.stream_key, self._prefix, stream))
        after = t.c.due_at >= since
        while True:
            rows = self._page([*conditions, after])
            yield [
                PublishedRow(row.id, uuid.UUID(bytes=bytes(row.event_id)), row.stream_key, row.stream_entry_id or "")
                for row in rows
            ]
            if len(rows) < PAGE:
                return
            last = rows[-1]
            # The first half is what the index can seek by.
            after = (t.c.due_at >= last.due_at) & ((t.c.due_at > last.due_at) | (t.c.id > last.id))

    def _page(self, conditions: Sequence[ColumnElement[bool]]) -> Sequence[Any]:
        c = self._t.c
        chosen: Any = select(c.id, c.event_id, c.stream_key, c.stream_entry_id, c.due_at).where(*conditions)
        chosen = self._db.tables.by_due(chosen.limit(PAGE))
        return self._db.run("republish", lambda connection: connection.execute(chosen).all())

    def sizes(self, ids: Sequence[int]) -> dict[int, int]:
        """The payloads' bytes of those of these rows that are still PUBLISHED, in id order."""
        t = self._t
        statement = select(t.c.id, func.length(t.c.payload)).where(
            t.c.id.in_(ids), t.c.status == Status.PUBLISHED.value
        )
        statement = statement.order_by(t.c.id)
        return self._db.run("republish", lambda connection: {row[0]: row[1] for row in connection.execute(statement)})

    def rows(self, ids: Sequence[int]) -> list[RestorableRow]:
        """These rows in id order, as far as they are still there; within an aggregate that is its own order."""
        t = self._t
        statement = select(t).where(t.c.id.in_(ids), t.c.status == Status.PUBLISHED.value).order_by(t.c.id)
        return self._db.run("republish", lambda connection: [_restorable(row) for row in connection.execute(statement)])

    def moved(self, entries: Sequence[tuple[int, str, str]]) -> int:
        """Note where rows stand now: (id, the entry it was, the entry it is); returns how many were still as they were.

        Guarded by the old entry, so that two who restore at once do not undo each other.
        """
        t = self._t
        statement = (
            update(t)
            .where(
                t.c.id == bindparam("row_id"),
                t.c.status == Status.PUBLISHED.value,
                t.c.stream_entry_id == bindparam("old_entry"),
            )
            .values(stream_entry_id=bindparam("new_entry"))
        )
        parameters = [{"row_id": id_, "old_entry": old, "new_entry": new} for id_, old, new in sorted(entries)]

        def write(connection: Connection) -> int:
            return sum(connection.execute(statement, each).rowcount for each in parameters)

        return self._db.run("republish", write) if entries else 0


def _restorable(row: Any) -> RestorableRow:
    event = Event(
        type=row.event_type,
        stream="",
        aggregate_type=row.aggregate_type,
        aggregate_id=row.aggregate_id,
        sequence=row.sequence,
        schema_version=row.schema_version,
        event_id=uuid.UUID(bytes=bytes(row.event_id)),
        occurred_at=row.occurred_at.replace(tzinfo=UTC),
        correlation_id=row.correlation_id,
        causation_id=row.causation_id,
        traceparent=row.traceparent,
    )
    return RestorableRow(row.id, event, bytes(row.payload), row.stream_key, row.stream_entry_id or "", row.replays)
