"""Recovery, cleanup and status (Z10, Z28, Z33, Z36, S15, G9, G10)."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from sqlalchemy import Engine, event, text

from tests.support.facts import Facts
from tests.support.outbox import execute, record
from tests.support.streams import outbox_rows, statuses
from zzol_relay import Relay, Status
from zzol_relay.core.observer import Recovered

pytestmark = pytest.mark.usefixtures("relay_tables")


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


def test_processes_that_were_silent_for_a_day_are_forgotten(worker: Relay, engine: Engine, make_relay: Any) -> None:
    other: Relay = make_relay(engine, [], worker=False, start=False, name="silent")
    other.beat()
    execute(engine, "UPDATE zzol_relay_instance SET beat_at = beat_at - INTERVAL 25 HOUR WHERE name = 'silent'")
    worker.beat()
    assert [instance.name for instance in worker.status().instances] == [worker.name]
