"""Each metric moved by what it is about, on a real database and a real Redis (G23, G24, S15)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from tests.integration.test_plans import touched
from tests.support.facts import Facts
from zzol_relay import Event, Relay, Stream
from zzol_relay.core.observer import (
    CircuitChanged,
    DataLossDetected,
    LoopFailed,
    Settled,
    ShardUnusable,
)
from zzol_relay.metrics import METRICS, Metrics
from zzol_relay.store.gauges import GaugeStore

KEY = "zzol:{room:0}"
STREAMS = [Stream(name="room", retention=0)]
KINDS = {metric.name: metric.kind for metric in METRICS}

Ask = Callable[..., float]


class Watch:
    """A relay's metrics in a registry of their own."""

    def __init__(self, relay: Relay) -> None:
        self.registry = CollectorRegistry()
        Metrics(self.registry).attach(relay)

    def __call__(self, name: str, **labels: str) -> float:
        """The value of ``zzol_<name>``; of a histogram the count; 0 where there is no such sample."""
        kind = KINDS[f"zzol_{name}"]
        suffix = {"counter": "_total", "histogram": "_count"}.get(kind, "")
        return self.registry.get_sample_value(f"zzol_{name}{suffix}", labels) or 0.0


def record(relay: Relay, engine: Engine, count: int = 1, aggregate: str = "A") -> list[Event]:
    with Session(engine) as session, session.begin():
        return relay.record_all(
            session,
            [
                Event(type="t", stream="room", aggregate_type="room", aggregate_id=aggregate, data=n)
                for n in range(count)
            ],
        )


def execute(engine: Engine, statement: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(statement))


def due_now(engine: Engine) -> None:
    execute(engine, "UPDATE zzol_outbox_event SET due_at = UTC_TIMESTAMP(6) WHERE status = 'PENDING'")


@pytest.mark.usefixtures("relay_tables")
def test_commits_of_a_healthy_day(engine: Engine, make_relay: Any, facts: Facts) -> None:
    relay: Relay = make_relay(engine, STREAMS, start=False)
    value = Watch(relay)
    relay.start()
    began = time.time()
    for _ in range(3):
        record(relay, engine)
    facts.wait_until(lambda: value("outbox_settled", path="after_commit") == 3)
    assert value("outbox_recorded") == 3
    assert value("outbox_published", path="after_commit") == 3
    assert value("outbox_commit_to_publish_seconds", path="after_commit") == 3
    assert value("outbox_commit_wait_seconds") == 3
    total = value.registry.get_sample_value("zzol_outbox_commit_to_publish_seconds_sum", {"path": "after_commit"})
    assert total is not None
    assert 0.0001 < total < 3.0, "the time that Redis took is in it"
    assert began - 1 < value("last_publish_timestamp_seconds", path="after_commit") <= time.time()
    assert began - 5 < value("outbox_last_published_timestamp_seconds") < time.time() + 5
    facts.wait_for_beats("poller", 1)
    for loop in ("poller", "settler", "dispatcher", "heartbeat"):
        assert began - 1 < value("loop_last_success_timestamp_seconds", loop=loop) <= time.time(), loop
    assert value("outbox_backlog", status="PENDING") == value("outbox_oldest_unpublished_age_seconds") == 0
    assert value("circuit_open") == value("loop_failures", loop="poller") == 0


@pytest.mark.usefixtures("relay_tables")
def test_the_poller_a_resend_and_the_backlog(engine: Engine, make_relay: Any) -> None:
    producer: Relay = make_relay(engine, STREAMS, mode="polling", worker=False, start=False)
    worker: Relay = make_relay(engine, [], worker=False, start=False)
    value = Watch(worker)
    record(producer, engine, 5)
    execute(engine, "UPDATE zzol_outbox_event SET created_at = created_at - INTERVAL 100 SECOND WHERE sequence = 3")
    assert value("outbox_backlog", status="PENDING") == 5
    assert value("outbox_oldest_unpublished_age_seconds") < 50, (
        "the lowest id is the oldest; created_at is not searched"
    )
    execute(engine, "UPDATE zzol_outbox_event SET created_at = created_at - INTERVAL 100 SECOND WHERE sequence = 1")
    assert 100 <= value("outbox_oldest_unpublished_age_seconds") < 150
    worker._publisher.learn([KEY])
    assert worker.run_once() == 5
    assert value("outbox_claimed") == value("outbox_published", path="poller") == 5
    assert value("outbox_settled", path="poller") == value("outbox_commit_to_publish_seconds", path="poller") == 5
    assert value("last_publish_timestamp_seconds", path="poller") > 0
    assert value("outbox_backlog", status="PENDING") == 0
    # Acknowledged but not marked (G12).
    execute(engine, "UPDATE zzol_outbox_event SET status = 'PENDING', due_at = UTC_TIMESTAMP(6) WHERE sequence = 5")
    worker.run_once()
    assert value("outbox_duplicates_suppressed", path="poller") == 1
    assert value("outbox_published", path="poller") == 5


