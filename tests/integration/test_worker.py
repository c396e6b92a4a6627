"""The fallback: claim, prove, publish, settle (Z9, Z27-Z32, Z35, G7, G10, G17, G18)."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, event, text
from sqlalchemy.orm import Session

from tests.support.facts import Facts
from tests.support.outbox import KEY, STREAMS, execute, record
from tests.support.streams import check_order, entries, outbox_rows, statuses
from zzol_relay import Event, Relay, Status
from zzol_relay.core.observer import Claimed, ClaimLost, Deferred, Settled

pytestmark = pytest.mark.usefixtures("relay_tables")


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


def test_what_stands_behind_a_row_in_backoff_waits_as_long_as_it(
    producer: Relay, worker: Relay, engine: Engine, facts: Facts
) -> None:
    """A chain behind one row would else be claimed and put off again and again, all the backoff long."""
    record(producer, engine, "A", 5)
    first = outbox_rows(engine, "id")[0].id
    execute(
        engine,
        "UPDATE zzol_outbox_event SET claim_token = NULL, due_at = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR WHERE id = :id",
        id=first,
    )
    assert worker.run_once() == 0
    late = "due_at > UTC_TIMESTAMP(6) + INTERVAL 59 MINUTE AS late, status, retry_count"
    assert {tuple(row) for row in outbox_rows(engine, late)} == {(1, "PENDING", 0)}


def test_what_stands_behind_a_row_that_somebody_holds_is_looked_at_again_soon(
    producer: Relay, worker: Relay, engine: Engine
) -> None:
    record(producer, engine, "A", 3)
    first = outbox_rows(engine, "id")[0].id
    execute(
        engine,
        "UPDATE zzol_outbox_event SET claim_token = :token, due_at = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR WHERE id = :id",
        token=b"t" * 16,
        id=first,
    )
    assert worker.run_once() == 0
    soon = "id, due_at < UTC_TIMESTAMP(6) + INTERVAL 1 MINUTE AS soon"
    assert [row.soon for row in outbox_rows(engine, soon)] == [0, 1, 1]


def test_with_an_open_circuit_the_poller_probes_before_it_claims_anything(
    producer: Relay, engine: Engine, make_relay: Any, own_redis: Any, facts: Facts
) -> None:
    """Z4: a backlog must not be claimed and given back all the outage long."""
    worker: Relay = make_relay(engine, [], worker=False, redis_url=own_redis.url, probe_base=60.0, probe_cap=60.0)
    record(producer, engine, "A", 2)
    own_redis.kill()
    worker._circuit.open("Redis was killed")
    assert worker.run_once() == 0
    assert facts.of(Claimed) == []
    own_redis.start()
    assert worker.run_once() == 2
