"""Writing outbox rows in the caller's transaction, and reading them for people."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, CursorResult, Row, bindparam, case, func, select
from sqlalchemy.dialects import mysql, sqlite
from sqlalchemy.exc import IntegrityError, StatementError

from zzol_relay.core.errors import InvalidEventError, SequenceError
from zzol_relay.core.events import Event
from zzol_relay.core.lifecycle import Status
from zzol_relay.store.database import Database
from zzol_relay.store.dialect import utc_after, utc_now
from zzol_relay.store.gauges import Backlog, read_backlog
from zzol_relay.store.order import read_predecessors
from zzol_relay.store.tables import Tables

__all__ = ["OutboxRecord", "OutboxStore", "OutboxWriter", "in_stream", "to_record"]


@dataclasses.dataclass(frozen=True, slots=True)
class OutboxRecord:
    """One outbox row as people see it; ``payload`` is JSON bytes."""

    id: int
    event_id: uuid.UUID
    stream_key: str
    aggregate_type: str | None
    aggregate_id: str | None
    sequence: int | None
    event_type: str
    schema_version: int
    status: Status
    retry_count: int
    replays: int
    last_error: str | None
    claimed_by: str | None
    correlation_id: str | None
    causation_id: str | None
    occurred_at: datetime
    created_at: datetime
    updated_at: datetime
    published_at: datetime | None
    stream_entry_id: str | None
    payload: bytes


_PIECE = 50_000
"""Rows that a search without an index reads per query."""

_KEY = ("stream", "aggregate_type", "aggregate_id")
_INSERTED = (
    "event_id", "stream_key", "aggregate_type", "aggregate_id", "sequence", "prev_sequence", "event_type",
    "schema_version", "payload", "correlation_id", "causation_id", "traceparent", "occurred_at", "claim_token",
)  # fmt: skip

# Drivers that take str, int, bytes, datetime and None as they are: past SQLAlchemy no value is converted for them.
_TAKE_PLAIN_VALUES = frozenset({"pymysql", "aiomysql", "asyncmy"})


class _Prepared:
    """A statement compiled once per driver, run without SQLAlchemy's work of each execution: 20-25 µs of every commit.

    ``columns`` are those that each execution gives a value. Other drivers get the statement as usual.
    """

    def __init__(self, statement: Any, columns: Sequence[str]) -> None:
        self._statement = statement
        self._columns = list(columns)
        self._compiled: dict[tuple[str, str], tuple[str, dict[str, Any], Sequence[str] | None]] = {}

    def execute(self, connection: Connection, values: dict[str, Any]) -> CursorResult[Any]:
        """Run it with a value for every parameter that has none of its own."""
        dialect = connection.dialect
        if dialect.driver not in _TAKE_PLAIN_VALUES:
            return connection.execute(self._statement, values)
        key = (dialect.name, dialect.driver)
        if key not in self._compiled:
            compiled = self._statement.compile(dialect=dialect, column_keys=self._columns)
            self._compiled[key] = (str(compiled), dict(compiled.params), compiled.positiontup)
        text, constants, positions = self._compiled[key]
        parameters = {**constants, **values}
        if positions is None:
            return connection.exec_driver_sql(text, parameters)
        return connection.exec_driver_sql(text, tuple([parameters[name] for name in positions]))


class OutboxWriter:
    """The statements that ``record()`` runs on the caller's connection.

    They hold no state and open nothing: the caller's transaction decides (Z6, Z21).
    """

    def __init__(self, tables: Tables, token: bytes, born_lease: float, name: str = "") -> None:
        self._token = token
        self._lease = round(born_lease * 1e6)
        insert = tables.outbox.insert().values(
            due_at=utc_after(bindparam("lease")),
            created_at=utc_now(),
            updated_at=utc_now(),
            status=Status.PENDING.value,
            retry_count=0,
            replays=0,
            # Whose the row is, as its born lease says. Written by the claim into a NULL, it would make the row grow
            # and full pages split: 12 µs a row of a drain.
            claimed_by=name[:64],
        )
        self._insert = _Prepared(insert, _INSERTED)
        self._allocate_mysql = _Prepared(self._allocation_mysql(tables), _KEY)
        self._reserve_mysql = self._reservation_mysql(tables)
        self._allocate_sqlite = self._allocation_sqlite(tables)
        self._last = select(tables.aggregate.c.last_sequence).where(
            tables.aggregate.c.stream == bindparam("stream"),
            tables.aggregate.c.aggregate_type == bindparam("aggregate_type"),
            tables.aggregate.c.aggregate_id == bindparam("aggregate_id"),
        )
        self._put_sqlite = self._put(tables)

    @staticmethod
    def _allocation_mysql(tables: Tables) -> Any:
        # One upsert, no SELECT FOR UPDATE: that deadlocks on new aggregates. LAST_INSERT_ID(expr) brings the number
        # back in the statement's own reply.
        statement = mysql.insert(tables.aggregate).values(last_sequence=func.last_insert_id(1))
        return statement.on_duplicate_key_update(
            last_sequence=func.last_insert_id(tables.aggregate.c.last_sequence + 1)
        )

    @staticmethod
    def _reservation_mysql(tables: Tables) -> Any:
        # The same lock for a number given by the caller; the reply brings the one before it, 0 for a new aggregate.
        last = tables.aggregate.c.last_sequence
        given: Any = bindparam("given")
        statement = mysql.insert(tables.aggregate).values(last_sequence=given + func.last_insert_id(0))
        return statement.on_duplicate_key_update(
            last_sequence=case((func.last_insert_id(last) < given, given), else_=last)
        )

    @staticmethod
    def _allocation_sqlite(tables: Tables) -> Any:
        statement = sqlite.insert(tables.aggregate).values(last_sequence=1)
        return statement.on_conflict_do_update(
            index_elements=["stream", "aggregate_type", "aggregate_id"],
            set_={"last_sequence": tables.aggregate.c.last_sequence + 1},
        ).returning(tables.aggregate.c.last_sequence)

    @staticmethod
    def _put(tables: Tables) -> Any:
        statement = sqlite.insert(tables.aggregate)
        return statement.on_conflict_do_update(
            index_elements=["stream", "aggregate_type", "aggregate_id"],
            set_={"last_sequence": statement.excluded.last_sequence},
        )

    def allocate(self, connection: Connection, event: Event) -> tuple[int, int]:
        """The event's sequence and the one before it in its aggregate, whose row is then locked to the commit.

        A sequence given by the caller takes the same lock and must be above the last†; raises ``SequenceError``
        otherwise, having written nothing.
        """
        key = {"stream": event.stream, "aggregate_type": event.aggregate_type, "aggregate_id": event.aggregate_id}
        sqlite_stand_in = connection.dialect.name == "sqlite"
        if event.sequence is None:
            if sqlite_stand_in:
                sequence = int(connection.execute(self._allocate_sqlite, key).scalar_one())
            else:
                sequence = int(self._allocate_mysql.execute(connection, key).lastrowid)
            return sequence, sequence - 1
        if sqlite_stand_in:
            last = int(connection.execute(self._last, key).scalar() or 0)
            if event.sequence > last:
                connection.execute(self._put_sqlite, {**key, "last_sequence": event.sequence})
        else:
            last = int(connection.execute(self._reserve_mysql, {**key, "given": event.sequence}).lastrowid)
        if event.sequence <= last:
            raise SequenceError(event.aggregate or "", event.sequence, last)
        return event.sequence, last

    def insert(
        self,
        connection: Connection,
        event: Event,
        data: bytes,
        stream_key: str,
        prev_sequence: int | None,
        *,
        leased: bool = True,
    ) -> int:
        """Insert one completed event as a PENDING row, born leased to this process; returns the row's id.

        ``leased=False`` where nobody will publish it after the commit: the poller may take it at once. Raises
        ``InvalidEventError`` for an event id that is in the outbox already.
        """
        try:
            result = self._insert.execute(connection, self._values(event, data, stream_key, prev_sequence, leased))
        except StatementError as error:
            # The caller will log it, and the payload is among the parameters.
            error.hide_parameters = True
            if not isinstance(error, IntegrityError):
                raise
            raise InvalidEventError(
                "event_id", f"{event.event_id} is in the outbox already; an event is recorded once"
            ) from error
        return int(result.lastrowid)

    def _values(
        self, event: Event, data: bytes, stream_key: str, prev_sequence: int | None, leased: bool
    ) -> dict[str, Any]:
        assert event.event_id is not None
        assert event.occurred_at is not None
        return {
            "event_id": event.event_id.bytes,
            "stream_key": stream_key,
            "aggregate_type": event.aggregate_type,
            "aggregate_id": event.aggregate_id,
            "sequence": event.sequence,
            "prev_sequence": prev_sequence,
            "event_type": event.type,
            "schema_version": event.schema_version,
            "payload": data,
            "correlation_id": event.correlation_id,
            "causation_id": event.causation_id,
            "traceparent": event.traceparent,
            "occurred_at": event.occurred_at.astimezone(UTC).replace(tzinfo=None),
            "claim_token": self._token,
            "lease": self._lease if leased else 0,
        }


class OutboxStore:
    """Reads of the outbox for status, tools and the order proof of the after-commit path."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._t = database.tables.outbox

    def predecessors(self, ids: Sequence[int]) -> dict[int, Status]:
        """The status of the predecessor of each of these rows; a row that has none, or whose is gone, is absent."""
        return self._db.run("predecessors", lambda connection: read_predecessors(connection, self._t, ids))

    def backlog(self) -> Backlog:
        """Counts by status up to a cap, and the age of the oldest unpublished row."""
        return self._db.run("backlog", lambda connection: read_backlog(connection, self._db.tables, Status))

    def find(self, event_id: uuid.UUID) -> OutboxRecord | None:
        """The row of an event, or None."""

        def read(connection: Connection) -> OutboxRecord | None:
            row = connection.execute(select(self._t).where(self._t.c.event_id == event_id.bytes)).first()
            return None if row is None else to_record(row)

        return self._db.run("find", read)

    def of_aggregate(
        self, kind: str, id_: str, *, stream: str | None = None, prefix: str = "", limit: int = 100
    ) -> list[OutboxRecord]:
        """The newest ``limit`` rows of an aggregate per shard, in sequence order, stream by stream.

        ``stream`` limits it to the logical stream of that name under the key ``prefix``.
        """
        t = self._t

        def read(connection: Connection) -> list[OutboxRecord]:
            # The aggregate alone is no prefix of the unique index; the few keys before it are.
            keys = select(t.c.stream_key).distinct()
            if stream is not None:
                keys = keys.where(in_stream(t.c.stream_key, prefix, stream))
            found: list[OutboxRecord] = []
            for key in sorted(connection.execute(keys).scalars()):
                newest = (
                    select(t)
                    .where(t.c.stream_key == key, t.c.aggregate_type == kind, t.c.aggregate_id == id_)
                    .order_by(t.c.sequence.desc())
                    .limit(limit)
                )
                found += reversed([to_record(row) for row in connection.execute(newest)])
            return found

        return self._db.run("of_aggregate", read)

    def of_correlation(self, correlation_id: str, *, limit: int = 100) -> list[OutboxRecord]:
        """The newest ``limit`` rows of a correlation id, in id order. Reads the whole table, piece by piece."""
        t = self._t
        bounds = select(func.min(t.c.id), func.max(t.c.id))
        low, high = self._db.run("find", lambda connection: tuple(connection.execute(bounds).one()))
        found: list[OutboxRecord] = []
        # No index holds it, and one query over millions of rows would outlast the relay's timeout.
        while high is not None and high >= low and len(found) < limit:
            found += self._piece(high, correlation_id, limit - len(found))
            high -= _PIECE
        return found[::-1]

    def _piece(self, high: int, correlation_id: str, limit: int) -> list[OutboxRecord]:
        t = self._t
        chosen = select(t).where(t.c.id > high - _PIECE, t.c.id <= high, t.c.correlation_id == correlation_id)
        chosen = chosen.order_by(t.c.id.desc()).limit(limit)
        return self._db.run("find", lambda connection: [to_record(row) for row in connection.execute(chosen)])

    def newest_entries(self, limit: int = 1000) -> dict[str, str]:
        """Of the ``limit`` rows settled last: the highest entry id per stream key."""

        def read(connection: Connection) -> dict[str, str]:
            t = self._t
            rows = connection.execute(
                select(t.c.stream_key, t.c.stream_entry_id)
                .where(t.c.status == Status.PUBLISHED.value)
                .order_by(t.c.status.desc(), t.c.due_at.desc(), t.c.id.desc())
                .limit(limit)
            ).all()
            return newest_per_key((key, entry) for key, entry in rows if entry)

        return self._db.run("newest_entries", read)


def newest_per_key(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The highest entry id per stream key; entry ids compare as two numbers, not as text."""
    newest: dict[str, tuple[int, int]] = {}
    for key, entry in pairs:
        ms, _, number = entry.partition("-")
        parsed = (int(ms), int(number or 0))
        if parsed > newest.get(key, (-1, -1)):
            newest[key] = parsed
    return {key: f"{ms}-{number}" for key, (ms, number) in newest.items()}


def in_stream(stream_key: Any, prefix: str, stream: str) -> ColumnElement[bool]:
    """Whether a column's stream key is a shard of the logical ``stream`` (Z26)."""
    # No LIKE: names may hold its wildcards.
    start = f"{prefix}:{{{stream}:"
    return func.substr(stream_key, 1, len(start)) == start


def to_record(row: Row[Any]) -> OutboxRecord:
    """A whole row as people see it."""
    fields = {name: getattr(row, name) for name in OutboxRecord.__slots__}
    fields["event_id"] = uuid.UUID(bytes=bytes(row.event_id))
    fields["status"] = Status(row.status)
    fields["payload"] = bytes(row.payload)
    return OutboxRecord(**fields)