@pytest.mark.usefixtures("relay_tables")
def test_an_event_that_fails_by_its_own_fault(engine: Engine, make_relay: Any, redis_client: redis.Redis) -> None:
    relay: Relay = make_relay(engine, STREAMS, mode="polling", worker=False, start=False, max_attempts=3)
    value = Watch(relay)
    (event,) = record(relay, engine)
    redis_client.lpush(f"{KEY}:seen:{event.event_id}", "of the wrong type")
    relay._publisher.learn()
    for _ in range(3):
        due_now(engine)
        relay.run_once()
    assert value("outbox_failed") == value("outbox_retried") == 2
    assert value("outbox_dead_lettered") == value("outbox_backlog", status="DEAD_LETTER") == 1


@pytest.mark.usefixtures("relay_tables")
def test_a_claim_that_expires(engine: Engine, make_relay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    relay: Relay = make_relay(engine, STREAMS, mode="polling", worker=False, start=False)
    value = Watch(relay)
    record(relay, engine)
    relay._publisher.learn()
    publish = relay._publisher.publish

    def slowly(commands: Any) -> Any:
        assert value("outbox_backlog", status="IN_PROGRESS") == 1
        execute(engine, "UPDATE zzol_outbox_event SET due_at = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND")
        assert relay.recover() == 1
        return publish(commands)

    monkeypatch.setattr(relay._publisher, "publish", slowly)
    assert relay.run_once() == 0
    assert value("outbox_recovered") == value("outbox_claims_lost", path="poller") == 1


@pytest.mark.usefixtures("relay_tables")
def test_redis_going_away_and_coming_back_empty(engine: Engine, make_relay: Any, own_redis: Any, facts: Facts) -> None:
    relay: Relay = make_relay(engine, STREAMS, redis_url=own_redis.url, born_lease=0.5)
    value = Watch(relay)
    record(relay, engine)
    facts.wait_for(Settled)
    own_redis.kill()
    record(relay, engine)
    facts.wait_for(lambda fact: isinstance(fact, CircuitChanged) and fact.open)
    record(relay, engine)
    assert value("circuit_open") == value("circuit_openings") == 1
    assert value("outbox_deferred", path="after_commit", reason="outage") == 1
    assert value("outbox_deferred", path="after_commit", reason="circuit") == 1
    assert value("outbox_backlog", status="PENDING") == 2
    own_redis.start()
    facts.wait_for(DataLossDetected)
    facts.wait_until(lambda: value("outbox_backlog", status="PENDING") == 0)
    assert value("redis_data_losses") >= 1
    assert value("circuit_open") == 0


@pytest.mark.usefixtures("relay_tables")
def test_a_shard_that_cannot_be_written(
    engine: Engine, make_relay: Any, redis_client: redis.Redis, facts: Facts
) -> None:
    relay: Relay = make_relay(engine, STREAMS, born_lease=0.5)
    value = Watch(relay)
    redis_client.set(KEY, "not a stream")
    record(relay, engine)
    facts.wait_for(ShardUnusable)
    assert value("redis_shards_unusable") >= 1
    redis_client.delete(KEY)


@pytest.mark.usefixtures("relay_tables")
def test_the_direct_path(engine: Engine, make_relay: Any, own_redis: Any) -> None:
    relay: Relay = make_relay(engine, STREAMS, redis_url=own_redis.url, worker=False, start=False)
    value = Watch(relay)

    async def play() -> None:
        async with relay:
            await relay.publish(Event(type="tap", stream="room", data=1))
            own_redis.kill()
            relay.publish_soon(Event(type="tap", stream="room", data=2))

    asyncio.run(play())
    assert value("direct_published") == value("direct_dropped") == 1
    assert value("last_publish_timestamp_seconds", path="direct") > 0


def test_loops_that_fail(engine: Engine, make_relay: Any, facts: Facts) -> None:
    relay: Relay = make_relay(engine, STREAMS, start=False)
    value = Watch(relay)
    relay.start()
    facts.wait_for(lambda fact: isinstance(fact, LoopFailed) and fact.loop == "poller")
    assert value("loop_failures", loop="poller") >= 1
    assert value("loop_last_success_timestamp_seconds", loop="poller") == 0
    # Nor is there a backlog to read.
    assert value("outbox_backlog", status="PENDING") == 0
    assert value("gauges_failures") >= 1


@pytest.mark.usefixtures("relay_tables")
def test_what_is_swallowed_is_counted(engine: Engine, make_relay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad_observer(fact: Any) -> None:
        raise ValueError("of the application's own")

    def bad_hook(shipments: Any) -> Any:
        raise ValueError("a defect")

    relay: Relay = make_relay(engine, STREAMS, observers=[bad_observer], worker=False)
    value = Watch(relay)
    record(relay, engine)
    assert value("observer_errors") >= 1
    monkeypatch.setattr(relay._after_commit, "submit", bad_hook)
    record(relay, engine)
    assert value("hook_errors") == 1


@pytest.mark.usefixtures("relay_tables")
def test_upkeep(engine: Engine, make_relay: Any, facts: Facts) -> None:
    relay: Relay = make_relay(engine, STREAMS, worker=False, cleanup_batch=2)
    value = Watch(relay)
    record(relay, engine, 5)
    facts.wait_for(Settled)
    execute(engine, "UPDATE zzol_outbox_event SET due_at = due_at - INTERVAL 2 DAY")
    assert relay.cleanup() == 5
    assert value("outbox_cleaned_up", table="outbox_event") == 5
    tries: list[int] = []

    def victim(connection: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            connection.execute(text("SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'deadlock'"))

    relay._database.run("settle", victim)
    assert value("outbox_deadlock_retries", operation="settle") == 1


@pytest.mark.usefixtures("relay_tables")
def test_of_many_processes_one_reports_the_backlog(engine: Engine, make_relay: Any) -> None:
    relays: list[Relay] = [make_relay(engine, STREAMS, mode="polling", worker=False) for _ in range(3)]
    watches = [Watch(relay) for relay in relays]
    record(relays[0], engine, 4)

    def reported() -> list[float | None]:
        name, labels = "zzol_outbox_backlog", {"status": "PENDING"}
        return [watch.registry.get_sample_value(name, labels) for watch in watches]

    assert reported() == reported() == [4.0, None, None]
    # A graceful stop hands the duty on at once.
    relays[0].stop()
    watches.pop(0)
    assert reported() == [4.0, None]
    # One that dies keeps it for the rest of its lease.
    watches.reverse()
    assert reported() == [None, 4.0]
    execute(engine, "UPDATE zzol_relay_duty SET lease_until = UTC_TIMESTAMP(6) WHERE name = 'gauges'")
    assert reported() == [4.0, None]


@pytest.mark.usefixtures("relay_tables")
def test_a_scrape_does_not_hang_with_the_database(engine: Engine, make_relay: Any, database_server: Any) -> None:
    relay: Relay = make_relay(engine, STREAMS, worker=False, start=False)
    value = Watch(relay)
    assert value("gauges_failures") == 0
    database_server.pause()
    began = time.monotonic()
    assert value("outbox_recorded") == 0
    assert time.monotonic() - began < 10
    database_server.resume()
    # The question under way is answered late, and the next one in time.
    assert value("gauges_failures") >= 1


@pytest.mark.usefixtures("relay_tables")
def test_counts_end_at_the_cap(engine: Engine, make_relay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zzol_relay.store.gauges.CAP", 3)
    relay: Relay = make_relay(engine, STREAMS, mode="polling", worker=False, start=False)
    value = Watch(relay)
    record(relay, engine, 6)
    assert value("outbox_backlog", status="PENDING") == 4
    assert relay.status().backlog.by_status == {
        "PENDING": 4, "IN_PROGRESS": 0, "PUBLISHED": 0, "DEAD_LETTER": 0, "DISCARDED": 0
    }  # fmt: skip


@pytest.mark.usefixtures("relay_tables")
def test_what_the_backlog_costs_does_not_grow_with_the_table(
    engine: Engine, make_relay: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zzol_relay.store.gauges.CAP", 20)
    relay: Relay = make_relay(engine, STREAMS, mode="polling", worker=False, start=False, database_pool=1)
    relay._publisher.learn()
    record(relay, engine, 400)
    assert relay.run_once() == 400
    record(relay, engine, 400)
    gauges = GaugeStore(relay._database)
    # 21 entries of the index, and as many rows of the derived table, for each status that is full.
    assert touched(relay, gauges.waiting) <= 100
    assert touched(relay, relay._store.backlog) <= 150
