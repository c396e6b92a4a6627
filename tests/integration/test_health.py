"""Live, ready and status, by call, over HTTP and on the command line (S15, Z4)."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from tests.support.facts import Facts
from zzol_relay import Event, Health, Relay, migrate
from zzol_relay.core.observer import CircuitChanged, LoopBeat, LoopFailed
from zzol_relay.relay.health import InTime, Schema, judge

LOOPS = {"heartbeat", "poller", "recovery", "overdue-cleanup", "dispatcher", "settler"}


def wait_until(condition: Callable[[], object], timeout: float = 10.0) -> None:
    """For what no fact announces: that time has passed."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s"
        time.sleep(0.02)


def of_loop(kind: type, loop: str) -> Callable[[Any], bool]:
    return lambda fact: isinstance(fact, kind) and fact.loop == loop  # type: ignore[attr-defined]


def happened(n: int = 0) -> Event:
    return Event(type="t", stream="room", aggregate_type="room", aggregate_id="A", data=n)


@pytest.mark.usefixtures("relay_tables")
def test_ready_from_the_start_to_the_stop(engine: Engine, make_relay: Any) -> None:
    relay: Relay = make_relay(engine, start=False)
    assert relay.health() == Health(True, False, ("not started",), {})
    relay.start()
    wait_until(lambda: relay.health().ready)
    health = relay.health()
    assert (health.live, health.reasons) == (True, ())
    assert set(health.loops) == LOOPS
    seen: list[Health] = []
    leave = relay._upkeep.leave

    def draining(instance: bytes) -> None:
        seen.append(relay.health())
        leave(instance)

    relay._upkeep.leave = draining  # type: ignore[method-assign]
    relay.stop()
    assert [(h.live, h.ready, h.reasons) for h in seen] == [(True, False, ("stopping or stopped",))]
    assert not relay.health().ready


@pytest.mark.usefixtures("relay_tables")
def test_a_loop_that_hangs_is_not_live_until_it_goes_on(
    engine: Engine, make_relay: Any, database_server: Any, facts: Facts
) -> None:
    relay: Relay = make_relay(engine, liveness_grace=1.0, database_timeout=25.0)
    wait_until(lambda: relay.health().ready)
    database_server.pause()
    wait_until(lambda: not relay.health().live)
    health = relay.health()
    assert health.ready, "to restart is the orchestrator's answer; to unready all would be an outage"
    assert any(reason.startswith("loop poller has not finished") for reason in health.reasons)
    database_server.resume()
    wait_until(lambda: relay.health().live)
    assert relay.health().reasons == ()


@pytest.mark.usefixtures("relay_tables")
def test_loops_without_work_stay_live(engine: Engine, make_relay: Any, facts: Facts) -> None:
    """Dispatcher and settler sleep until there is a commit: idling is life."""
    relay: Relay = make_relay(engine, liveness_grace=1.0, heartbeat_interval=0.1)
    for loop in ("dispatcher", "settler"):
        facts.wait_for(of_loop(LoopBeat, loop), count=15)
    assert relay.health().live


@pytest.mark.usefixtures("relay_tables")
def test_a_dispatcher_that_hangs_is_not_live(engine: Engine, make_relay: Any) -> None:
    relay: Relay = make_relay(engine, liveness_grace=0.4, heartbeat_interval=0.1, commit_wait=0.05)
    wait_until(lambda: relay.health().ready)
    go_on = threading.Event()
    send = relay._after_commit._delivery.send

    def hang(shipments: Any, path: Any) -> Any:
        if path == "after_commit":
            go_on.wait(20)
        return send(shipments, path)

    relay._after_commit._delivery.send = hang  # type: ignore[method-assign]
    with Session(engine) as session, session.begin():
        relay.record(session, happened())
    wait_until(lambda: not relay.health().live)
    assert [reason.split()[1] for reason in relay.health().reasons] == ["dispatcher"]
    go_on.set()
    wait_until(lambda: relay.health().live)


@pytest.mark.usefixtures("relay_tables")
def test_redis_down_stays_live_and_ready_and_status_tells(
    engine: Engine, make_relay: Any, own_redis: Any, facts: Facts
) -> None:
    """Z4: a Redis outage must not take every process out of service."""
    relay: Relay = make_relay(engine, redis_url=own_redis.url)
    wait_until(lambda: relay.health().ready)
    own_redis.kill()
    with Session(engine) as session, session.begin():
        relay.record(session, happened())
    facts.wait_for(lambda fact: isinstance(fact, CircuitChanged) and fact.open)
    facts.wait_for_beats("poller", 2)
    health = relay.health()
    assert (health.live, health.ready, health.reasons) == (True, True, ())
    status = relay.status()
    assert status.circuit == "open"
    assert status.backlog.by_status["PENDING"] == 1
    assert status.backlog.oldest_unpublished_age is not None
    assert status.health.ready


