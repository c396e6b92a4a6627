"""Claiming, settling, giving back, renewing and recovering outbox rows (Z30, Z32).

Every transition is one guarded UPDATE by primary key: status and claim token stand in its WHERE and the row count is
checked†, so a worker that lost its claim changes nothing.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import BindParameter, Connection, String, bindparam, case, cast, func, literal, null, select, update

from zzol_relay.core.events import Event
from zzol_relay.core.lifecycle import Status
from zzol_relay.core.policy import exhausted
from zzol_relay.core.sequence import DeadLetterPolicy, Planned, plan_batch
from zzol_relay.settings import Settings
from zzol_relay.store.database import Database
from zzol_relay.store.dialect import seconds_since, utc_after, utc_now
from zzol_relay.store.order import prove, put_off
from zzol_relay.store.tables import MAX_ERROR

__all__ = ["Claim", "ClaimStore", "ClaimedRow", "Failure", "Recovery"]


# Not frozen, though nobody changes one: freezing costs 1.5 µs a row.
@dataclasses.dataclass(slots=True)
class ClaimedRow:
    """A row as the delivery needs it. ``age`` is seconds since its creation when it was claimed."""

    id: int
    event: Event
    data: bytes | None
    stream_key: str
    prev_sequence: int | None
    retry_count: int
    replays: int
    size: int
    age: float
    aggregate_key: tuple[str, str, str] | None = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        # Kept: planning a batch asks for it six times a row.
        event = self.event
        aggregate_id = event.aggregate_id
        self.aggregate_key = (
            None if aggregate_id is None else (self.stream_key, event.aggregate_type or "", aggregate_id)
        )

    @property
    def event_id(self) -> uuid.UUID:
        assert self.event.event_id is not None
        return self.event.event_id

    @property
    def sequence(self) -> int | None:
        return self.event.sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """What one claim holds, under a token that is fresh per claim. ``waiting`` rows were put off by the order."""

    token: bytes
    rows: tuple[Planned[ClaimedRow], ...]
    waiting: tuple[uuid.UUID, ...]
    more: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that failed by the row's own fault."""

    id: int
    error: str
    retry_count: int
    delay: float
    dead: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Recovery:
    """What one round of recovery moved."""

    recovered: tuple[uuid.UUID, ...]
    dead: tuple[uuid.UUID, ...]


