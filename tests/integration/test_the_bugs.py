"""The bugs that the sources tell of: shown by a naive variant, absent here (Z2, Z3, Z18, Z25, Z35).

Z10 and Z29 stand in test_worker.py, beside what prevents them.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy import Engine, event, text
from sqlalchemy.orm import Session

from tests.support.facts import Facts
from tests.support.streams import entries, outbox_rows, statuses
from zzol_relay import Event, Relay, Stream
from zzol_relay.core.observer import Settled

pytestmark = pytest.mark.usefixtures("relay_tables")

STREAMS = [Stream(name="room", retention=0)]
NAIVE_STREAM = "naive"


def happened(kind: str, data: Any = None) -> Event:
    return Event(type=kind, stream="room", aggregate_type="room", aggregate_id="A", data=data)


@pytest.fixture
def rooms(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE naive_room (id INT AUTO_INCREMENT PRIMARY KEY, code VARCHAR(8))"))


def count_rooms(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT COUNT(*) FROM naive_room")).scalar_one())


INSERT = text("INSERT INTO naive_room (code) VALUES ('A')")


@pytest.mark.usefixtures("rooms")
def test_z2_publishing_before_commit_leaves_a_ghost(engine: Engine, make_relay: Any, redis_client: redis.Redis) -> None:
    """Z2."""
    with Session(engine) as session:
        session.execute(INSERT)
        redis_client.xadd(NAIVE_STREAM, {"type": "room.created"})
        session.rollback()
    assert (count_rooms(engine), redis_client.xlen(NAIVE_STREAM)) == (0, 1), "the naive ghost"

    relay: Relay = make_relay(engine, STREAMS, worker=False)
    with Session(engine) as session:
        session.execute(INSERT)
        relay.record(session, happened("room.created"))
        session.rollback()
    assert (count_rooms(engine), entries(redis_client)) == (0, [])


@pytest.mark.usefixtures("rooms")
def test_z3_publishing_after_commit_loses_what_redis_did_not_take(
    engine: Engine, make_relay: Any, own_redis: Any, facts: Facts
) -> None:
    """Z3."""
    relay: Relay = make_relay(engine, STREAMS, redis_url=own_redis.url)
    own_redis.kill()
    with redis.Redis(port=own_redis.port, socket_timeout=1, retry=Retry(NoBackoff(), 0)) as client:
        with Session(engine) as session:
            session.execute(INSERT)
            session.commit()
        with pytest.raises(redis.ConnectionError):
            client.xadd(NAIVE_STREAM, {"type": "room.created"})
    with Session(engine) as session:
        session.execute(INSERT)
        relay.record(session, happened("room.created"))
        session.commit()
    own_redis.start()
    facts.wait_until(lambda: statuses(engine) == {"PUBLISHED": 1})
    with redis.Redis.from_url(own_redis.url, decode_responses=True) as client:
        assert client.xlen(NAIVE_STREAM) == 0, "the naive room that other instances never hear of"
        assert [e.type for e in entries(client)] == ["room.created"]
    assert count_rooms(engine) == 2


def test_z18_with_polling_alone_join_is_handled_before_create(
    engine: Engine, make_relay: Any, redis_client: redis.Redis
) -> None:
    """Z18: the direct "join" overtakes the polled "create"; right after commit it cannot."""

    def play(relay: Relay) -> list[str]:
        # Trimmed, not deleted: a stream that forgot its last id is a loss of data.
        redis_client.xtrim("zzol:{room:0}", maxlen=0, approximate=False)
        with Session(engine) as session, session.begin():
            relay.record(session, happened("room.created"))
        redis_client.xadd("zzol:{room:0}", {"id": "direct", "type": "room.joined", "data": "1"})
        relay.run_once()
        return [e.type for e in entries(redis_client)]

    polling: Relay = make_relay(engine, STREAMS, worker=False, mode="polling")
    assert play(polling) == ["room.joined", "room.created"], "the inversion of mode A"
    hybrid: Relay = make_relay(engine, STREAMS, worker=False)
    assert play(hybrid) == ["room.created", "room.joined"]


@pytest.mark.usefixtures("rooms")
def test_z25_a_mark_made_in_the_hook_never_reaches_the_database(engine: Engine, make_relay: Any, facts: Facts) -> None:
    """Z25: in ``after_commit`` the session's transaction is over; the naive mark is lost with an error."""
    errors: list[Exception] = []
    with Session(engine) as session:

        @event.listens_for(session, "after_commit")
        def mark(hooked: Session) -> None:
            try:
                hooked.execute(text("UPDATE naive_room SET code = 'DONE'"))
            except Exception as error:
                errors.append(error)

        session.execute(INSERT)
        session.commit()
    with engine.connect() as connection:
        assert connection.execute(text("SELECT code FROM naive_room")).scalar() == "A", "the naive mark is lost"
    assert len(errors) == 1

    relay: Relay = make_relay(engine, STREAMS, worker=False)
    with Session(engine) as session, session.begin():
        relay.record(session, happened("room.created"))
    facts.wait_for(Settled)
    assert statuses(engine) == {"PUBLISHED": 1}


def test_z35_a_poller_takes_the_row_that_is_being_published_right_after_commit(
    engine: Engine, make_relay: Any, redis_client: redis.Redis
) -> None:
    """Z35 "no duplicates": SKIP LOCKED does not see a publisher that holds no lock. Born leases and the script do."""
    relay: Relay = make_relay(engine, STREAMS, worker=False)
    during: list[Any] = []
    send = relay._after_commit._delivery.send

    def naive_poll_meanwhile(shipments: Any, path: Any) -> Any:
        with engine.begin() as connection:
            naive = connection.execute(
                text(
                    "SELECT id FROM zzol_outbox_event WHERE status = 'PENDING' ORDER BY id LIMIT 50"
                    " FOR UPDATE SKIP LOCKED"
                )
            ).all()
            for row in naive:
                redis_client.xadd(NAIVE_STREAM, {"row": row.id})
        during.append(relay.run_once())
        sent = send(shipments, path)
        redis_client.xadd(NAIVE_STREAM, {"row": shipments[0].row.id})
        return sent

    relay._after_commit._delivery.send = naive_poll_meanwhile  # type: ignore[method-assign]
    with Session(engine) as session, session.begin():
        relay.record(session, happened("room.created"))
    assert redis_client.xlen(NAIVE_STREAM) == 2, "the naive duplicate"
    assert during == [0]
    assert len(entries(redis_client)) == 1

    # A transaction longer than the lease makes it moot; then the script holds.
    relay._after_commit._delivery.send = send  # type: ignore[method-assign]
    late = outbox_rows(engine)[0]
    with engine.begin() as connection:
        connection.execute(text("UPDATE zzol_outbox_event SET status = 'PENDING', due_at = UTC_TIMESTAMP(6)"))
    relay.run_once()
    assert len(entries(redis_client)) == 1
    assert late.event_id == outbox_rows(engine)[0].event_id
