"""``zzol-relay worker``: publishes, and ends as told."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator

import pytest
import redis
from sqlalchemy import Engine, create_engine
from sqlalchemy.pool import NullPool

from tests.support.cli import WORKER, run_cli_process
from tests.support.processes import Child
from zzol_relay import Event, Relay, Settings
from zzol_relay.embedded import RedisServer, free_port
from zzol_relay.store import migrate

RunChild = Callable[..., Child]


@pytest.fixture
def outbox(sqlite_url: str) -> Iterator[Engine]:
    """An engine on a migrated SQLite file."""
    migrate.upgrade(sqlite_url, Settings.load({}))
    engine = create_engine(sqlite_url, poolclass=NullPool)
    yield engine
    engine.dispose()


def record(make_relay: Callable[..., Relay], engine: Engine) -> Event:
    relay = make_relay(engine, start=False, mode="polling")
    event = Event(type="room.created", stream="room", aggregate_type="room", aggregate_id="r", data={"host": "s3cret"})
    with relay.begin(engine) as connection:
        return relay.record(connection, event)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_publishes_until_a_signal(
    number: signal.Signals,
    outbox: Engine,
    sqlite_url: str,
    redis_server: RedisServer,
    make_relay: Callable[..., Relay],
    run_child: RunChild,
):
    """Z13, Z32: a process of its own publishes what the outbox holds."""
    event = record(make_relay, outbox)
    child = run_child(WORKER, "--log-json", "worker", ZZOL_DATABASE_URL=sqlite_url, ZZOL_REDIS_URL=redis_server.url)
    assert str(event.event_id) in first_entry(redis_server)
    child.kill(number)
    assert child.wait(10) == 0
    lines = [json.loads(line) for line in child.lines]
    assert [line["signal"] for line in lines if line["message"] == "stopping"] == [number.name]
    assert lines[-1]["message"] == "relay stopped"
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert "s3cret" not in "\n".join(child.lines)


def test_it_works_as_soon_as_redis_is_there(
    outbox: Engine,
    sqlite_url: str,
    own_redis: RedisServer,
    make_relay: Callable[..., Relay],
    run_child: RunChild,
):
    """Z4, Z7."""
    record(make_relay, outbox)
    own_redis.kill()
    child = run_child(WORKER, "worker", ZZOL_DATABASE_URL=sqlite_url, ZZOL_REDIS_URL=own_redis.url)
    wait_for_text(child, "Redis is unavailable")
    own_redis.start()
    assert first_entry(own_redis)
    child.kill(signal.SIGTERM)
    assert child.wait(10) == 0


def test_it_waits_for_a_database_that_is_not_there(redis_server: RedisServer, run_child: RunChild):
    url = f"mysql+pymysql://u:s3cret@127.0.0.1:{free_port()}/game"
    child = run_child(WORKER, "worker", ZZOL_DATABASE_URL=url, ZZOL_REDIS_URL=redis_server.url)
    wait_for_text(child, "relay started")
    child.kill(signal.SIGTERM)
    assert child.wait(10) == 0
    assert "the database cannot be reached yet" in "\n".join(child.lines)
    assert "s3cret" not in "\n".join(child.lines)


def test_missing_tables_end_it(sqlite_url: str, redis_server: RedisServer):
    answer = run_cli_process("worker", ZZOL_DATABASE_URL=sqlite_url, ZZOL_REDIS_URL=redis_server.url)
    assert answer.code == 4
    assert answer.err.splitlines()[-1] == (
        "zzol-relay: the relay's tables are missing or too old; run 'zzol-relay migrate'"
    )


@pytest.mark.parametrize(("signals", "code"), [(2, -signal.SIGTERM), (1, 1)], ids=["second signal", "too late"])
def test_a_hung_database_cannot_keep_it(
    signals: int,
    code: int,
    outbox: Engine,
    sqlite_url: str,
    redis_server: RedisServer,
    run_child: RunChild,
):
    child = run_child(WORKER, "worker", ZZOL_DATABASE_URL=sqlite_url, ZZOL_REDIS_URL=redis_server.url)
    wait_for_text(child, "relay started")
    with outbox.connect() as connection:
        # Nobody else can write, so the worker cannot sign off.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        child.kill(signal.SIGTERM)
        wait_for_text(child, "stopping")
        if signals == 2:
            child.kill(signal.SIGTERM)
        assert child.wait(5 if signals == 2 else 11) == code


def first_entry(server: RedisServer) -> str:
    """Wait for the first entry of the stream ``room``."""
    with redis.Redis.from_url(server.url, socket_timeout=30) as client:
        reply = client.xread({"zzol:{room:0}": "0"}, block=20_000)
    assert reply, "no entry came"
    return str(reply)


def wait_for_text(child: Child, text: str) -> None:
    """Wait for a line that holds ``text``; log lines begin with the time."""
    seen = 0
    while not any(text in line for line in child.lines):
        seen += 1
        child.wait_for_line("20", count=seen)
