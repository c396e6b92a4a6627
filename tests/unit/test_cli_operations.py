"""``zzol-relay migrate``, ``status``, ``recover``, ``cleanup``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Engine, create_engine, select, text, update
from sqlalchemy.pool import NullPool

from tests.support.cli import run_cli
from zzol_relay import Event, Relay
from zzol_relay.embedded import RedisServer
from zzol_relay.store.tables import Tables

OLD = "2020-01-01 00:00:00.000000"
OUTBOX = Tables("zzol_", None).outbox


def record(make_relay: Callable[..., Relay], engine: Engine, count: int) -> list[str]:
    relay = make_relay(engine, start=False, mode="polling")
    events = [
        Event(type="room.created", stream="room", aggregate_type="room", aggregate_id=f"r{n}", data={"host": "ann"})
        for n in range(count)
    ]
    with relay.begin(engine) as connection:
        return [str(event.event_id) for event in relay.record_all(connection, events)]


def statuses(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(select(OUTBOX.c.status).order_by(OUTBOX.c.id)).scalars())


def test_migrate_says_what_it_did_and_may_be_repeated(sqlite_url: str):
    first, second = (run_cli("migrate", ZZOL_DATABASE_URL=sqlite_url) for _ in range(2))
    assert (first.code, first.out) == (0, "applied 0001\n")
    assert (second.code, second.out) == (0, "nothing to do\n")


def test_migrate_sql_prints_what_makes_the_tables_and_connects_to_nothing(sqlite_url: str):
    answer = run_cli("migrate", "--sql", ZZOL_DATABASE_URL=sqlite_url, ZZOL_TABLE_PREFIX="my_")
    assert (answer.code, answer.err) == (0, "")
    engine = create_engine(sqlite_url, poolclass=NullPool)
    with engine.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM sqlite_master")).scalar() == 0
        for statement in answer.out.split(";"):
            if statement.strip():
                connection.exec_driver_sql(statement)
    answer = run_cli("status", "--json", ZZOL_DATABASE_URL=sqlite_url, ZZOL_TABLE_PREFIX="my_")
    assert answer.json["schema"]["revision"] == answer.json["schema"]["head"]


def test_migrate_sql_is_of_the_databases_dialect():
    answer = run_cli("migrate", "--sql", ZZOL_DATABASE_URL="mysql+pymysql://u:pw@192.0.2.1/game", ZZOL_SCHEMA="game")
    assert answer.code == 0
    assert "CREATE TABLE IF NOT EXISTS game.zzol_outbox_event" in answer.out
    assert "MEDIUMBLOB" in answer.out


def test_status_of_an_outbox(
    sqlite_engine: Engine, sqlite_url: str, redis_server: RedisServer, make_relay: Callable[..., Relay]
):
    """G9, S15: backlog and the age of the oldest unpublished event."""
    record(make_relay, sqlite_engine, 3)
    make_relay(sqlite_engine, start=False, name="box:1").beat()
    env = {"ZZOL_DATABASE_URL": sqlite_url, "ZZOL_REDIS_URL": redis_server.url}

    answer = run_cli("status", "--json", **env)
    assert (answer.code, answer.err) == (0, "")
    assert answer.json["backlog"]["by_status"]["PENDING"] == 3
    assert answer.json["backlog"]["oldest_unpublished_age"] >= 0
    assert answer.json["redis"] == {"reachable": True, "error": None}
    assert [instance["name"] for instance in answer.json["instances"]] == ["box:1"]

    plain = run_cli("status", **env)
    assert plain.code == 0
    assert ["pending", "3"] in plain.rows
    assert ["redis", "up"] in plain.rows
    assert plain.rows[-1][0] == "box:1"


def test_recover_returns_expired_claims(
    sqlite_engine: Engine, sqlite_url: str, make_relay: Callable[..., Relay], redis_server: RedisServer
):
    """Z33, Z10: decided by the claim's end, not by the row's age."""
    record(make_relay, sqlite_engine, 2)
    with sqlite_engine.begin() as connection:
        connection.execute(update(OUTBOX).where(OUTBOX.c.id == 1).values(status="IN_PROGRESS", due_at=text(f"'{OLD}'")))
    answer = run_cli("recover", ZZOL_DATABASE_URL=sqlite_url, ZZOL_REDIS_URL=redis_server.url)
    assert (answer.code, answer.out) == (0, "recovered 1\n")
    assert statuses(sqlite_engine) == ["PENDING", "PENDING"]


def test_cleanup_deletes_only_what_is_settled_and_old(
    sqlite_engine: Engine, sqlite_url: str, make_relay: Callable[..., Relay], redis_server: RedisServer
):
    """Z36."""
    record(make_relay, sqlite_engine, 3)
    with sqlite_engine.begin() as connection:
        old = {"due_at": text(f"'{OLD}'"), "created_at": text(f"'{OLD}'")}
        connection.execute(update(OUTBOX).where(OUTBOX.c.id <= 2).values(old))
        connection.execute(update(OUTBOX).where(OUTBOX.c.id == 1).values(status="PUBLISHED"))
    answer = run_cli("cleanup", ZZOL_DATABASE_URL=sqlite_url, ZZOL_REDIS_URL=redis_server.url)
    assert (answer.code, answer.out) == (0, "deleted 1\n")
    assert statuses(sqlite_engine) == ["PENDING", "PENDING"]


@pytest.mark.parametrize("command", [("status",), ("dead-letters", "list")], ids=" ".join)
def test_output_is_drawn_on_a_terminal_only(
    command: tuple[str, ...], sqlite_engine: Engine, sqlite_url: str, redis_server: RedisServer
):
    env = {"ZZOL_DATABASE_URL": sqlite_url, "ZZOL_REDIS_URL": redis_server.url}
    drawn = run_cli(*command, FORCE_COLOR="1", TTY_COMPATIBLE="1", **env)
    piped = run_cli(*command, **env)
    assert "━" in drawn.out
    assert "━" not in piped.out
    assert "\x1b" not in piped.out
