"""Dead letters: reading them, and the operator's transitions, each audited in its own transaction (Z13)."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Row, func, literal, select, update

from zzol_relay.core.errors import ConfigurationError
from zzol_relay.core.lifecycle import UNPUBLISHED, Status
from zzol_relay.core.sequence import DeadLetterPolicy
from zzol_relay.settings import Settings
from zzol_relay.store.audit import write_audit
from zzol_relay.store.database import Database
from zzol_relay.store.dialect import utc_after, utc_now
from zzol_relay.store.gauges import CAP
from zzol_relay.store.outbox import OutboxRecord, in_stream, to_record

__all__ = ["BATCH", "Action", "DeadLetterFilter", "DeadLetterStore"]

BATCH = 500
"""Rows moved per transaction."""
_RELEASED = 5000
"""Most waiting rows that one such transaction makes due."""

Action = Literal["replay", "discard"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFilter:
    """Which dead letters; what is None says nothing, and an empty filter means all of them.

    ``stream`` is a logical stream, ``type`` an event type, ``aggregate`` is ``type:id``, ``error`` is a part of the
    last error in whatever case. ``older_than`` and ``newer_than`` are seconds since the row became a dead letter.
    Raises ``ConfigurationError`` for an aggregate without a type, and for negative seconds.
    """

    stream: str | None = None
    type: str | None = None
    aggregate: str | None = None
    error: str | None = None
    older_than: float | None = None
    newer_than: float | None = None

    def __post_init__(self) -> None:
        if self.aggregate is not None and not all(self.aggregate.partition(":")):
            raise ConfigurationError(f"aggregate {self.aggregate!r} is not of the form type:id")
        for name in ("older_than", "newer_than"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigurationError(f"{name} ({value:g} s) is negative")

    def given(self) -> dict[str, Any]:
        """What it says, by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