@pytest.mark.usefixtures("relay_tables")
def test_mysql_down_stays_live_and_ready(engine: Engine, make_relay: Any, database_server: Any, facts: Facts) -> None:
    relay: Relay = make_relay(engine, liveness_grace=5.0)
    wait_until(lambda: relay.health().ready)
    database_server.kill()
    for loop in ("poller", "heartbeat"):
        facts.wait_for(of_loop(LoopFailed, loop))
    assert (relay.health().live, relay.health().ready) == (True, True)
    # Also for a process that begins in the outage, and so cannot look at its schema.
    second: Relay = make_relay(engine)
    wait_until(lambda: second.health().ready)


def test_a_missing_schema_is_not_ready_until_it_is_migrated(engine: Engine, make_relay: Any, facts: Facts) -> None:
    relay: Relay = make_relay(engine)
    wait_until(lambda: "migrate" in " ".join(relay.health().reasons))
    assert (relay.health().live, relay.health().ready) == (True, False)
    migrate(engine, settings=relay.settings)
    wait_until(lambda: relay.health().ready)
    facts.wait_for_beats("heartbeat", 1)
    with Session(engine) as session, session.begin():
        relay.record(session, happened())


@pytest.mark.usefixtures("relay_tables")
def test_tables_of_an_older_release_do_not_fit(engine: Engine, make_relay: Any) -> None:
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE zzol_outbox_event DROP COLUMN replays"))
    relay: Relay = make_relay(engine)
    wait_until(lambda: "migrate" in " ".join(relay.health().reasons))
    assert not relay.health().ready
    # A newer release's are more, and fit.
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE zzol_outbox_event ADD COLUMN replays SMALLINT NOT NULL DEFAULT 0"))
        connection.execute(text("ALTER TABLE zzol_outbox_event ADD COLUMN added_later INT NULL"))
    wait_until(lambda: relay.health().ready)


def test_a_long_poll_is_alive_as_long_as_it_makes_progress(engine: Engine, make_relay: Any, relay_tables: Any) -> None:
    relay: Relay = make_relay(engine, mode="polling", worker=False, start=False, batch_rows=1)
    with Session(engine) as session, session.begin():
        relay.record_all(session, [happened(n) for n in range(3)])
    pulse = relay._vitals.pulse
    pulse.allowances["poller"] = 1.0
    relay._publisher.learn()
    ticks = itertools.count(1)
    pulse._clock = lambda: float(next(ticks))
    assert relay.run_once() == 3
    assert next(ticks) > 6, "each claim and each settle is a sign of life"


@pytest.mark.parametrize(
    ("state", "schema", "ages", "live", "ready"),
    [
        ("new", Schema.UNASKED, {}, True, False),
        ("started", Schema.UNASKED, {"poller": 0.0}, True, False),
        ("started", Schema.FIT, {"poller": 9.9}, True, True),
        ("started", Schema.FIT, {"poller": 10.1}, False, True),
        ("started", Schema.UNREACHABLE, {"poller": 0.0}, True, True),
        ("started", Schema.UNFIT, {"poller": 0.0}, True, False),
        ("stopped", Schema.FIT, {"poller": 99.0}, True, False),
    ],
)
def test_the_verdict(state: Any, schema: Schema, ages: dict[str, float], live: bool, ready: bool) -> None:
    health = judge(state, schema, ages, {"poller": 10.0})
    assert (health.live, health.ready) == (live, ready)
    assert (health.reasons == ()) == (live and ready)


def test_what_hangs_is_asked_once_and_waited_for_briefly() -> None:
    go_on = threading.Event()
    asked: list[int] = []

    def ask() -> int:
        asked.append(1)
        assert go_on.wait(20)
        return len(asked)

    in_time = InTime(ask, "test")
    for _ in range(3):
        with pytest.raises(TimeoutError):
            in_time(0.01)
    assert len(asked) == 1
    go_on.set()
    assert in_time(10.0) == 1
    assert in_time(10.0) == 2

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        InTime(fail, "test")(10.0)
