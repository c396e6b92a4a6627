"""Promise 3 under faults: Redis down, stalled, lying; commits succeed within their bound (Z3, Z4, Z18, Z24, Z29)."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from tests.support.facts import Facts
from tests.support.proxy import TcpProxy
from tests.support.streams import check_order, entries, outbox_rows, statuses
from zzol_relay import Event, Relay, Stream
from zzol_relay.core.observer import CircuitChanged, Deferred, Published, Recorded

pytestmark = pytest.mark.usefixtures("relay_tables")

STREAMS = [Stream(name="room", retention=0)]


def created(code: str, data: Any = None) -> Event:
    return Event(type="room.created", stream="room", aggregate_type="room", aggregate_id=code, data=data)


WAITED = 0.5
"""A wait that ended at its bound of 0.25 s, on a busy machine."""
NOT_WAITED = 0.25
"""Less than the bound: nobody waited for it."""


def commit(relay: Relay, engine: Engine, code: str, data: Any = None) -> None:
    """Record one event and commit."""
    with Session(engine) as session:
        relay.record(session, created(code, data))
        session.commit()


def waits(facts: Facts) -> list[float]:
    """How long each commit was held for its publishing, in seconds."""
    return [fact.waited for fact in facts.of(Recorded)]


@pytest.fixture
def proxy(redis_server: Any) -> Any:
    made = TcpProxy("127.0.0.1", redis_server.port)
    yield made
    made.close()


def through(proxy: TcpProxy) -> str:
    return f"redis://127.0.0.1:{proxy.port}/0"


def test_with_redis_down_commits_succeed_and_do_not_wait_while_the_circuit_is_open(
    engine: Engine, make_relay: Any, own_redis: Any, facts: Facts, caplog: pytest.LogCaptureFixture
) -> None:
    """Z3, Z4: no rollback; one warning per change of state, not per event."""
    relay: Relay = make_relay(engine, STREAMS, redis_url=own_redis.url, worker=True, start=False).start()
    commit(relay, engine, "A", 0)
    own_redis.kill()
    for n in range(1, 21):
        commit(relay, engine, "A", n)
    assert max(waits(facts)) < WAITED
    facts.wait_for(lambda fact: isinstance(fact, CircuitChanged) and fact.open)
    assert max(waits(facts)[-10:]) < NOT_WAITED
    own_redis.start()
    facts.wait_for(lambda fact: isinstance(fact, CircuitChanged) and not fact.open)
    facts.wait_until(lambda: statuses(engine) == {"PUBLISHED": 21})
    with redis.Redis.from_url(own_redis.url, decode_responses=True) as client:
        found = entries(client)
    check_order(found)
    # The first entry went with the server's memory: it had none on disk.
    assert [e.data for e in found] == list(range(1, 21))
    warnings = [r for r in caplog.records if r.name == "zzol_relay.circuit"]
    assert len(warnings) == 2
    assert {row.retry_count for row in outbox_rows(engine)} == {0}


def test_a_stalled_redis_bounds_the_wait_and_takes_no_connection_hostage(
    engine: Engine, make_relay: Any, proxy: TcpProxy, facts: Facts
) -> None:
    """Z29: with an application pool of one connection, others go on while a commit waits."""
    small = create_engine(engine.url, pool_size=1, max_overflow=0, pool_timeout=1)
    relay: Relay = make_relay(small, STREAMS, redis_url=through(proxy), worker=False, start=False).start()
    commit(relay, small, "A")
    proxy.stall()
    recorded = threading.Event()

    def commit_while_stalled() -> None:
        with Session(small) as session:
            relay.record(session, created("A"))
            recorded.set()
            session.commit()

    thread = threading.Thread(target=commit_while_stalled)
    thread.start()
    assert recorded.wait(5)
    queries = 0
    while thread.is_alive():
        with small.connect() as connection:
            assert connection.execute(text("SELECT 1")).scalar() == 1
            queries += 1
    thread.join()
    assert NOT_WAITED <= waits(facts)[-1] < WAITED
    assert queries > 3
    facts.wait_for(lambda fact: isinstance(fact, CircuitChanged) and fact.open)
    commit(relay, small, "A")
    assert waits(facts)[-1] < NOT_WAITED
    proxy.resume()
    facts.wait_for(lambda fact: isinstance(fact, CircuitChanged) and not fact.open)
    small.dispose()


def test_a_lost_reply_leaves_one_entry(
    engine: Engine, make_relay: Any, proxy: TcpProxy, redis_client: redis.Redis, facts: Facts
) -> None:
    """G11: the XADD happened, its reply was lost; the resend is a duplicate."""
    relay: Relay = make_relay(engine, STREAMS, redis_url=through(proxy), born_lease=0.6, worker=True, start=False)
    relay.start()
    commit(relay, engine, "A", 0)
    proxy.drop_replies()
    commit(relay, engine, "A", 1)
    proxy.resume()
    facts.wait_until(lambda: statuses(engine) == {"PUBLISHED": 2})
    assert [e.data for e in entries(redis_client)] == [0, 1]


def test_two_threads_on_one_aggregate_each_find_their_event_in_the_stream(
    engine: Engine, make_relay: Any, redis_client: redis.Redis
) -> None:
    """Promise 3: DEFERRED is repeated within the bound, since the predecessor is in flight in another thread."""
    relay: Relay = make_relay(engine, STREAMS, worker=False, commit_wait=1.5, start=False).start()
    missing: list[str] = []

    def work(name: str) -> None:
        for n in range(30):
            with Session(engine) as session:
                event = relay.record(session, created("HOT", [name, n]))
                session.commit()
            if redis_client.exists(f"zzol:{{room:0}}:seen:{event.event_id}") == 0:
                missing.append(str(event.sequence))

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert missing == []
    found = entries(redis_client)
    check_order(found)
    assert len(found) == 120


def test_a_missing_tail_is_proven_from_the_database(engine: Engine, make_relay: Any, redis_client: redis.Redis) -> None:
    """The tail's TTL ran out: the predecessor's row is settled, so the event goes as head within its commit."""
    relay: Relay = make_relay(engine, STREAMS, worker=False, start=False).start()
    commit(relay, engine, "A", 1)
    redis_client.delete("zzol:{room:0}:tail:room:A")
    with relay._database.engine.begin() as connection:
        connection.execute(text("UPDATE zzol_outbox_event SET status = 'PUBLISHED'"))
    commit(relay, engine, "A", 2)
    assert [e.data for e in entries(redis_client)] == [1, 2]


def test_an_unpublished_predecessor_defers_and_costs_nothing(
    engine: Engine, make_relay: Any, redis_client: redis.Redis, facts: Facts
) -> None:
    """Z18: the later event must not overtake the earlier one that is still in the outbox."""
    waiting: Relay = make_relay(engine, STREAMS, worker=False, mode="polling", start=False)
    relay: Relay = make_relay(engine, STREAMS, worker=False, start=False).start()
    commit(waiting, engine, "A", 1)
    commit(relay, engine, "A", 2)
    assert waits(facts)[-1] < WAITED
    assert entries(redis_client) == []
    facts.wait_for(lambda fact: isinstance(fact, Deferred) and fact.reason == "order")
    waiting.run_once()
    assert [e.data for e in entries(redis_client)] == [1]


def test_rows_recorded_in_an_outage_are_born_without_a_lease(
    engine: Engine, make_relay: Any, own_redis: Any, facts: Facts
) -> None:
    """Nobody publishes them after their commit, so that the poller need not wait when Redis is back."""
    relay: Relay = make_relay(engine, STREAMS, redis_url=own_redis.url, worker=False, born_lease=300.0)
    own_redis.kill()
    commit(relay, engine, "A", 1)
    facts.wait_for(lambda fact: isinstance(fact, CircuitChanged) and fact.open)
    commit(relay, engine, "B", 2)
    own_redis.start()
    facts.wait_for(lambda fact: isinstance(fact, CircuitChanged) and not fact.open)
    assert relay.run_once() == 1
    assert {row.aggregate_id: row.status for row in outbox_rows(engine)} == {"A": "PENDING", "B": "PUBLISHED"}


def test_what_overflows_the_queue_is_left_to_the_poller(
    engine: Engine, make_relay: Any, proxy: TcpProxy, facts: Facts
) -> None:
    relay: Relay = make_relay(
        engine, STREAMS, redis_url=through(proxy), worker=False, dispatch_queue=3, start=False
    ).start()
    proxy.stall()
    with Session(engine) as session, session.begin():
        relay.record_all(session, [created(str(n)) for n in range(4)])
    assert facts.of(Deferred)[0].reason == "overflow"
    assert waits(facts)[0] < NOT_WAITED


def test_a_relay_that_is_not_started_records_and_does_not_wait(engine: Engine, make_relay: Any, facts: Facts) -> None:
    relay: Relay = make_relay(engine, STREAMS, worker=False, start=False)
    commit(relay, engine, "A")
    assert waits(facts)[-1] < NOT_WAITED
    assert statuses(engine) == {"PENDING": 1}
    assert facts.of(Deferred)[0].reason == "stopping"


def test_a_start_while_redis_is_down_succeeds_and_publishes_when_it_comes(
    engine: Engine, make_relay: Any, own_redis: Any, facts: Facts
) -> None:
    own_redis.kill()
    relay: Relay = make_relay(engine, STREAMS, redis_url=own_redis.url, worker=True, start=False).start()
    commit(relay, engine, "A")
    assert waits(facts)[-1] < NOT_WAITED
    own_redis.start()
    facts.wait_until(lambda: statuses(engine) == {"PUBLISHED": 1})


@pytest.mark.parametrize("driver", ["aiomysql", "asyncmy"])
def test_an_async_session_waits_without_blocking_the_loop(
    engine: Engine, make_relay: Any, proxy: TcpProxy, redis_client: redis.Redis, facts: Facts, driver: str
) -> None:
    async def scenario() -> int:
        async_engine = create_async_engine(engine.url.set(drivername=f"mysql+{driver}"))
        relay: Relay = make_relay(async_engine, STREAMS, redis_url=through(proxy), worker=False, start=False).start()
        async with AsyncSession(async_engine) as session:
            await session.run_sync(relay.record, created("A", 1))
            await session.commit()
            assert [e.data for e in entries(redis_client)] == [1]
            proxy.stall()
            await session.run_sync(relay.record, created("A", 2))
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    await asyncio.sleep(0.01)
                    ticks += 1

            ticking = asyncio.create_task(tick())
            await session.commit()
            ticking.cancel()
            # Cancelled while it waits: the commit is done, the session stays usable.
            await session.run_sync(relay.record, created("B", 3))
            cancelled = asyncio.create_task(session.commit())
            while not cancelled.done() and relay._after_commit._pending < 2:
                await asyncio.sleep(0.001)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            assert (await session.execute(text("SELECT 1"))).scalar() == 1
        proxy.resume()
        await async_engine.dispose()
        return ticks

    ticks = asyncio.run(scenario())
    assert max(waits(facts)) < WAITED
    assert ticks >= 5
    assert len(outbox_rows(engine)) == 3


def test_the_fact_of_publishing_names_its_path(
    engine: Engine, make_relay: Any, facts: Facts, redis_client: redis.Redis
) -> None:
    relay: Relay = make_relay(engine, STREAMS, worker=False, start=False).start()
    commit(relay, engine, "A")
    assert facts.of(Published)[0].path == "after_commit"