class DeadLetterStore:
    """DEAD_LETTER → PENDING (replay) or DISCARDED; nothing else leaves that state."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._db = database
        self._t = database.tables.outbox
        self._prefix = settings.key_prefix
        self._policy: DeadLetterPolicy = settings.on_dead_letter

    def matching(self, wanted: DeadLetterFilter, *, limit: int, after: int) -> list[OutboxRecord]:
        """Dead letters by id, ``limit`` of them with an id above ``after``."""
        t = self._t

        def read(connection: Connection) -> list[OutboxRecord]:
            chosen = select(t).where(*self._conditions(wanted), t.c.id > after).order_by(t.c.id).limit(limit)
            return [to_record(row) for row in connection.execute(chosen)]

        return self._db.run("dead_letters", read)

    def count(self, wanted: DeadLetterFilter) -> int:
        """How many dead letters match."""
        statement = select(func.count()).select_from(self._t).where(*self._conditions(wanted))
        return self._db.run("dead_letters", lambda connection: int(connection.execute(statement).scalar_one()))

    def waiting_behind(self, record: OutboxRecord) -> int:
        """How many unpublished rows of the aggregate stand behind this row, counted up to 100,000."""
        if record.sequence is None:
            return 0
        t = self._t
        behind = (
            select(t.c.id)
            .where(*self._behind(record), t.c.status.in_(sorted(status.value for status in UNPUBLISHED)))
            .limit(CAP)
            .subquery()
        )
        statement = select(func.count()).select_from(behind)
        return self._db.run("waiting_behind", lambda connection: int(connection.execute(statement).scalar_one()))

    def move(self, action: Action, event_ids: Sequence[uuid.UUID], actor: str) -> Iterator[int]:
        """Move those of ``event_ids`` that are dead letters; yields the count of each batch, once it is committed."""
        t = self._t
        for start in range(0, len(event_ids), BATCH):
            given = event_ids[start : start + BATCH]
            chosen = select(*self._moved_columns()).where(
                t.c.event_id.in_([event_id.bytes for event_id in given]), t.c.status == Status.DEAD_LETTER.value
            )
            yield self._db.run(action, self._batch(action, chosen, actor, {"event_ids": list(map(str, given))}))[0]

    def move_matching(
        self, action: Action, wanted: DeadLetterFilter, actor: str, limit: int | None = None
    ) -> Iterator[int]:
        """Move the dead letters that match and are there now, at most ``limit``; yields as ``move``.

        What dies while this runs is not touched, so that it comes to an end whatever the events do.
        """
        t = self._t
        until: Any = self._db.run("now", lambda connection: connection.execute(select(utc_now())).scalar_one())
        conditions = [*self._conditions(wanted), t.c.due_at <= until]
        left = limit
        position: ColumnElement[bool] | None = None
        while left is None or left > 0:
            size = BATCH if left is None else min(BATCH, left)
            chosen = self._db.tables.by_due(select(*self._moved_columns()).where(*conditions).limit(size))
            if position is not None:
                chosen = chosen.where(position)
            moved, rows = self._db.run(action, self._batch(action, chosen, actor, {"filter": wanted.given()}, until))
            if rows:
                yield moved
            if len(rows) < size:
                return
            if left is not None:
                left -= len(rows)
            last = rows[-1]
            position = (t.c.due_at >= last.due_at) & ((t.c.due_at > last.due_at) | (t.c.id > last.id))

    def _moved_columns(self) -> tuple[Any, ...]:
        c = self._t.c
        return c.id, c.event_id, c.due_at, c.stream_key, c.aggregate_type, c.aggregate_id, c.sequence

    def _batch(
        self,
        action: Action,
        chosen: Any,
        actor: str,
        detail: Mapping[str, Any],
        until: Any = None,
    ) -> Callable[[Connection], tuple[int, Sequence[Row[Any]]]]:
        """The work of one transaction: choose, move by primary key with the state restated, release, audit."""
        t = self._t
        values: dict[str, Any] = {"claim_token": None, "due_at": utc_now(), "updated_at": utc_now()}
        if action == "replay":
            # The number is kept until PUBLISHED: it makes the poller send the row outside the order, deduplicated by
            # it†.
            values |= {"status": Status.PENDING.value, "retry_count": 0, "replays": t.c.replays + 1}
        else:
            values |= {"status": Status.DISCARDED.value}

        def work(connection: Connection) -> tuple[int, Sequence[Row[Any]]]:
            rows = connection.execute(chosen).all()
            ids = sorted(row.id for row in rows)
            moving = update(t).where(t.c.id.in_(ids), t.c.status == Status.DEAD_LETTER.value).values(values)
            if until is not None:
                # One that was replayed and died again in between.
                moving = moving.where(t.c.due_at <= until)
            moved = connection.execute(moving).rowcount if ids else 0
            if moved and self._policy == "block":
                self._release(connection, rows)
            if rows or until is None:
                found = [str(uuid.UUID(bytes=bytes(row.event_id))) for row in rows]
                write_audit(
                    connection,
                    self._db.tables,
                    actor=actor,
                    action=action,
                    affected=moved,
                    detail={"event_ids": found, **detail},
                )
            return moved, rows

        return work

    def _release(self, connection: Connection, rows: Sequence[Row[Any]]) -> None:
        """Make due what waits behind these rows, the next of each aggregate first: they were put off for up to a
        minute, since nobody knew when an operator would come."""
        t = self._t
        first: dict[tuple[str, str, str], Row[Any]] = {}
        for row in rows:
            if row.sequence is not None:
                key = (row.stream_key, row.aggregate_type, row.aggregate_id)
                if key not in first or row.sequence < first[key].sequence:
                    first[key] = row
        ids: list[int] = []
        for row in first.values():
            waiting = select(t.c.id).where(*self._behind(row), t.c.status == Status.PENDING.value)
            ids += connection.execute(waiting.order_by(t.c.sequence).limit(max(1, _RELEASED // len(first)))).scalars()
        ids.sort()
        for start in range(0, len(ids), BATCH):
            connection.execute(
                update(t)
                .where(
                    t.c.id.in_(ids[start : start + BATCH]), t.c.status == Status.PENDING.value, t.c.due_at > utc_now()
                )
                .values(due_at=utc_now())
            )

    def _behind(self, row: Any) -> tuple[ColumnElement[bool], ...]:
        c = self._t.c
        return (
            c.stream_key == row.stream_key,
            c.aggregate_type == row.aggregate_type,
            c.aggregate_id == row.aggregate_id,
            c.sequence > row.sequence,
        )

    def _conditions(self, wanted: DeadLetterFilter) -> list[ColumnElement[bool]]:
        c = self._t.c
        conditions: list[ColumnElement[bool]] = [c.status == Status.DEAD_LETTER.value]
        if wanted.stream is not None:
            conditions.append(in_stream(c.stream_key, self._prefix, wanted.stream))
        if wanted.type is not None:
            conditions.append(c.event_type == wanted.type)
        if wanted.aggregate is not None:
            kind, _, id_ = wanted.aggregate.partition(":")
            conditions += [c.aggregate_type == kind, c.aggregate_id == id_]
        if wanted.error is not None:
            conditions.append(func.instr(func.lower(c.last_error), wanted.error.lower()) > 0)
        # A dead letter's due_at is when it died.
        if wanted.older_than is not None:
            conditions.append(c.due_at <= utc_after(literal(-round(wanted.older_than * 1e6))))
        if wanted.newer_than is not None:
            conditions.append(c.due_at >= utc_after(literal(-round(wanted.newer_than * 1e6))))
        return conditions
