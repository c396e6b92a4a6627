"""Claim, empty poll, recovery and cleanup read the one index in its own order (Z28, Z35, G20), beside 300,000 rows in
backoff and 300,000 published. Counted in rows that the server touched, not in time: EXPLAIN shows the right index in
the bad cases too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from zzol_relay import Event, Relay, Stream

pytestmark = [pytest.mark.usefixtures("relay_tables"), pytest.mark.timeout(180)]

ROWS = 300_000

FILL = """
INSERT INTO zzol_outbox_event (event_id, stream_key, aggregate_type, aggregate_id, sequence, prev_sequence, event_type,
    schema_version, payload, occurred_at, status, retry_count, due_at, replays, created_at, updated_at)
SELECT UNHEX(LEFT(SHA2(CONCAT(:status, n), 256), 32)), 'zzol:{room:0}',
       'room', CONCAT(:status, n MOD 1000), n, n - 1000, 't',
    1, '1', UTC_TIMESTAMP(6), :status, 0, UTC_TIMESTAMP(6) + INTERVAL :due SECOND + INTERVAL n MICROSECOND, 0,
    UTC_TIMESTAMP(6), UTC_TIMESTAMP(6)
FROM (
    SELECT a.d + 10 * b.d + 100 * c.d + 1000 * d.d + 10000 * e.d + 100000 * f.d + 1 AS n
    FROM digits a, digits b, digits c, digits d, digits e, digits f
) AS numbers WHERE n <= :rows
"""

# MariaDB and MySQL count what a connection's statements touched; these grow when rows are read or sorted.
COUNTERS = ("Handler_read_key", "Handler_read_next", "Handler_read_prev", "Handler_read_rnd", "Handler_read_rnd_next",
            "Handler_read_first", "Handler_read_last", "Sort_rows")  # fmt: skip


@pytest.fixture
def crowd(engine: Engine) -> None:
    """300,000 rows in backoff (due in an hour), 300,000 published (young)."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE digits (d INT)"))
        connection.execute(text("INSERT INTO digits VALUES (0),(1),(2),(3),(4),(5),(6),(7),(8),(9)"))
    for status, due in (("PENDING", 3600), ("PUBLISHED", -60)):
        with engine.begin() as connection:
            connection.execute(text(FILL), {"status": status, "due": due, "rows": ROWS})
    with engine.connect() as connection:
        connection.execute(text("ANALYZE TABLE zzol_outbox_event")).all()


@pytest.fixture
def worker(engine: Engine, make_relay: Any) -> Relay:
    relay: Relay = make_relay(engine, [], worker=False, database_pool=1, start=False)
    relay._publisher.learn(["zzol:{room:0}"])
    return relay


def touched(relay: Relay, action: Callable[[], object]) -> int:
    """Rows that the relay's one connection touched while ``action`` ran."""

    def read() -> int:
        with relay._database.engine.connect() as connection:
            status: dict[str, Any] = dict(connection.execute(text("SHOW SESSION STATUS")).all())
        return sum(int(status.get(name, 0)) for name in COUNTERS)

    read()
    overhead_from = read()
    before = read()
    overhead = before - overhead_from
    action()
    return read() - before - overhead


def test_each_query_touches_only_what_it_takes(
    engine: Engine, worker: Relay, make_relay: Any, redis_client: redis.Redis, crowd: None
) -> None:
    assert touched(worker, worker.run_once) <= 10, "an empty poll is one cheap index hit (Z28)"
    assert touched(worker, worker.recover) <= 10
    assert touched(worker, worker._upkeep.delete_settled) <= 10

    producer: Relay = make_relay(engine, [Stream(name="room", retention=0)], worker=False, mode="polling", start=False)
    with Session(engine) as session, session.begin():
        for n in range(100):
            producer.record(session, Event(type="t", stream="room", aggregate_type="room", aggregate_id=f"x{n % 10}"))
    # The candidates, their predecessors, the update by primary key and the settle: a handful of touches a row.
    assert touched(worker, lambda: worker.run_once() == 100 or pytest.fail("not all were sent")) <= 100 * 12

    with engine.begin() as connection:
        connection.execute(text("UPDATE zzol_outbox_event SET due_at = due_at - INTERVAL 2 DAY"
                                " WHERE status = 'PUBLISHED' ORDER BY due_at LIMIT 500"))  # fmt: skip
    assert touched(worker, lambda: worker.cleanup() == 500 or pytest.fail("not all were deleted")) <= 500 * 6


def test_a_naive_order_by_id_crawls_over_the_rows_in_backoff(engine: Engine, worker: Relay, crowd: None) -> None:
    """The reason for reading (status, due_at, id) in its own order, shown by the naive query (Z9)."""
    naive = (
        "SELECT id FROM zzol_outbox_event FORCE INDEX (PRIMARY) WHERE status = 'PENDING' AND due_at <= UTC_TIMESTAMP(6)"
        " ORDER BY id LIMIT 500"
    )

    def run() -> None:
        with worker._database.engine.connect() as connection:
            assert connection.execute(text(naive)).all() == []

    assert touched(worker, run) >= ROWS


def test_producers_are_not_blocked_while_a_claim_is_open(engine: Engine, worker: Relay, make_relay: Any) -> None:
    """READ COMMITTED takes no gap locks; at REPEATABLE READ the insert below would wait."""
    producer: Relay = make_relay(engine, [Stream(name="room")], worker=False, mode="polling", start=False)

    def record(code: str) -> None:
        with Session(engine) as session, session.begin():
            session.execute(text("SET SESSION innodb_lock_wait_timeout = 1"))
            producer.record(session, Event(type="t", stream="room", aggregate_type="room", aggregate_id=code))

    record("A")
    with worker._database.begin() as connection:
        claim = worker._claims._claim(connection, b"t" * 16)
        assert len(claim.rows) == 1
        for code in ("A", "B", "C"):
            record(code)
    with engine.connect() as other:
        assert other.execute(text("SELECT COUNT(*) FROM zzol_outbox_event")).scalar() == 4
