"""``zzol-relay check`` against real servers: what is wrong with them is found, and nothing is changed (Z5, G9)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.pool import NullPool

from tests.support.cli import Answer, run_cli, run_on_a_terminal
from zzol_relay import migrate
from zzol_relay.embedded import RedisServer, free_port
from zzol_relay.store.database import Database


def check(database_url: str, redis_url: str, **env: str) -> Answer:
    return run_cli("check", "--json", ZZOL_DATABASE_URL=database_url, ZZOL_REDIS_URL=redis_url, **env)


def bad(answer: Answer) -> dict[str, str]:
    return {finding["name"]: finding["verdict"] for finding in answer.json if finding["verdict"] != "ok"}


def found(answer: Answer, name: str) -> str:
    (finding,) = [finding for finding in answer.json if finding["name"] == name]
    return f"{finding['found']} | {finding['mend']}"


@pytest.fixture
def durable_redis() -> Iterator[RedisServer]:
    with RedisServer(config={"appendonly": "yes"}) as server:
        yield server


@pytest.fixture
def migrated(database_url: str) -> str:
    migrate(database_url)
    return database_url


def test_servers_that_are_fit(migrated: str, durable_redis: RedisServer, database_server: Any):
    answer = check(migrated, durable_redis.url)
    assert bad(answer) == {}
    assert (answer.code, answer.err) == (0, "")
    product = "MariaDB" if database_server.kind == "mariadb" else "MySQL"
    assert found(answer, "database version").startswith(f"{product} ")
    assert found(answer, "redis version").startswith("Redis 7") or "Valkey" in found(answer, "redis version")
    assert found(answer, "persistence").startswith("AOF")

    with redis.Redis.from_url(durable_redis.url, decode_responses=True) as client:
        left: Any = client.keys()
        assert left in ([], ["zzol:{zzol-check:0}:probe"])
        assert all(client.pttl(key) in (-2, *range(1001)) for key in left), "what is left is gone within a second"


def test_before_the_migration(database_url: str, durable_redis: RedisServer):
    answer = check(database_url, durable_redis.url)
    assert answer.code == 1
    assert bad(answer) == {"schema": "fail", "privileges": "warn"}
    assert "zzol-relay migrate" in found(answer, "schema")


def test_servers_that_are_away_are_findings_and_passwords_stay_hidden(migrated: str, redis_server: RedisServer):
    url = make_url(migrated).set(port=free_port(), password="s3cret").render_as_string(hide_password=False)
    answer = check(url, f"redis://:s3cret@127.0.0.1:{free_port()}/0")
    assert answer.code == 1
    assert bad(answer) == {"database": "fail", "redis": "fail"}
    assert "Can't connect to MySQL server" in found(answer, "database")
    assert "s3cret" not in answer.out + answer.err
    refused = make_url(migrated).set(username="nobody", password="s3cret").render_as_string(hide_password=False)
    assert "Access denied for user 'nobody'" in found(check(refused, redis_server.url), "database")


@pytest.fixture
def limited(engine: Engine, migrated: str) -> Iterator[Any]:
    """``limited("SELECT, INSERT")``: the URL of a user that has these privileges on the database, and no more."""
    name = f"u{uuid.uuid4().hex[:12]}"
    url = make_url(migrated)

    def make(privileges: str) -> str:
        with engine.connect() as connection:
            connection.exec_driver_sql(f"CREATE USER '{name}'@'127.0.0.1' IDENTIFIED BY 'pw-Only-4-tests'")
            connection.exec_driver_sql(f"GRANT {privileges} ON `{url.database}`.* TO '{name}'@'127.0.0.1'")
        return url.set(username=name, password="pw-Only-4-tests").render_as_string(hide_password=False)

    yield make
    with engine.connect() as connection:
        connection.exec_driver_sql(f"DROP USER IF EXISTS '{name}'@'127.0.0.1'")


def test_the_privileges_that_the_relay_needs_are_enough(limited: Any, durable_redis: RedisServer):
    answer = check(limited("SELECT, INSERT, UPDATE, DELETE"), durable_redis.url)
    assert bad(answer) == {}


@pytest.mark.parametrize("lacking", ["SELECT", "INSERT", "UPDATE", "DELETE"])
def test_a_privilege_that_is_lacking_is_named(limited: Any, durable_redis: RedisServer, lacking: str):
    held = [name for name in ("SELECT", "INSERT", "UPDATE", "DELETE") if name != lacking]
    answer = check(limited(", ".join(held)), durable_redis.url)
    assert answer.code == 1
    if lacking == "SELECT":
        # The revision cannot be read either.
        assert bad(answer) == {"database": "fail"}
        assert "SELECT command denied" in found(answer, "database")
    else:
        assert bad(answer) == {"privileges": "fail"}
        assert f"{lacking} on zzol_outbox_event" in found(answer, "privileges")


def test_a_read_only_database_is_a_replica(engine: Engine, migrated: str, durable_redis: RedisServer):
    with engine.connect() as connection:
        connection.execute(text("SET GLOBAL read_only = 1"))
        try:
            answer = check(migrated, durable_redis.url)
        finally:
            connection.execute(text("SET GLOBAL read_only = 0"))
    assert answer.code == 1
    assert bad(answer) == {"database role": "fail"}


def test_nothing_is_written_to_the_tables(engine: Engine, migrated: str, durable_redis: RedisServer):
    with engine.connect() as connection:
        before = connection.execute(text("SELECT COUNT(*), MAX(id) FROM zzol_outbox_event")).one()
        check(migrated, durable_redis.url)
        connection.rollback()
        assert connection.execute(text("SELECT COUNT(*), MAX(id) FROM zzol_outbox_event")).one() == before
        for table in ("outbox_aggregate", "relay_instance", "relay_duty", "relay_audit"):
            assert connection.execute(text(f"SELECT COUNT(*) FROM zzol_{table}")).scalar() == 0


@pytest.fixture
def sqlite(sqlite_url: str) -> str:
    migrate(sqlite_url)
    return sqlite_url


def test_sqlite_is_a_stand_in(sqlite: str, redis_server: RedisServer):
    answer = check(sqlite, redis_server.url)
    assert answer.code == 0
    assert bad(answer) == {"database version": "warn", "persistence": "warn"}
    assert "neither AOF nor RDB" in found(answer, "persistence")


def test_an_evicting_redis_fails(sqlite: str, redis_server: RedisServer, redis_client: redis.Redis):
    redis_client.config_set("maxmemory-policy", "allkeys-lru")
    answer = check(sqlite, redis_server.url)
    assert answer.code == 1
    assert bad(answer)["eviction"] == "fail"


def test_a_replica_and_a_full_redis_fail(sqlite: str, redis_server: RedisServer, redis_client: redis.Redis):
    redis_client.replicaof("127.0.0.1", 1)
    answer = check(sqlite, redis_server.url)
    redis_client.replicaof("NO", "ONE")
    assert (bad(answer)["redis role"], bad(answer)["redis commands"]) == ("fail", "fail")
    assert "READONLY" in found(answer, "redis commands") or "read only" in found(answer, "redis commands")
    redis_client.config_set("maxmemory", "1")
    assert bad(check(sqlite, redis_server.url))["redis commands"] == "fail"


def test_a_user_of_redis_who_may_not_is_told_what(sqlite: str, redis_server: RedisServer, redis_client: redis.Redis):
    url = redis_server.url.replace("redis://", "redis://relay:pw@")
    allowed = ["+@read", "+@write", "+@scripting", "+info", "+time", "+ping", "-xadd", "-set"]
    redis_client.acl_setuser("relay", enabled=True, passwords=["+pw"], keys=["zzol:*"], commands=allowed)
    answer = check(sqlite, url)
    assert bad(answer) == {"database version": "warn", "persistence": "warn", "redis commands": "fail"}
    assert found(answer, "redis commands").startswith("denied: SET, XADD")
    assert "cannot be read" in found(answer, "persistence"), "CONFIG is not needed"
    redis_client.acl_setuser("relay", enabled=True, commands=["+xadd", "+set", "-evalsha"])
    assert bad(check(sqlite, url))["publish script"] == "fail"
    redis_client.acl_setuser("relay", enabled=True, commands=["+evalsha"])
    assert check(sqlite, url).code == 0
    assert bad(check(sqlite, url, ZZOL_KEY_PREFIX="other"))["redis commands"] == "fail"


def test_it_is_a_table_for_people_and_lines_for_programs(sqlite: str, redis_server: RedisServer):
    env = {"ZZOL_DATABASE_URL": sqlite, "ZZOL_REDIS_URL": redis_server.url}
    piped = run_cli("check", **env)
    assert piped.rows[0] == ["check", "verdict", "found", "mend"]
    assert ["eviction", "ok", "noeviction", ""] in piped.rows
    code, drawn = run_on_a_terminal("check", answer="", **env)
    assert code == 0
    assert "━" in drawn


def test_the_clocks_are_compared(sqlite: str, redis_server: RedisServer):
    answer = check(sqlite, redis_server.url)
    assert float(found(answer, "redis clock").split()[0]) < 1.0


def test_a_session_that_a_proxy_resets_fails(
    migrated: str, durable_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
):
    """The isolation that counts is the one the server says our own connection has."""
    derive = Database._derive

    def reset(self: Database, *arguments: Any) -> Engine:
        return create_engine(derive(self, *arguments).url, poolclass=NullPool, isolation_level="REPEATABLE READ")

    monkeypatch.setattr(Database, "_derive", reset)
    assert bad(check(migrated, durable_redis.url)) == {"isolation": "fail"}
