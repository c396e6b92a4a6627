"""Recording in the caller's transaction: what is published, what never is, and what is refused (Z6, Z21, Z22, G3)."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, String, create_engine, event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from tests.support.facts import Facts
from tests.support.streams import check_order, entries, outbox_rows, statuses
from zzol_relay import (
    Event,
    InvalidEventError,
    PayloadTooLargeError,
    RecordingError,
    Relay,
    SequenceError,
    Stream,
    UnknownStreamError,
)
from zzol_relay.core.observer import Deferred, Published, Recorded

pytestmark = pytest.mark.usefixtures("relay_tables")


class Base(DeclarativeBase):
    pass


class Room(Base):
    __tablename__ = "business_room"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(50))


@pytest.fixture
def relay(engine: Engine, make_relay: Any) -> Relay:
    Base.metadata.create_all(engine)
    # Long leases and a sleeping poller: what arrives came by the after-commit path.
    relay: Relay = make_relay(engine, [Stream(name="room")], worker=False, start=False)
    return relay.start()


def room_event(code: str = "A", **changes: Any) -> Event:
    fields: dict[str, Any] = {"type": "room.created", "stream": "room", "aggregate_type": "room"}
    return Event(**fields | {"aggregate_id": code, "data": {"code": code}} | changes)


def test_business_row_and_event_commit_together_and_the_entry_stands_when_commit_returns(
    relay: Relay, engine: Engine, redis_client: redis.Redis
) -> None:
    """Z6, Z22, Z23, promise 3."""
    with Session(engine) as session:
        session.add(Room(name="A"))
        recorded = relay.record(session, room_event())
        assert entries(redis_client) == []
        session.commit()
        found = entries(redis_client)
    assert [(e.event_id, e.sequence, e.data) for e in found] == [(str(recorded.event_id), 1, {"code": "A"})]
    assert recorded.sequence == 1
    with engine.connect() as connection:
        assert connection.execute(text("SELECT COUNT(*) FROM business_room")).scalar() == 1


def test_the_mark_really_reaches_the_database(
    relay: Relay, engine: Engine, redis_client: redis.Redis, facts: Facts
) -> None:
    """Z12, Z25: PENDING → PUBLISHED in a transaction of its own, with the entry's id."""
    from zzol_relay.core.observer import Settled

    with Session(engine) as session, session.begin():
        relay.record(session, room_event())
    facts.wait_for(Settled)
    (row,) = outbox_rows(engine)
    assert (row.status, row.stream_entry_id) == ("PUBLISHED", entries(redis_client)[0].entry_id)
    assert row.published_at is not None
    assert row.claim_token is None
    assert row.retry_count == 0


def test_a_rollback_publishes_nothing_and_leaves_no_row(
    relay: Relay, engine: Engine, redis_client: redis.Redis
) -> None:
    """Z2, G8."""
    with Session(engine) as session:
        session.add(Room(name="A"))
        relay.record(session, room_event())
        session.rollback()
        session.commit()
    assert entries(redis_client) == []
    assert outbox_rows(engine) == []


def test_a_rolled_back_savepoint_takes_only_its_own_events(
    relay: Relay, engine: Engine, redis_client: redis.Redis
) -> None:
    with Session(engine) as session:
        relay.record(session, room_event(data=1))
        savepoint = session.begin_nested()
        relay.record(session, room_event(data="ghost"))
        with session.begin_nested():
            relay.record(session, room_event(data="released into a ghost"))
        savepoint.rollback()
        with session.begin_nested():
            relay.record(session, room_event(data=2))
        session.commit()
    found = entries(redis_client)
    assert [(e.data, e.sequence) for e in found] == [(1, 1), (2, 2)]


def test_a_released_savepoint_publishes_once_the_root_commits(
    relay: Relay, engine: Engine, redis_client: redis.Redis
) -> None:
    """``after_commit`` fires on savepoint release too."""
    with Session(engine) as session:
        with session.begin_nested():
            relay.record(session, room_event(data=1))
        assert entries(redis_client) == []
        session.commit()
        assert [e.data for e in entries(redis_client)] == [1]


