"""The crash windows, with real processes killed at named points (G8, G10, G11, G12, G25, Z3, Z33)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from tests.support.facts import Facts
from tests.support.processes import Child
from tests.support.streams import check_order, entries, outbox_rows, statuses
from zzol_relay import Event, Relay, Stream
from zzol_relay.core.observer import DuplicatesSuppressed, Recovered

pytestmark = pytest.mark.usefixtures("relay_tables")

CHILD = Path(__file__).with_name("child.py")
Spawn = Callable[[str, str], Child]


@pytest.fixture
def spawn(engine: Engine, redis_server: Any) -> Iterator[Spawn]:
    children: list[Child] = []
    environment = {
        "DATABASE_URL": engine.url.render_as_string(hide_password=False),
        "REDIS_URL": redis_server.url,
    }

    def start(role: str, point: str) -> Child:
        child = Child(CHILD, role, point, env=environment)
        children.append(child)
        return child

    yield start
    for child in children:
        child.close()


@pytest.fixture
def survivor(engine: Engine, make_relay: Any, redis_client: redis.Redis) -> Relay:
    """A healthy relay with a running fallback, as the other instances have it."""
    relay: Relay = make_relay(engine, [], worker=True, start=False)
    return relay


def backlog(engine: Engine, make_relay: Any, count: int = 6) -> None:
    producer: Relay = make_relay(engine, [Stream(name="room", retention=0)], worker=False, mode="polling", start=False)
    with Session(engine) as session, session.begin():
        for n in range(count):
            producer.record(session, Event(type="t", stream="room", aggregate_type="room", aggregate_id="AB"[n % 2],
                                           data=n))  # fmt: skip


def all_published(engine: Engine, count: int) -> Callable[[], bool]:
    return lambda: statuses(engine) == {"PUBLISHED": count}


def test_killed_just_before_commit_nothing_is_left(
    spawn: Spawn, engine: Engine, survivor: Relay, redis_client: redis.Redis, facts: Facts
) -> None:
    """G8, window 1."""
    child = spawn("produce", "before_commit")
    child.wait_for_line("POINT before_commit")
    child.kill()
    survivor.start()
    facts.wait_for_beats("poller", 3)
    assert outbox_rows(engine) == []
    assert entries(redis_client) == []


def test_killed_after_commit_before_xadd_the_poller_publishes_when_the_born_lease_ends(
    spawn: Spawn, engine: Engine, survivor: Relay, redis_client: redis.Redis, facts: Facts
) -> None:
    """Z3, G9, window 2."""
    child = spawn("produce", "after_commit")
    child.wait_for_line("POINT after_commit")
    child.kill()
    assert statuses(engine) == {"PENDING": 2}
    assert entries(redis_client) == []
    survivor.start()
    facts.wait_until(all_published(engine, 2))
    assert [e.data for e in entries(redis_client)] == [0, 1]
    assert {row.retry_count for row in outbox_rows(engine)} == {0}


def test_killed_after_xadd_before_settle_the_resend_is_a_duplicate(
    spawn: Spawn, engine: Engine, survivor: Relay, redis_client: redis.Redis, facts: Facts
) -> None:
    """G12, window 5."""
    child = spawn("produce", "after_xadd")
    child.wait_for_line("POINT after_xadd")
    child.kill()
    assert statuses(engine) == {"PENDING": 2}
    before = entries(redis_client)
    assert len(before) == 2
    survivor.start()
    facts.wait_until(all_published(engine, 2))
    assert entries(redis_client) == before
    assert len(facts.of(DuplicatesSuppressed)[0].event_ids) >= 1
    assert {row.stream_entry_id for row in outbox_rows(engine)} == {e.entry_id for e in before}


@pytest.mark.parametrize("point", ["holding", "between"])
def test_a_worker_killed_with_claims_gives_them_up_to_recovery(
    spawn: Spawn, engine: Engine, make_relay: Any, survivor: Relay, redis_client: redis.Redis, facts: Facts, point: str
) -> None:
    """G10, G11, Z33: while holding claims, and between publish and settle."""
    backlog(engine, make_relay)
    child = spawn("work", point)
    child.wait_for_line(f"POINT {point}")
    child.kill()
    assert statuses(engine) == {"IN_PROGRESS": 6}
    assert len(entries(redis_client)) == (0 if point == "holding" else 6)
    survivor.start()
    facts.wait_until(all_published(engine, 6))
    found = entries(redis_client)
    check_order(found)
    assert len(found) == 6
    assert sum(fact.count for fact in facts.of(Recovered)) == 6
    assert {row.retry_count for row in outbox_rows(engine)} == {1}


def test_a_worker_paused_past_its_lease_settles_and_reorders_nothing(
    spawn: Spawn, engine: Engine, make_relay: Any, survivor: Relay, redis_client: redis.Redis, facts: Facts
) -> None:
    """SIGSTOP past the lease, then SIGCONT: the token fences its settle, the script its entries."""
    backlog(engine, make_relay)
    child = spawn("work", "paused")
    child.wait_for_line("POINT paused")
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    survivor.start()
    facts.wait_until(all_published(engine, 6))
    before, rows = entries(redis_client), outbox_rows(engine)
    child.kill(signal.SIGCONT)
    assert child.wait_for_line("SETTLED") == "SETTLED 0"
    assert entries(redis_client) == before
    assert outbox_rows(engine) == rows
    check_order(before)