class ClaimStore:
    """The transitions of claimed rows; each call is one short transaction of the relay's own."""

    def __init__(self, database: Database, settings: Settings, name: str) -> None:
        self._db = database
        self._t = database.tables.outbox
        self._table_name = database.engine.dialect.identifier_preparer.format_table(self._t)
        self._name = name[:64]
        self._settings = settings
        self._policy: DeadLetterPolicy = settings.on_dead_letter
        # Small payloads travel with the claim, large ones are read after it, one batch's worth at a time: a claim of
        # 500 rows of 256 KiB would otherwise hold 128 MB.
        self._inline = max(1024, settings.batch_bytes // settings.batch_rows)
        self._candidates = self._candidate_query()
        self._hold = self._hold_statement()

    def _candidate_query(self) -> Any:
        t = self._t
        size = func.length(t.c.payload)
        # The index's own order (status, due_at, id); for rows never retried it is id order (Z9).
        return self._db.tables.by_due(
            select(
                t.c.id, t.c.event_id, t.c.stream_key, t.c.aggregate_type, t.c.aggregate_id, t.c.sequence,
                t.c.prev_sequence, t.c.event_type,
                case((size <= self._inline, t.c.payload), else_=null()),
                # The driver decodes a row in Python, value by value. A NULL costs it next to nothing, so the usual
                # value travels as one; a time as text is read in C.
                case((size <= self._inline, null()), else_=size),
                func.nullif(t.c.schema_version, 1), func.nullif(t.c.retry_count, 0), func.nullif(t.c.replays, 0),
                cast(t.c.occurred_at, String(26)),
                t.c.correlation_id, t.c.causation_id, t.c.traceparent, seconds_since(t.c.created_at),
            )
            .where(t.c.status == Status.PENDING.value, t.c.due_at <= utc_now())
            .limit(self._settings.batch_rows)
            .with_for_update(skip_locked=True)
        )  # fmt: skip

    def _hold_statement(self) -> Any:
        t = self._t
        # The ids as literals: as parameters each would be escaped by itself.
        ids: BindParameter[int] = bindparam("ids", expanding=True, literal_execute=True)
        return (
            update(t)
            .where(t.c.id.in_(ids), t.c.status == Status.PENDING.value)
            .values(
                status=Status.IN_PROGRESS.value,
                claim_token=bindparam("token"),
                claimed_by=self._name,
                due_at=utc_after(literal(_micros(self._settings.claim_lease))),
                updated_at=utc_now(),
            )
        )

    def claim(self) -> Claim:
        """Claim the next batch of due rows whose order is proven (Z35).

        READ COMMITTED, so that no gap is locked and no producer waits. The order proof is a second statement after
        the locks†: inside the locking SELECT it would read an older snapshot. ``more`` says whether another claim may
        find more at once.
        """
        token = uuid.uuid4().bytes
        return self._db.run("claim", lambda connection: self._claim(connection, token))

    def _claim(self, connection: Connection, token: bytes) -> Claim:
        rows = [_claimed(row) for row in connection.execute(self._candidates)]
        if not rows:
            return Claim(token, (), (), False)
        plan = plan_batch(rows, prove(connection, self._t, rows), self._policy, max_bytes=self._settings.batch_bytes)
        if plan.send:
            connection.execute(self._hold, {"ids": [planned.row.id for planned in plan.send], "token": token})
        if plan.wait:
            put_off(connection, self._t, plan.wait, self._settings)
        more = len(rows) == self._settings.batch_rows or bool(plan.leave)
        return Claim(token, plan.send, tuple(row.event_id for row in plan.wait), more and bool(plan.send or plan.wait))

    def payloads(self, ids: Sequence[int]) -> dict[int, bytes]:
        """The payloads that were too large to travel with the claim."""
        t = self._t

        def read(connection: Connection) -> dict[int, bytes]:
            return {id_: bytes(data) for id_, data in connection.execute(
                select(t.c.id, t.c.payload).where(t.c.id.in_(ids)))}  # fmt: skip

        return self._db.run("payloads", read) if ids else {}

    def settle(self, token: bytes, source: Status, entries: Sequence[tuple[int, str]]) -> int:
        """Mark rows PUBLISHED with their entry ids, in one UPDATE; returns how many were still ours.

        ``source`` is IN_PROGRESS for a claim and PENDING for rows that this process recorded and published itself.
        """
        if not entries:
            return 0
        if self._db.is_sqlite:
            statement = self._settle_sqlite(token, source, entries)
            return self._db.run("settle", lambda connection: connection.execute(statement).rowcount)
        # Only the placeholders differ between two batches: compiling two parameters a row anew took 20 µs a row.
        marks = ",".join(["%s"] * len(entries))
        text = (
            f"UPDATE {self._table_name} SET status = %s, due_at = UTC_TIMESTAMP(6), published_at = UTC_TIMESTAMP(6),"  # noqa: S608
            f" updated_at = UTC_TIMESTAMP(6), claim_token = NULL, stream_entry_id = ELT(FIELD(id, {marks}), {marks})"
            f" WHERE id IN ({marks}) AND status = %s AND claim_token = %s"
        )
        ids = [id_ for id_, _ in entries]
        parameters = (Status.PUBLISHED.value, *ids, *(entry for _, entry in entries), *ids, source.value, token)
        return self._db.run("settle", lambda connection: connection.exec_driver_sql(text, parameters).rowcount)

    def _settle_sqlite(self, token: bytes, source: Status, entries: Sequence[tuple[int, str]]) -> Any:
        t = self._t
        return (
            update(t)
            .where(t.c.id.in_([id_ for id_, _ in entries]), t.c.status == source.value, t.c.claim_token == token)
            .values(
                status=Status.PUBLISHED.value,
                due_at=utc_now(),
                published_at=utc_now(),
                updated_at=utc_now(),
                claim_token=None,
                stream_entry_id=case(dict(entries), value=t.c.id),
            )
        )

    def give_back(self, token: bytes, ids: Sequence[int], delay: float, *, in_front: bool = False) -> int:
        """Return claimed rows to PENDING without costing an attempt†, due after ``delay`` seconds.

        ``in_front`` instead of a delay: before the rows that are due already. Due from now they would stand behind
        them, their own followers among them, each of which would be claimed and put off once.
        """
        if not ids:
            return 0
        t = self._t
        due: Any = utc_after(literal(_micros(delay)))
        if in_front:
            # When it was created: in the order of the sequence. A clock set back must not make it a time to come.
            due = case((t.c.created_at < utc_now(), t.c.created_at), else_=utc_now())
        statement = (
            update(t)
            .where(t.c.id.in_(ids), t.c.status == Status.IN_PROGRESS.value, t.c.claim_token == token)
            .values(
                status=Status.PENDING.value,
                claim_token=None,
                due_at=due,
                updated_at=utc_now(),
            )
        )
        return self._db.run("give_back", lambda connection: connection.execute(statement).rowcount)

    def fail(self, token: bytes, failures: Sequence[Failure]) -> frozenset[int]:
        """Count an attempt against each row: PENDING with backoff, or DEAD_LETTER; returns the ids still ours."""
        t = self._t

        def write(connection: Connection) -> frozenset[int]:
            kept = set()
            for failure in failures:
                result = connection.execute(
                    update(t)
                    .where(
                        t.c.id == failure.id,
                        t.c.status == Status.IN_PROGRESS.value,
                        t.c.claim_token == token,
                        t.c.retry_count == failure.retry_count - 1,
                    )
                    .values(
                        status=Status.DEAD_LETTER.value if failure.dead else Status.PENDING.value,
                        retry_count=failure.retry_count,
                        last_error=failure.error[:MAX_ERROR],
                        claim_token=None,
                        due_at=utc_after(literal(0 if failure.dead else _micros(failure.delay))),
                        updated_at=utc_now(),
                    )
                )
                if result.rowcount == 1:
                    kept.add(failure.id)
            return frozenset(kept)

        return self._db.run("fail", write) if failures else frozenset()

    def renew(self, token: bytes, ids: Sequence[int]) -> frozenset[int]:
        """Extend a claim by another lease; returns the ids that are still ours. The others must not be sent."""
        t = self._t

        def write(connection: Connection) -> frozenset[int]:
            ours = t.c.id.in_(ids), t.c.status == Status.IN_PROGRESS.value, t.c.claim_token == token
            result = connection.execute(
                update(t)
                .where(*ours)
                .values(due_at=utc_after(literal(_micros(self._settings.claim_lease))), updated_at=utc_now())
            )
            if result.rowcount == len(ids):
                return frozenset(ids)
            return frozenset(connection.execute(select(t.c.id).where(*ours)).scalars())

        return self._db.run("renew", write) if ids else frozenset()

    def recover(self, delay_after: Callable[[int], float]) -> Recovery:
        """Return up to a batch of expired claims to PENDING, each costing an attempt (Z33).

        ``delay_after(retry_count)`` gives the seconds to wait. The UPDATE restates the whole predicate, ``due_at``
        too†: a claim renewed in between is not taken. An attempt is counted because a row that kills its worker would
        otherwise crash-loop for ever.
        """
        t = self._t
        expired = (t.c.status == Status.IN_PROGRESS.value, t.c.due_at <= utc_now())
        dead: list[uuid.UUID] = []
        recovered: list[uuid.UUID] = []

        def move(connection: Connection) -> Recovery:
            dead.clear()
            recovered.clear()
            rows: Sequence[Any] = connection.execute(
                self._db.tables.by_due(
                    select(t.c.id, t.c.event_id, t.c.retry_count)
                    .where(*expired)
                    .limit(self._settings.batch_rows)
                    .with_for_update(skip_locked=True)
                )
            ).all()
            statement = (
                update(t)
                .where(t.c.id == bindparam("row_id"), *expired)
                .values(
                    status=bindparam("new_status"),
                    retry_count=bindparam("attempts"),
                    last_error="the claim expired: its worker died or hung",
                    claim_token=None,
                    due_at=utc_after(bindparam("delay")),
                    updated_at=utc_now(),
                )
            )
            for row in rows:
                attempts = row.retry_count + 1
                gone = exhausted(attempts, self._settings.max_attempts)
                result = connection.execute(
                    statement,
                    {
                        "row_id": row.id,
                        "new_status": (Status.DEAD_LETTER if gone else Status.PENDING).value,
                        "attempts": attempts,
                        "delay": 0 if gone else _micros(delay_after(attempts)),
                    },
                )
                if result.rowcount == 1:
                    (dead if gone else recovered).append(uuid.UUID(bytes=bytes(row.event_id)))
            return Recovery(tuple(recovered), tuple(dead))

        return self._db.run("recover", move)


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


def _claimed(row: Any) -> ClaimedRow:
    (
        id_, event_id, stream_key, aggregate_type, aggregate_id, sequence, prev_sequence, event_type,
        data, size, schema_version, retry_count, replays, occurred_at, correlation_id, causation_id, traceparent, age,
    ) = row  # fmt: skip
    event = Event(
        type=event_type,
        stream="",
        aggregate_type=aggregate_type,
        aggregate_id=aggregate_id,
        sequence=sequence,
        schema_version=schema_version or 1,
        event_id=uuid.UUID(bytes=bytes(event_id)),
        occurred_at=datetime.fromisoformat(occurred_at).replace(tzinfo=UTC),
        correlation_id=correlation_id,
        causation_id=causation_id,
        traceparent=traceparent,
    )
    return ClaimedRow(
        id=id_,
        event=event,
        data=None if data is None else bytes(data),
        stream_key=stream_key,
        prev_sequence=prev_sequence,
        retry_count=retry_count or 0,
        replays=replays or 0,
        size=size if data is None else len(data),
        age=float(age),
    )