def test_a_released_savepoint_publishes_nothing_when_the_root_rolls_back(
    relay: Relay, engine: Engine, redis_client: redis.Redis
) -> None:
    with Session(engine) as session:
        with session.begin_nested():
            relay.record(session, room_event(data=1))
        session.rollback()
    assert entries(redis_client) == []


def test_a_savepoint_opened_past_the_session_is_left_to_the_poller(
    relay: Relay, engine: Engine, redis_client: redis.Redis, facts: Facts
) -> None:
    with Session(engine) as session:
        connection = session.connection()
        savepoint = connection.begin_nested()
        relay.record(session, room_event(data="ghost"))
        savepoint.rollback()
        relay.record(session, room_event(data=1))
        session.commit()
    assert [e.data for e in entries(redis_client)] == [1]
    assert facts.of(Deferred)[0].reason == "outer"
    assert [row.sequence for row in outbox_rows(engine)] == [1]


def test_an_outside_transaction_that_rolls_back_later_publishes_nothing(
    relay: Relay, engine: Engine, redis_client: redis.Redis
) -> None:
    """The usual test fixture: a Session that joins a Connection's transaction."""
    with engine.connect() as connection:
        outside = connection.begin()
        with Session(bind=connection, join_transaction_mode="create_savepoint") as session:
            relay.record(session, room_event())
            session.commit()
        with Session(bind=connection) as session:
            relay.record(session, room_event())
            session.commit()
        outside.rollback()
    assert entries(redis_client) == []
    assert outbox_rows(engine) == []


def test_a_session_bound_to_a_connection_publishes_where_it_commits_for_real(
    relay: Relay, engine: Engine, redis_client: redis.Redis
) -> None:
    with engine.connect() as connection, Session(bind=connection) as session:
        relay.record(session, room_event())
        session.commit()
        assert len(entries(redis_client)) == 1


def test_a_commit_that_raises_publishes_nothing(
    relay: Relay, engine: Engine, redis_client: redis.Redis, facts: Facts
) -> None:
    """It may or may not have happened; the poller finds the row if it did."""
    own = create_engine(engine.url)

    @event.listens_for(own, "commit")
    def fail(connection: Any) -> None:
        raise OperationalError("COMMIT", {}, Exception("connection lost"))

    with Session(own) as session:
        relay.record(session, room_event())
        with pytest.raises(OperationalError):
            session.commit()
    own.dispose()
    assert entries(redis_client) == []
    assert facts.of(Recorded) == []


def test_several_events_and_several_commits_of_one_session_keep_their_order(
    relay: Relay, engine: Engine, redis_client: redis.Redis
) -> None:
    with Session(engine) as session:
        for commit in range(3):
            for n in range(4):
                relay.record(session, room_event(data=[commit, n]))
            session.commit()
    found = entries(redis_client)
    assert [e.data for e in found] == [[c, n] for c in range(3) for n in range(4)]
    assert [e.sequence for e in found] == list(range(1, 13))


def test_an_empty_commit_publishes_nothing_twice(relay: Relay, engine: Engine, redis_client: redis.Redis) -> None:
    with Session(engine) as session:
        relay.record(session, room_event())
        session.commit()
        session.commit()
        session.add(Room(name="B"))
        session.commit()
    assert len(entries(redis_client)) == 1


def test_record_all_locks_in_sorted_order_and_returns_in_the_given_one(
    relay: Relay, engine: Engine, redis_client: redis.Redis
) -> None:
    given = [room_event("C", data=1), room_event("A", data=2), room_event("C", data=3), room_event("B", data=4)]
    with Session(engine) as session:
        recorded = relay.record_all(session, given)
        session.commit()
    assert [e.data for e in recorded] == [1, 2, 3, 4]
    assert [e.sequence for e in recorded] == [1, 1, 2, 1]
    assert [row.aggregate_id for row in outbox_rows(engine)] == ["A", "B", "C", "C"]
    check_order(entries(redis_client))
    assert relay.record_all(session, []) == []


