"""``record()``: one outbox row in the caller's own transaction (Z6, Z21, G3)."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.util.concurrency import await_, in_greenlet

from zzol_relay.core.errors import RecordingError, UnknownStreamError
from zzol_relay.core.events import Event, encode_data, validate
from zzol_relay.core.ids import RANDOM_BITS, uuid7
from zzol_relay.core.observer import Deferred, Fact, Recorded
from zzol_relay.core.sequence import Mode
from zzol_relay.relay.after_commit import AfterCommit
from zzol_relay.relay.delivery import Shipment
from zzol_relay.relay.unit_of_work import ConnectionUnit, SessionUnit
from zzol_relay.settings import Settings, Stream, mask_url
from zzol_relay.store.claims import ClaimedRow
from zzol_relay.store.database import Database
from zzol_relay.store.outbox import OutboxWriter
from zzol_relay.streams.keys import shard_of, stream_key

__all__ = ["Recorder", "complete"]

_log = logging.getLogger("zzol_relay.recorder")


def complete(event: Event) -> Event:
    """``event`` with an id and a time where it has none."""
    if event.event_id is not None and event.occurred_at is not None:
        return event
    return dataclasses.replace(
        event,
        event_id=event.event_id or uuid7(time.time_ns() // 1_000_000, secrets.randbits(RANDOM_BITS)),
        occurred_at=event.occurred_at or datetime.now(UTC),
    )


class Recorder:
    """Writes outbox rows and arranges what follows the commit. ``after_commit`` is None in polling mode (Z14)."""

    def __init__(
        self,
        database: Database,
        writer: OutboxWriter,
        streams: Mapping[str, Stream],
        settings: Settings,
        epoch: Callable[[str], str | None],
        after_commit: AfterCommit | None,
        observe: Callable[[Fact], None],
        fill: Callable[[Event], Event] = complete,
    ) -> None:
        self._database = database
        self._writer = writer
        self._streams = dict(streams)
        self._settings = settings
        self._epoch = epoch
        self._after_commit = after_commit
        self._observe = observe
        self._fill = fill
        self._connections: WeakKeyDictionary[Connection, ConnectionUnit] = WeakKeyDictionary()
        self._place = _place(make_url(database.source) if isinstance(database.source, str) else database.source.url)
        self.hook_errors = 0

    def record(self, target: Session | scoped_session[Session] | Connection, event: Event) -> Event:
        """As ``Relay.record``."""
        return self.record_all(target, (event,))[0]

    def record_all(
        self, target: Session | scoped_session[Session] | Connection, events: Iterable[Event]
    ) -> list[Event]:
        """As ``Relay.record_all``."""
        prepared = [self._prepare(event) for event in events]
        if not prepared:
            return []
        if isinstance(target, scoped_session):
            target = target()
        outer = False
        if isinstance(target, Session):
            connection, outer = self._session_connection(target)
        elif isinstance(target, Connection):
            connection = target
            if connection not in self._connections:
                raise RecordingError(
                    "this Connection was not opened by relay.begin(); Core commits without telling, so use"
                    " 'with relay.begin(engine) as connection:', or record on the Session"
                )
        else:
            raise RecordingError(
                f"cannot record on {type(target).__name__}: pass the Session, or a Connection of relay.begin();"
                " with an AsyncSession use 'await session.run_sync(relay.record, event)'"
            )
        _refuse_autocommit(connection)
        shipments = self._write(connection, prepared)
        self._note(target, connection, shipments, outer)
        return [shipment.row.event for shipment in shipments]

    @contextmanager
    def begin(self, engine: Engine) -> Iterator[Connection]:
        """As ``Relay.begin``."""
        self._refuse_elsewhere(engine)
        with engine.connect() as connection:
            unit = ConnectionUnit(connection)
            self._connections[connection] = unit
            try:
                with connection.begin():
                    yield connection
            finally:
                del self._connections[connection]
        self.hand_over(unit.take())

    def hand_over(self, shipments: list[Shipment]) -> None:
        """After the commit, with no connection held. Nothing escapes: the rows are safe, the commit is done."""
        if not shipments:
            return
        try:
            started = time.monotonic()
            if self._after_commit is None:
                self._observe(Recorded(tuple(s.row.event_id for s in shipments), 0.0))
                return
            ticket = self._after_commit.submit(shipments)
            if ticket is not None and self._settings.commit_wait:
                if in_greenlet():
                    # Under AsyncSession: the wait must not block the event loop.
                    await_(ticket.wait_async(self._settings.commit_wait))
                else:
                    ticket.wait(self._settings.commit_wait)
            self._after_commit.recorded(shipments, time.monotonic() - started)
        except Exception:
            self.hook_errors += 1
            _log.exception("the after-commit hook failed; the poller publishes", extra={"rows": len(shipments)})

    def _prepare(self, event: Event) -> tuple[Event, bytes, str]:
        validate(event)
        stream = self._streams.get(event.stream)
        if stream is None:
            raise UnknownStreamError(event.stream, tuple(self._streams))
        data = encode_data(event.data, self._settings.max_payload_bytes)
        event = self._fill(event)
        shard = shard_of(event.aggregate_id or str(event.event_id), stream.shards)
        return event, data, stream_key(self._settings.key_prefix, event.stream, shard)

    def _write(self, connection: Connection, prepared: list[tuple[Event, bytes, str]]) -> list[Shipment]:
        # Aggregates are locked in sorted order: two transactions that lock two of them in opposite orders deadlock.
        # Within an aggregate the given order stays.
        order = sorted(range(len(prepared)), key=lambda i: _lock_order(prepared[i][0]))
        shipments: dict[int, Shipment] = {}
        # With an open circuit nobody publishes after the commit: the poller need not wait for a lease to end.
        leased = self._after_commit is not None and self._after_commit.accepts
        for i in order:
            event, data, key = prepared[i]
            previous: int | None = None
            if event.aggregate_id is not None:
                sequence, previous = self._writer.allocate(connection, event)
                event = dataclasses.replace(event, sequence=sequence)
            row_id = self._writer.insert(connection, event, data, key, previous, leased=leased)
            row = ClaimedRow(
                id=row_id,
                event=event,
                data=data,
                stream_key=key,
                prev_sequence=previous,
                retry_count=0,
                replays=0,
                size=len(data),
                age=0.0,
            )
            mode = Mode.UNORDERED if event.aggregate_id is None else Mode.NEXT
            shipments[i] = Shipment(row, data, mode, self._epoch(key) or "")
        return [shipments[i] for i in range(len(prepared))]

    def _note(
        self, target: Session | Connection, connection: Connection, shipments: list[Shipment], outer: bool
    ) -> None:
        if isinstance(target, Connection):
            unit = self._connections[target]
            for shipment in shipments:
                unit.add(shipment)
            return
        if _raw_savepoint(target, connection):
            # A savepoint opened past the Session: whether it rolls back is not told. The poller sees what is there.
            self._observe(Deferred("after_commit", tuple(s.row.event_id for s in shipments), "outer"))
            return
        session_unit = target.info.get(self)
        if session_unit is None:
            session_unit = target.info[self] = SessionUnit(target, self.hand_over)
        for shipment in shipments:
            session_unit.add(target, shipment, connection if outer else None)

    def _session_connection(self, session: Session) -> tuple[Connection, bool]:
        """The connection of the session's transaction, and whether the session was bound to it from outside."""
        table = self._database.tables.outbox
        routed = list(session.binds.values())
        try:
            bind = session.get_bind(clause=table)
        except UnboundExecutionError:
            if not routed:
                raise RecordingError("this Session has no bind; bind it to the engine of the outbox") from None
            bind = routed[0]
        self._refuse_elsewhere(bind.engine)
        # Routed by mapper or table, business rows and outbox row could land on two connections: two transactions.
        if any(other is not bind for other in routed):
            raise RecordingError(
                "this Session routes tables to several engines (binds=…), so that an outbox row would not be in their"
                " transaction; use a Session with one bind"
            )
        return session.connection(bind_arguments={"bind": bind}), isinstance(bind, Connection)

    def _refuse_elsewhere(self, engine: Engine) -> None:
        if _place(engine.url) != self._place:
            raise RecordingError(
                f"this session or engine is bound to {mask_url(str(engine.url))}, but the relay's outbox is at"
                f" {mask_url(str(self._database.url))}: the row would not be in the same transaction"
            )


