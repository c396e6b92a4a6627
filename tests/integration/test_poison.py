"""Rows that fail by their own fault, kill their worker, or come from another past (Z13, Z31, S9, G9)."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from sqlalchemy import Engine, text

from tests.support.facts import Facts
from tests.support.outbox import KEY, execute, record
from tests.support.streams import check_order, entries, outbox_rows, statuses
from zzol_relay import Event, Relay
from zzol_relay.core.observer import DeadLettered, Failed

pytestmark = pytest.mark.usefixtures("relay_tables")


def test_a_row_that_kills_its_worker_is_claimed_alone_and_ends_as_a_dead_letter(
    producer: Relay, worker: Relay, engine: Engine, redis_client: redis.Redis, facts: Facts
) -> None:
    """Z13: recovery counts; a killer neither loops for ever nor takes its neighbours with it."""
    killer = record(producer, engine, "K")[0]
    record(producer, engine, "N", 2)
    batch = worker._claims.claim()
    assert len(batch.rows) == 3
    for attempt in range(1, 11):
        execute(engine, "UPDATE zzol_outbox_event SET due_at = UTC_TIMESTAMP(6) - INTERVAL 1 HOUR"
                        " WHERE status = 'IN_PROGRESS'")  # fmt: skip
        worker.recover()
        execute(engine, "UPDATE zzol_outbox_event SET due_at = UTC_TIMESTAMP(6) - INTERVAL 1 MINUTE"
                        " WHERE status = 'PENDING' AND aggregate_id = 'K'")  # fmt: skip
        if attempt < 10:
            claim = worker._claims.claim()
            assert [planned.row.event_id for planned in claim.rows] == [killer.event_id]
    execute(engine, "UPDATE zzol_outbox_event SET due_at = UTC_TIMESTAMP(6) WHERE status = 'PENDING'")
    while worker.run_once():
        pass
    assert statuses(engine) == {"DEAD_LETTER": 1, "PUBLISHED": 2}
    assert facts.of(DeadLettered)[0].event_id == killer.event_id


def poison(redis_client: redis.Redis, event: Event) -> None:
    redis_client.lpush(f"{KEY}:seen:{event.event_id}", "of the wrong type")


def test_a_poison_row_costs_attempts_and_dies_while_the_others_go_on(
    producer: Relay, worker: Relay, engine: Engine, redis_client: redis.Redis, facts: Facts
) -> None:
    """Z13, Z31, S9: own error, backoff, dead letter at the tenth; under skip its aggregate goes on past it."""
    events = record(producer, engine, "A", 3)
    poison(redis_client, events[1])
    record(producer, engine, "B")
    for _ in range(40):
        worker.run_once()
        execute(engine, "UPDATE zzol_outbox_event SET due_at = UTC_TIMESTAMP(6) WHERE status = 'PENDING'")
    assert statuses(engine) == {"PUBLISHED": 3, "DEAD_LETTER": 1}
    dead = outbox_rows(engine)[1]
    assert (dead.retry_count, dead.sequence) == (10, 2)
    assert "WRONGTYPE" in dead.last_error
    assert [fact.retry_count for fact in facts.of(Failed)] == list(range(1, 10))
    found = entries(redis_client)
    check_order(found)
    assert [e.sequence for e in found if e.subject == "room/A"] == [1, 3]


def test_under_block_the_aggregate_waits_for_the_operator(
    producer: Relay, engine: Engine, make_relay: Any, redis_client: redis.Redis
) -> None:
    worker: Relay = make_relay(engine, [], worker=False, on_dead_letter="block", max_attempts=1, start=False)
    events = record(producer, engine, "A", 2)
    poison(redis_client, events[0])

    def poll() -> None:
        for _ in range(5):
            execute(engine, "UPDATE zzol_outbox_event SET due_at = UTC_TIMESTAMP(6) WHERE status = 'PENDING'")
            worker.run_once()

    poll()
    assert statuses(engine) == {"DEAD_LETTER": 1, "PENDING": 1}
    redis_client.delete(f"{KEY}:seen:{events[0].event_id}")
    assert worker.dead_letters.replay([events[0].event_id], actor="ann") == 1  # type: ignore[list-item]
    poll()
    found = entries(redis_client)
    assert [(e.sequence, e.replay) for e in found] == [(1, None), (2, None)]


def test_discarding_lets_a_blocked_aggregate_go(
    producer: Relay, engine: Engine, make_relay: Any, redis_client: redis.Redis
) -> None:
    worker: Relay = make_relay(engine, [], worker=False, on_dead_letter="block", max_attempts=1, start=False)
    events = record(producer, engine, "A", 2)
    poison(redis_client, events[0])
    worker.run_once()
    assert worker.dead_letters.discard([events[0].event_id], actor="ann") == 1  # type: ignore[list-item]
    execute(engine, "UPDATE zzol_outbox_event SET due_at = UTC_TIMESTAMP(6) WHERE status = 'PENDING'")
    worker.run_once()
    assert [e.sequence for e in entries(redis_client)] == [2]
    assert statuses(engine) == {"DISCARDED": 1, "PUBLISHED": 1}


def test_a_replay_under_skip_stands_behind_its_successors_and_says_so(
    producer: Relay, engine: Engine, make_relay: Any, redis_client: redis.Redis
) -> None:
    """Promise 2's visible exception; Z13: no automatic retry before."""
    worker: Relay = make_relay(engine, [], worker=False, max_attempts=1, start=False)
    events = record(producer, engine, "A", 2)
    poison(redis_client, events[0])
    worker.run_once()
    execute(engine, "UPDATE zzol_outbox_event SET due_at = UTC_TIMESTAMP(6) WHERE status = 'PENDING'")
    worker.run_once()
    assert statuses(engine) == {"DEAD_LETTER": 1, "PUBLISHED": 1}
    assert worker.run_once() == 0
    redis_client.delete(f"{KEY}:seen:{events[0].event_id}")
    dead = worker.dead_letters.list()
    assert [record.event_id for record in dead] == [events[0].event_id]
    assert worker.dead_letters.replay([dead[0].event_id], actor="ann") == 1
    assert worker.dead_letters.replay([dead[0].event_id], actor="ann") == 0
    assert worker.run_once() == 1
    assert [(e.sequence, e.replay) for e in entries(redis_client)] == [(2, None), (1, "1")]
    with engine.connect() as connection:
        audit = connection.execute(text("SELECT actor, action, affected FROM zzol_relay_audit ORDER BY id")).all()
    assert [tuple(line) for line in audit] == [("ann", "replay", 1), ("ann", "replay", 0)]


