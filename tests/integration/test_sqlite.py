"""SQLite stands in for first steps: the same promises in one process, tried briefly."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from tests.support.facts import Facts
from tests.support.streams import check_order, entries, statuses
from zzol_relay import ConfigurationError, Event, Relay, SequenceError, Stream

STREAMS = [Stream(name="room", retention=0)]


def happened(code: str, n: Any = None, **fields: Any) -> Event:
    return Event(type="t", stream="room", aggregate_type="room", aggregate_id=code, data=n, **fields)


def test_recording_publishing_rolling_back_and_polling(
    sqlite_engine: Engine, make_relay: Any, redis_client: redis.Redis, facts: Facts
) -> None:
    relay: Relay = make_relay(sqlite_engine, STREAMS)
    with Session(sqlite_engine) as session:
        relay.record(session, happened("A", 1))
        session.commit()
        assert [e.data for e in entries(redis_client)] == [1]
        relay.record(session, happened("A", "ghost"))
        session.rollback()
        relay.record(session, happened("A", 2, sequence=10))
        with pytest.raises(SequenceError):
            relay.record(session, happened("A", 3, sequence=10))
        session.commit()
    facts.wait_until(lambda: statuses(sqlite_engine) == {"PUBLISHED": 2})
    assert [(e.data, e.sequence) for e in entries(redis_client)] == [(1, 1), (2, 10)]


def test_the_fallback_recovery_and_cleanup(sqlite_engine: Engine, make_relay: Any, redis_client: redis.Redis) -> None:
    relay: Relay = make_relay(sqlite_engine, STREAMS, worker=False, start=False, mode="polling")
    for n in range(5):
        with Session(sqlite_engine) as session, session.begin():
            relay.record(session, happened("AB"[n % 2], n))
    claim = relay._claims.claim()
    assert len(claim.rows) == 5
    past = "strftime('%Y-%m-%d %H:%M:%f', 'now', '-2 days') || '000'"
    with sqlite_engine.begin() as connection:
        connection.execute(text(f"UPDATE zzol_outbox_event SET due_at = {past}"))
    assert relay.recover() == 5
    with sqlite_engine.begin() as connection:
        connection.execute(text(f"UPDATE zzol_outbox_event SET due_at = {past}"))
    while relay.run_once():
        pass
    check_order(entries(redis_client))
    assert len(entries(redis_client)) == 5
    with sqlite_engine.begin() as connection:
        connection.execute(text(f"UPDATE zzol_outbox_event SET due_at = {past}"))
    assert relay.cleanup() == 5
    assert relay.status().backlog.by_status["PUBLISHED"] == 0


def test_several_threads_write_at_once(
    sqlite_engine: Engine, make_relay: Any, redis_client: redis.Redis, facts: Facts
) -> None:
    relay: Relay = make_relay(sqlite_engine, STREAMS)
    errors: list[BaseException] = []

    def work(code: str) -> None:
        try:
            for n in range(20):
                with Session(sqlite_engine) as session, session.begin():
                    relay.record(session, happened(code, n))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(code,)) for code in "AB"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert errors == []
    facts.wait_until(lambda: statuses(sqlite_engine) == {"PUBLISHED": 40}, timeout=20)
    check_order(entries(redis_client))


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "postgresql://u@h/db", "oracle://u@h/db"])
def test_databases_that_cannot_hold_an_outbox_are_refused(url: str) -> None:
    with pytest.raises(ConfigurationError):
        Relay(url, STREAMS)
