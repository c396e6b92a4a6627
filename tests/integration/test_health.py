"""Live, ready and status, by call, over HTTP and on the command line (S15, Z4)."""

from __future__ import annotations

import http.client
import itertools
import signal
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import orjson
import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from tests.support.cli import WORKER, run_cli
from tests.support.facts import Facts
from zzol_relay import ConfigurationError, Event, Health, Relay, migrate
from zzol_relay.cli.health import verdict
from zzol_relay.core.observer import CircuitChanged, LoopBeat, LoopFailed, Settled
from zzol_relay.metrics import Metrics
from zzol_relay.probes import serve_probes
from zzol_relay.relay.health import InTime, Schema, judge
from zzol_relay.store.upkeep import Instance

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


class Probe:
    """A client of the probes at a port of this machine."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, path: str, method: str = "GET") -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        kind = answer.headers["Content-Type"] or ""
        return answer.status, orjson.loads(body) if body and kind == "application/json" else body.decode()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.mark.usefixtures("relay_tables")
def test_probes_over_http(engine: Engine, make_relay: Any, registry: CollectorRegistry, facts: Facts) -> None:
    relay: Relay = make_relay(engine, start=False)
    Metrics(registry).attach(relay)
    with serve_probes(relay, 0, registry=registry) as server:
        probe = Probe(server.port)
        assert probe.ask("/live") == (200, {"live": True, "reasons": []})
        assert probe.ask("/ready") == (503, {"ready": False, "reasons": ["not started"]})
        relay.start()
        wait_until(lambda: probe.ask("/ready")[0] == 200)
        with Session(engine) as session, session.begin():
            relay.record(session, happened())
        facts.wait_for(Settled)
        code, status = probe.ask("/status")
        assert code == 200
        assert status["health"]["live"]
        assert status["health"]["loops"].keys() == LOOPS
        assert status["redis"] == {"circuit": "closed"}
        assert status["database"] == {"answers": True, "error": None}
        assert status["backlog"]["by_status"]["PUBLISHED"] == 1
        assert status["backlog"]["last_published_at"].endswith("Z")
        assert status["counters"]["published_after_commit"] == 1
        assert status["errors"] == {"observer": 0, "hook": 0, "direct_dropped": 0}
        code, text_ = probe.ask("/metrics")
        assert code == 200
        assert 'zzol_outbox_published_total{path="after_commit"} 1.0' in text_
        assert probe.ask("/live", "HEAD") == (200, "")
        assert probe.ask("/live", "POST")[0] == 405
        assert probe.ask("/elsewhere")[0] == 404
        relay.stop()
        assert probe.ask("/ready")[0] == 503
    with pytest.raises(OSError, match="refused"):
        probe.ask("/live")


@pytest.mark.usefixtures("relay_tables")
def test_probes_answer_while_the_database_hangs(
    engine: Engine, make_relay: Any, database_server: Any, registry: CollectorRegistry
) -> None:
    relay: Relay = make_relay(engine, liveness_grace=0.5)
    Metrics(registry).attach(relay)
    with serve_probes(relay, 0, registry=registry) as server:
        probe = Probe(server.port)
        wait_until(lambda: probe.ask("/ready")[0] == 200)
        database_server.pause()
        wait_until(lambda: probe.ask("/live")[0] == 503)
        assert "poller" in str(probe.ask("/live")[1]["reasons"])
        assert probe.ask("/ready")[0] == 200
        started = time.monotonic()
        for _ in range(2):
            assert probe.ask("/status")[1]["database"] == {"answers": False, "error": "TimeoutError"}
            assert "zzol_gauges_failures_total" in probe.ask("/metrics")[1]
        assert time.monotonic() - started < 15.0
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("zzol-relay-")]
        assert threads.count("zzol-relay-status") == threads.count("zzol-relay-gauges") == 1
        database_server.resume()
        wait_until(lambda: probe.ask("/live")[0] == 200)
        wait_until(lambda: probe.ask("/status")[1]["database"]["answers"])


@pytest.mark.usefixtures("relay_tables")
def test_a_port_that_is_taken_is_named(engine: Engine, make_relay: Any) -> None:
    relay: Relay = make_relay(engine, start=False)
    with serve_probes(relay, 0) as server, pytest.raises(ConfigurationError, match=f"port {server.port}"):
        serve_probes(relay, server.port)


def test_a_worker_serves_its_probes(
    engine: Engine, database_url: str, redis_server: Any, run_child: Any, facts: Facts
) -> None:
    migrate(engine)
    env = {"ZZOL_DATABASE_URL": database_url, "ZZOL_REDIS_URL": redis_server.url, "ZZOL_HEARTBEAT_INTERVAL": "0.2"}
    answer = run_cli("status", "--health", **env)
    assert (answer.code, "no worker" in answer.out) == (1, True)
    child = run_child(WORKER, "--log-json", "worker", "--probe-port", "0", **env)
    line = child.wait_for_line('{"time"')
    assert "probes are served" in line
    probe = Probe(orjson.loads(line)["port"])
    wait_until(lambda: probe.ask("/ready")[0] == 200)
    assert probe.ask("/live")[0] == 200
    assert "process_cpu_seconds_total" in probe.ask("/metrics")[1]
    wait_until(lambda: run_cli("status", "--health", **env).code == 0)
    answer = run_cli("status", "--health", "--json", **env)
    assert (answer.json["live"], answer.json["ready"], answer.json["reasons"]) == (True, True, [])
    assert [instance["role"] for instance in answer.json["instances"]] == ["worker"]
    child.kill(signal.SIGTERM)
    assert child.wait() == 0
    assert run_cli("status", "--health", **env).code == 1


def test_the_command_tells_a_missing_schema(database_url: str, redis_server: Any) -> None:
    answer = run_cli("status", "--health", ZZOL_DATABASE_URL=database_url, ZZOL_REDIS_URL=redis_server.url)
    assert answer.code == 1
    assert "zzol-relay migrate" in answer.out


def instance(role: str, beat_age: float, **health: Any) -> Instance:
    counters = {"health": health} if health else {}
    return Instance(f"box:{role}", "1", role, "closed", counters, datetime(2026, 1, 1), beat_age)


@pytest.mark.parametrize(
    ("instances", "live", "ready", "reason"),
    [
        ([], False, False, "no worker has given a sign of life within 30 s"),
        ([instance("worker", 1.0)], True, True, ""),
        ([instance("worker", 31.0)], False, False, "no worker has given a sign of life within 30 s"),
        ([instance("app", 1.0)], False, False, "no worker has given a sign of life within 30 s"),
        ([instance("app+worker", 1.0), instance("worker", 900.0, live=False)], True, True, ""),
        ([instance("worker", 1.0, live=False, ready=True, reasons=["hung"])], False, True, "box:worker: hung"),
        ([instance("worker", 1.0, live=True, ready=False, reasons=[])], True, False, "no worker is ready"),
    ],
)
def test_the_verdict_on_a_deployment(instances: list[Instance], live: bool, ready: bool, reason: str) -> None:
    assert verdict(True, instances, 30.0) == (live, ready, [reason] if reason else [])
