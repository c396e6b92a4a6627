"""The fallback: claim, publish, settle, back off, recover, clean up (Z9-Z13, Z27-Z36, G7-G12, G17, G18)."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, event, text
from sqlalchemy.orm import Session

from tests.support.facts import Facts
from tests.support.streams import check_order, entries, outbox_rows, statuses
from zzol_relay import Event, Relay, Status, Stream
from zzol_relay.core.observer import Claimed, ClaimLost, DeadLettered, Deferred, Failed, Recovered, Settled

pytestmark = pytest.mark.usefixtures("relay_tables")

STREAMS = [Stream(name="room", retention=0)]
KEY = "zzol:{room:0}"


def record(relay: Relay, engine: Engine, aggregate: str | None = "A", count: int = 1, **fields: Any) -> list[Event]:
    kind = None if aggregate is None else "room"
    with Session(engine) as session, session.begin():
        return relay.record_all(
            session,
            [
                Event(type="t", stream="room", aggregate_type=kind, aggregate_id=aggregate, data=n, **fields)
                for n in range(count)
            ],
        )


def execute(engine: Engine, statement: str, **parameters: Any) -> int:
    with engine.begin() as connection:
        return connection.execute(text(statement), parameters).rowcount


@pytest.fixture
def producer(engine: Engine, make_relay: Any) -> Relay:
    """Records rows that are due at once and publishes nothing by itself (polling mode)."""
    relay: Relay = make_relay(engine, STREAMS, worker=False, mode="polling", start=False)
    return relay


@pytest.fixture
def worker(engine: Engine, make_relay: Any) -> Relay:
    """A bare worker: it declares no stream, and is driven by ``run_once``."""
    relay: Relay = make_relay(engine, [], worker=False, start=False)
    return relay


def test_a_bare_worker_publishes_what_is_due_in_order_and_settles_it(
    producer: Relay, worker: Relay, engine: Engine, redis_client: redis.Redis, facts: Facts
) -> None:
    """Z7, Z9, Z13, Z26: the stored key alone tells where a row goes."""
    record(producer, engine, "A", 3)
    record(producer, engine, "B", 2)
    record(producer, engine, None, 2)
    assert worker.run_once() == 7
    found = entries(redis_client)
    check_order(found)
    assert len(found) == 7
    rows = outbox_rows(engine)
    assert {row.status for row in rows} == {"PUBLISHED"}
    assert {row.stream_entry_id for row in rows} == {entry.entry_id for entry in found}
    assert len(facts.of(Settled)) >= 1
    assert worker.run_once() == 0


def test_fresh_rows_belong_to_their_process_until_the_born_lease_ends(
    engine: Engine, make_relay: Any, worker: Relay, redis_client: redis.Redis
) -> None:
    """Z35: the poller must not take a row that is being published right after commit."""
    app: Relay = make_relay(engine, STREAMS, worker=False)
    app._after_commit.submit = lambda shipments: None  # type: ignore[method-assign]
    record(app, engine)
    assert statuses(engine) == {"PENDING": 1}
    assert worker.run_once() == 0
    execute(engine, "UPDATE zzol_outbox_event SET due_at = due_at - INTERVAL 2 SECOND")
    assert worker.run_once() == 1
    assert len(entries(redis_client)) == 1


def test_no_transaction_and_no_connection_is_held_while_publishing(
    producer: Relay, worker: Relay, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Z29, Z30, G17: the naive worker in the same test holds one; ours holds none."""
    record(producer, engine, "A", 2)
    pool: Any = worker._database.engine.pool
    held: list[int] = []
    publish = worker._publisher.publish

    def watching(commands: Any) -> Any:
        held.append(pool.checkedout())
        return publish(commands)

    monkeypatch.setattr(worker._publisher, "publish", watching)
    assert worker.run_once() == 2
    assert held == [0]

    record(producer, engine, "A", 1)
    with worker._database.engine.begin() as connection:
        connection.execute(text("SELECT id FROM zzol_outbox_event WHERE status = 'PENDING' FOR UPDATE SKIP LOCKED"))
        watching([])
    assert held == [0, 1]