def test_events_without_an_aggregate_are_published_and_unordered(
    relay: Relay, engine: Engine, redis_client: redis.Redis
) -> None:
    with Session(engine) as session, session.begin():
        relay.record_all(session, [Event(type="tick", stream="room", data=n) for n in range(3)])
    found = entries(redis_client)
    assert sorted(e.data for e in found) == [0, 1, 2]
    assert {e.sequence for e in found} == {None}


def test_core_needs_relay_begin_and_publishes_after_it(relay: Relay, engine: Engine, redis_client: redis.Redis) -> None:
    """Core's own commit event fires before the driver's commit."""
    with relay.begin(engine) as connection:
        connection.execute(text("INSERT INTO business_room (name) VALUES ('core')"))
        relay.record(connection, room_event(data=1))
        ghost = connection.begin_nested()
        relay.record(connection, room_event(data="ghost"))
        with connection.begin_nested():
            relay.record(connection, room_event(data="released into a ghost"))
        ghost.rollback()
        with connection.begin_nested():
            relay.record(connection, room_event(data=2))
        assert entries(redis_client) == []
    assert [(e.data, e.sequence) for e in entries(redis_client)] == [(1, 1), (2, 2)]


def test_core_publishes_nothing_when_its_block_raises(relay: Relay, engine: Engine, redis_client: redis.Redis) -> None:
    with pytest.raises(ZeroDivisionError), relay.begin(engine) as connection:
        relay.record(connection, room_event())
        raise ZeroDivisionError
    assert entries(redis_client) == []
    assert outbox_rows(engine) == []


def test_a_connection_past_relay_begin_is_refused(relay: Relay, engine: Engine) -> None:
    with engine.begin() as connection, pytest.raises(RecordingError, match=r"relay\.begin"):
        relay.record(connection, room_event())


def test_scoped_sessions_and_sessionmaker_begin_work(relay: Relay, engine: Engine, redis_client: redis.Redis) -> None:
    factory = sessionmaker(engine, expire_on_commit=False, autoflush=False)
    scoped = scoped_session(factory)
    relay.record(scoped, room_event(data=1))
    scoped.commit()
    scoped.remove()
    with factory.begin() as session:
        relay.record(session, room_event(data=2))
    assert [e.data for e in entries(redis_client)] == [1, 2]


BAD: list[tuple[type[Exception], Event]] = [
    (InvalidEventError, room_event(data={1, 2})),
    (InvalidEventError, room_event(data=float("nan"))),
    (PayloadTooLargeError, room_event(data="x" * 300_000)),
    (UnknownStreamError, room_event(stream="nowhere")),
    (InvalidEventError, room_event("x" * 200)),
    (InvalidEventError, room_event(type="t" * 200)),
    (InvalidEventError, room_event(occurred_at=datetime(2026, 1, 1))),
    (InvalidEventError, room_event(data=datetime(2026, 1, 1))),
    (SequenceError, room_event(sequence=2)),
]


@pytest.mark.parametrize(("error", "bad"), BAD)
def test_what_is_refused_is_refused_before_anything_is_written_and_the_session_lives(
    relay: Relay, engine: Engine, redis_client: redis.Redis, error: type[Exception], bad: Event
) -> None:
    with Session(engine) as session:
        relay.record(session, room_event(sequence=5, data=1))
        session.commit()
        with pytest.raises(error):
            relay.record_all(session, [bad])
        session.add(Room(name="after"))
        relay.record(session, room_event(data=2))
        session.commit()
    found = entries(redis_client)
    assert [(e.data, e.sequence) for e in found] == [(1, 5), (2, 6)]
    assert statuses(engine).keys() <= {"PUBLISHED", "PENDING"}
    assert len(outbox_rows(engine)) == 2


def test_given_sequences_take_the_lock_and_must_rise(relay: Relay, engine: Engine, redis_client: redis.Redis) -> None:
    """S6, S13; the dagger rule on caller-given sequences."""
    with Session(engine) as session:
        relay.record(session, room_event(sequence=10, data="authorized"))
        relay.record(session, room_event(sequence=11, data="compensated"))
        with pytest.raises(SequenceError) as caught:
            relay.record(session, room_event(sequence=11))
        session.commit()
    assert (caught.value.sequence, caught.value.last) == (11, 11)
    assert [(row.sequence, row.prev_sequence) for row in outbox_rows(engine)] == [(10, 0), (11, 10)]
    assert [e.sequence for e in entries(redis_client)] == [10, 11]


