"""Migrations make what ``Tables`` describes, under any prefix and schema, however often and by however many at once."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, create_engine, inspect, text
from sqlalchemy.pool import NullPool

from tests.support.cli import run_cli_process
from zzol_relay import Event, Settings
from zzol_relay.embedded import DatabaseServer
from zzol_relay.store import migrate
from zzol_relay.store.outbox import OutboxWriter
from zzol_relay.store.tables import Tables

PREFIXES = ["zzol_", "", "other_"]


def settings(**options: object) -> Settings:
    return Settings.load({}, **options)


@contextmanager
def engine_on(url: str) -> Iterator[Engine]:
    engine = create_engine(url, poolclass=NullPool)
    try:
        yield engine
    finally:
        engine.dispose()


def table_names(tables: Tables) -> list[str]:
    return sorted(table.name for table in tables.metadata.tables.values())


def differences(engine: Engine, prefix: str) -> list[object]:
    tables = Tables(prefix, None)
    ours = set(table_names(tables))

    def include(thing: object, name: str | None, kind: str, reflected: bool, compared: object) -> bool:
        return kind != "table" or name in ours

    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"include_object": include, "compare_type": True, "compare_server_default": True}
        )
        return list(compare_metadata(context, tables.metadata))


def definitions(connection: Connection, names: list[str]) -> list[str]:
    return [str(connection.execute(text(f"SHOW CREATE TABLE `{name}`")).one()[1]) for name in names]


def write_an_event(engine: Engine, tables: Tables) -> int:
    writer = OutboxWriter(tables, uuid.uuid4().bytes, 2.0)
    event = Event(type="room.created", stream="room", aggregate_type="room", aggregate_id="r")
    with engine.begin() as connection:
        return writer.allocate(connection, event)[0]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_migrations_equal_the_tables_on_sqlite(prefix: str, sqlite_url: str):
    """Z8, G4."""
    migrate.upgrade(sqlite_url, settings(table_prefix=prefix))
    with engine_on(sqlite_url) as engine:
        assert differences(engine, prefix) == []
        names = [*table_names(Tables(prefix, None)), f"{prefix}alembic_version"]
        assert sorted(inspect(engine).get_table_names()) == sorted(names)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_migrations_equal_the_tables_to_the_letter(prefix: str, database_server: DatabaseServer, engine: Engine):
    """Z8, G4: the same SHOW CREATE TABLE, indexes, character sets and all."""
    tables = Tables(prefix, None)
    names = table_names(tables)
    migrate.upgrade(engine, settings(table_prefix=prefix))
    assert differences(engine, prefix) == []
    with engine.connect() as connection:
        migrated = definitions(connection, names)
    tables.metadata.drop_all(engine)
    tables.metadata.create_all(engine)
    with engine.connect() as connection:
        assert definitions(connection, names) == migrated


def test_two_prefixes_live_side_by_side(engine: Engine):
    for prefix in ("a_", "b_"):
        assert migrate.upgrade(engine, settings(table_prefix=prefix)) == ("0001",)
    assert write_an_event(engine, Tables("a_", None)) == 1
    assert write_an_event(engine, Tables("b_", None)) == 1
    assert migrate.current_revision(engine, settings(table_prefix="c_")) is None


def test_tables_may_stand_in_another_schema(database_server: DatabaseServer, database_url: str, engine: Engine):
    other = f"other_{uuid.uuid4().hex[:12]}"
    database_server.create_database(other)
    try:
        there = settings(schema=other)
        assert migrate.upgrade(database_url, there) == ("0001",)
        assert migrate.schema_fits(database_url, there)
        assert inspect(engine).get_table_names() == []
        assert f"{there.table_prefix}alembic_version" in inspect(engine).get_table_names(schema=other)
        assert write_an_event(engine, Tables(there.table_prefix, other)) == 1
    finally:
        database_server.drop_database(other)


def test_the_printed_sql_makes_the_same(engine: Engine):
    wanted = settings(table_prefix="sql_")
    with engine.begin() as connection:
        for statement in re.split(r";\s*\n", migrate.migration_sql(engine, wanted)):
            lines = [line for line in statement.splitlines() if not line.startswith("--")]
            if "".join(lines).strip():
                connection.exec_driver_sql("\n".join(lines))
    assert differences(engine, "sql_") == []
    assert migrate.schema_fits(engine, wanted)
    assert migrate.upgrade(engine, wanted) == ()


def test_several_processes_may_migrate_at_once(database_url: str, engine: Engine):
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: run_cli_process("migrate", ZZOL_DATABASE_URL=database_url), range(4)))
    assert [answer.err for answer in answers] == [""] * 4
    assert sorted(answer.out for answer in answers) == ["applied 0001\n"] + ["nothing to do\n"] * 3
    assert differences(engine, "zzol_") == []


def test_several_processes_may_migrate_sqlite_at_once(sqlite_url: str):
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: run_cli_process("migrate", ZZOL_DATABASE_URL=sqlite_url), range(4)))
    assert [answer.err for answer in answers] == [""] * 4
    assert sorted(answer.out for answer in answers) == ["applied 0001\n"] + ["nothing to do\n"] * 3


@pytest.mark.parametrize("made", range(1, 5))
def test_a_migration_that_was_cut_short_is_finished(made: int, engine: Engine):
    """MySQL commits each statement of a migration by itself: what a killed one has made may stand there."""
    tables = Tables("zzol_", None)
    for table in list(tables.metadata.sorted_tables)[:made]:
        # As far as CREATE TABLE, before its CREATE INDEX.
        for index in list(table.indexes):
            table.indexes.discard(index)
        table.create(engine)
    assert migrate.upgrade(engine, settings()) == ("0001",)
    assert differences(engine, "zzol_") == []


def test_where_a_database_stands(sqlite_url: str):
    """A newer release's schema fits, since migrations only expand; none at all does not."""
    ours = settings()
    assert migrate.current_revision(sqlite_url, ours) is None
    assert not migrate.schema_fits(sqlite_url, ours)
    migrate.upgrade(sqlite_url, ours)
    assert migrate.current_revision(sqlite_url, ours) == migrate.head_revision()
    assert migrate.schema_fits(sqlite_url, ours)
    with engine_on(sqlite_url) as engine, engine.begin() as connection:
        connection.execute(text("UPDATE zzol_alembic_version SET version_num = '9999'"))
    assert migrate.schema_fits(sqlite_url, ours)
    assert migrate.upgrade(sqlite_url, ours) == ()
    assert migrate.current_revision(sqlite_url, ours) == "9999"


def test_the_applications_own_migrations_are_left_alone(engine: Engine):
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('theirs')"))
    migrate.upgrade(engine, settings())
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all() == ["theirs"]


def test_the_lock_is_let_go(engine: Engine):
    migrate.upgrade(engine, settings())
    with engine.connect() as connection:
        held = connection.execute(
            text("SELECT COUNT(*) FROM information_schema.processlist WHERE state = 'User lock'")
        ).scalar()
    assert held == 0
    assert migrate.upgrade(engine, settings(table_prefix="again_")) == ("0001",)