def test_two_workers_share_the_rows_and_publish_each_once(
    producer: Relay, engine: Engine, make_relay: Any, redis_client: redis.Redis
) -> None:
    """Z35, G18: SKIP LOCKED shares, the proof orders."""
    for code in "ABCDEFGH":
        record(producer, engine, code, 30)
    workers = [make_relay(engine, [], worker=False, batch_rows=20, blocked_delay=0.01, start=False) for _ in range(3)]
    settled = [0, 0, 0]

    def work(index: int) -> None:
        for _ in range(2000):
            settled[index] += workers[index].run_once()
            if sum(settled) >= 240:
                return

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sum(settled) == 240
    check_order(entries(redis_client))
    assert len(entries(redis_client)) == 240


def test_skip_locked_alone_would_reorder(
    producer: Relay, worker: Relay, engine: Engine, redis_client: redis.Redis, facts: Facts
) -> None:
    """G18, the bug shown: while another holds the first row, a naive claim takes the second."""
    record(producer, engine, "A", 2)
    naive = "SELECT id FROM zzol_outbox_event WHERE status = 'PENDING' ORDER BY id LIMIT 50 FOR UPDATE SKIP LOCKED"
    with engine.connect() as other:
        first = outbox_rows(engine, "id")[0].id
        other.execute(text("SELECT id FROM zzol_outbox_event WHERE id = :id FOR UPDATE"), {"id": first})
        with engine.connect() as second:
            second.execution_options(isolation_level="READ COMMITTED")
            taken = second.execute(text(naive)).all()
            assert len(taken) == 1
        assert worker.run_once() == 0
        assert entries(redis_client) == []
        assert facts.of(Deferred)[-1].reason == "order"
    execute(engine, "UPDATE zzol_outbox_event SET due_at = UTC_TIMESTAMP(6)")
    assert worker.run_once() == 2
    assert [e.sequence for e in entries(redis_client)] == [1, 2]


