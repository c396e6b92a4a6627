"""MySQL going away under running loops: they live on, and nothing is lost (S9)."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from tests.support.facts import Facts
from tests.support.streams import check_order, entries, statuses
from zzol_relay import Event, Relay, SchemaError, Stream
from zzol_relay.core.observer import LoopFailed, Settled

STREAMS = [Stream(name="room", retention=0)]


def happened(n: int, aggregate: str = "A") -> Event:
    return Event(type="t", stream="room", aggregate_type="room", aggregate_id=aggregate, data=n)


def commit(relay: Relay, engine: Engine, n: int) -> None:
    with Session(engine) as session, session.begin():
        relay.record(session, happened(n))


@pytest.mark.usefixtures("relay_tables")
def test_loops_survive_a_database_that_dies_and_comes_back(
    engine: Engine, make_relay: Any, database_server: Any, redis_client: redis.Redis, facts: Facts
) -> None:
    relay: Relay = make_relay(engine, STREAMS, born_lease=0.5)
    commit(relay, engine, 1)
    facts.wait_for(Settled)
    database_server.kill()
    facts.wait_for(lambda fact: isinstance(fact, LoopFailed) and fact.loop == "poller")
    with pytest.raises(DBAPIError):
        commit(relay, engine, 2)
    database_server.start()
    facts.clear()
    facts.wait_for_beats("poller", 1)
    commit(relay, engine, 3)
    facts.wait_until(lambda: statuses(engine) == {"PUBLISHED": 2}, timeout=30)
    assert [e.data for e in entries(redis_client)] == [1, 3]


@pytest.mark.usefixtures("relay_tables")
def test_a_database_that_dies_between_publish_and_settle_leaves_one_entry(
    engine: Engine, make_relay: Any, database_server: Any, redis_client: redis.Redis, facts: Facts
) -> None:
    """G12: acked but not marked; the resend is a duplicate."""
    producer: Relay = make_relay(engine, STREAMS, worker=False, mode="polling")
    for n in range(3):
        commit(producer, engine, n)
    worker: Relay = make_relay(engine, [], worker=False, claim_lease=1.0)
    worker._publisher.learn(["zzol:{room:0}"])
    send = worker._worker._delivery.send

    def die_after_publishing(shipments: Any, path: Any) -> Any:
        sent = send(shipments, path)
        database_server.kill()
        return sent

    worker._worker._delivery.send = die_after_publishing  # type: ignore[method-assign]
    with pytest.raises(DBAPIError):
        worker.run_once()
    before = entries(redis_client)
    assert len(before) == 3
    database_server.start()
    make_relay(engine, [])
    facts.wait_until(lambda: statuses(engine) == {"PUBLISHED": 3}, timeout=30)
    assert entries(redis_client) == before


def test_missing_tables_are_named_and_the_relay_comes_to_life_when_they_are_there(
    engine: Engine, make_relay: Any, facts: Facts
) -> None:
    relay: Relay = make_relay(engine, STREAMS)
    failed = facts.wait_for(lambda fact: isinstance(fact, LoopFailed) and fact.loop == "poller")
    assert "zzol-relay migrate" in failed[0].error
    with pytest.raises(SchemaError):
        relay.run_once()
    relay._database.tables.metadata.create_all(engine)
    facts.wait_for_beats("poller", 1)
    commit(relay, engine, 1)
    facts.wait_for(Settled)


@pytest.mark.usefixtures("relay_tables")
def test_deadlocks_of_the_relays_own_transactions_run_again(engine: Engine, make_relay: Any, facts: Facts) -> None:
    from zzol_relay.core.observer import DeadlockRetried

    relay: Relay = make_relay(engine, STREAMS, worker=False)
    tries: list[int] = []

    def victim(connection: Any) -> str:
        tries.append(1)
        if len(tries) < 3:
            connection.execute(text("SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'deadlock'"))
        return "done"

    assert relay._database.run("test", victim) == "done"
    assert [fact.operation for fact in facts.of(DeadlockRetried)] == ["test", "test"]

    def always(connection: Any) -> None:
        connection.execute(text("SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1205, MESSAGE_TEXT = 'waited'"))

    with pytest.raises(DBAPIError):
        relay._database.run("test", always)


@pytest.mark.usefixtures("relay_tables")
def test_concurrent_recorders_of_new_aggregates_do_not_deadlock(
    engine: Engine, make_relay: Any, redis_client: redis.Redis, facts: Facts
) -> None:
    """One upsert instead of SELECT … FOR UPDATE and INSERT; ``record_all`` sorts. The caller's transactions are not
    retried by us, so not one may deadlock."""
    import random
    import threading

    relay: Relay = make_relay(engine, STREAMS)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for n in range(40):
                with Session(engine) as session, session.begin():
                    codes = [f"new-{n}-{rng.randrange(4)}" for _ in range(3)]
                    relay.record_all(session, [happened(n, code) for code in codes])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert errors == []
    facts.wait_until(lambda: statuses(engine) == {"PUBLISHED": 720}, timeout=30)
    check_order(entries(redis_client))
    assert len(entries(redis_client)) == 720