def test_a_replayed_row_keeps_its_number_until_it_is_published(
    producer: Relay, engine: Engine, make_relay: Any, redis_client: redis.Redis
) -> None:
    """The dagger rule: the reply of a replay is lost, the row is sent again under the same number, once there."""
    worker: Relay = make_relay(engine, [], worker=False, max_attempts=1, start=False)
    (dead,) = record(producer, engine)
    poison(redis_client, dead)
    worker.run_once()
    redis_client.delete(f"{KEY}:seen:{dead.event_id}")
    worker.dead_letters.replay([dead.event_id])  # type: ignore[list-item]
    claim = worker._claims.claim()
    shipment_mode = claim.rows[0].mode.value
    worker._claims.give_back(claim.token, [claim.rows[0].row.id], 0)
    again = worker._claims.claim()
    assert (shipment_mode, again.rows[0].mode.value) == ("replay", "replay")
    assert again.rows[0].row.replays == 1


def test_past_of_a_young_row_becomes_a_dead_letter_and_of_an_old_one_is_settled(
    producer: Relay, worker: Relay, engine: Engine, redis_client: redis.Redis, facts: Facts
) -> None:
    """The dagger rule: a sequence that restarted (a restored database) must be seen, never settled in silence."""
    record(producer, engine)
    redis_client.set(f"{KEY}:tail:room:A", "7")
    worker._publisher.learn([KEY])
    worker.run_once()
    assert statuses(engine) == {"DEAD_LETTER": 1}
    assert "restored" in facts.of(DeadLettered)[0].error
    execute(engine, "UPDATE zzol_outbox_event SET status = 'PENDING', created_at = created_at - INTERVAL 11 MINUTE")
    worker.run_once()
    assert statuses(engine) == {"PUBLISHED": 1}
    assert entries(redis_client) == []