def _lock_order(event: Event) -> tuple[str, str, str]:
    return (event.stream, event.aggregate_type or "", event.aggregate_id or "")


def _place(url: URL) -> tuple[Any, ...]:
    backend = "mysql" if url.get_backend_name() == "mariadb" else url.get_backend_name()
    host = None if backend == "sqlite" else url.host or "localhost"
    return (
        backend,
        host,
        url.port or (3306 if backend == "mysql" else None),
        url.database,
        url.query.get("unix_socket"),
    )


def _refuse_autocommit(connection: Connection) -> None:
    dbapi = connection.connection.dbapi_connection
    get_autocommit = getattr(dbapi, "get_autocommit", None) or getattr(
        getattr(dbapi, "driver_connection", None), "get_autocommit", None
    )
    asked = connection.get_execution_options().get("isolation_level")
    if asked == "AUTOCOMMIT" or (asked is None and get_autocommit is not None and get_autocommit() is True):
        raise RecordingError(
            "this connection is in AUTOCOMMIT: the outbox row would be committed on its own (G3); use a transaction"
        )


def _raw_savepoint(session: Session, connection: Connection) -> bool:
    """Whether the innermost savepoint on the connection is not the Session's own."""
    innermost = connection.get_nested_transaction()
    if innermost is None:
        return False
    owner = session.get_nested_transaction() or session.get_transaction()
    known = getattr(owner, "_connections", {}).get(connection)
    return known is None or known[1] is not innermost