def test_the_proof_reads_after_the_locks(
    producer: Relay, worker: Relay, engine: Engine, redis_client: redis.Redis
) -> None:
    """The dagger rule: a predecessor that is un-settled between snapshot and lock must be seen.

    Between our locking SELECT and our proof, another transaction turns the predecessor back to PENDING (a replay does
    that); a proof inside the locking SELECT would have read it as settled.
    """
    record(producer, engine, "A", 2)
    execute(engine, "UPDATE zzol_outbox_event SET status = 'DEAD_LETTER' WHERE sequence = 1")
    # MariaDB locks the row just past the end of the range it read as well; give it another one to lock.
    record(producer, engine, "Z")
    execute(engine, "UPDATE zzol_outbox_event SET due_at = due_at + INTERVAL 1 HOUR WHERE aggregate_id = 'Z'")
    first = outbox_rows(engine, "id")[0].id
    seen: list[str] = []

    def interleave(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        seen.append(statement)
        if "SKIP LOCKED" in statement:
            # By primary key: a scan would wait for the rows that the claim has locked.
            execute(
                engine,
                "UPDATE zzol_outbox_event SET status = 'PENDING', due_at = due_at + INTERVAL 1 HOUR WHERE id = :id",
                id=first,
            )

    event.listen(worker._database.engine, "after_cursor_execute", interleave)
    assert worker.run_once() == 0
    assert any("SKIP LOCKED" in statement for statement in seen)
    assert entries(redis_client) == []


def test_a_stale_worker_settles_nothing(
    producer: Relay, worker: Relay, engine: Engine, make_relay: Any, facts: Facts
) -> None:
    """Fencing by token and status: by id alone, the first worker would settle the second one's claim."""
    record(producer, engine)
    claim = worker._claims.claim()
    execute(engine, "UPDATE zzol_outbox_event SET due_at = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND")
    assert worker.recover() == 1
    execute(engine, "UPDATE zzol_outbox_event SET due_at = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND")
    second = make_relay(engine, [], worker=False, start=False)._claims
    held = second.claim()
    row_id = held.rows[0].row.id
    assert claim.rows[0].row.id == row_id
    assert worker._claims.settle(claim.token, Status.IN_PROGRESS, [(row_id, "1-0")]) == 0
    assert worker._claims.give_back(claim.token, [row_id], 0) == 0
    assert worker._claims.renew(claim.token, [row_id]) == frozenset()
    assert statuses(engine) == {"IN_PROGRESS": 1}
    assert second.renew(held.token, [row_id]) == {row_id}
    assert second.settle(held.token, Status.IN_PROGRESS, [(row_id, "1-0")]) == 1


def test_recovery_restates_the_lease(producer: Relay, worker: Relay, engine: Engine) -> None:
    """The dagger rule: a claim renewed between recovery's SELECT and its UPDATE is not taken."""
    record(producer, engine)
    claim = worker._claims.claim()
    row_id = claim.rows[0].row.id
    execute(engine, "UPDATE zzol_outbox_event SET due_at = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND")

    def renewed_meanwhile(conn: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        # The same transaction, so that its own row lock does not stand in the way of showing it.
        if "SKIP LOCKED" in statement:
            conn.exec_driver_sql("UPDATE zzol_outbox_event SET due_at = UTC_TIMESTAMP(6) + INTERVAL 30 SECOND")

    event.listen(worker._database.engine, "after_cursor_execute", renewed_meanwhile)
    assert worker.recover() == 0
    assert worker._claims.settle(claim.token, Status.IN_PROGRESS, [(row_id, "1-0")]) == 1


def test_recovery_looks_at_the_lease_and_never_at_the_rows_age(producer: Relay, worker: Relay, engine: Engine) -> None:
    """Z10, Z33: a row created long ago and claimed just now must not be "recovered"; by created_at it would be."""
    record(producer, engine)
    execute(engine, "UPDATE zzol_outbox_event SET created_at = created_at - INTERVAL 3 DAY")
    worker._claims.claim()
    naive = (
        "SELECT COUNT(*) FROM zzol_outbox_event"
        " WHERE status = 'IN_PROGRESS' AND created_at < UTC_TIMESTAMP() - INTERVAL 5 MINUTE"
    )
    with engine.connect() as connection:
        assert connection.execute(text(naive)).scalar() == 1
    assert worker.recover() == 0
    assert statuses(engine) == {"IN_PROGRESS": 1}


def test_an_expired_claim_comes_back_with_backoff_and_one_attempt(
    producer: Relay, worker: Relay, engine: Engine, facts: Facts
) -> None:
    """Z33, G10."""
    record(producer, engine)
    worker._claims.claim()
    execute(engine, "UPDATE zzol_outbox_event SET due_at = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND")
    assert worker.recover() == 1
    (row,) = outbox_rows(engine, "*, due_at > UTC_TIMESTAMP(6) - INTERVAL 1 SECOND AS later")
    assert (row.status, row.retry_count, row.claim_token, row.later) == ("PENDING", 1, None, 1)
    assert facts.of(Recovered)[0].count == 1


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


def test_order_that_is_not_ready_costs_no_attempt_and_does_not_fill_the_window(
    producer: Relay, engine: Engine, make_relay: Any, redis_client: redis.Redis, facts: Facts
) -> None:
    """The dagger rules: DEFERRED is free; rows that wait get a short due_at, so that later ones are reached."""
    worker: Relay = make_relay(engine, [], worker=False, batch_rows=3, blocked_delay=60.0, start=False)
    record(producer, engine, "A", 6)
    execute(engine, "UPDATE zzol_outbox_event SET due_at = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR WHERE sequence = 1")
    record(producer, engine, "B", 1)
    assert worker.run_once() == 1
    assert [e.subject for e in entries(redis_client)] == ["room/B"]
    assert {row.retry_count for row in outbox_rows(engine)} == {0}


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


def test_large_payloads_go_through_in_bounded_batches(
    producer: Relay, engine: Engine, make_relay: Any, redis_client: redis.Redis, facts: Facts
) -> None:
    worker: Relay = make_relay(engine, [], worker=False, batch_rows=10, batch_bytes=100_000, start=False)
    with Session(engine) as session, session.begin():
        for n in range(6):
            producer.record(session, Event(type="t", stream="room", aggregate_type="room", aggregate_id="A",
                                           data=str(n) * 40_000))  # fmt: skip
    assert worker.run_once() == 6
    assert [e.data[0] for e in entries(redis_client)] == list("012345")
    assert max(len(fact.event_ids) for fact in facts.of(Claimed)) == 2


def test_a_worker_told_to_stop_claims_no_more(producer: Relay, worker: Relay, engine: Engine) -> None:
    record(producer, engine)
    worker._worker.stop()
    assert worker.run_once() == 0
    assert statuses(engine) == {"PENDING": 1}


def test_a_claim_given_back_on_stop_costs_nothing(
    producer: Relay, worker: Relay, engine: Engine, monkeypatch: pytest.MonkeyPatch, facts: Facts
) -> None:
    record(producer, engine, "A", 3)
    payloads = worker._claims.payloads

    def stop_meanwhile(ids: Any) -> Any:
        worker._worker.stop()
        return payloads(ids)

    monkeypatch.setattr(worker._claims, "payloads", stop_meanwhile)
    assert worker.run_once() == 0
    assert {(row.status, row.retry_count, row.claim_token) for row in outbox_rows(engine)} == {("PENDING", 0, None)}
    assert facts.of(Deferred)[-1].reason == "stopping"


def test_a_slow_worker_checks_its_claim_just_before_sending(
    producer: Relay,
    engine: Engine,
    make_relay: Any,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    facts: Facts,
) -> None:
    """Rows that recovery has taken meanwhile are not sent."""
    worker: Relay = make_relay(engine, [], worker=False, claim_lease=0.000003, start=False)
    worker._publisher.learn([KEY])
    record(producer, engine, "A", 2)
    payloads = worker._claims.payloads

    def taken_meanwhile(ids: Any) -> Any:
        stolen = "UPDATE zzol_outbox_event SET claim_token = :other WHERE sequence = 1"
        execute(engine, stolen, other=uuid.uuid4().bytes)
        return payloads(ids)

    monkeypatch.setattr(worker._claims, "payloads", taken_meanwhile)
    worker.run_once()
    assert facts.of(ClaimLost)[0].count == 1
    assert entries(redis_client) == []


def test_cleanup_deletes_old_settled_rows_only(
    producer: Relay, worker: Relay, engine: Engine, redis_client: redis.Redis
) -> None:
    """Z10, Z36: by the time of settling, never an unsent row, never by created_at."""
    record(producer, engine, "A", 3)
    worker.run_once()
    record(producer, engine, "B", 2)
    execute(engine, "UPDATE zzol_outbox_event SET created_at = created_at - INTERVAL 3 DAY")
    assert worker.cleanup() == 0
    execute(engine, "UPDATE zzol_outbox_event SET due_at = due_at - INTERVAL 25 HOUR")
    assert worker.cleanup() == 3
    assert statuses(engine) == {"PENDING": 2}
    assert worker.run_once() == 2


def test_the_successor_of_a_deleted_row_is_proven(producer: Relay, worker: Relay, engine: Engine) -> None:
    record(producer, engine, "A", 1)
    worker.run_once()
    execute(engine, "DELETE FROM zzol_outbox_event")
    record(producer, engine, "A", 1)
    assert worker.run_once() == 1


def test_one_process_cleans_at_a_time(worker: Relay, engine: Engine, make_relay: Any) -> None:
    other: Relay = make_relay(engine, [], worker=False, start=False)
    assert other._upkeep.take_duty("cleanup", b"o" * 16, 60)
    assert worker.cleanup() is None
    other._upkeep.finish_duty("cleanup", b"o" * 16)
    assert worker.cleanup() == 0
    assert worker._cleanup.run_once() is None


def test_bulk_cleanup_goes_in_small_transactions(
    producer: Relay, engine: Engine, make_relay: Any, facts: Facts
) -> None:
    worker: Relay = make_relay(engine, [], worker=False, cleanup_batch=4, start=False)
    record(producer, engine, "A", 10)
    worker.run_once()
    execute(engine, "UPDATE zzol_outbox_event SET due_at = due_at - INTERVAL 25 HOUR")
    commits: list[int] = []
    event.listen(worker._database.engine, "commit", lambda connection: commits.append(1))
    assert worker.cleanup() == 10
    assert len(commits) >= 3


def test_status_tells_backlog_and_age(producer: Relay, worker: Relay, engine: Engine) -> None:
    """S15, G9, G23."""
    record(producer, engine, "A", 2)
    execute(engine, "UPDATE zzol_outbox_event SET created_at = created_at - INTERVAL 90 SECOND")
    status = worker.status()
    assert status.backlog.by_status["PENDING"] == 2
    assert 90 <= (status.backlog.oldest_unpublished_age or 0) < 150
    assert status.backlog.last_published_at is None
    worker.run_once()
    status = worker.status()
    assert status.backlog.oldest_unpublished_age is None
    assert status.backlog.last_published_at is not None