def test_a_bind_on_another_connection_is_refused(relay: Relay, engine: Engine, tmp_path: Any) -> None:
    """G3: a repository on its own connection breaks the atomicity."""
    elsewhere = create_engine(f"sqlite:///{tmp_path}/other.db")
    with Session(elsewhere) as session, pytest.raises(RecordingError, match="same transaction"):
        relay.record(session, room_event())
    twin = create_engine(engine.url)
    with Session(engine, binds={Room: twin}) as session, pytest.raises(RecordingError, match="several engines"):
        relay.record(session, room_event())
    with Session(binds={Room: engine}) as session:
        relay.record(session, room_event())
        session.rollback()
    with Session() as session, pytest.raises(RecordingError, match="no bind"):
        relay.record(session, room_event())
    elsewhere.dispose()
    twin.dispose()


def test_autocommit_is_refused(relay: Relay, engine: Engine) -> None:
    """G3."""
    loose = engine.execution_options(isolation_level="AUTOCOMMIT")
    with Session(loose) as session, pytest.raises(RecordingError, match="AUTOCOMMIT"):
        relay.record(session, room_event())
    assert outbox_rows(engine) == []


def test_something_else_than_a_session_is_refused_with_a_hint(relay: Relay) -> None:
    with pytest.raises(RecordingError, match="run_sync"):
        relay.record(object(), room_event())  # type: ignore[arg-type]


def test_the_payload_is_a_snapshot(relay: Relay, engine: Engine, redis_client: redis.Redis) -> None:
    """G6: what the caller changes after record() does not change the event."""
    data = {"n": 1}
    with Session(engine) as session:
        relay.record(session, room_event(data=data))
        data["n"] = 2
        session.commit()
    assert entries(redis_client)[0].data == {"n": 1}


def test_polling_mode_publishes_nothing_after_commit(
    engine: Engine, make_relay: Any, redis_client: redis.Redis
) -> None:
    """Z14, Z15: mode A is selectable."""
    relay: Relay = make_relay(engine, [Stream(name="room")], worker=False, mode="polling", start=False).start()
    with Session(engine) as session, session.begin():
        relay.record(session, room_event())
    assert entries(redis_client) == []
    assert relay.run_once() == 1
    assert len(entries(redis_client)) == 1


def test_an_exception_in_the_hook_does_not_come_out_of_commit(
    relay: Relay, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Z24: the data is committed; the hook swallows, counts and leaves the row to the poller."""

    def explode(shipments: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(relay._after_commit, "submit", explode)
    with Session(engine) as session:
        relay.record(session, room_event())
        session.commit()
        assert session.execute(text("SELECT 1")).scalar() == 1
    assert relay._recorder.hook_errors == 1
    assert statuses(engine) == {"PENDING": 1}


def test_facts_tell_of_recording_and_publishing(relay: Relay, engine: Engine, facts: Facts) -> None:
    with Session(engine) as session:
        recorded = relay.record(session, room_event())
        session.rollback()
        assert facts.of(Recorded) == []
        recorded = relay.record(session, room_event())
        session.commit()
    assert facts.of(Recorded)[0].event_ids == (recorded.event_id,)
    assert facts.of(Published)[0].event_ids == (recorded.event_id,)


def test_an_event_id_is_recorded_once(relay: Relay, engine: Engine, redis_client: redis.Redis) -> None:
    """G5: a deterministic id makes a second attempt recognisable; the session stays usable."""
    once = uuid.uuid4()
    with Session(engine) as session:
        relay.record(session, room_event(event_id=once, data=1))
        session.commit()
        with pytest.raises(InvalidEventError, match="already"):
            relay.record(session, room_event(event_id=once, data=2))
        relay.record(session, room_event(data=3))
        session.commit()
    assert [e.data for e in entries(redis_client)] == [1, 3]
